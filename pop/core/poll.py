"""The result of a pop, and a poll that waits for one."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import NamedTuple

from penstock.pop.core.checkpoint import Checkpoint


class PopResult(NamedTuple):
    """The messages that a pop handed out.

    Parameters:
        checkpoint: the deliveries.
        records: the record of each delivery's message; None if it can't be read, or has expired, or its delivery is over.
        size: bytes of the records.
    """

    checkpoint: Checkpoint
    records: list[bytes | None]
    size: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, records: list[bytes | None]) -> PopResult:
        """Return the result with these deliveries and records."""
        return cls(checkpoint, records, sum(map(len, filter(None, records))))


class Poll:
    """A call that waits for the first message of its groups.

    Parameters:
        future: gets the result.
        messages_max: how many messages the call wants at most.
        invisible_ms: how long the messages are invisible then.
        attempt_id: of the call; empty if it gave none.
        in_order_max: how many messages of one message group the call wants at most from a FIFO group.
        caller: whose call it is, see `Unsynced`.
    """

    __slots__ = ("attempt_id", "caller", "future", "in_order_max", "invisible_ms", "messages_max")

    def __init__(
        self,
        future: asyncio.Future[PopResult],
        messages_max: int,
        invisible_ms: int,
        attempt_id: str = "",
        in_order_max: int = 1,
        caller: Hashable | None = None,
    ) -> None:
        self.caller = caller
        self.future = future
        self.messages_max = messages_max
        self.invisible_ms = invisible_ms
        self.attempt_id = attempt_id
        self.in_order_max = in_order_max
