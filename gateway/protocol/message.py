"""What a message says besides its topic and body: as properties of MQTT 5.0 on the wire, and as they are stored."""

from __future__ import annotations

from penstock.gateway.protocol.fields import U32, write_binary, write_pair, write_string
from penstock.gateway.protocol.properties import Found, Property
from penstock.store.record import Properties


def to_stored(
    found: Found, now_ms: int, *, publisher: str = "", deliver_at_ms: int = 0, session: str = "", packet_id: int = 0
) -> Properties:
    """Return what is stored with a message that came with the properties `found`.

    Args:
        found: of a PUBLISH or of a will.
        now_ms: when it came: its expiry interval counts from there, or from when it is due.
        publisher: the client, where its own subscriptions must not get it.
        deliver_at_ms: when it is due, or 0.
        session, packet_id: see `Properties`.
    """
    get = found.get
    expiry_s = get(Property.MESSAGE_EXPIRY_S)
    return Properties(
        user=get(Property.USER_PROPERTY, []),
        deliver_at_ms=deliver_at_ms,
        expires_at_ms=0 if expiry_s is None else max(now_ms, deliver_at_ms) + expiry_s * 1000,
        payload_format=get(Property.PAYLOAD_FORMAT),
        content_type=get(Property.CONTENT_TYPE),
        response_topic=get(Property.RESPONSE_TOPIC),
        correlation_data=get(Property.CORRELATION_DATA),
        publisher=publisher,
        session=session,
        packet_id=packet_id,
    )


def to_wire(stored: Properties, now_ms: int) -> bytes:
    """Return the properties of a PUBLISH, without their length.

    The expiry interval is what is left of it at `now_ms`, rounded up [MQTT-3.3.2-6]; that it has not passed is the caller's to
    know. User properties keep their order [MQTT-3.3.2-17], [MQTT-3.3.2-18].
    """
    parts: list[bytes] = []
    if stored.payload_format is not None:  # [MQTT-3.3.2-4]
        parts.append(bytes((Property.PAYLOAD_FORMAT, stored.payload_format)))
    if stored.expires_at_ms:
        left_s = max(-(-(stored.expires_at_ms - now_ms) // 1000), 0)
        parts.append(b"\x02" + U32.pack(left_s))
    if stored.content_type is not None:  # [MQTT-3.3.2-20]
        parts.append(b"\x03" + write_string(stored.content_type))
    if stored.response_topic is not None:  # [MQTT-3.3.2-15]
        parts.append(b"\x08" + write_string(stored.response_topic))
    if stored.correlation_data is not None:  # [MQTT-3.3.2-16]
        parts.append(b"\x09" + write_binary(stored.correlation_data))
    parts += [b"\x26" + write_pair(pair) for pair in stored.user]
    return b"".join(parts)
