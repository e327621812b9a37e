"""DISCONNECT: how a client of MQTT 5.0 ends its connection (MQTT 5.0, 3.14)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.protocol.errors import MalformedPacket, ProtocolError, check_reason
from penstock.gateway.protocol.fields import REMAINING_BYTES_MAX
from penstock.gateway.protocol.packets import DISCONNECT
from penstock.gateway.protocol.properties import Property, PropertyValues, read_properties
from penstock.gateway.protocol.reasons import ReasonCode


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A valid DISCONNECT of a client.

    Parameters:
        reason: its reason code.
        session_expiry_s: the new session expiry interval in seconds, or None to keep that of the CONNECT.
    """

    reason: int
    session_expiry_s: int | None = None


def parse_disconnect(body: bytes, user_properties_max: int = REMAINING_BYTES_MAX) -> Disconnect:
    """Parse the body of a client's DISCONNECT of MQTT 5.0 (3.14.2). In MQTT 3.1.1 the body is always empty.

    Raises:
        ProtocolError: the server has to close the connection with the error's reason, and to publish the will.
    """
    if not body:
        return Disconnect(ReasonCode.NORMAL_DISCONNECTION)
    reason, at = body[0], 1
    check_reason(DISCONNECT, reason)
    values: PropertyValues = {}
    if at < len(body):  # 3.14.2.2.1
        values, at = read_properties(body, at, DISCONNECT, user_properties_max)
    if at != len(body):
        raise MalformedPacket(f"A DISCONNECT has {len(body) - at} bytes after its properties.")
    if Property.SERVER_REFERENCE in values:
        raise ProtocolError("A client's DISCONNECT has a server reference (3.14.2.2.5).")
    return Disconnect(reason, values.get(Property.SESSION_EXPIRY_S))
