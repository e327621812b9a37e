"""What all connections together keep in memory while the disk has no room for it."""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

from penstock.gateway.connection.pausing import PauseReason
from penstock.store.options import MIB

KEPT_BYTES_MAX: Final = 64 * MIB
"""Bytes that all connections together may keep. Above it the server reads no connection that keeps anything."""


class Keeper(Protocol):
    """A connection that keeps packets until the disk has room."""

    def pause_reading(self, reason: PauseReason) -> None:
        """Stop reading for a reason."""
        ...

    def retry_kept(self) -> None:
        """Handle the packets again that are kept."""
        ...


class DiskFullBacklog:
    """The connections that keep packets while the disk is full, and how many bytes they keep."""

    def __init__(self) -> None:
        self._keepers: dict[Keeper, None] = {}
        self.kept_bytes = 0
        """Bytes of packets that wait for a disk with room."""

    @property
    def is_full(self) -> bool:
        """True if `KEPT_BYTES_MAX` is exceeded."""
        return self.kept_bytes > KEPT_BYTES_MAX

    def add(self, keeper: Keeper, size: int) -> None:
        """Note that a connection keeps `size` more bytes; pause all that keep anything if this fills the backlog."""
        had_room = not self.is_full
        self._keepers[keeper] = None
        self.kept_bytes += size
        if had_room and self.is_full:
            for each in self._keepers:
                each.pause_reading(PauseReason.DISK_FULL)

    def remove(self, keeper: Keeper, size: int) -> None:
        """Note that a connection keeps nothing any more; it kept `size` bytes."""
        self._keepers.pop(keeper, None)
        self.kept_bytes -= size

    def retry(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let all connections try again, in the order in which they began to keep packets. The disk has room again."""
        for keeper in tuple(self._keepers):
            loop.call_soon(keeper.retry_kept)
