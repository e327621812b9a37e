"""The administration of dead letters: listing them, redriving them to their group, and purging them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

import orjson

from penstock.pop.core.deadletters import DeadLetter
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.names import DEAD_LETTERS
from penstock.pop.core.order import NO_KEY, order_key
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.state import PopState
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.record import Kind
from penstock.store.store import Store

DEAD_LETTERS_MAX = 10_000
"""Maximum number of dead letters that one call lists or redrives, because the loop does nothing else meanwhile."""


LettersByGroup = dict[int, list[DeadLetter]]
"""Dead letters by the id of the group that has them."""


class DeadLetterAdmin:
    """Lists, redrives and purges dead letters.

    Parameters:
        store: has the messages.
        state: has the groups and their dead letters.
        records: appends what is decided.
        serve: called with a group whose polls may get messages now.
    """

    def __init__(self, store: Store, state: PopState, records: GroupRecords, serve: Callable[[ConsumerGroup], None]) -> None:
        self._store = store
        self._state = state
        self._records = records
        self._serve = serve

    def list(self, name: str, position: int = 0, limit: int = DEAD_LETTERS_MAX) -> list[DeadLetter]:
        """Return the dead letters of the group `name` that were not redriven, in the order of the log.

        Args:
            name: of the group.
            position: dead letters whose messages are before this position of the log are left out.
            limit: maximum number of dead letters, up to `DEAD_LETTERS_MAX`.
        """
        queue = self._store.queues.find(DEAD_LETTERS + name)
        if queue is None:
            return []
        self._store.commit()
        return [*islice(self._state.dead_letters.listed(queue.id, position), min(limit, DEAD_LETTERS_MAX))]

    def redrive(self, name: str, positions: Iterable[int] | None = None) -> int:
        """Send dead letters of the group `name` back to it as new messages; return how many.

        Each dead letter is sent back once, even if the node crashes. A dead letter that another group has popped from
        `$dlq/NAME` also stays with that group.

        Args:
            name: of the group.
            positions: of the messages; None for all dead letters, up to `DEAD_LETTERS_MAX`. Messages that are no dead letters
                are skipped.
        """
        by_group = self._named(name, positions)
        for group_id, letters in by_group.items():
            group = self._state.groups_by_id[group_id]
            properties = b""
            if group.order is not None:
                properties = orjson.dumps({"keys": [self._key(letter) for letter in letters]})
            self._records.append(Kind.DEAD_LETTER_REDRIVEN, group_id, name, _body(letters), properties=properties)
            self._serve(group)
        return sum(map(len, by_group.values()))

    def purge(self, name: str, positions: Iterable[int] | None = None) -> int:
        """Remove dead letters of the group `name`; return how many. The arguments are those of `redrive`.

        Their messages stay in the log until retention drops them. A dead letter that another group has popped from
        `$dlq/NAME` stays with that group.
        """
        by_group = self._named(name, positions)
        for group_id, letters in by_group.items():
            self._records.append(Kind.DEAD_LETTER_PURGED, group_id, name, _body(letters))
        return sum(map(len, by_group.values()))

    def find(self, name: str, position: int) -> DeadLetter | None:
        """Return the dead letter of the group `name` that the message at a position is; None if it is none."""
        return next((letter for letters in self._named(name, [position]).values() for letter in letters), None)

    def _named(self, name: str, positions: Iterable[int] | None) -> LettersByGroup:
        """Return the dead letters of a group that still exist, by the id of the group with their filter."""
        queue = self._store.queues.find(DEAD_LETTERS + name)
        if queue is None:
            return {}
        if positions is None:
            letters = self.list(name)
        else:
            self._store.commit()
            listed_at = self._state.dead_letters.listed_at
            letters = [letter for position in sorted(set(positions)) for letter in listed_at(queue.id, position)]
        by_group: LettersByGroup = {}
        for letter in letters:
            if letter.group_id in self._state.groups_by_id and not self._store.is_expired(letter.position):
                by_group.setdefault(letter.group_id, []).append(letter)
        return by_group

    def _key(self, letter: DeadLetter) -> int:
        data = self._records.read(letter.position, letter.size)
        return order_key(data) if data is not None else NO_KEY


def _body(letters: Iterable[DeadLetter]) -> bytes:
    return b"".join(TIMER_ENTRY.pack(letter.position, letter.size) for letter in letters)
