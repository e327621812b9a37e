"""SUBSCRIBE and UNSUBSCRIBE: which filters a client asks for or gives up (MQTT 5.0, 3.8 and 3.10).

Clauses in brackets are those of MQTT 5.0. Where MQTT 3.1.1 has the same rule under another number, that number follows as
3.1.1:[...].
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.protocol.errors import (
    MalformedPacket,
    PacketIdMissing,
    ProtocolError,
    TooManyFields,
)
from penstock.gateway.protocol.fields import REMAINING_BYTES_MAX, read_byte, read_string, read_u16
from penstock.gateway.protocol.packets import NAMES, NO_LOCAL, SUBSCRIBE, UNSUBSCRIBE
from penstock.gateway.protocol.properties import Property, PropertyValues, read_properties
from penstock.gateway.protocol.topics import SHARE


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A SUBSCRIBE that is well formed. Its filters are UTF-8, but may break the rules of MQTT 5.0, 4.7.

    Parameters:
        packet_id: 1 to 65,535.
        filters: at least one filter with its subscription options (MQTT 5.0, 3.8.3.1), in the order of the SUBACK.
        identifier: the subscription identifier; 0 means none.
    """

    packet_id: int
    filters: list[tuple[str, int]]
    identifier: int = 0


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """An UNSUBSCRIBE that is well formed, with at least one filter. As in `Subscribe`, the filters may break rules."""

    packet_id: int
    filters: list[str]


def parse_subscribe(
    body: bytes,
    *,
    is_v5: bool = False,
    filters_max: int = REMAINING_BYTES_MAX,
    user_properties_max: int = REMAINING_BYTES_MAX,
) -> Subscribe:
    """Parse the body of a SUBSCRIBE.

    A filter that breaks the rules of 4.7 does not make the packet malformed: the server refuses that filter in the SUBACK
    (3.9.3, reason 0x8F).

    Args:
        body: the packet without its fixed header.
        is_v5: whether the packet is of MQTT 5.0.
        filters_max: see `GatewayOptions.packet_filters_max`.
        user_properties_max: see `GatewayOptions.user_properties_max`.

    Raises:
        ProtocolError: the connection has to close.
    """
    packet_id, at = _packet_id(body, SUBSCRIBE)
    values: PropertyValues = {}
    if is_v5:
        values, at = read_properties(body, at, SUBSCRIBE, user_properties_max)
    _check_count(body, at, SUBSCRIBE, filters_max)
    filters: list[tuple[str, int]] = []
    end = len(body)
    while at < end:
        topic_filter, at = read_string(body, at, "topic filter")  # [MQTT-3.8.3-1]
        options, at = read_byte(body, at, "subscription options")
        _check_options(topic_filter, options, is_v5)
        filters.append((topic_filter, options))
    if not filters:
        raise ProtocolError("A SUBSCRIBE has no topic filter. Send at least one [MQTT-3.8.3-2] 3.1.1:[MQTT-3.8.3-3].")
    return Subscribe(packet_id, filters, values.get(Property.SUBSCRIPTION_IDENTIFIER, [0])[0])


def parse_unsubscribe(
    body: bytes,
    *,
    is_v5: bool = False,
    filters_max: int = REMAINING_BYTES_MAX,
    user_properties_max: int = REMAINING_BYTES_MAX,
) -> Unsubscribe:
    """Parse the body of an UNSUBSCRIBE. The arguments are those of `parse_subscribe`.

    Raises:
        ProtocolError: the connection has to close.
    """
    packet_id, at = _packet_id(body, UNSUBSCRIBE)
    if is_v5:
        _, at = read_properties(body, at, UNSUBSCRIBE, user_properties_max)
    _check_count(body, at, UNSUBSCRIBE, filters_max)
    filters: list[str] = []
    end = len(body)
    while at < end:
        topic_filter, at = read_string(body, at, "topic filter")  # [MQTT-3.10.3-1]
        filters.append(topic_filter)
    if not filters:
        raise ProtocolError("An UNSUBSCRIBE has no topic filter. Send at least one [MQTT-3.10.3-2].")
    return Unsubscribe(packet_id, filters)


def _check_count(body: bytes, at: int, kind: int, most: int) -> None:
    """Raise TooManyFields if more than `most` filters begin from `at` on. This looks at their lengths only."""
    end = len(body) - 1
    beyond = 2 + (kind == SUBSCRIBE)  # The length comes before the filter, and in a SUBSCRIBE the options after it.
    for _ in range(most):
        if at >= end:
            return
        at += beyond + (body[at] << 8 | body[at + 1])
    if at < end:
        raise TooManyFields(NAMES[kind], most, "topic filters")


def _check_options(topic_filter: str, options: int, is_v5: bool) -> None:
    if options > (0x3F if is_v5 else 2):
        raise MalformedPacket(
            f"A SUBSCRIBE has reserved bits set in its options {options:#04x} [MQTT-3.8.3-5] 3.1.1:[MQTT-3-8.3-4]."
        )
    if options & 3 == 3:
        raise ProtocolError("A SUBSCRIBE asks for QoS 3. Use 0, 1 or 2 (3.8.3.1).")
    if options >> 4 == 3:
        raise ProtocolError("A SUBSCRIBE asks for retain handling 3. Use 0, 1 or 2 (3.8.3.1).")
    if options & NO_LOCAL and topic_filter.startswith(SHARE):
        raise ProtocolError("A shared subscription can't have the option no local [MQTT-3.8.3-4].")


def _packet_id(body: bytes, kind: int) -> tuple[int, int]:
    packet_id, at = read_u16(body, 0, "packet id")
    if not packet_id:
        raise PacketIdMissing(kind)
    return packet_id, at
