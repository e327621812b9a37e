"""What one connection has received and has not handled yet."""

from __future__ import annotations

from typing import Final

from penstock.gateway.protocol.fixed_header import packet_bytes
from penstock.gateway.protocol.packets import Packet
from penstock.gateway.transport.socket_transport import READ_BYTES, READ_BYTES_MIN, SocketTransport

UNACKED_MESSAGES: Final = 4096
"""Messages of a client that waits for no acks that are read in one turn of the loop, about. Only small messages reach this."""

TURN_MESSAGES: Final = 512
"""Messages of a client that waits for acks that the server handles in one turn of the loop, about. If the client sends more at
once, then some messages are on their way to the disk, and some are acknowledged, while others are handled: the row `window` of
`bench-mqtt`, with 1,000 messages in flight, shows it."""


class Inbox:
    """Holds what one connection has received and has not handled: the beginning of a packet, and what waits for its turn.

    The reads of a packet that comes in many are collected, and joined once.

    Parameters:
        packet_bytes_max: the size of the largest packet, in bytes.
    """

    __slots__ = ("_missing", "_parts", "deferred", "has_begun", "late", "packet_bytes_max", "turns")

    def __init__(self, packet_bytes_max: int) -> None:
        self.packet_bytes_max = packet_bytes_max
        """The size of the largest packet that may come, in bytes: first of a CONNECT, then of any packet."""
        self.turns: SocketTransport | None = None
        """The transport, if it is one that is read at most once in a turn of the loop."""
        self.has_begun = False
        """A packet has begun, and a further read has to follow before it can be decoded."""
        self._parts: list[bytes] = []
        self._missing = 0
        self.deferred: list[Packet] | None = None
        """The packets that wait for the plugins or for a later turn, in order; None while nothing waits. The list is empty if
        all that waits is in `late`, as a CONNECT is."""
        self.late = b""
        """What was received and is still to be decoded: after `deferred`, or after the piece that was decoded last."""

    def open(self, turns: SocketTransport | None) -> None:
        """Begin with a transport, if it is one that is read at most once in a turn of the loop."""
        self.turns = turns
        if turns is not None:  # a client that is not yet known makes the server keep little
            turns.limit_reads(READ_BYTES_MIN)

    def begin(self, data: bytes) -> None:
        """Keep the beginning of a packet, for the next read to follow."""
        self.has_begun = True
        self._parts.append(data)
        self._missing = max(packet_bytes(data) - len(data), 1)

    def join(self, data: bytes) -> bytes:
        """Add a read to the packet that has begun; return all bytes when they may be a whole packet, and no byte before."""
        self._parts.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return b""
        data = b"".join(self._parts)
        self._parts.clear()
        self.has_begun = False
        return data

    def take_late(self) -> bytes:
        """Return what can be decoded of `late`."""
        late, self.late = self.late, b""
        return self.join(late) if late and self.has_begun else late

    def pace(self, size: int, count: int, *, is_acked: bool) -> None:
        """Let about `TURN_MESSAGES` be read in a turn if acks are due, else `UNACKED_MESSAGES`.

        This goes by a read of `size` bytes and `count` packets. It changes nothing unless the read was a long one.
        """
        turns = self.turns
        if turns is not None and (count > TURN_MESSAGES or size >= turns.read_bytes):
            most = TURN_MESSAGES if is_acked else UNACKED_MESSAGES
            turns.limit_reads(size // count * most if count else READ_BYTES)
