"""The administration of groups and dead letters: what an operator decides. Every change is a record, as in the core."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

import orjson

from penstock.pop.core.core import PopCore
from penstock.pop.core.deadletters import DeadLetter
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.names import DEAD_LETTERS
from penstock.pop.core.order import NO_KEY, order_key
from penstock.pop.core.settings import GroupSettings, check_settings
from penstock.pop.errors import GroupBusy, GroupExists, GroupUnknown, RequestInvalid
from penstock.store.errors import PositionUnknown
from penstock.store.lightqueue import ENTRY, End, LightQueue, Start
from penstock.store.record import HEADER_BYTES, REFERENCE, TIMER_ENTRY, Kind, store_ms_of

DEAD_LETTERS_MAX = 10_000
"""Dead letters that one call lists or sends back: about 0.3 s of the loop."""


class ResetTo(NamedTuple):
    """Where a group is to begin anew: one of these.

    Parameters:
        end: "earliest" for all that its queue still has, "latest" for what comes from now on.
        time_ms: what was stored then or later, ms since 1970. A delayed message counts by when it was due, half of a
            transaction by when it was committed.
        position: what came into its queue from this position of the log on.
    """

    end: End | None = None
    time_ms: int | None = None
    position: int | None = None


class Description(NamedTuple):
    """How a group stands."""

    group: ConsumerGroup
    visible: int
    """What a pop could get now; of a group that looks at each message, at most."""
    retries: int
    """Of these, what comes back."""
    in_flight: int
    delayed: int
    """Of what is in flight, what waits for its back-off."""
    parked: int
    """What waits behind its message group."""
    dead: int
    oldest_ms: int | None
    """Age of the oldest message that is not handed out, in ms."""
    oldest_in_flight_ms: int | None
    """Age of the oldest delivery that is out, in ms."""


class GroupAdmin:
    """Creates, describes, changes, resets and deletes groups; lists and sends back dead letters.

    A group that consumes several filters is one of these for each; an empty filter means all of them.

    Parameters:
        core: whose groups.
    """

    def __init__(self, core: PopCore) -> None:
        self.core = core
        self.on_deleted: list[Callable[[ConsumerGroup], None]] = []
        """Called with each group that was deleted."""
        self._store = core.store
        self._state = core.state

    def find(self, name: str, topic_filter: str = "") -> list[ConsumerGroup]:
        """Return a group's consumption of a filter, or of all its filters.

        Raises:
            GroupUnknown: there is none.
        """
        if topic_filter:
            group = self._state.groups.get((name, topic_filter))
            found = [] if group is None else [group]
        else:
            found = [group for group in self.core if group.name == name]
        if not found:
            on = f" on {topic_filter[:80]!r}" if topic_filter else ""
            raise GroupUnknown(f"there is no group {name[:80]!r}{on}")
        return found

    def create(self, name: str, topic_filter: str, start: Start, settings: GroupSettings) -> ConsumerGroup:
        """Create a group; return the one that is there if its settings are these.

        One that a shared or a lite subscription has made gets these settings, and outlasts that from now on.

        Raises:
            GroupExists: it is there with other settings.
            GroupInvalid, RequestInvalid, TopicInvalid, Overloaded, LimitExceeded: as they say.
        """
        check_settings(settings, self.core.options)
        group = self._state.groups.get((name, topic_filter))
        if group is None:
            return self.core.groups.create(name, topic_filter, start, settings)
        settings = replace(settings, lite=group.settings.lite)
        if group.settings.is_temporary:  # others were first; from now on it is the operator's
            return self.update(name, topic_filter, lambda _: settings)[0]
        if group.settings != settings:
            raise GroupExists(f"the group {name!r} on {topic_filter[:80]!r} exists with other settings: update it")
        return group

    def update(self, name: str, topic_filter: str, change: Callable[[GroupSettings], GroupSettings]) -> list[ConsumerGroup]:
        """Change settings. They hold for what is handed out, and for what fails, from now on.

        Raises:
            GroupUnknown: there is no such group.
            RequestInvalid: a setting is out of its bounds; nothing is changed.
            GroupBusy: `fifo` can't change while messages are out, come back, or wait for their turn; nothing is changed.
        """
        groups = self.find(name, topic_filter)
        wanted = [check_settings(change(group.settings), self.core.options) for group in groups]
        for group, settings in zip(groups, wanted, strict=True):
            if settings.fifo != group.settings.fifo and not group.is_quiet:
                raise GroupBusy(
                    f"the group {name!r} on {group.filter!r} has messages in flight, or on their way back: fifo can change "
                    f"when there are none; pause it, and wait until they are settled"
                )
        for group, settings in zip(groups, wanted, strict=True):
            if settings == group.settings:
                continue
            if group.scanned > group.cursor:  # what was passed over was decided by the old expression
                noted = {"cursor": group.scanned, "mended": self._state.mended}
                self.core.records.append(Kind.POP_CHECKPOINT, group.id, group.name, properties=orjson.dumps(noted))
            self.core.groups.configure(group, settings)
            self.core.polls.serve(group)
        return groups

    def pause(self, name: str, topic_filter: str = "") -> list[ConsumerGroup]:
        """Let a group's pops get nothing, until `resume`. What is out may be settled, and comes back as ever."""
        return self.update(name, topic_filter, lambda settings: replace(settings, paused=True))

    def resume(self, name: str, topic_filter: str = "") -> list[ConsumerGroup]:
        """End a pause; polls that wait are served."""
        return self.update(name, topic_filter, lambda settings: replace(settings, paused=False))

    def reset(self, name: str, topic_filter: str, to: ResetTo) -> list[ConsumerGroup]:
        """Let a group begin anew elsewhere. All its handles are void; what came back, or waits for its turn, is forgotten.

        Raises:
            GroupUnknown: there is no such group.
            GroupBusy: its queue is still being filled with what the log has.
            RequestInvalid: not exactly one of the places is given, or it is negative.
        """
        if sum(value is not None for value in to) != 1:
            raise RequestInvalid("give one of earliest, latest, a time or a position")
        if min(to.time_ms or 0, to.position or 0) < 0:
            raise RequestInvalid("a time, or a position, can't be negative")
        self._store.commit()  # so that what was stored in this very turn has its offset
        groups = self.find(name, topic_filter)
        for group in groups:
            if self._store.queues.is_backfilling(group.queue):
                raise GroupBusy(f"the queue of {group.filter!r} is still being filled from the log: try again in a moment")
        for group in groups:
            row = {"cursor": self._offset(group.queue, to), "retry_cursor": group.retry.next_offset}
            self.core.records.append_references(
                Kind.GROUP_OFFSET_RESET, group, self._open_references(group), properties=orjson.dumps(row)
            )
            self.core.polls.serve(group)
        return groups

    def delete(self, name: str, topic_filter: str = "") -> None:
        """Delete a group. Its handles are void, its polls end. Its dead letters go too, unless another group consumes them.

        Raises:
            GroupUnknown: there is no such group.
        """
        for group in self.find(name, topic_filter):
            self.core.records.append_references(Kind.GROUP_DELETED, group, self._open_references(group))
            while group.polls:
                poll = group.polls.popleft()
                if not poll.future.done():  # one that waits in other groups too
                    poll.future.set_exception(GroupUnknown(f"the group {name!r} on {group.filter!r} was deleted"))
            for deleted in self.on_deleted:
                deleted(group)

    def _open_references(self, group: ConsumerGroup) -> list[bytes]:
        """Return all deliveries of a group that are open: 0.2 us for each of the node."""
        return [
            REFERENCE.pack(checkpoint.position, index)
            for checkpoint in self._state.checkpoints.values()
            if checkpoint.group_id == group.id
            for index in checkpoint.open_indexes()
        ]

    # --- offsets ----------------------------------------------------------------------------------------------------

    def _offset(self, queue: LightQueue, to: ResetTo) -> int:
        if to.end == "earliest":
            return queue.first_offset()
        if to.end == "latest":
            return queue.next_offset
        if to.position is not None:
            return queue.offset_from(to.position, self._store.log)
        assert to.time_ms is not None
        return queue.offset_at(to.time_ms, self._store.log)

    def _stored_ms(self, position: int) -> int:
        try:
            return store_ms_of(self._store.read(position, HEADER_BYTES))
        except PositionUnknown:
            return 0  # before the log's start: older than all that is asked for

    # --- dead letters -----------------------------------------------------------------------------------------------

    def dead_letters(self, name: str, position: int = 0, limit: int = DEAD_LETTERS_MAX) -> list[DeadLetter]:
        """Return the dead letters of the group `name` that were not sent back, in the order of the log.

        Args:
            position: of the first that is wanted.
            limit: how many at most, up to `DEAD_LETTERS_MAX`.
        """
        queue = self._store.queues.find(DEAD_LETTERS + name)
        if queue is None:
            return []
        self._store.commit()
        return list(islice(self._state.dead_letters.listed(queue.id, position), min(limit, DEAD_LETTERS_MAX)))

    def redrive(self, name: str, positions: Iterable[int] | None = None) -> int:
        """Send dead letters of the group `name` back to it, as new messages; return how many. Each goes once, whatever crashes.

        One that another group has popped from `$dlq/NAME` is in that group's hands all the same.

        Args:
            positions: of the messages; None for all, up to `DEAD_LETTERS_MAX`. Those that are no dead letters are left out.
        """
        queue = self._store.queues.find(DEAD_LETTERS + name)
        if queue is None:
            return 0
        if positions is None:
            letters = self.dead_letters(name)
        else:
            self._store.commit()
            listed_at = self._state.dead_letters.listed_at
            letters = [letter for position in sorted(set(positions)) for letter in listed_at(queue.id, position)]
        by_group: dict[int, list[DeadLetter]] = {}
        for letter in letters:
            if letter.group_id in self._state.groups_by_id and not self._store.is_expired(letter.position):
                by_group.setdefault(letter.group_id, []).append(letter)
        for group_id, found in by_group.items():
            group = self._state.groups_by_id[group_id]
            body = b"".join(TIMER_ENTRY.pack(letter.position, letter.size) for letter in found)
            properties = b""
            if group.order is not None:
                properties = orjson.dumps({"keys": [self._key(letter) for letter in found]})
            self.core.records.append(Kind.DEAD_LETTER_REDRIVEN, group_id, name, body, properties=properties)
            self.core.polls.serve(group)
        return sum(map(len, by_group.values()))

    def _key(self, letter: DeadLetter) -> int:
        data = self.core.read(letter.position, letter.size)
        return order_key(data) if data is not None else NO_KEY

    # --- describing -------------------------------------------------------------------------------------------------

    def describe(self, groups: Iterable[ConsumerGroup]) -> list[Description]:
        """Return how groups stand. Costs a look at each open checkpoint of the node, and two records a group."""
        now_ms = self._store.now_ms()
        delayed: Counter[int] = Counter()
        oldest_pop_ms: dict[int, int] = {}
        for checkpoint in self._state.checkpoints.values():
            oldest_pop_ms.setdefault(checkpoint.group_id, checkpoint.pop_ms)  # they are in the order of their pops
            if checkpoint.deadline_ms <= now_ms:
                delayed[checkpoint.group_id] += checkpoint.open.bit_count()
        return [
            Description(
                group,
                visible=group.visible,
                retries=group.visible_retries,
                in_flight=group.in_flight,
                delayed=delayed[group.id],
                parked=group.order.parked if group.order is not None else 0,
                dead=group.dead_letter_count,
                oldest_ms=self._oldest_ms(group, now_ms),
                oldest_in_flight_ms=now_ms - oldest_pop_ms[group.id] if group.id in oldest_pop_ms else None,
            )
            for group in groups
        ]

    def _oldest_ms(self, group: ConsumerGroup, now_ms: int) -> int | None:
        waiting = (group.queue.read(group.scanned, 1), group.retry.read(group.retry_cursor, 1))
        ages = [now_ms - self._stored_ms(ENTRY.unpack(entry)[0]) for entry in waiting if entry]
        return max(ages, default=None)
