"""What a consumer of a worker has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class WorkerCounts:
    """Counts of one consumer of a worker since it started."""

    handled: int = 0
    """Messages whose handler returned."""
    failed: int = 0
    """Messages whose handler raised: they went back as failed attempts."""
    timed_out: int = 0
    """Those of `failed` whose handler did not end within the timeout."""
    replies_refused: int = 0
    """Replies that the node refused: of a topic to which nobody can publish, or the worker may not, or too large. Their
    messages count as `handled`."""
    dead_lettered: int = 0
    """Messages that became dead letters, because they were rejected or could not be decoded."""
    undecodable: int = 0
    """Those of `dead_lettered` whose body could not be decoded."""
    returned: int = 0
    """Messages that went back without counting an attempt, because the worker stopped or was too slow."""
    late: int = 0
    """Messages whose handler ended after their deadline. Another consumer gets or got them."""
    extended: int = 0
    """Extensions of messages whose handler was still running."""
    reconnects: int = 0
    """How often the consumer had to start again, because the group was deleted or the node refused it."""
