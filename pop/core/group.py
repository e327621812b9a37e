"""A consumer group: the consumers that share the messages of a filter. Each message goes to one of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import orjson

from penstock.pop.backoff import Backoff
from penstock.pop.core.deadletters import DEAD_LETTERS, RedrivenMessages
from penstock.pop.core.expression import Expression, compile_expression
from penstock.pop.core.order import FifoOrder
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.pop.options import PopOptions
from penstock.store.histogram import LATENCY_BOUNDS_MS, Histogram
from penstock.store.queues.lightqueue import LightQueue, Watcher
from penstock.store.space.accounts import NODE_ACCOUNT

if TYPE_CHECKING:
    from penstock.pop.core.poll import Poll


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
        name: of the group.
        topic_filter: what it consumes.
        queue: the light queue of the filter.
        retry: the light queue of its retries.
        settings: what was set for it.
        options: what applies where nothing was set.
        redriven: what it has got back from its dead letters.
        account: id of the account that is charged for it (`store.space.ledger`).
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
        name: str,
        topic_filter: str,
        queue: LightQueue,
        retry: LightQueue,
        settings: ConsumerGroupSettings,
        options: PopOptions,
        redriven: RedrivenMessages,
        account: int = NODE_ACCOUNT,
    ) -> None:
        self.id = group_id
        self.account = account
        self.name = name
        self.filter = topic_filter
        self.queue = queue
        self.retry = retry
        self.redriven = redriven
        self.epoch = 0
        """Number of resets."""
        self.cursor = 0
        self.scanned = 0
        self.ahead = (0, b"")
        """Entries of its queue that were read ahead, and the offset of the first. Entries of a queue never change."""
        self.retry_cursor = 0
        self.retry_scanned = 0
        self.in_flight = 0
        self.delayed = 0
        self.alone = 0
        """Number of deliveries that consumers have at the level `ALONE` (`pop.core.suspicion`)."""
        self.dead_letter_count = 0
        """Number of its dead letters that were not redriven."""
        self.expected = 0
        """Offset that the next checkpoint record should state; differs from `cursor` after a repair, see `pop.core.damages`."""
        self.frozen = False
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
        self.dead_letters_of = topic_filter.removeprefix(DEAD_LETTERS) if topic_filter.startswith(DEAD_LETTERS) else ""
        """Name of the group whose dead letters it consumes; empty if it consumes no dead letters."""
        self.watcher: Watcher | None = None
        self.order: FifoOrder | None = None
        """The order of its message groups; None if the group is not FIFO."""
        self.configure(settings, options)

    def configure(self, settings: ConsumerGroupSettings, options: PopOptions) -> None:
        """Apply settings, and the node's options where the settings leave something open."""
        self.settings = settings
        self.attempts_max = settings.attempts_max or options.attempts_max
        self.backoff: Backoff = options.retry_backoff_ms if settings.backoff is None else settings.backoff
        self.invisible_ms = settings.invisible_ms or options.invisible_ms_default
        self.jitter = 0.0 if isinstance(settings.backoff, tuple) else options.retry_jitter_percent / 100
        """Part of each wait by which the wait may be shorter, at random. The waits of a list that was set are exact."""
        self.in_flight_max = settings.in_flight_max or options.in_flight_max
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
