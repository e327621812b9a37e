"""What consumers ask for with handles besides an acknowledgement, and what comes of it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class AckOutcome(Enum):
    """What came of an ack, a dead-lettering or a change of invisible time. The names are those of the API's codes."""

    OK = "done"
    INVALID_HANDLE = "this is not a handle that this node gave to this group"
    HANDLE_EXPIRED = (
        "the delivery is over: its invisible time has passed, and the message becomes, or became, visible again as a new "
        "attempt; or its group was reset or deleted"
    )
    ALREADY_ACKED = "the delivery was acknowledged before"
    HANDLE_REPLACED = "a change of invisible time gave a newer handle: use that one"
    INVALID_INVISIBLE_TIME = "the invisible time must be at least 0 ms and at most 12 hours"


class VisibilityChange(NamedTuple):
    """A request to move the deadline of a delivery.

    Parameters:
        handle: names the delivery.
        invisible_ms: from now to the new deadline; 0 makes the message visible at once (nack).
        suspend: the return of the message at the new deadline doesn't count as an attempt.
        nack: the consumer returns the message, and has it no more. `suspend` and an invisible time of 0 say so, too.
        detail: of a nack: why the attempt failed, in the consumer's words; up to `DETAIL_BYTES_MAX` bytes.
    """

    handle: str
    invisible_ms: int
    suspend: bool = False
    nack: bool = False
    detail: str = ""

    @property
    def returns(self) -> bool:
        """True if the consumer has the message no more: it waits for the deadline alone."""
        return self.nack or self.suspend or self.invisible_ms == 0
