"""Why a connection is not read for a while, and what can be paused."""

from __future__ import annotations

from enum import IntFlag
from typing import Protocol


class PauseReason(IntFlag):
    """Why the server does not read a connection. Several reasons may hold at a time; reading resumes when none is left."""

    ANSWERS_UNREAD = 1
    """The client does not read the answers that pile up for it."""
    THROTTLED = 2
    """The client has sent more than its rate allows."""
    DISK_BEHIND = 4
    """Too many bytes of the log wait for the disk."""
    AUTHORIZATION_PENDING = 8
    """The plugins have not said yet what the client may do."""
    DISK_FULL = 16
    """The client has published more than the server keeps in memory while the disk has no room."""
    TURN_OVER = 32
    """The client has sent so much at once that the rest is handled in later turns of the loop."""


class Pausable(Protocol):
    """What the throttle and the back-pressure stop and let go on: a connection."""

    def pause_reading(self, reason: PauseReason) -> None:
        """Stop reading for a reason."""
        ...

    def resume_reading(self, reason: PauseReason) -> None:
        """Withdraw a reason; read again if no other is left."""
        ...
