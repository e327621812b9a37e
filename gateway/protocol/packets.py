"""The control packets of MQTT: their numbers, their names, and the tuples into which `decode` turns them.

This module imports nothing of the package, so that every other module may import it.
"""

from __future__ import annotations

from typing import Any, Final, TypeAlias

# MQTT 5.0, 2.1.2. These are plain ints because the hot path compares them for each packet.
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
"""Exists in MQTT 5.0 only."""

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
"""The name of each packet type, by its number."""

# The following types are never on the wire. `decode` uses them to say more about an item than the packet type does.
MALFORMED: Final = 0
"""The type of the last item that `decode` returns if the bytes at that place are not a valid packet."""

PUBLISH_WITH: Final = 17
"""The type of an item for a PUBLISH of MQTT 5.0 that has properties, or that has an alias in place of a topic."""

PUBLISH_RUN: Final = 18
"""The type of an item for several PUBLISHes that differ only in their packet ids and bodies."""
PING_RUN: Final = 19
"""The type of an item for several PINGREQs."""
PUBACK_RUN: Final = 20
"""The type of an item for several PUBACKs without reason codes."""

DUP: Final = 0x08
"""Flag in the first byte of a PUBLISH: the packet may have been sent before [MQTT-3.3.1-1]."""

WILL: Final = 16
"""Stands for the will properties of a CONNECT wherever a function asks to which packet properties belong."""

Packet: TypeAlias = tuple[Any, ...]
"""One item that `decode` returns. Its first element is its type:

    (PUBLISH, flags, topic, packet_id, body)    flags: retain 1, QoS << 1, DUP 8; packet_id is 0 at QoS 0
    (PUBLISH_WITH, flags, topic, packet_id, body, properties)
                                                MQTT 5.0: properties are bytes, and the topic may be empty
    (PUBLISH_RUN, flags, topic, packet_ids, bodies)
                                                two or more PUBLISHes at QoS 0 or 1, if the caller wants runs; packet_ids
                                                is empty at QoS 0
    (PING_RUN, count)                           two or more PINGREQs, if the caller wants runs
    (PUBACK_RUN, packet_ids)                    two or more PUBACKs without reason codes, if the caller wants runs
    (PUBACK, packet_id)                         also PUBREC, PUBREL, PUBCOMP, and UNSUBACK of 3.1.1; packet_id is never 0
    (PUBACK, packet_id, reason)                 MQTT 5.0: the packet has a reason code
    (type, flags, body)                         all others; `connect`, `subscribe` and `disconnect` parse the body
    (MALFORMED, error)                          always last: the bytes after the packets before it are no packet; `error` is
                                                a `ProtocolError`, and the connection has to close

A topic is bytes that nobody has checked yet: the route of the store checks it once per topic instead of once per message.
"""

V3_1: Final = 3
"""Protocol level of MQTT 3.1 in a CONNECT. The gateway serves it like 3.1.1; only the protocol name differs."""
V3_1_1: Final = 4
"""Protocol level of MQTT 3.1.1."""
V5_0: Final = 5
"""Protocol level of MQTT 5.0."""

NEVER_S: Final = 0xFFFF_FFFF
"""The session expiry interval that means never (MQTT 5.0, 3.1.2.11.2)."""

RECEIVE_MAXIMUM: Final = 65_535
"""The receive maximum of a client or server that states none (MQTT 5.0, 3.1.2.11.3)."""

# Bits of the subscription options (MQTT 5.0, 3.8.3.1). MQTT 3.1.1 has the QoS only.
QOS: Final = 0x03
NO_LOCAL: Final = 0x04
RETAIN_AS_PUBLISHED: Final = 0x08
RETAIN_HANDLING: Final = 0x30
