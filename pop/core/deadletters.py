"""Dead letters: the messages that a group has failed to process, where each came from, and why it failed.

The messages are in the light queue `$dlq/GROUP`. A dead letter has a row from the record that dead-lettered the message to the
record that redrives it, or until retention drops the message. So a row also tells that the dead letter was not redriven. Rows
are read from the index when somebody asks; only those of the open commit are in memory.

A dead letter has no time to live any more, because an operator decides what becomes of it. So a redriven message has none:
it is known until its group is reset or deleted, or retention drops it, and doesn't expire in later attempts.

Rows of the index, all integers of keys big-endian:

- dead letters: key b"D", id of the `$dlq/` queue u32, position u64, group id u32; value offset in that queue u64, size u32,
  attempts u16, reason u8, failed ms i64, and what the consumer said in UTF-8.
- redriven messages: key b"d", group id u32, position u64; no value. They are looked up where they are needed, so they take no
  memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import IntEnum
from itertools import islice, takewhile
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

import orjson

from penstock.pop.core.checkpoint import FROM_QUEUE
from penstock.pop.core.order import NO_KEY, order_key
from penstock.pop.errors import RequestInvalid
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.index.index import Batch, Index, after
from penstock.store.index.rowformats import KeySpace
from penstock.store.record import Kind

if TYPE_CHECKING:
    from penstock.pop.core.checkpoint import Checkpoint
    from penstock.pop.core.group import ConsumerGroup
    from penstock.pop.core.records import GroupRecords
    from penstock.pop.core.state import PopState
    from penstock.store.store import Store

DEAD_LETTERS = "$dlq/"
"""A group's dead letters are in the light queue with this prefix and the name of the group."""

DEAD_LETTERS_MAX = 10_000
"""Maximum number of dead letters that one call lists or redrives, because the loop does nothing else meanwhile."""

_KEY = Struct(">cIQI")
_QUEUE_PREFIX = Struct(">cI")
_MESSAGE_PREFIX = Struct(">cIQ")
_ROW = Struct("<QIHBq")
_REDRIVEN_KEY = Struct(">cIQ")
_REDRIVEN_PREFIX = Struct(">cI")

DETAIL_BYTES_MAX = 2_000
"""Maximum length of the detail of a dead letter, in bytes of UTF-8."""

Key = tuple[int, int, int]
"""Id of the `$dlq/` queue, position of the message, id of the group."""


class Reason(IntEnum):
    """Why a message is a dead letter. The index has the numbers, the log has the names."""

    ATTEMPTS_EXHAUSTED = 1
    """It was handed out as often as its group allows, and never acknowledged."""
    UNREADABLE = 2
    """Its record can't be read any more."""
    FORWARDED = 3
    """A consumer dead-lettered it."""


class DeadLetter(NamedTuple):
    """One dead letter.

    Parameters:
        queue_id: id of the `$dlq/` queue.
        position: of the message.
        group_id: of the group that failed to process the message.
        offset: in the `$dlq/` queue.
        size: of the message's record.
        attempts: how often the message was handed out.
        reason: why it is a dead letter.
        failed_ms: when it became one, in ms since 1970.
        detail: why a consumer dead-lettered it, in the consumer's words; or why the last attempt failed, if the node knows.
    """

    queue_id: int
    position: int
    group_id: int
    offset: int
    size: int
    attempts: int
    reason: Reason
    failed_ms: int
    detail: str = ""

    @property
    def key(self) -> Key:
        return self.queue_id, self.position, self.group_id


class DeadLetterOrigin(NamedTuple):
    """The dead letter that a popped message is, and where it came from.

    Parameters:
        letter: the dead letter that the message is.
        group: name of the group that failed to process the message.
        filter: by which that group got the message; empty if the group was deleted.
    """

    letter: DeadLetter
    group: str
    filter: str


def check_detail(detail: str) -> None:
    """Check the length of what a consumer says about a failure. Raises RequestInvalid."""
    if len(detail) * 4 > DETAIL_BYTES_MAX and len(detail.encode()) > DETAIL_BYTES_MAX:
        raise RequestInvalid(f"the reason of a failure has {len(detail.encode())} bytes: use up to {DETAIL_BYTES_MAX}")


class DeadLetterTable:
    """The dead letters of all groups. Only `PopState` changes them."""

    def __init__(self) -> None:
        self._changed: dict[Key, DeadLetter | None] = {}
        self._queues_deleted: set[int] = set()
        """Ids of deleted `$dlq/` queues whose rows must be deleted."""
        self._index: Index | None = None

    def add(self, letter: DeadLetter) -> None:
        """Add a dead letter."""
        self._changed[letter.key] = letter

    def remove(self, key: Key) -> None:
        """Remove a dead letter that was redriven, or whose message was dropped."""
        self._changed[key] = None

    def delete_queue(self, queue_id: int) -> None:
        """Remove all dead letters of a `$dlq/` queue that is deleted."""
        self._queues_deleted.add(queue_id)

    def get(self, key: Key) -> DeadLetter | None:
        """Return a dead letter; None if there is none with this key, or it was redriven."""
        if key in self._changed:
            return self._changed[key]
        assert self._index is not None
        row = self._index.get(_KEY.pack(KeySpace.DEAD, *key))
        return _letter(key, row) if row is not None else None

    def of_message(self, queue_id: int, position: int, offset: int | None = None) -> DeadLetter | None:
        """Return the dead letter that a message in a `$dlq/` queue is; None if there is none.

        With `offset`, return only the dead letter that has this offset in the queue.
        """
        letters = {letter.key: letter for letter in self.listed_at(queue_id, position)}
        for key, letter in self._changed.items():
            if key[:2] == (queue_id, position):
                letters.pop(key, None)
                if letter is not None:
                    letters[key] = letter
        return next((letter for letter in letters.values() if offset is None or letter.offset == offset), None)

    def listed(self, queue_id: int, position: int = 0) -> Iterator[DeadLetter]:
        """Yield the committed dead letters of a `$dlq/` queue in the order of the log, from `position` on."""
        return self._saved(_QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id), position.to_bytes(8, "big"))

    def listed_at(self, queue_id: int, position: int) -> Iterator[DeadLetter]:
        """Yield the committed dead letters that one message is: one for each filter by which its group got the message."""
        return self._saved(_MESSAGE_PREFIX.pack(KeySpace.DEAD, queue_id, position))

    def before(self, position: int) -> Iterator[DeadLetter]:
        """Yield the committed dead letters of all queues whose messages are before `position` in the log."""
        assert self._index is not None
        queue_id = 0
        while (
            row := self._index.first_at_or_after(_QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id), bytes(KeySpace.DEAD))
        ) is not None:
            queue_id = _KEY.unpack(row[0])[1]
            yield from takewhile(lambda letter: letter.position < position, self.listed(queue_id))
            queue_id += 1

    def _saved(self, prefix: bytes, start: bytes = b"") -> Iterator[DeadLetter]:
        assert self._index is not None
        for key, row in self._index.rows(prefix, start):
            _, queue_id, position, group_id = _KEY.unpack(key)
            yield _letter((queue_id, position, group_id), row)

    # --- the index --------------------------------------------------------------------------------------------------

    def load(self, index: Index) -> None:
        """Read from `index` from now on."""
        self._index = index

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        for key, letter in self._changed.items():
            if letter is None:
                batch.delete(_KEY.pack(KeySpace.DEAD, *key))
            else:
                batch.put(
                    _KEY.pack(KeySpace.DEAD, *key),
                    _ROW.pack(letter.offset, letter.size, letter.attempts, letter.reason, letter.failed_ms)
                    + letter.detail.encode(),
                )
        self._changed.clear()
        for queue_id in self._queues_deleted:
            prefix = _QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id)
            batch.delete_range(prefix, after(prefix))
        self._queues_deleted.clear()


def _letter(key: Key, row: bytes) -> DeadLetter:
    offset, size, attempts, reason, failed_ms = _ROW.unpack_from(row)
    return DeadLetter(*key, offset, size, attempts, Reason(reason), failed_ms, row[_ROW.size :].decode())


class RedrivenMessages:
    """The positions of the messages that a group has got back from its dead letters.

    Parameters:
        group_id: of the group.
        index: has the rows of earlier commits.
    """

    __slots__ = ("_changed", "_group_id", "_index", "_is_cleared", "_may_have_rows")

    def __init__(self, group_id: int, index: Index) -> None:
        self._group_id = group_id
        self._index = index
        self._changed: dict[int, bool] = {}
        """Positions that were added, or removed, since the last call of `save`."""
        self._is_cleared = False
        """True if all rows must be deleted before those of `_changed` are written."""
        self._may_have_rows: bool | None = None
        """False if there are no rows; None before the first look."""

    def __contains__(self, position: object) -> bool:
        """Return whether a message was redriven."""
        assert isinstance(position, int)
        is_redriven = self._changed.get(position)
        if is_redriven is not None:
            return is_redriven
        return self._has_rows() and self._index.get(_REDRIVEN_KEY.pack(KeySpace.REDRIVEN, self._group_id, position)) is not None

    def __bool__(self) -> bool:
        """Return whether there may be any."""
        return any(self._changed.values()) or self._has_rows()

    def _has_rows(self) -> bool:
        """Return whether there may be rows. Most groups have none, and then a message that has expired costs no lookup."""
        if self._may_have_rows is None:
            prefix = _REDRIVEN_PREFIX.pack(KeySpace.REDRIVEN, self._group_id)
            self._may_have_rows = self._index.first_at_or_after(prefix, prefix) is not None
        return self._may_have_rows

    def add(self, position: int) -> None:
        """Note that a message was redriven."""
        self._changed[position] = True

    def remove(self, position: int) -> None:
        """Forget a message that retention has dropped."""
        self._changed[position] = False

    def clear(self) -> None:
        """Forget all messages, because the group was reset."""
        self._changed.clear()
        self._is_cleared, self._may_have_rows = True, False

    def before(self, position: int) -> Iterator[int]:
        """Yield the committed positions before `position`, in order."""
        if self._has_rows():
            rows = self._index.rows(_REDRIVEN_PREFIX.pack(KeySpace.REDRIVEN, self._group_id))
            yield from takewhile(lambda redriven: redriven < position, (_REDRIVEN_KEY.unpack(key)[2] for key, _ in rows))

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        if self._is_cleared:
            delete_redriven(batch, self._group_id)
            self._is_cleared = False
        for position, is_redriven in self._changed.items():
            key = _REDRIVEN_KEY.pack(KeySpace.REDRIVEN, self._group_id, position)
            if is_redriven:
                batch.put(key, b"")
                self._may_have_rows = True
            else:
                batch.delete(key)
        self._changed.clear()


def delete_redriven(batch: Batch, group_id: int) -> None:
    """Delete all rows of a group, with one range delete."""
    prefix = _REDRIVEN_PREFIX.pack(KeySpace.REDRIVEN, group_id)
    batch.delete_range(prefix, after(prefix))


LettersByGroup = dict[int, list[DeadLetter]]
"""Dead letters by the id of the group that has them."""


class DeadLetters:
    """Lists, redrives and purges dead letters, and tells where popped ones came from.

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
            group = self._state.groups.by_id[group_id]
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

    def origins(self, checkpoint: Checkpoint) -> dict[int, DeadLetterOrigin]:
        """Return the origins of the dead letters among the messages of a checkpoint, by index."""
        group = self._state.groups.by_id.get(checkpoint.group_id)
        if group is None or not group.dead_letters_of:
            return {}
        origins = {}
        for index, entry in enumerate(checkpoint.entries()):
            offset = entry.offset if entry.source == FROM_QUEUE else None
            letter = self._state.dead_letters.of_message(group.queue.id, entry.position, offset)
            if letter is not None:
                origins[index] = DeadLetterOrigin(letter, group.dead_letters_of, self.filter_of(letter))
        return origins

    def filter_of(self, letter: DeadLetter) -> str:
        """Return the filter by which a group got the message of a dead letter; empty if the group was deleted."""
        group = self._state.groups.by_id.get(letter.group_id)
        return group.filter if group is not None else ""

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
            if letter.group_id in self._state.groups.by_id and not self._store.is_expired(letter.position):
                by_group.setdefault(letter.group_id, []).append(letter)
        return by_group

    def _key(self, letter: DeadLetter) -> int:
        data = self._store.read_intact(letter.position, letter.size)
        return order_key(data) if data is not None else NO_KEY


def _body(letters: Iterable[DeadLetter]) -> bytes:
    return b"".join(TIMER_ENTRY.pack(letter.position, letter.size) for letter in letters)
