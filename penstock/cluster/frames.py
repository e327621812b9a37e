"""The frames of the stream between a leader and its followers.

A follower dials the leader and sends HELLO. The leader answers WELCOME, and then sends the log from where both agree on. The
follower answers with ACK. Integers are little-endian:

    offset  type  meaning
    0       u32   bytes of the payload
    4       u32   CRC-32 of everything after it: the rest of the header, and the payload
    8       u8    kind: see `FrameKind`
    9       3     zeros
    12      u32   epoch: of the leader, and in DATA that of the records
    16      u64   position: see `FrameKind`
    24      u64   committed: everything before it is committed
    32      u64   stamp: the leader's time in ms when it sent the frame; an ACK has that of the last frame that it got
    40            payload

The payload of DATA is whole records as they are in the leader's log, of one epoch and one segment. Those of HELLO, WELCOME and
RELAY are JSON.

A connection that relays a client begins with RELAY instead. After the leader has answered RELAYED, both ends send the bytes of
that client, without frames.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from ipaddress import ip_address
from struct import Struct
from typing import Any, NamedTuple, Self
from zlib import crc32

import orjson

from penstock.cluster.errors import StreamBroken
from penstock.cluster.shardkey import ReplicaId, name_of, replica_named
from penstock.store.epochs import EpochTable
from penstock.store.record import RECORD_BYTES_MAX
from penstock.store.topics import excerpt

HEADER = Struct("<IIB3xIQQQ")
CRC_FROM = 8
_PREFIX = Struct("<II")
_REST = Struct("<B3xIQQQ")

assert HEADER.size == _PREFIX.size + _REST.size == 40

PAYLOAD_BYTES_MAX = RECORD_BYTES_MAX
"""Largest payload of a connection whose ends know each other."""
HELLO_BYTES_MAX = 64 * 1024
"""Largest payload before that."""

POP_LISTENER = "gRPC"
"""Name of the gRPC listener in RELAY. Names of MQTT listeners have no capital letters."""


class FrameKind(IntEnum):
    """What a frame says."""

    HELLO = 1
    """From the follower: who it is, and its log's epochs. Position: the end of its log. Payload: `HelloPayload`."""
    WELCOME = 2
    """Position: where the follower must cut its log. Payload: `WelcomePayload`."""
    REFUSED = 3
    """The leader ends the connection. Payload: why, in UTF-8."""
    DATA = 4
    """Records. Position: of the first one."""
    ROLL = 5
    """A segment begins at the position, where the follower's log ends."""
    HEARTBEAT = 6
    """The leader is alive, and has nothing to send."""
    RESIGN = 7
    """The leader resigns. Position: the id of the replica that should stand first."""
    START = 9
    """The leader's log begins at the position. A follower may drop what is before when it has applied up to `committed`."""
    ACK = 8
    """From the follower: its log is durable up to the position."""
    RELAY = 10
    """From a follower: this connection is a client's. Payload: `RelayPayload`."""
    RELAYED = 11
    """The leader serves that client. What follows are the client's bytes."""
    SNAPSHOT = 12
    """From the leader, in place of WELCOME: its log begins at the position, after the end of the follower's. Payload: the next
    bytes of the snapshot there. Committed: how many bytes the snapshot has. The position of an ACK is how many have come."""


class Frame(NamedTuple):
    """A frame that was received."""

    kind: FrameKind
    epoch: int
    position: int
    committed: int
    stamp: int
    payload: bytes


def encode_frame(kind: FrameKind, epoch: int, position: int, committed: int = 0, stamp: int = 0, payload: bytes = b"") -> bytes:
    """Return the header of a frame. The caller sends the payload after it."""
    rest = _REST.pack(kind, epoch, position, committed, stamp)
    return _PREFIX.pack(len(payload), crc32(payload, crc32(rest))) + rest


class FrameReader:
    """Cuts the bytes of a connection into frames.

    Parameters:
        payload_bytes_max: largest payload that is accepted.
    """

    def __init__(self, payload_bytes_max: int = HELLO_BYTES_MAX) -> None:
        self.payload_bytes_max = payload_bytes_max
        self._buffer = bytearray()
        self._at = 0
        """End of the frame that was yielded last."""

    def rest(self) -> bytes:
        """Return the bytes after the frame that `feed` has just yielded."""
        return bytes(memoryview(self._buffer)[self._at :])

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Take bytes, and yield the frames that are whole.

        Raises:
            StreamBroken: the bytes are no frame.
        """
        buffer = self._buffer
        buffer += data
        at = 0
        try:
            while len(buffer) - at >= HEADER.size:
                size, crc, kind, epoch, position, committed, stamp = HEADER.unpack_from(buffer, at)
                if size > self.payload_bytes_max:
                    raise StreamBroken(f"a frame of {size} bytes came, and at most {self.payload_bytes_max} are expected here")
                stop = at + HEADER.size + size
                if len(buffer) < stop:
                    break
                with memoryview(buffer) as view:
                    if crc32(view[at + CRC_FROM : stop]) != crc:
                        raise StreamBroken("the checksum of a frame does not match: the network or a machine has changed it")
                    payload = bytes(view[at + HEADER.size : stop])
                try:
                    known = FrameKind(kind)
                except ValueError as error:
                    raise StreamBroken(f"a frame of kind {kind} came, which a later version may know") from error
                self._at = at = stop
                yield Frame(known, epoch, position, committed, stamp, payload)
        finally:
            del buffer[:at]


class HelloPayload(NamedTuple):
    """What a follower says first."""

    cluster: str
    replica: ReplicaId
    to: ReplicaId
    """Whom it means to have dialled."""
    epochs: EpochTable
    version: str

    def encoded(self) -> bytes:
        """Return it as JSON."""
        return orjson.dumps(
            {
                "cluster": self.cluster,
                "replica": name_of(self.replica),
                "to": name_of(self.to),
                "epochs": [list(each) for each in self.epochs],
                "version": self.version,
            }
        )

    @classmethod
    def decoded(cls, payload: bytes) -> Self:
        """Return what `encoded` has written. Raises StreamBroken."""
        try:
            fields: dict[str, Any] = orjson.loads(payload)
            return cls(
                str(fields["cluster"]),
                replica_named(fields["replica"]),
                replica_named(fields["to"]),
                _table(fields["epochs"]),
                str(fields["version"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StreamBroken(f"a HELLO can't be read: {excerpt(payload, 200)} ({error!r})") from error


class WelcomePayload(NamedTuple):
    """What a leader tells a follower first."""

    epochs: EpochTable
    """The epochs of the leader's log."""
    secret: bytes
    """By which the shard's replicas sign handles of deliveries."""

    def encoded(self) -> bytes:
        """Return it as JSON."""
        return orjson.dumps({"epochs": [list(each) for each in self.epochs], "secret": self.secret.hex()})

    @classmethod
    def decoded(cls, payload: bytes) -> Self:
        """Return what `encoded` has written. Raises StreamBroken."""
        try:
            fields: dict[str, Any] = orjson.loads(payload)
            return cls(_table(fields["epochs"]), bytes.fromhex(fields["secret"]))
        except (ValueError, KeyError, TypeError) as error:
            raise StreamBroken(f"a WELCOME can't be read ({error!r})") from error


class RelayPayload(NamedTuple):
    """Whose connection a follower relays."""

    cluster: str
    to: ReplicaId
    """Whom it means to have dialled."""
    listener: str
    """Name of the listener that the client has connected to: `POP_LISTENER`, or that of an MQTT listener."""
    host: str
    """Numeric address of the client; empty on a Unix socket."""
    port: int
    is_tls: bool
    """Whether the client begins with a handshake of TLS."""

    def encoded(self) -> bytes:
        """Return it as JSON."""
        return orjson.dumps({**self._asdict(), "to": name_of(self.to)})

    @classmethod
    def decoded(cls, payload: bytes) -> Self:
        """Return what `encoded` has written. Raises StreamBroken."""
        try:
            fields: dict[str, Any] = orjson.loads(payload)
            host = str(fields["host"])
            if host:
                ip_address(host.partition("%")[0])
            return cls(
                str(fields["cluster"]),
                replica_named(fields["to"]),
                str(fields["listener"]),
                host,
                int(fields["port"]),
                bool(fields["is_tls"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StreamBroken(f"a RELAY can't be read: {excerpt(payload, 200)} ({error!r})") from error


def _table(rows: list[list[int]]) -> EpochTable:
    return EpochTable((int(number), int(begin)) for number, begin in rows)
