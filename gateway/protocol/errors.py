"""What a client can do wrong. Each error carries the reason code of MQTT 5.0 that answers it.

After any of these errors the connection closes: [MQTT-4.13.1-1] 3.1.1:[MQTT-4.8.0-1].
"""

from __future__ import annotations

from penstock.gateway.protocol.packets import NAMES
from penstock.gateway.protocol.reasons import REASON_OF, REASONS, ConnectCode, ReasonCode
from penstock.store.topics import excerpt


class ProtocolError(Exception):
    """Raised when a packet is well formed but not allowed at this point. It is also the base class of the other errors."""

    def __init__(self, message: str, reason: ReasonCode = ReasonCode.PROTOCOL_ERROR) -> None:
        self.reason = reason
        super().__init__(message)


class MalformedPacket(ProtocolError):
    """Raised when bytes can't be parsed as a packet."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ReasonCode.MALFORMED_PACKET)


class PacketTooLarge(ProtocolError):
    """Raised when a fixed header announces more bytes than the server accepts, before the server buffers the packet."""

    def __init__(self, packet_bytes: int, packet_bytes_max: int, topic: bytes) -> None:
        """`topic` is what has come of the topic of a PUBLISH; otherwise empty."""
        super().__init__(
            f"A packet announces {packet_bytes} bytes. Send {packet_bytes_max} at most: a PUBLISH has room for "
            f"mqtt.message_bytes_max, and a CONNECT for less.{f' It is a PUBLISH to {excerpt(topic)}.' if topic else ''}",
            ReasonCode.PACKET_TOO_LARGE,
        )


class TooManyFields(ProtocolError):
    """Raised when a packet has more user properties or topic filters than the server accepts, before it parses them all."""

    def __init__(self, kind: str, most: int, fields: str) -> None:
        super().__init__(f"A {kind} has more than {most} {fields}. Send fewer in each.", ReasonCode.QUOTA_EXCEEDED)


class PacketIdMissing(ProtocolError):
    """Raised when a packet that must have a packet id has the id 0. `kind` is the type of the packet."""

    def __init__(self, kind: int) -> None:
        super().__init__(f"A {NAMES[kind]} has the packet id 0. Use 1 to 65535 [MQTT-2.2.1-3] 3.1.1:[MQTT-2.3.1-1].")


class MalformedTopic(ProtocolError):
    """Raised when a topic or a filter in a packet breaks MQTT 5.0, 4.7."""


class ConnectRefused(ProtocolError):
    """Raised when the server answers a CONNECT by a CONNACK with a refusal, and then closes the connection.

    `code` is the answer in MQTT 3.1.1. `reason` is the answer in MQTT 5.0; by default it is the one that `code` stands for.
    """

    def __init__(self, message: str, code: ConnectCode, reason: ReasonCode | None = None) -> None:
        self.code = code
        super().__init__(message, REASON_OF[code] if reason is None else reason)


class UnsupportedVersion(ConnectRefused):
    """Raised when a CONNECT asks for a version of MQTT that isn't served. `is_v5` tells the format of the answer."""

    def __init__(self, message: str, *, is_v5: bool) -> None:
        self.is_v5 = is_v5
        super().__init__(message, ConnectCode.UNACCEPTABLE_PROTOCOL_VERSION)


def check_reason(kind: int, reason: int) -> None:
    """Raise ProtocolError if a packet of type `kind` can't have this reason code [MQTT-3.4.2-1], [MQTT-3.14.2-1]."""
    if reason not in REASONS[kind]:
        raise ProtocolError(f"A {NAMES[kind]} can't have the reason code {reason:#04x} (2.4).")
