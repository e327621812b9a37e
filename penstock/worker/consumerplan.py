"""What a consumer of a worker does: a filter, a group and a handler, with their options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.pop.client.requests import Start, check_start
from penstock.pop.client.results import GroupSettings
from penstock.worker.context import Middleware
from penstock.worker.handler import Handler

POP_MAX = 1_024
"""Maximum number of messages that a worker asks for at once: the node's default limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerPlan:
    """A consumer of a worker. `Worker.consumer` documents the parameters, but for one.

    Parameters:
        on_demand: A slot takes messages only after `RunningConsumer.admit` was called for it.

    Raises:
        ValueError: A number is out of its bounds.
    """

    topic_filter: str
    group: str
    handler: Handler
    concurrency: int
    timeout_s: float
    invisible_s: float
    fifo: bool
    start: Start
    settings: GroupSettings | None
    middleware: Sequence[Middleware]
    on_demand: bool = False

    def __post_init__(self) -> None:
        if not 1 <= self.concurrency <= 10_000:
            raise ValueError(f"concurrency is {self.concurrency}: use 1 to 10,000")
        check_start(self.start)
        if not self.timeout_s > 0:
            raise ValueError(f"timeout is {self.timeout_s}: use more than 0 seconds")
        if not 0.1 <= self.invisible_s <= 43_200:
            raise ValueError(f"invisible is {self.invisible_s}: use 0.1 to 43,200 seconds")
        if not 0 <= self.handler.batch <= POP_MAX:
            raise ValueError(f"batch is {self.handler.batch}: use 1 to {POP_MAX}, or 0 for one message a call")

    @property
    def name(self) -> str:
        """Names the consumer in the log."""
        return f"{self.group} on {self.topic_filter}"
