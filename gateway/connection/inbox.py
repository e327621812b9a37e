"""Framing: what one connection receives, cut into packets."""

from __future__ import annotations

from typing import Final

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.fixed_header import Side, packet_bytes
from penstock.gateway.protocol.packets import MALFORMED, Packet
from penstock.gateway.transport.socket_transport import READ_BYTES, READ_BYTES_MIN, SocketTransport
from penstock.store.options import KIB

PIECE_BYTES: Final = 32 * KIB
"""Bytes of a read in which the packets begin that are decoded at once. A read may hold 130,000 packets of two bytes."""

UNACKED_MESSAGES: Final = 4096
"""Messages of a client that waits for no acks that are read in one turn of the loop, about. Only small messages reach this."""

TURN_MESSAGES: Final = 512
"""Messages of a client that waits for acks that the server handles in one turn of the loop, about. If the client sends more at
once, then some messages are on their way to the disk, and some are acknowledged, while others are handled: the row `window` of
`bench-mqtt`, with 1,000 messages in flight, shows it."""


class Inbox:
    """Joins the reads of one connection, and decodes them.

    A packet that comes in many reads is collected, and joined once. What the plugins must decide on first waits here too.

    Parameters:
        packet_bytes_max: the size of the largest packet, in bytes.
        user_properties_max: see `GatewayOptions.user_properties_max`.
    """

    __slots__ = ("_collected", "_missing", "_turns", "_user_properties_max", "deferred", "late", "packet_bytes_max", "rest")

    def __init__(self, packet_bytes_max: int, user_properties_max: int) -> None:
        self.packet_bytes_max = packet_bytes_max
        """The size of the largest packet that may come, in bytes: first of a CONNECT, then of any packet."""
        self._user_properties_max = user_properties_max
        self._turns: SocketTransport | None = None
        self.rest = b""
        """The beginning of a packet, for the next read to follow."""
        self._collected: list[bytes] = []
        self._missing = 0
        self.deferred: list[Packet] | None = None
        """The packets that wait for the plugins or for a later turn, in order; None while nothing waits. The list is empty if
        all that waits is in `late`, as a CONNECT is."""
        self.late = b""
        """What was received and is still to be decoded: after `deferred`, or after the piece that was decoded last."""

    def open(self, turns: SocketTransport | None) -> None:
        """Begin with a transport, if it is one that is read at most once in a turn of the loop."""
        self._turns = turns
        if turns is not None:  # a client that is not yet known makes the server keep little
            turns.limit_reads(READ_BYTES_MIN)

    @property
    def is_idle(self) -> bool:
        """True if no part of a packet is here, nothing waits for the plugins, and reads come in turns."""
        return self._turns is not None and self.deferred is None and not (self.rest or self._missing)

    @property
    def is_collecting(self) -> bool:
        """True while a packet misses so many bytes that its reads are collected."""
        return self._missing > 0

    def collect(self, data: bytes) -> bytes:
        """Add a read to the packet that `is_collecting`; return all its bytes when it is whole, and no byte before."""
        self._collected.append(data)
        self._missing -= len(data)
        if self._missing > 0:
            return b""
        data = b"".join(self._collected)
        self._collected.clear()
        self._missing = 0
        return data

    def decode(self, data: bytes, side: Side, *, runs: bool) -> list[Packet]:
        """Return the packets that are whole with this read, and keep what follows them.

        Of a large read these are the packets of its first piece. The other pieces are then in `late`.

        Args:
            data: what was read, after `rest`.
            side: the packets that may come.
            runs: whether to put PUBLISHes together that differ in packet ids and bodies only.
        """
        packets, used = decode(data, self.packet_bytes_max, side, runs, self._user_properties_max, PIECE_BYTES)
        if used == len(data):
            self.rest = b""
        elif used >= PIECE_BYTES and not (packets and packets[-1][0] == MALFORMED):
            self.rest = b""
            self.late = data[used:] + self.late
        else:
            self.keep(data[used:], is_malformed=bool(packets) and packets[-1][0] == MALFORMED)
        return packets

    def decode_again(self, data: bytes, side: Side) -> list[Packet]:
        """Return the packets in what follows the CONNECT in its read: only now the version is known."""
        self._forget_rest()
        return self.decode(data, side, runs=True)

    def _forget_rest(self) -> None:
        self.rest = self.late = b""
        self._collected.clear()
        self._missing = 0

    def keep(self, rest: bytes, *, is_malformed: bool = False) -> None:
        """Keep the beginning of a packet."""
        wanted = 0 if is_malformed else packet_bytes(rest)
        if wanted > len(rest):
            self._collected.append(rest)
            self._missing = wanted - len(rest)
            self.rest = b""
        else:
            self.rest = rest

    def pace(self, size: int, count: int, *, is_acked: bool) -> None:
        """Let about `TURN_MESSAGES` be read in a turn if acks are due, else `UNACKED_MESSAGES`.

        This goes by a read of `size` bytes and `count` packets.
        """
        turns = self._turns
        if turns is not None and (count > TURN_MESSAGES or size >= turns.read_bytes):
            most = TURN_MESSAGES if is_acked else UNACKED_MESSAGES
            turns.limit_reads(size // count * most if count else READ_BYTES)

    # --- what waits ---------------------------------------------------------------------------------

    def defer(self, packets: list[Packet]) -> None:
        """Let packets wait, and what is in `late` after them. Nothing more is read meanwhile, so all are of one read."""
        self.deferred = packets

    def defer_connect(self, data: bytes) -> None:
        """Let a CONNECT wait for the plugins, and all that was read with it. `data` is decoded again afterwards."""
        self._forget_rest()
        self.late = data
        self.deferred = []

    def take_deferred(self) -> list[Packet] | None:
        """Return the packets that have waited, which wait no longer."""
        packets, self.deferred = self.deferred, None
        return packets

    def take_late(self) -> bytes:
        """Return what was received while packets waited."""
        late, self.late = self.late, b""
        return late
