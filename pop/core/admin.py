"""The administration of groups: what operators decide. Every change is a record, as in the core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import orjson

from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.groups import Groups
from penstock.pop.core.records import GroupRecords
from penstock.pop.core.settings import ConsumerGroupSettings, check_settings
from penstock.pop.core.state import PopState
from penstock.pop.errors import GroupBusy, GroupExists, GroupUnknown, RequestInvalid
from penstock.pop.options import PopOptions
from penstock.store.bodies import REFERENCE
from penstock.store.queues.lightqueue import End, LightQueue, Start
from penstock.store.record import BY_OPERATOR, LAST_MEMBER_LEFT, Kind
from penstock.store.space.causer import NODE, Causer
from penstock.store.store import Store


class ResetTo(NamedTuple):
    """Where a group that is reset begins again. Exactly one of the parameters must be given.

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


class GroupAdmin:
    """Creates, changes, resets and deletes groups.

    A group that consumes several filters is one `ConsumerGroup` for each; an empty filter means all of them.

    Parameters:
        store: has the light queues that groups read.
        state: has the checkpoints.
        groups: creates and configures groups.
        records: appends what is decided.
        serve: called with a group whose polls may get messages now.
        options: bounds of settings.
    """

    def __init__(
        self,
        store: Store,
        state: PopState,
        groups: Groups,
        records: GroupRecords,
        serve: Callable[[ConsumerGroup], None],
        options: PopOptions,
    ) -> None:
        self._store = store
        self._state = state
        self._groups = groups
        self._records = records
        self._serve = serve
        self._options = options
        self.on_deleted: list[Callable[[ConsumerGroup], None]] = []
        """Called with each group that was deleted."""

    def find(self, name: str, topic_filter: str = "") -> list[ConsumerGroup]:
        """Return a group on one filter, or on all its filters.

        Raises:
            GroupUnknown: there is no such group.
        """
        if topic_filter:
            group = self._groups.get(name, topic_filter)
            found = [] if group is None else [group]
        else:
            found = [group for group in self._groups if group.name == name]
        if not found:
            on = f" on {topic_filter[:80]!r}" if topic_filter else ""
            raise GroupUnknown(f"there is no group {name[:80]!r}{on}")
        return found

    def create(
        self, name: str, topic_filter: str, start: Start, settings: ConsumerGroupSettings, causer: Causer = NODE
    ) -> ConsumerGroup:
        """Create a group, for which the causer is charged, or return the existing one if it has these settings.

        A group that a shared or a lite subscription created gets these settings, and becomes permanent.

        Raises:
            GroupExists: the group exists with other settings.
            GroupInvalid, RequestInvalid, TopicInvalid, Overloaded, LimitExceeded: as `Groups.create` raises them.
        """
        check_settings(settings, self._options)
        group = self._groups.get(name, topic_filter)
        if group is None:
            return self._groups.create(name, topic_filter, start, settings, causer)
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
                noted = {"cursor": group.scanned, "mended": self._state.mended}
                self._records.append(Kind.POP_CHECKPOINT, group.id, group.name, properties=orjson.dumps(noted))
            self._groups.configure(group, settings)
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
        """Return references to all open deliveries of a group. This visits all open checkpoints of the node."""
        return [
            REFERENCE.pack(checkpoint.position, index)
            for checkpoint in self._state.checkpoints.values()
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
