"""What a client can do wrong. Each error carries the MQTT 5.0 reason code to answer with, and a sentence that tells what was
wrong, with which value, and what to do. After any of them the connection closes: [MQTT-4.13.1-1] 3.1.1:[MQTT-4.8.0-1].
"""

from __future__ import annotations

from penstock.gateway.protocol.reasons import REASON_OF, ConnectCode, ReasonCode


class ProtocolError(Exception):
    """Base of these errors; raised itself for a packet that is well formed but not allowed at this point."""

    def __init__(self, message: str, reason: ReasonCode = ReasonCode.PROTOCOL_ERROR) -> None:
        self.reason = reason
        super().__init__(message)


class MalformedPacket(ProtocolError):
    """Raised when bytes can't be parsed as a packet."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ReasonCode.MALFORMED_PACKET)


class PacketTooLarge(ProtocolError):
    """Raised when a fixed header announces more bytes than the server takes: before the packet is buffered."""

    def __init__(self, packet_bytes: int, packet_bytes_max: int) -> None:
        super().__init__(
            f"a packet of {packet_bytes} bytes was announced; send {packet_bytes_max} at most",
            ReasonCode.PACKET_TOO_LARGE,
        )


class InvalidTopic(ProtocolError):
    """Raised when a topic or a filter in a packet breaks MQTT 4.7."""


class ConnectRefused(ProtocolError):
    """Raised when a CONNECT is to be answered by a CONNACK that says why not, and then closed.

    `code` is the answer in MQTT 3.1.1; `reason` is the one in MQTT 5.0, the same unless it is given.
    """

    def __init__(self, message: str, code: ConnectCode, reason: ReasonCode | None = None) -> None:
        self.code = code
        super().__init__(message, REASON_OF[code] if reason is None else reason)


class UnsupportedVersion(ConnectRefused):
    """Raised when a CONNECT asks for a version of MQTT that isn't served. `is_v5` tells in which format to answer."""

    def __init__(self, message: str, *, is_v5: bool) -> None:
        self.is_v5 = is_v5
        super().__init__(message, ConnectCode.UNACCEPTABLE_PROTOCOL_VERSION)
