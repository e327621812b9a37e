"""A group: who consumes a filter together. Any consumer of it may get any message, and each message goes to one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from typing import TYPE_CHECKING

import orjson

from penstock.pop.backoff import Backoff
from penstock.pop.core.expression import Expression, compile_expression
from penstock.pop.core.order import Order
from penstock.pop.core.settings import GroupSettings
from penstock.pop.errors import GroupInvalid
from penstock.pop.options import PopOptions
from penstock.store.lightqueue import LightQueue, Watcher

if TYPE_CHECKING:
    from penstock.pop.core.poll import Poll

DEAD_LETTERS = "$dlq/"
"""What stands before the name of a group in the filter of its dead letters."""

GROUP_BYTES_MAX = 255
"""A group's name is written into each of its records: short is cheap, and longer than this is a mistake."""


def check_group_name(name: str) -> str:
    """Return `name` if a group may have it: 1 to 255 bytes of UTF-8, printable, no `/`, `#`, `+` or `$`, no space around it.

    Raises:
        GroupInvalid: says what is wrong.
    """
    if not name:
        raise GroupInvalid("the group's name is empty; give the consumers of one service a common name, such as 'billing'")
    if len(name.encode(errors="replace")) > GROUP_BYTES_MAX:
        raise GroupInvalid(f"the group's name {name[:40]!r}... has more than {GROUP_BYTES_MAX} bytes")
    if not name.isprintable() or name != name.strip() or any(c in "/#+$" for c in name):
        raise GroupInvalid(
            f"the group's name {name!r} has characters that no name may have: "
            f"use printable ones without '/', '#', '+' or '$', and no space before or behind them"
        )
    return name


class Group:
    """One group's consumption of one filter. A group that pops several filters has one of these for each.

    New messages come from `queue`, those that come back from `retry`. The cursors are the offsets of what was not handed
    out yet; `in_flight` counts what was, and isn't settled.

    A group that doesn't take every message `looks` at each: its filter on delivery may not want it, or its message group may be
    busy. `scanned` is how far it has looked. It may be ahead of `cursor`, which is how far the log says that it has: what lies
    between was not wanted, and is looked at again after a crash.

    Parameters:
        group_id: from its first record; never used again.
        name: of the service.
        topic_filter: what it consumes.
        queue: the light queue of the filter.
        retry: the light queue of what comes back.
        settings: what was set for it.
        options: what holds where nothing was set.
    """

    __slots__ = (
        "ahead",
        "attempt_ids",
        "attempts_max",
        "backoff",
        "cursor",
        "dead",
        "dead_letters_of",
        "epoch",
        "expected",
        "expression",
        "filter",
        "frozen",
        "gone",
        "id",
        "in_flight",
        "in_flight_max",
        "invisible_ms",
        "latency",
        "looking",
        "name",
        "order",
        "polls",
        "queue",
        "retry",
        "retry_cursor",
        "retry_turn",
        "scanned",
        "settings",
        "watcher",
    )

    def __init__(
        self,
        group_id: int,
        name: str,
        topic_filter: str,
        queue: LightQueue,
        retry: LightQueue,
        settings: GroupSettings,
        options: PopOptions,
    ) -> None:
        self.id = group_id
        self.name = name
        self.filter = topic_filter
        self.queue = queue
        self.retry = retry
        self.epoch = 0
        """How often its offset was reset."""
        self.cursor = 0
        self.scanned = 0
        self.ahead = (0, b"")
        """Offset of the first of some entries of its queue, and these: read before they were asked for. None ever changes."""
        self.retry_cursor = 0
        self.in_flight = 0
        self.dead = 0
        """Dead letters that were not sent back."""
        self.expected = 0
        """Offset that the next checkpoint record should state; differs from `cursor` behind damage (see `pop.core.damages`)."""
        self.frozen = False
        """True while a checkpoint before those that are read is lost: the cursor waits there."""
        self.gone = False
        """True once it was deleted: whoever still holds it gets nothing more."""
        self.retry_turn = False
        self.polls: deque[Poll] = deque()
        self.looking = False
        """True while another look at its queue is scheduled."""
        self.attempt_ids: dict[str, int] = {}
        """Open checkpoints of calls that gave an attempt id, by that id."""
        self.latency = Latencies()
        self.dead_letters_of = topic_filter.removeprefix(DEAD_LETTERS) if topic_filter.startswith(DEAD_LETTERS) else ""
        """The group whose dead letters it consumes, if it does."""
        self.watcher: Watcher | None = None
        self.order: Order | None = None
        self.configure(settings, options)

    def configure(self, settings: GroupSettings, options: PopOptions) -> None:
        """Take over settings, with the node's options where they leave something open."""
        self.settings = settings
        self.attempts_max = settings.attempts_max or options.attempts_max
        self.backoff: Backoff = options.retry_backoff_ms if settings.backoff is None else settings.backoff
        self.invisible_ms = settings.invisible_ms or options.invisible_ms_default
        self.in_flight_max = settings.in_flight_max or options.in_flight_max
        self.expression: Expression | None = compile_expression(settings.expression, settings.expression_type)
        if not settings.fifo:
            self.order = None
        elif self.order is None:
            self.order = Order()

    @property
    def looks(self) -> bool:
        """True where it doesn't simply take the next message."""
        return self.order is not None or self.expression is not None or bool(self.dead_letters_of)

    @property
    def visible(self) -> int:
        """How many messages a pop could get now. Of a group that looks at each: at most, since it has not looked yet."""
        return self.visible_new + self.visible_retries

    @property
    def visible_new(self) -> int:
        """How many of them were never handed out."""
        unseen = max(self.queue.committed_offset - self.scanned, 0)
        return unseen if self.order is None else unseen + len(self.order.ready)

    @property
    def visible_retries(self) -> int:
        """How many of them came back."""
        return max(self.retry.committed_offset - self.retry_cursor, 0)

    @property
    def is_quiet(self) -> bool:
        """True where no message is out, comes back, or waits for its turn."""
        returning = self.retry.next_offset - self.retry_cursor
        return not (self.in_flight or returning > 0 or (self.order and self.order.parked))

    def row(self) -> bytes:
        """Return the index row, without what `in_flight` counts: the checkpoints say that."""
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
                "dead": self.dead,
                "settings": self.settings.row(),
            }
        )


LATENCY_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1_000, 2_000, 5_000, 10_000, 30_000, 60_000, 300_000, 3_600_000)
"""Upper ends of the buckets."""


class Latencies:
    """A histogram of times in ms, since the start: one count a bucket, and one for all that took longer."""

    __slots__ = ("counts", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BOUNDS_MS) + 1)
        self.sum_ms = 0

    def add(self, latency_ms: int, count: int) -> None:
        """Count `count` times of `latency_ms`."""
        self.counts[bisect_left(LATENCY_BOUNDS_MS, latency_ms)] += count
        self.sum_ms += latency_ms * count
