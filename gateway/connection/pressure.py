"""Back-pressure: while the disk is behind, nobody who publishes is read, so what waits for it is bounded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.gateway.connection.throttle import PRESSURE

if TYPE_CHECKING:
    import asyncio

    from penstock.gateway.connection.connection import Connection
    from penstock.store.store import Store

RECHECK_S: Final = 0.02
"""How often it is looked whether the disk has caught up, while somebody waits for that."""


class Pressure:
    """The connections that wait for the disk.

    Parameters:
        store: whose log it is about.
        bytes_max: see `LimitOptions.undurable_bytes_max`. Reading goes on when half of it is left.
    """

    def __init__(self, store: Store, bytes_max: int) -> None:
        self._store = store
        self._bytes_max = bytes_max
        self._waiting: dict[Connection, None] = {}
        self._checking = False
        self._call_later: Callable[..., asyncio.TimerHandle]
        self.check_at = 0
        """Up to this end of the log the disk is not behind, whatever it has done since: so a read costs one comparison."""
        self.entered = 0
        """How often the disk has fallen behind."""

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._call_later = loop.call_later

    def __len__(self) -> int:
        """How many connections wait; 0 where the disk keeps up."""
        return len(self._waiting)

    @property
    def undurable_bytes(self) -> int:
        """Bytes of log that are stored and not known to be on disk."""
        return self._store.log.end - self._store.durable_position

    def apply(self, connection: Connection) -> None:
        """Stop reading a connection that has just published, if the disk is behind. For a log that ends past `check_at`."""
        self.check_at = self._store.durable_position + self._bytes_max
        if self._store.log.end <= self.check_at:
            return
        if not self._waiting:
            self.entered += 1
            if not self._checking:
                self._wait()
        self._waiting[connection] = None
        connection.hold_reading(PRESSURE)

    def _wait(self) -> None:
        self._checking = True
        self._store.when_durable(_nothing)  # at QoS 0 nobody waits for a sync, so none might be under way
        self._call_later(RECHECK_S, self._check)

    def _check(self) -> None:
        self._checking = False
        if not self._waiting:
            return
        if self.undurable_bytes > self._bytes_max // 2:
            self._wait()
            return
        waiting = tuple(self._waiting)
        self._waiting.clear()
        for connection in waiting:
            connection.release_reading(PRESSURE)

    def forget(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        self._waiting.pop(connection, None)


def _nothing() -> None:
    """For a sync that nobody waits for."""
