"""The control packets of MQTT: their numbers, and what those off the hot path say once `parsers` has read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from penstock.gateway.protocol.properties import Found

MALFORMED: Final = 0
"""Not on the wire: the type of the item that `codec.decode` puts last where the bytes are no packet."""

# MQTT 5.0, 2.1.2. Plain ints, because the hot path compares them for each packet.
CONNECT: Final = 1
CONNACK: Final = 2
PUBLISH: Final = 3
PUBACK: Final = 4
PUBREC: Final = 5
PUBREL: Final = 6
PUBCOMP: Final = 7
SUBSCRIBE: Final = 8
SUBACK: Final = 9
UNSUBSCRIBE: Final = 10
UNSUBACK: Final = 11
PINGREQ: Final = 12
PINGRESP: Final = 13
DISCONNECT: Final = 14
AUTH: Final = 15
"""MQTT 5.0 only."""

NAMES: Final = (
    "reserved type 0",
    "CONNECT",
    "CONNACK",
    "PUBLISH",
    "PUBACK",
    "PUBREC",
    "PUBREL",
    "PUBCOMP",
    "SUBSCRIBE",
    "SUBACK",
    "UNSUBSCRIBE",
    "UNSUBACK",
    "PINGREQ",
    "PINGRESP",
    "DISCONNECT",
    "AUTH",
)
"""Of the types, by number."""

PUBLISH_WITH: Final = 17
"""Not on the wire: the type of the item that `codec.decode` makes of a PUBLISH of MQTT 5.0 that has properties, or no
topic of its own."""

PUBLISH_RUN: Final = 18
"""Not on the wire: the type of the item that `codec.decode` makes of PUBLISHes that differ in nothing but their packet
ids and bodies."""

V3_1: Final = 3
"""Protocol level of MQTT 3.1 in a CONNECT. It is served as 3.1.1 is: what differs is the protocol's name."""
V3_1_1: Final = 4
"""Protocol level of MQTT 3.1.1."""
V5_0: Final = 5
"""Protocol level of MQTT 5.0."""

NEVER_S: Final = 0xFFFF_FFFF
"""A session expiry interval that means never (MQTT 5.0, 3.1.2.11.2)."""

RECEIVE_MAXIMUM: Final = 65_535
"""The receive maximum of who states none (MQTT 5.0, 3.1.2.11.3)."""

QOS: Final = 0x03
NO_LOCAL: Final = 0x04
RETAIN_AS_PUBLISHED: Final = 0x08
RETAIN_HANDLING: Final = 0x30
"""Parts of the subscription options: MQTT 5.0, 3.8.3.1. In 3.1.1 there is the QoS only."""


@dataclass(frozen=True, slots=True)
class Will:
    """The message that a client leaves behind, to be published when its connection ends without a DISCONNECT.

    `properties` are those of MQTT 5.0 that go with the message; `delay_s` is how long it waits for the client to return.
    """

    topic: str
    body: bytes
    qos: int
    retain: bool
    delay_s: int = 0
    properties: Found = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Connect:
    """A CONNECT that is valid. `client_id` is empty where the server has to assign one; `keep_alive_s` 0 is none.

    `clean_start` is the clean session of MQTT 3.1.1, where `session_expiry_s` follows from it. What only MQTT 5.0 has is
    what a client there gets that doesn't say it.
    """

    level: int
    client_id: str
    clean_start: bool
    keep_alive_s: int
    will: Will | None
    username: str | None
    password: bytes | None
    session_expiry_s: int = 0
    receive_max: int = RECEIVE_MAXIMUM
    packet_bytes_max: int | None = None
    topic_alias_max: int = 0
    wants_response_information: bool = False
    wants_problem_information: bool = True
    user_properties: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Subscribe:
    """A SUBSCRIBE: filters with the options asked for, in the order in which the SUBACK answers them; at least one.

    The options are those of MQTT 5.0, 3.8.3.1. `identifier` is 0 where there is none.
    """

    packet_id: int
    filters: list[tuple[str, int]]
    identifier: int = 0


@dataclass(frozen=True, slots=True)
class Unsubscribe:
    """An UNSUBSCRIBE: at least one filter."""

    packet_id: int
    filters: list[str]


@dataclass(frozen=True, slots=True)
class Disconnect:
    """A DISCONNECT of a client. `session_expiry_s` is None where the one of the CONNECT holds."""

    reason: int
    session_expiry_s: int | None = None
