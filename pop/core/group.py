"""Consumer groups: the consumers that share the messages of a filter. Each message goes to one of them.

Rows of the index: key b"G", group id u32 big-endian, value `ConsumerGroup.row`; and those of `pop.core.order` and
`pop.core.deadletters`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from struct import Struct
from typing import TYPE_CHECKING, Any

import orjson

from penstock.pop.core.deadletters import DEAD_LETTERS, RedrivenMessages, delete_redriven
from penstock.pop.core.expression import Expression, compile_expression
from penstock.pop.core.order import FifoOrder, delete_order
from penstock.pop.core.settings import Backoff, ConsumerGroupSettings
from penstock.pop.errors import GroupInvalid, RequestInvalid
from penstock.store.histogram import LATENCY_BOUNDS_MS, Histogram
from penstock.store.index.index import Batch, Index
from penstock.store.index.rowformats import KeySpace
from penstock.store.queues.lightqueue import LightQueue, Watcher
from penstock.store.record import POP_FIXED, Record

if TYPE_CHECKING:
    from penstock.pop.core.damages import DamagedRanges
    from penstock.pop.core.polls import Poll
    from penstock.pop.options import PopOptions
    from penstock.store.queues.queues import Queues

GROUP_BYTES_MAX = 255
"""Maximum length of a group's name. Each record of a group contains the name, so a longer one is probably a mistake."""

DAMAGES_ROW = 0
"""Group id whose row holds the damaged ranges. The ids of groups begin at 1."""

_GROUP_KEY = Struct(">cI")


def check_group_name(name: str) -> str:
    """Return `name` if it is valid: 1 to 255 bytes of UTF-8, printable, no `/`, `#`, `+` or `$`, no space at its ends.

    Raises:
        GroupInvalid: the message says what is wrong.
    """
    if not name:
        raise GroupInvalid("the group's name is empty; give the consumers of one service a common name, such as 'billing'")
    if len(name.encode(errors="replace")) > GROUP_BYTES_MAX:
        raise GroupInvalid(f"the group's name {name[:40]!r}... has more than {GROUP_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip() or any(c in "/#+$" for c in name):
        raise GroupInvalid(
            f"the group's name {name!r} has characters that no name may have: "
            f"use printable ones without '/', '#', '+' or '$', and no space at the beginning or the end"
        )
    return name


def check_system_filter(name: str, topic_filter: str) -> None:
    """Check that the group `name` may consume `topic_filter`, which starts with '$'.

    Raises:
        RequestInvalid: the filter is not `$dlq/GROUP`, or GROUP is the group itself.
        GroupInvalid: GROUP is not a valid name.
    """
    if not topic_filter.startswith(DEAD_LETTERS):
        raise RequestInvalid(f"the filter {topic_filter[:80]!r} can't be popped: of '$' topics only $dlq/GROUP can")
    if check_group_name(topic_filter.removeprefix(DEAD_LETTERS)) == name:
        raise RequestInvalid(
            f"the group {name!r} can't pop its own dead letters: a message that fails again would come back forever"
        )


class ConsumerGroup:
    """One group on one filter. A group that consumes several filters has one of these for each.

    New messages come from `queue`, retries from `retry`. `cursor` and `retry_cursor` are the offsets of the first messages
    that were not handed out. `in_flight` is the number of messages that were handed out and are neither acknowledged, revived
    nor dead letters. `delayed` of them wait for a delay or their back-off, and no consumer has them.

    A group that doesn't take every message is selective: it inspects each, because its filter on delivery may not want the
    message, or the message group may be busy. `scanned` is the offset up to which it has inspected its queue. It may be ahead
    of `cursor`, the offset that the log states: the group skipped what is between, and inspects it again after a crash. Other
    groups skip in this way what retention has dropped. `retry_scanned` is the same of the retry queue. It is not ahead of
    `retry_cursor` unless nothing is left there.

    Parameters:
        group_id: from its first record; never used again.
        row: its index row, as `row` returns it, with the id of its account (`store.ledger`).
        queue: the light queue of its filter.
        retry: the light queue of its retries.
        redriven: what it has got back from its dead letters.
        options: what applies where nothing was set.
    """

    __slots__ = (
        "account",
        "ahead",
        "alone",
        "attempt_ids",
        "attempts_max",
        "backoff",
        "cursor",
        "dead_letter_count",
        "dead_letters_of",
        "delayed",
        "delayed_max",
        "epoch",
        "expected",
        "expression",
        "filter",
        "frozen",
        "id",
        "in_flight",
        "in_flight_max",
        "invisible_ms",
        "is_deleted",
        "jitter",
        "latency",
        "name",
        "order",
        "polls",
        "queue",
        "redriven",
        "retry",
        "retry_cursor",
        "retry_scanned",
        "retry_turn",
        "scanned",
        "serve_scheduled",
        "set_back",
        "settings",
        "waits_for_room",
        "watcher",
    )

    def __init__(
        self,
        group_id: int,
        row: Mapping[str, Any],
        queue: LightQueue,
        retry: LightQueue,
        redriven: RedrivenMessages,
        options: PopOptions,
    ) -> None:
        self.id = group_id
        self.account: int = row["account"]
        self.name: str = row["name"]
        self.filter: str = row["filter"]
        self.queue = queue
        self.retry = retry
        self.redriven = redriven
        self.epoch: int = row["epoch"]
        """Number of resets."""
        self.cursor: int = row["cursor"]
        self.scanned: int = self.cursor
        self.ahead = (0, b"")
        """Entries of its queue that were read ahead, and the offset of the first. Entries of a queue never change."""
        self.retry_cursor: int = row["retry_cursor"]
        self.retry_scanned = 0
        self.in_flight = 0
        self.delayed = 0
        self.alone = 0
        """Number of deliveries that consumers have at the level `ALONE` (`pop.core.suspicion`)."""
        self.dead_letter_count: int = row.get("dead", 0)
        """Number of its dead letters that were not redriven."""
        self.expected: int = row.get("expected", self.cursor)
        """Offset that the next checkpoint record should state; differs from `cursor` after a repair, see `pop.core.damages`."""
        self.frozen: bool = row.get("frozen", False)
        """True while a checkpoint before those that recovery reads is lost: the cursor must not move."""
        self.set_back = 0
        """How often since the start the group went back in its queue, because damaged messages were left out there."""
        self.is_deleted = False
        """True after the group was deleted. Callers that still have a reference to it get no messages."""
        self.retry_turn = False
        """True if a pop begins with retries, if there are any."""
        self.polls: deque[Poll] = deque()
        """Polls that wait, oldest first."""
        self.waits_for_room = False
        """True while its polls wait until their caller has room for more messages."""
        self.serve_scheduled = False
        """True while its polls are to be served in the next turn of the loop."""
        self.attempt_ids: dict[str, int] = {}
        """Positions of the open checkpoints of calls that gave an attempt id, by that id."""
        self.latency = Histogram(LATENCY_BOUNDS_MS)
        """Time from pop to acknowledgement."""
        self.dead_letters_of = self.filter.removeprefix(DEAD_LETTERS) if self.filter.startswith(DEAD_LETTERS) else ""
        """Name of the group whose dead letters it consumes; empty if it consumes no dead letters."""
        self.watcher: Watcher | None = None
        self.order: FifoOrder | None = None
        """The order of its message groups; None if the group is not FIFO."""
        self.configure(ConsumerGroupSettings.from_row(row.get("settings", {})), options)

    def configure(self, settings: ConsumerGroupSettings, options: PopOptions) -> None:
        """Apply settings, and the node's options where the settings leave something open."""
        self.settings = settings
        self.attempts_max = settings.attempts_max or options.attempts_max
        self.backoff: Backoff = options.retry_backoff_ms if settings.backoff is None else settings.backoff
        self.invisible_ms = settings.invisible_ms or options.invisible_ms_default
        self.jitter = 0.0 if isinstance(settings.backoff, tuple) else options.retry_jitter_percent / 100
        """Part of each wait by which the wait may be shorter, at random. The waits of a list that was set are exact."""
        self.in_flight_max: int = settings.in_flight_max or options.in_flight_max
        self.delayed_max = options.delayed_max
        self.expression: Expression | None = compile_expression(settings.expression, settings.expression_type)
        if not settings.fifo:
            self.order = None
        elif self.order is None:
            self.order = FifoOrder()

    @property
    def is_selective(self) -> bool:
        """True if the group inspects each message, and doesn't simply take the next one."""
        return self.order is not None or self.expression is not None or bool(self.dead_letters_of)

    @property
    def room(self) -> int:
        """How many more messages the group may have in flight. What waits for its back-off has a bound of its own."""
        return self.in_flight_max - self.in_flight + self.delayed if self.delayed < self.delayed_max else 0

    @property
    def visible(self) -> int:
        """Upper bound of the messages that a pop can get now, without a lookup. `count_visible` is more exact."""
        return self.visible_new + self.visible_retries

    @property
    def visible_new(self) -> int:
        """Upper bound of the visible messages that were never handed out. Trimmed ones count until the group passes them."""
        unseen = max(self.queue.committed_offset - self.scanned, 0)
        return unseen if self.order is None else unseen + len(self.order.ready)

    @property
    def visible_retries(self) -> int:
        """Upper bound of the visible messages that were handed out before, as `visible_new` is."""
        return max(self.retry.committed_offset - max(self.retry_cursor, self.retry_scanned), 0)

    def count_visible(self) -> int:
        """Return the number of messages that a pop can get now. For a selective group this is an upper bound."""
        ready = len(self.order.ready) if self.order is not None else 0
        return self.queue.count_from(self.scanned) + ready + self.count_retries()

    def count_retries(self) -> int:
        """Return the number of visible messages that were handed out before."""
        return self.retry.count_from(self.retry_cursor)

    def count_returned(self) -> tuple[int, int]:
        """Return how many messages came back and wait for their next delivery: the least and the greatest number possible.

        Both are equal in most groups. In a FIFO group, a parked message without a counted attempt may be new, or may have been
        suspended. Redriven dead letters wait in the same places, and did not come back from a delivery.
        """
        queued = self.count_retries() + self.retry.next_offset - self.retry.committed_offset
        counted = self.order.parked_again if self.order is not None else 0
        most = queued + (self.order.parked if self.order is not None else 0)
        least = 0 if most and self.redriven else queued + counted
        return least, most

    @property
    def is_quiet(self) -> bool:
        """True if no message is in flight, waits in the retry queue, or is parked."""
        returning = self.count_retries() + self.retry.next_offset - self.retry.committed_offset
        return not (self.in_flight or returning or (self.order and self.order.parked))

    def row(self) -> bytes:
        """Return the index row. It doesn't contain `in_flight`, which follows from the checkpoints."""
        return orjson.dumps(
            {
                "name": self.name,
                "filter": self.filter,
                "queue": self.queue.id,
                "retry": self.retry.id,
                "epoch": self.epoch,
                "cursor": self.cursor,
                "retry_cursor": self.retry_cursor,
                "expected": self.expected,
                "frozen": self.frozen,
                "dead": self.dead_letter_count,
                "settings": self.settings.row(),
                "account": self.account,
            }
        )


class GroupTable:
    """All groups. Only applying a record changes it.

    Parameters:
        queues: the light queues that groups read.
        damages: the damaged ranges of the log.
        arrived: called with a group when messages that are visible to it were committed.
        options: what applies to a group where nothing was set for it.
    """

    def __init__(
        self, queues: Queues, damages: DamagedRanges, arrived: Callable[[ConsumerGroup], None], options: PopOptions
    ) -> None:
        self._queues = queues
        self._damages = damages
        self._arrived = arrived
        self._options = options
        self.by_name: dict[tuple[str, str], ConsumerGroup] = {}
        """Groups by name and filter."""
        self.by_id: dict[int, ConsumerGroup] = {}
        self.next_id = 1
        self.changed: set[int] = set()
        """Ids of the groups whose rows must be written."""
        self.orders_deleted: set[int] = set()
        """Ids of the groups whose order rows must be deleted."""
        self._deleted: list[int] = []
        self._index: Index | None = None

    def add(self, group_id: int, row: dict[str, Any]) -> ConsumerGroup:
        """Add the group that an index row describes."""
        assert self._index is not None
        queue, retry = self._queues.get(row["queue"]), self._queues.get(row["retry"])
        group = ConsumerGroup(group_id, row, queue, retry, RedrivenMessages(group_id, self._index), self._options)
        self.by_id[group_id] = self.by_name[group.name, group.filter] = group
        self.reserve_id(group_id)

        def arrived(_queue: LightQueue, _offset: int, _entries: bytes) -> None:
            self._arrived(group)

        group.watcher = arrived
        group.queue.watchers.append(arrived)
        group.retry.watchers.append(arrived)
        return group

    def reserve_id(self, group_id: int) -> None:
        """Never give this id to a new group."""
        self.next_id = max(self.next_id, group_id + 1)

    def remove(self, group: ConsumerGroup) -> None:
        """Remove a deleted group."""
        group.is_deleted = True
        del self.by_id[group.id]
        del self.by_name[group.name, group.filter]
        assert group.watcher is not None
        group.queue.watchers.remove(group.watcher)
        group.retry.watchers.remove(group.watcher)
        self.changed.discard(group.id)
        self._deleted.append(group.id)
        self.orders_deleted.add(group.id)

    def of_record(self, record: Record) -> ConsumerGroup | None:
        """Return the group of a record. Return None, and log it, if damage has destroyed the record that created the group."""
        group_id = int(POP_FIXED.unpack(record.fixed)[0])
        group = self.by_id.get(group_id)
        if group is None:
            self._damages.skip(record, "group", group_id)
            self.reserve_id(group_id)
        return group

    def load(self, index: Index) -> None:
        """Read all rows, also that of the damaged ranges."""
        self._index = index
        for key, value in index.rows(bytes(KeySpace.GROUP)):
            group_id = _GROUP_KEY.unpack(key)[1]
            if group_id == DAMAGES_ROW:
                self._damages.load(value)
            else:
                group = self.add(group_id, orjson.loads(value))
                if group.order is not None:
                    group.order.load(index, group_id)

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        if self._damages.changed:
            batch.put(_GROUP_KEY.pack(KeySpace.GROUP, DAMAGES_ROW), self._damages.row())
        for group_id in self._deleted:
            batch.delete(_GROUP_KEY.pack(KeySpace.GROUP, group_id))
            delete_redriven(batch, group_id)
        for group_id in self.orders_deleted:
            delete_order(batch, group_id)
        for group_id in self.changed:
            group = self.by_id[group_id]
            batch.put(_GROUP_KEY.pack(KeySpace.GROUP, group_id), group.row())
            group.redriven.save(batch)
            if group.order is not None:
                group.order.save(batch, group_id)
        self._deleted.clear()
        self.orders_deleted.clear()
        self.changed.clear()
