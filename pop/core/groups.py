"""The groups: creating, configuring, resetting, deleting and describing them. Every change is a record."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import orjson

from penstock.pop.core.group import ConsumerGroup, check_group_name, check_system_filter
from penstock.pop.core.settings import DEFAULTS, ConsumerGroupSettings, check_settings
from penstock.pop.errors import GroupBusy, GroupExists, GroupUnknown, Overloaded, RequestInvalid
from penstock.store.bodies import REFERENCE
from penstock.store.errors import DiskFull, LimitExceeded, PositionUnknown, StoreError
from penstock.store.queues.lightqueue import ENTRY, End, LightQueue, Start
from penstock.store.record import BY_OPERATOR, HEADER_BYTES, LAST_MEMBER_LEFT, Kind, store_ms_of
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import NODE, Causer

if TYPE_CHECKING:
    from penstock.pop.core.checkpoint import Checkpoint
    from penstock.pop.core.records import GroupRecords
    from penstock.pop.core.state import PopState
    from penstock.pop.options import PopOptions
    from penstock.store.store import Store


class ResetTo(NamedTuple):
    """The place where a group that is reset begins again. Exactly one of the parameters must be given.

    Parameters:
        end: "earliest" for all messages that its queue still has, "latest" for messages that arrive from now on.
        time_ms: messages that were stored at this time or later, ms since 1970. A delayed message counts by the time when it
            was due, a half message by the time when it was committed.
        position: messages that came into its queue at this position of the log or later.
        offset: messages from this offset of its queue on, or the nearest one that the queue has.
    """

    end: End | None = None
    time_ms: int | None = None
    position: int | None = None
    offset: int | None = None


class GroupSnapshot(NamedTuple):
    """Snapshot of a group's backlog.

    Parameters:
        group: that is described.
        visible: number of messages that a pop can get now; an upper bound for a selective group.
        retries: how many of the visible messages are retries.
        in_flight: number of messages that were handed out and not acknowledged.
        delayed: how many messages in flight wait for a delay or their back-off, so that no consumer has them.
        parked: number of messages that wait for their message group.
        dead: number of dead letters.
        oldest_ms: age of the oldest message that was not handed out, in ms; None if there is none.
        oldest_in_flight_ms: age of the oldest open delivery, in ms; None if there is none.
    """

    group: ConsumerGroup
    visible: int
    retries: int
    in_flight: int
    delayed: int
    parked: int
    dead: int
    oldest_ms: int | None
    oldest_in_flight_ms: int | None


class Groups:
    """All groups. A group that consumes several filters is one `ConsumerGroup` for each of them.

    Where a method takes a filter, an empty one means all filters of the group.

    Parameters:
        store: has the light queues that groups read, and the ledger that is charged for each group.
        state: has the groups and their checkpoints.
        records: appends what is decided.
        serve: called with a group whose polls may get messages now.
        options: bounds, and whether consumers may create groups.
    """

    def __init__(
        self,
        store: Store,
        state: PopState,
        records: GroupRecords,
        serve: Callable[[ConsumerGroup], None],
        options: PopOptions,
    ) -> None:
        store.ledger.limit(Resource.GROUPS, options.groups_max, "raise pop.groups_max")
        self._store = store
        self._state = state
        self._records = records
        self._serve = serve
        self._options = options
        self.on_deleted: list[Callable[[ConsumerGroup], None]] = []
        """Called with each group that was deleted."""

    def __iter__(self) -> Iterator[ConsumerGroup]:
        """Yield all groups."""
        return iter(self._state.groups.by_id.values())

    def with_id(self, group_id: int) -> ConsumerGroup | None:
        """Return the group with an id; None if there is none."""
        return self._state.groups.by_id.get(group_id)

    def get(self, name: str, topic_filter: str) -> ConsumerGroup | None:
        """Return the group `name` on `topic_filter`; None if there is none."""
        return self._state.groups.by_name.get((name, topic_filter))

    def get_or_create(self, name: str, topic_filter: str, start: Start = "earliest", causer: Causer = NODE) -> ConsumerGroup:
        """Return the group `name` on `topic_filter`; create it if it doesn't exist, to begin at `start`.

        A group that a shared or a lite subscription created becomes permanent: from now on a service counts on it.

        Raises:
            GroupUnknown: it doesn't exist, and `pop.groups_auto_create` is off.
            GroupInvalid: the name is not valid.
            RequestInvalid: the filter is a '$' topic that this group can't consume.
            TopicInvalid: the filter breaks MQTT 5.0, 4.7.
            Overloaded, LimitExceeded: `pop.groups_max` or `store.queues_max` is reached, or the causer may have no more.
        """
        group = self._state.groups.by_name.get((name, topic_filter))
        if group is not None:
            if group.settings.is_temporary:
                with suppress(DiskFull):  # the next call tries again
                    self.configure(group, replace(group.settings, shared=False, lite_ends_ms=None))
            return group
        self.check_may_create(name, topic_filter)
        return self.add(name, topic_filter, start, DEFAULTS, causer)

    def check_may_create(self, name: str, topic_filter: str) -> None:
        """Raise GroupUnknown if consumers can't create groups because `pop.groups_auto_create` is off."""
        if not self._options.groups_auto_create:
            raise GroupUnknown(
                f"there is no group {name[:80]!r} on {topic_filter[:80]!r}: create it first, or set pop.groups_auto_create"
            )

    def add(
        self, name: str, topic_filter: str, start: Start, settings: ConsumerGroupSettings, causer: Causer = NODE
    ) -> ConsumerGroup:
        """Add a group that doesn't exist. The caller must have checked the settings. The causer is charged for it.

        Raises:
            GroupInvalid, RequestInvalid, TopicInvalid, Overloaded, LimitExceeded: as `get_or_create` raises them.
        """
        check_group_name(name)
        if topic_filter.startswith("$"):
            check_system_filter(name, topic_filter)
        try:
            by = self._store.ledger.admit(causer, Resource.GROUPS, topic=topic_filter).row()
        except LimitExceeded as error:
            raise Overloaded(str(error)) from error
        group_id = self._state.groups.next_id
        owner = f"group:{group_id}"
        queue = self._store.queues.declare(topic_filter, owner, start, causer)
        try:
            retry = self._store.queues.declare(f"$retry/{group_id}", owner, causer=causer)
        except StoreError:
            self._store.queues.drop(queue, owner)
            raise
        row = {
            "group": name,
            "filter": topic_filter,
            "queue": queue.id,
            "retry": retry.id,
            "cursor": self._store.queues.offset_of(queue, start),
            "by": by,
        }
        if settings != DEFAULTS:
            row["settings"] = settings.row()
        self._records.append(Kind.GROUP_CREATED, group_id, name, properties=orjson.dumps(row))
        return self._state.groups.by_name[name, topic_filter]

    def configure(self, group: ConsumerGroup, settings: ConsumerGroupSettings) -> None:
        """Change the settings of a group. The caller must have checked them.

        Raises:
            DiskFull: the disk has no room for the record; nothing is changed.
        """
        self._records.append(Kind.GROUP_CHANGED, group.id, group.name, properties=orjson.dumps({"settings": settings.row()}))

    def find(self, name: str, topic_filter: str = "") -> list[ConsumerGroup]:
        """Return a group on one filter, or on all its filters.

        Raises:
            GroupUnknown: there is no such group.
        """
        if topic_filter:
            group = self.get(name, topic_filter)
            groups = [] if group is None else [group]
        else:
            groups = [group for group in self if group.name == name]
        if not groups:
            on = f" on {topic_filter[:80]!r}" if topic_filter else ""
            raise GroupUnknown(f"there is no group {name[:80]!r}{on}")
        return groups

    def create(
        self, name: str, topic_filter: str, start: Start, settings: ConsumerGroupSettings, causer: Causer = NODE
    ) -> ConsumerGroup:
        """Create a group, for which the causer is charged, or return the existing one if it has these settings.

        A group that a shared or a lite subscription created gets these settings, and becomes permanent.

        Raises:
            GroupExists: the group exists with other settings.
            GroupInvalid, RequestInvalid, TopicInvalid, Overloaded, LimitExceeded: as `add` raises them.
        """
        check_settings(settings, self._options)
        group = self.get(name, topic_filter)
        if group is None:
            return self.add(name, topic_filter, start, settings, causer)
        settings = replace(settings, lite=group.settings.lite)
        if group.settings.is_temporary:  # a subscription created it first; from now on it is the operator's
            return self.update(name, topic_filter, lambda _: settings)[0]
        if replace(group.settings, expression_of_consumers=settings.expression_of_consumers) != settings:
            raise GroupExists(f"the group {name!r} on {topic_filter[:80]!r} exists with other settings: update it")
        return group

    def update(
        self, name: str, topic_filter: str, change: Callable[[ConsumerGroupSettings], ConsumerGroupSettings]
    ) -> list[ConsumerGroup]:
        """Change settings. They apply to messages that are handed out, and to attempts that fail, from now on.

        Raises:
            GroupUnknown: there is no such group.
            RequestInvalid: a setting is out of its bounds; nothing is changed.
            GroupBusy: `fifo` can't change while messages are in flight, wait for a retry, or are parked; nothing is changed.
        """
        groups = self.find(name, topic_filter)
        wanted = [check_settings(change(group.settings), self._options) for group in groups]
        for group, settings in zip(groups, wanted, strict=True):
            if settings.fifo != group.settings.fifo and not group.is_quiet:
                raise GroupBusy(
                    f"the group {name!r} on {group.filter!r} has messages in flight or waiting for a retry: fifo can change "
                    f"when there are none; pause the group, and wait until they are acknowledged"
                )
        for group, settings in zip(groups, wanted, strict=True):
            if settings == group.settings:
                continue
            if group.scanned > group.cursor:  # the old expression has decided about the messages that were skipped
                row = {"cursor": group.scanned, "mended": self._state.mended}
                self._records.append(Kind.POP_CHECKPOINT, group.id, group.name, properties=orjson.dumps(row))
            self.configure(group, settings)
            self._serve(group)
        return groups

    def pause(self, name: str, topic_filter: str = "") -> list[ConsumerGroup]:
        """Let the pops of a group get nothing until `resume`. Open deliveries can be acknowledged, and expire as usual."""
        return self.update(name, topic_filter, lambda settings: replace(settings, paused=True))

    def resume(self, name: str, topic_filter: str = "") -> list[ConsumerGroup]:
        """End a pause, and serve the polls that wait."""
        return self.update(name, topic_filter, lambda settings: replace(settings, paused=False))

    def reset(self, name: str, topic_filter: str, to: ResetTo) -> list[ConsumerGroup]:
        """Let a group begin again elsewhere. All its handles become void, and its retries and parked messages are forgotten.

        Raises:
            GroupUnknown: there is no such group.
            GroupBusy: its queue is still being filled with messages that the log already has.
            RequestInvalid: not exactly one of the places is given, or it is negative.
        """
        if sum(value is not None for value in to) != 1:
            raise RequestInvalid("give exactly one of earliest, latest, a time, a position or an offset")
        if min(to.time_ms or 0, to.position or 0, to.offset or 0) < 0:
            raise RequestInvalid("a time, a position or an offset can't be negative")
        self._store.commit()  # messages that were stored in this turn of the loop get their offsets
        groups = self.find(name, topic_filter)
        for group in groups:
            if self._store.queues.is_backfilling(group.queue):
                raise GroupBusy(f"the queue of {group.filter!r} is still being filled from the log: try again in a moment")
        for group in groups:
            row = {"cursor": self._offset(group.queue, to), "retry_cursor": group.retry.next_offset}
            self._records.append_references(
                Kind.GROUP_OFFSET_RESET, group, self._open_references(group), properties=orjson.dumps(row)
            )
            self._serve(group)
        return groups

    def delete(self, name: str, topic_filter: str = "", *, is_unused: bool = False) -> None:
        """Delete a group. Its handles become void, and its polls fail.

        Its dead letters are deleted too, unless another group consumes them.

        Args:
            name: of the group.
            topic_filter: its filter; empty for all its filters.
            is_unused: whether no operator asked for this, but the last subscription has ended of those that had created the
                group. The record says which.

        Raises:
            GroupUnknown: there is no such group.
        """
        flags = LAST_MEMBER_LEFT if is_unused else BY_OPERATOR
        for group in self.find(name, topic_filter):
            self._records.append_references(Kind.GROUP_DELETED, group, self._open_references(group), flags=flags)
            while group.polls:
                poll = group.polls.popleft()
                if not poll.future.done():  # another group may have served a poll of several groups
                    poll.future.set_exception(GroupUnknown(f"the group {name!r} on {group.filter!r} was deleted"))
            for deleted in self.on_deleted:
                deleted(group)

    def _open_references(self, group: ConsumerGroup) -> list[bytes]:
        """Return references to all open deliveries of a group. To find them, this visits all open checkpoints of the node."""
        if not group.in_flight:
            return []
        return [
            REFERENCE.pack(checkpoint.position, index)
            for checkpoint in self._state.checkpoints.open.values()
            if checkpoint.group_id == group.id
            for index in checkpoint.open_indexes()
        ]

    def _offset(self, queue: LightQueue, to: ResetTo) -> int:
        if to.end == "earliest":
            return queue.first_offset()
        if to.end == "latest":
            return queue.next_offset
        if to.offset is not None:
            return min(max(to.offset, queue.first_offset()), queue.next_offset)
        if to.position is not None:
            return queue.offset_from(to.position, self._store.copies)
        assert to.time_ms is not None
        return queue.offset_at(to.time_ms, self._store.copies)


def snapshots(groups: Iterable[ConsumerGroup], checkpoints: Mapping[int, Checkpoint], store: Store) -> list[GroupSnapshot]:
    """Return a snapshot of each group. This visits all open checkpoints of the node, and reads two records for each group.

    Args:
        groups: that are described.
        checkpoints: all checkpoints with open deliveries, in the order of their positions.
        store: has the messages.
    """
    now_ms = store.now_ms()
    oldest_pop_ms: dict[int, int] = {}
    for checkpoint in checkpoints.values():
        oldest_pop_ms.setdefault(checkpoint.group_id, checkpoint.pop_ms)  # checkpoints are in the order of their pops
    return [
        GroupSnapshot(
            group,
            visible=group.count_visible(),
            retries=group.count_retries(),
            in_flight=group.in_flight,
            delayed=group.delayed,
            parked=group.order.parked if group.order is not None else 0,
            dead=group.dead_letter_count,
            oldest_ms=_oldest_ms(group, store, now_ms),
            oldest_in_flight_ms=now_ms - oldest_pop_ms[group.id] if group.id in oldest_pop_ms else None,
        )
        for group in groups
    ]


def _oldest_ms(group: ConsumerGroup, store: Store, now_ms: int) -> int | None:
    waiting = (group.queue.read(group.scanned, 1), group.retry.read(group.retry_cursor, 1))
    ages = [now_ms - _stored_ms(store, ENTRY.unpack(entry)[0]) for entry in waiting if entry]
    return max(ages, default=None)


def _stored_ms(store: Store, position: int) -> int:
    try:
        return store_ms_of(store.read(position, HEADER_BYTES))
    except PositionUnknown:
        return 0  # retention has dropped the message, so it is older than every other
