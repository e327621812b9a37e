"""A group: who consumes a filter together. Any consumer of it may get any message, and each message goes to one of them."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import orjson

from pop.errors import GroupInvalid
from store.lightqueue import LightQueue

if TYPE_CHECKING:
    from pop.poll import Poll

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
    """

    __slots__ = (
        "cursor",
        "epoch",
        "expected",
        "filter",
        "frozen",
        "id",
        "in_flight",
        "name",
        "polls",
        "queue",
        "retry",
        "retry_cursor",
        "retry_turn",
    )

    def __init__(self, group_id: int, name: str, topic_filter: str, queue: LightQueue, retry: LightQueue) -> None:
        self.id = group_id
        self.name = name
        self.filter = topic_filter
        self.queue = queue
        self.retry = retry
        self.epoch = 0
        self.cursor = 0
        self.retry_cursor = 0
        self.in_flight = 0
        self.expected = 0
        """Offset that the next checkpoint record should state; differs from `cursor` behind damage (see `pop.damages`)."""
        self.frozen = False
        """True while a checkpoint before those that are read is lost: the cursor waits there."""
        self.retry_turn = False
        self.polls: deque[Poll] = deque()

    @property
    def visible(self) -> int:
        """How many messages a pop could get now."""
        return self.visible_new + self.visible_retries

    @property
    def visible_new(self) -> int:
        """How many of them were never handed out."""
        return max(self.queue.committed_offset - self.cursor, 0)

    @property
    def visible_retries(self) -> int:
        """How many of them came back."""
        return max(self.retry.committed_offset - self.retry_cursor, 0)

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
            }
        )
