"""Conversion of a message's properties between the wire format of MQTT 5.0 and the store."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.gateway.protocol.fields import U32, write_binary, write_pair, write_string
from penstock.gateway.protocol.properties import Property, PropertyValues
from penstock.store.properties import Properties


def to_stored(
    values: PropertyValues,
    now_ms: Callable[[], int],
    *,
    publisher: str = "",
    deliver_at_ms: int = 0,
    session: str = "",
    packet_id: int = 0,
    by: Sequence[str] = (),
) -> Properties:
    """Return the properties to store with a message.

    Args:
        values: the properties of its PUBLISH or will.
        now_ms: returns when the message came, in ms since 1970. Its expiry interval counts from then, also if it is delayed.
        publisher: the client id of the publisher, if its own subscriptions must not get the message, else empty.
        deliver_at_ms: when the message is due, in ms since 1970; 0 means at once.
        session, packet_id, by: see `Properties`.
    """
    get = values.get
    expiry_s = get(Property.MESSAGE_EXPIRY_S)
    return Properties(
        user=get(Property.USER_PROPERTY, []),
        deliver_at_ms=deliver_at_ms,
        expires_at_ms=0 if expiry_s is None else now_ms() + expiry_s * 1000,
        payload_format=get(Property.PAYLOAD_FORMAT),
        content_type=get(Property.CONTENT_TYPE),
        response_topic=get(Property.RESPONSE_TOPIC),
        correlation_data=get(Property.CORRELATION_DATA),
        publisher=publisher,
        session=session,
        packet_id=packet_id,
        by=list(by),
    )


def to_wire(stored: Properties, now_ms: int) -> bytes:
    """Return the properties of a PUBLISH without their length field.

    The expiry interval is the time that is left at `now_ms`, rounded up to seconds [MQTT-3.3.2-6]. The caller checks that the
    message has not expired. User properties keep their order [MQTT-3.3.2-17], [MQTT-3.3.2-18].
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
