"""Back-pressure: while the disk is behind, the server does not read publishers, which bounds what waits for the disk."""

from __future__ import annotations

import asyncio
from enum import IntFlag
from typing import TYPE_CHECKING, Final

from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection

RECHECK_S: Final = 0.02
"""Seconds between two checks whether the disk has caught up, while a connection waits for it."""


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


class Backpressure:
    """Pauses publishers while too many bytes of the log wait for the disk.

    Parameters:
        store: its log is what the disk falls behind with.
        bytes_max: see `LimitOptions.undurable_bytes_max`. Reading resumes when half of it is left.
    """

    def __init__(self, store: Store, bytes_max: int) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._waiting: dict[Connection, None] = {}
        self._is_checking = False
        self._loop: asyncio.AbstractEventLoop
        self.check_at = 0
        """The disk cannot be behind while the log ends at or below this position: so a read costs one comparison."""
        self.entered = 0
        """How often the disk has fallen behind."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Check by itself from now on whether the disk has caught up."""
        self._loop = loop

    def __len__(self) -> int:
        """Return how many connections wait; 0 while the disk keeps up."""
        return len(self._waiting)

    @property
    def undurable_bytes(self) -> int:
        """Bytes of the log that are stored and not known to be on disk."""
        return self._store.log.end - self._store.committed_position

    def apply(self, publisher: Connection) -> None:
        """Pause a connection that has just published, if the disk is behind. Needed only if the log ends above `check_at`."""
        self.check_at = self._store.committed_position + self._bytes_max
        if self._store.log.end <= self.check_at:
            return
        if not self._waiting:
            self.entered += 1
            if not self._is_checking:
                self._check_later()
        self._waiting[publisher] = None
        publisher.pause_reading(PauseReason.DISK_BEHIND)

    def forget(self, publisher: Connection) -> None:
        """Forget a connection that has closed."""
        self._waiting.pop(publisher, None)

    def _check_later(self) -> None:
        self._is_checking = True
        self._store.when_durable(_nothing)  # no client waits for a sync at QoS 0, so without this none might be under way
        self._loop.call_later(RECHECK_S, self._check)

    def _check(self) -> None:
        self._is_checking = False
        if not self._waiting:
            return
        if self.undurable_bytes > self._bytes_max // 2:
            self._check_later()
            return
        waiting = tuple(self._waiting)
        self._waiting.clear()
        for publisher in waiting:
            publisher.resume_reading(PauseReason.DISK_BEHIND)


def _nothing() -> None:
    """Callback for a sync that no client waits for."""
