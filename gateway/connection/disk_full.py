"""What all connections together keep in memory while the disk has no room for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final
from weakref import ref

from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.protocol.packets import Packet
from penstock.store.options import KIB, MIB

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection

ALL_BYTES_MAX: Final = 64 * MIB
"""Bytes that all connections together may keep. Above it the server reads no connection that keeps anything."""

CONNECTION_BYTES_MAX: Final = 64 * KIB
"""Bytes that one connection may keep. Above it the server does not read the connection."""

PACKET_OVERHEAD_BYTES: Final = 256
"""Memory that a kept packet takes besides its topic and its body."""


class DiskFullBacklog:
    """The connections that keep packets while the disk is full, and how many bytes they keep."""

    def __init__(self) -> None:
        self._keepers: dict[Connection, None] = {}
        self.kept_bytes = 0
        """Bytes of packets that wait for a disk with room."""

    @property
    def is_full(self) -> bool:
        """True if `ALL_BYTES_MAX` is exceeded."""
        return self.kept_bytes > ALL_BYTES_MAX

    def add(self, keeper: Connection, size: int) -> None:
        """Note that a connection keeps `size` more bytes; pause all that keep anything if this fills the backlog."""
        had_room = not self.is_full
        self._keepers[keeper] = None
        self.kept_bytes += size
        if had_room and self.is_full:
            for each in self._keepers:
                each.pause_reading(PauseReason.DISK_FULL)

    def remove(self, keeper: Connection, size: int) -> None:
        """Note that a connection keeps nothing any more; it kept `size` bytes."""
        self._keepers.pop(keeper, None)
        self.kept_bytes -= size

    def retry(self, loop: asyncio.AbstractEventLoop) -> None:
        """Let all connections try again, in the order in which they began to keep packets. The disk has room again."""
        for keeper in tuple(self._keepers):
            loop.call_soon(keeper.retry_kept)


class KeptPackets:
    """The packets that one connection keeps until the disk has room: neither lost nor acknowledged.

    The server serves everything else that the client sends, such as its pings and acks, until the client has sent more than
    `CONNECTION_BYTES_MAX`. Then it does not read the connection any more. So devices with a small window stay connected through
    a full disk.

    Parameters:
        backlog: what all connections keep together.
    """

    __slots__ = ("_backlog", "_bytes", "_keeper", "packets")

    def __init__(self, backlog: DiskFullBacklog) -> None:
        self._backlog = backlog
        self._keeper: ref[Connection]
        self._bytes = 0
        self.packets: list[Packet] = []
        """The packets that wait, in order."""

    def open(self, keeper: Connection) -> None:
        """Keep packets for a connection, to which only a weak reference is held: it must not be part of a circle."""
        self._keeper = ref(keeper)

    def __bool__(self) -> bool:
        return bool(self.packets)

    @property
    def is_full(self) -> bool:
        """True if the connection must not be read because of what it keeps."""
        return self._bytes > CONNECTION_BYTES_MAX or (self._bytes > 0 and self._backlog.is_full)

    def add(self, packets: list[Packet], size: int) -> None:
        """Keep packets, of whatever type, that take `size` bytes together."""
        keeper = self._keeper()
        assert keeper is not None, "only the connection itself keeps packets"
        self.packets += packets
        self._bytes += size
        self._backlog.add(keeper, size)
        if self.is_full:
            keeper.pause_reading(PauseReason.DISK_FULL)

    def clear(self) -> list[Packet]:
        """Keep nothing any more; return what was kept. The caller handles it again, or the client is gone."""
        packets = self.packets
        keeper = self._keeper()
        assert keeper is not None, "only the connection itself keeps packets"
        self._backlog.remove(keeper, self._bytes)
        self.packets, self._bytes = [], 0
        return packets
