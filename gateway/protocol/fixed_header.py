"""The fixed header of a packet: which first bytes may come from which side, and how long the rest of the packet is.

One lookup in a table of 256 entries checks the type of a packet, its direction and its flags at once. Clauses in brackets are
those of MQTT 5.0. Where MQTT 3.1.1 has the same rule under another number, that number follows as 3.1.1:[...].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from penstock.gateway.protocol.errors import MalformedPacket, ProtocolError
from penstock.gateway.protocol.packets import (
    AUTH,
    CONNACK,
    CONNECT,
    DISCONNECT,
    NAMES,
    PINGREQ,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBREC,
    PUBREL,
    SUBACK,
    SUBSCRIBE,
    UNSUBACK,
    UNSUBSCRIBE,
)

# The shapes: what `decode` does with a packet, by its first byte. Plain ints, because the hot path compares them.
REFUSED: Final = 0
PUBLISH_PLAIN: Final = 1
"""A PUBLISH of MQTT 3.1.1 at QoS 0, which has no packet id."""
PUBLISH_ACKED: Final = 2
"""A PUBLISH of MQTT 3.1.1 at QoS 1 or 2."""
ACK: Final = 3
EMPTY: Final = 4
"""Nothing may follow the fixed header."""
OTHER: Final = 5
"""A parser off the hot path reads the body."""
PUBLISH_PLAIN_5: Final = 6
"""A PUBLISH of MQTT 5.0 at QoS 0."""
PUBLISH_ACKED_5: Final = 7
"""A PUBLISH of MQTT 5.0 at QoS 1 or 2."""

FLAGS: Final = {PUBREL: 2, SUBSCRIBE: 2, UNSUBSCRIBE: 2}
"""The flags of the packets whose flags are not 0 (Table 2.2). The flags of a PUBLISH vary and are not listed."""

_ACKS: Final = frozenset((PUBACK, PUBREC, PUBREL, PUBCOMP))


class Side(NamedTuple):
    """The packets that may come from one side, client or server, in one version of MQTT."""

    shapes: bytes
    """The shape of a packet, by its first byte."""
    is_v5: bool
    gaps: bytes
    """By the first byte of a PUBLISH that may be part of a run: 1 more than the number of bytes between topic and body. For
    all other first bytes 0."""


GAP_WITH_ID: Final = 3
"""`Side.gaps` has this value or a greater one where a packet id stands between topic and body."""


def _side(kinds: Iterable[int], empties: Iterable[int], acks: frozenset[int], is_v5: bool) -> Side:
    shapes = bytearray(256)
    for kind in kinds:
        shapes[kind << 4 | FLAGS.get(kind, 0)] = ACK if kind in acks else EMPTY if kind in empties else OTHER
    plain, acked = (PUBLISH_PLAIN_5, PUBLISH_ACKED_5) if is_v5 else (PUBLISH_PLAIN, PUBLISH_ACKED)
    for header in range(PUBLISH << 4, PUBLISH + 1 << 4):
        qos = header >> 1 & 3
        is_plain = qos == 0 and not header & 8  # [MQTT-3.3.1-2]
        shapes[header] = plain if is_plain else acked if qos in (1, 2) else REFUSED  # [MQTT-3.3.1-4]
    gaps = bytearray(256)
    gaps[PUBLISH << 4] = 1 + is_v5
    gaps[PUBLISH << 4 | 1 << 1] = 3 + is_v5
    return Side(bytes(shapes), is_v5, bytes(gaps))


_TO_SERVER: Final = (CONNECT, *_ACKS, SUBSCRIBE, UNSUBSCRIBE, PINGREQ, DISCONNECT)
_TO_CLIENT: Final = (CONNACK, *_ACKS, SUBACK, UNSUBACK, PINGRESP)

FROM_CLIENT: Final = _side(_TO_SERVER, (PINGREQ, DISCONNECT), _ACKS, False)
"""The packets that a server accepts in MQTT 3.1.1, and a first CONNECT of any version."""

FROM_SERVER: Final = _side(_TO_CLIENT, (PINGRESP,), _ACKS | {UNSUBACK}, False)
"""The packets that a client accepts in MQTT 3.1.1."""

FROM_CLIENT_5: Final = _side((*_TO_SERVER, AUTH), (PINGREQ,), _ACKS, True)
"""The packets that a server accepts in MQTT 5.0."""

FROM_SERVER_5: Final = _side((*_TO_CLIENT, AUTH, DISCONNECT), (PINGRESP,), _ACKS, True)
"""The packets that a client accepts in MQTT 5.0."""


def packet_bytes(buffer: bytes) -> int:
    """Return the size of the packet at the beginning of `buffer`, fixed header included; 0 if too few bytes have come to tell.

    A connection uses this size for a packet that arrives in many reads: it collects that many bytes and decodes once. `buffer`
    is what `decode` left over, so the size is within `packet_bytes_max`.
    """
    if len(buffer) < 2:
        return 0
    if buffer[1] < 128:
        return 2 + buffer[1]
    start, length = long_length(buffer, 0, len(buffer))
    return start + length


def long_length(buffer: bytes, at: int, end: int) -> tuple[int, int]:
    """Return where the body of the packet at `at` starts, and its length, for a length field of two to four bytes (1.5.5).

    Both are 0 while the length field is incomplete.

    Raises:
        MalformedPacket: the length field has more than four bytes.
    """
    length = buffer[at + 1] & 127
    for more in range(1, 4):
        place = at + 1 + more
        if place == end:
            return 0, 0
        byte = buffer[place]
        length |= (byte & 127) << 7 * more
        if byte < 128:
            return place + 1, length
    raise MalformedPacket("A remaining length continues after its fourth byte (1.5.5).")


def header_error(header: int, is_v5: bool) -> ProtocolError:
    """Return the error that says why no packet may begin with the byte `header`."""
    kind, flags = header >> 4, header & 15
    name = NAMES[kind]
    if kind == PUBLISH:
        if flags & 6 == 6:
            return MalformedPacket("A PUBLISH has QoS 3. Use 0, 1 or 2 [MQTT-3.3.1-4].")
        return MalformedPacket("A PUBLISH at QoS 0 has DUP set, but QoS 0 is never sent twice [MQTT-3.3.1-2].")
    if not kind or (kind == AUTH and not is_v5):
        return MalformedPacket(f"A packet has type {kind}, which does not exist (2.1.2).")
    if flags != FLAGS.get(kind, 0):
        expected = FLAGS.get(kind, 0)  # [MQTT-3.6.1-1], [MQTT-3.8.1-1], [MQTT-3.10.1-1], [MQTT-3.14.1-1]
        wrong = f"A {name} has the flags {flags:#06b} in its fixed header. They must be {expected:#06b}"
        return MalformedPacket(f"{wrong} [MQTT-2.1.3-1] 3.1.1:[MQTT-2.2.2-2].")
    return ProtocolError(f"A {name} came from the side that must not send it (2.1.2).")
