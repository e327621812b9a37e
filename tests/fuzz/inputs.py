"""The inputs of the fuzzers: streams of bad clients, which Hypothesis generates from the shared tables of packets."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import islice, pairwise
from random import Random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from penstock.gateway.protocol import fields, packets
from penstock.gateway.protocol.packets import WILL
from penstock.gateway.protocol.properties import RULES, Property, write_properties
from penstock.gateway.protocol.reasons import REASONS
from penstock.gateway.transport.proxy import V2
from tests.gateway import packet_cases, packet_cases_5, proxy_headers
from tests.gateway.packet_cases import connect, field, packet, subscribe, unsubscribe
from tests.gateway.wire import BYE, CLEAN, PING

SEEDS = [case.data for table in (packet_cases, packet_cases_5) for case in (*table.VALID, *table.INVALID)]
"""All packets of the shared tables."""

HEADERS = [header for header, _ in proxy_headers.VALID.values()] + list(proxy_headers.INVALID.values())

HANDSHAKE = (
    b"GET /mqtt HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Protocol: mqtt\r\n\r\n"
)

CLIENT_IDS = st.sampled_from([b"", b"fuzz-1", b"fuzz-2", b"fuzz-3"])
"""There are few client ids, so that clients take over each other's sessions."""
TOPICS = st.sampled_from([b"a", b"a/b", b"a/b/c", b"", b"$SYS/x", b"$delayed/1/a", b"$delayed/x/a", b"a/#", b"\xff", b"/" * 40])
FILTERS = st.sampled_from([b"a", b"a/b", b"a/+", b"+/#", b"#", b"$share/g/a", b"$share//a", b"$SYS/#", b"a/#/b", b"/" * 40])
PACKET_IDS = st.sampled_from([1, 1, 2, 3, 65_535])

# --- streams of any bytes -------------------------------------------------------------------------------------------------


def _changed(data: bytes, changes: list[tuple[str, int, int]]) -> bytes:
    found = bytearray(data)
    for what, place, value in changes:
        at = place % (len(found) + 1)
        if what == "i":
            found.insert(at, value)
        elif what == "d":
            del found[at : at + 1 + value % 8]
        elif at < len(found):
            found[at] = value if what == "s" else found[at] ^ 1 << value % 8
    return bytes(found)


def damaged(streams: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """Generate streams with some bytes changed, removed or inserted."""
    change = st.tuples(st.sampled_from("scid"), st.integers(0, 5000), st.integers(0, 255))
    return st.builds(_changed, streams, st.lists(change, max_size=5))


def framed() -> st.SearchStrategy[bytes]:
    """Generate packets with valid framing and any contents."""
    body = st.binary(max_size=40) | st.builds(
        lambda name, rest: field(name) + rest, st.binary(max_size=20), st.binary(max_size=20)
    )
    return st.lists(st.builds(packet, st.integers(0, 255), body), max_size=10).map(b"".join)


def known() -> st.SearchStrategy[bytes]:
    """Generate packets of the tables in any order."""
    return st.lists(st.sampled_from(SEEDS), max_size=10).map(b"".join)


# --- valid packets in any order -----------------------------------------------------------------------------------------------

_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    fields.read_byte: st.integers(0, 1),
    fields.read_u16: st.sampled_from([1, 2, 64, 65_535]),
    fields.read_u32: st.sampled_from([1, 2, 30, 127, 4096, 0xFFFF_FFFF]),
    fields.read_varint: st.sampled_from([1, 127, 128, 268_435_455]),
    fields.read_string: st.sampled_from(["", "a", "a/b", "é\U0001f600"]),
    fields.read_binary: st.binary(max_size=6),
    fields.read_pair: st.tuples(st.sampled_from(["", "b"]), st.sampled_from(["", "c"])),
}
_LISTED = (Property.USER_PROPERTY, Property.SUBSCRIPTION_IDENTIFIER)
_REFUSED = (Property.AUTHENTICATION_METHOD, Property.AUTHENTICATION_DATA)
"""These properties would end nearly every CONNECT that has them."""


@cache
def about(kind: int) -> st.SearchStrategy[bytes]:
    """Generate a property length and properties that a type of packet may have."""
    values: dict[Property, st.SearchStrategy[Any]] = {}
    for one in Property:
        if kind in RULES[one].packets and one not in _REFUSED:
            value = _VALUES[RULES[one].type.read]
            values[one] = (
                st.lists(value, min_size=1, max_size=2 if one == Property.USER_PROPERTY else 1) if one in _LISTED else value
            )
    return st.just(b"\0") | st.fixed_dictionaries({}, optional=values).map(write_properties)


@st.composite
def connects(draw: st.DrawFn, is_v5: bool) -> bytes:
    flags = (
        draw(st.sampled_from([0, CLEAN]))
        | draw(st.sampled_from([0, 4, 0x0C, 0x14, 0x24]))
        | draw(st.sampled_from([0, 0x80, 0xC0]))
    )
    payload = [draw(CLIENT_IDS)]
    if flags & 4:
        payload += [draw(TOPICS), draw(st.binary(max_size=8))]
    payload += [b"u"] * bool(flags & 0x80) + [b"p"] * bool(flags & 0x40)
    keep_alive_s = draw(st.sampled_from([0, 1, 60]))
    if not is_v5:
        return connect(flags, *payload, keep_alive_s=keep_alive_s)
    will = draw(about(WILL)) if flags & 4 else b""
    return packet_cases_5.connect_5(flags, *payload, about=draw(about(packets.CONNECT)), will=will, keep_alive_s=keep_alive_s)


@st.composite
def publishes(draw: st.DrawFn, is_v5: bool) -> bytes:
    qos = draw(st.integers(0, 2))
    flags = qos << 1 | draw(st.integers(0, 1)) | (8 if qos and draw(st.booleans()) else 0)
    head = field(draw(TOPICS)) + (draw(PACKET_IDS).to_bytes(2, "big") if qos else b"")
    return packet(0x30 | flags, head + (draw(about(packets.PUBLISH)) if is_v5 else b"") + draw(st.binary(max_size=60)))


@st.composite
def acks(draw: st.DrawFn, is_v5: bool) -> bytes:
    kind = draw(st.sampled_from([packets.PUBACK, packets.PUBREC, packets.PUBREL, packets.PUBCOMP]))
    body = draw(PACKET_IDS).to_bytes(2, "big")
    if is_v5 and draw(st.booleans()):
        body += bytes((draw(st.sampled_from(sorted(REASONS[kind]))),)) + (draw(about(kind)) if draw(st.booleans()) else b"")
    return packet(kind << 4 | (2 if kind == packets.PUBREL else 0), body)


@cache
def subscribes(is_v5: bool) -> st.SearchStrategy[bytes]:
    options = (
        st.integers(0, 2)
        if not is_v5
        else st.builds(
            lambda qos, flags, handling: qos | flags | handling << 4,
            st.integers(0, 2),
            st.sampled_from([0, 4, 8, 12]),
            st.integers(0, 2),
        )
    )
    filters = st.lists(st.tuples(FILTERS, options), min_size=1, max_size=3)
    if not is_v5:
        return st.builds(lambda packet_id, filters: subscribe(packet_id, *filters), PACKET_IDS, filters)
    return st.builds(
        lambda packet_id, filters, about: packet_cases_5.subscribe_5(packet_id, *filters, about=about),
        PACKET_IDS,
        filters,
        about(packets.SUBSCRIBE),
    )


@cache
def others(is_v5: bool) -> st.SearchStrategy[bytes]:
    """Generate an UNSUBSCRIBE, PINGREQ, DISCONNECT or AUTH."""
    filters = st.lists(FILTERS, min_size=1, max_size=2)
    if not is_v5:
        return st.builds(lambda filters: unsubscribe(9, *filters), filters) | st.sampled_from([PING, BYE])
    reason = st.sampled_from(sorted(REASONS[packets.DISCONNECT])).map(lambda reason: bytes((reason,)))
    return st.one_of(
        st.builds(
            lambda filters, about: packet_cases_5.unsubscribe_5(9, *filters, about=about), filters, about(packets.UNSUBSCRIBE)
        ),
        st.sampled_from([PING, BYE, b"\xf0\0"]),
        st.builds(lambda reason, about: packet(packets.DISCONNECT << 4, reason + about), reason, about(packets.DISCONNECT)),
        st.just(packet(packets.AUTH << 4, b"\x18" + write_properties({Property.AUTHENTICATION_METHOD: "x"}))),
    )


@cache
def conversations() -> st.SearchStrategy[bytes]:
    """Generate valid packets of one version, often after a CONNECT, with acks for messages that were never sent."""

    def of(is_v5: bool) -> st.SearchStrategy[bytes]:
        hello = connects(is_v5)
        one = st.one_of(publishes(is_v5), acks(is_v5), subscribes(is_v5), publishes(is_v5), others(is_v5))
        rest = st.lists(one, max_size=14).map(b"".join)
        return st.one_of(st.tuples(hello, rest), st.tuples(hello, rest), st.tuples(hello, rest, hello), st.tuples(rest)).map(
            b"".join
        )

    return of(False) | of(True)


@cache
def mqtt() -> st.SearchStrategy[bytes]:
    """Generate streams: valid MQTT, damaged MQTT, and anything else. Most begin with a CONNECT, which lets more happen."""
    hello = connects(False) | connects(True)
    return st.one_of(
        conversations(),
        conversations(),
        damaged(conversations()),
        st.builds(bytes.__add__, hello, damaged(known())),
        st.builds(bytes.__add__, hello, framed()),
        damaged(known()),
        st.builds(bytes.__add__, st.just(b"") | hello, st.binary(max_size=300)),
    )


# --- what comes before MQTT ---------------------------------------------------------------------------------------------------


def frame(first: int, payload: bytes, *, is_masked: bool = True, said: int | None = None) -> bytes:
    """Return a WebSocket frame (RFC 6455, 5.2) with the given first byte, which claims the length `said`."""
    size = len(payload) if said is None else said
    mask = 0x80 if is_masked else 0
    head = bytes((first,))
    if size < 126:
        head += bytes((mask | size,))
    elif size < 65_536:
        head += bytes((mask | 126,)) + size.to_bytes(2, "big")
    else:
        head += bytes((mask | 127,)) + size.to_bytes(8, "big")
    key = b"\1\2\3\4"
    return head + (key + bytes(byte ^ key[at % 4] for at, byte in enumerate(payload)) if is_masked else payload)


_PLACES = st.lists(st.integers(0, 500), max_size=4)
_CONTROL_FRAMES = st.builds(frame, st.sampled_from([0x88, 0x89, 0x8A]), st.binary(max_size=130))
_ODD_FRAMES = st.lists(
    st.builds(
        lambda first, payload, is_masked, said: frame(first, payload, is_masked=is_masked, said=said),
        st.integers(0, 255),
        st.binary(max_size=20),
        st.booleans(),
        st.none() | st.sampled_from([0, 5, 126, 65_536, 2**40, 2**63]),
    ),
    max_size=2,
)


@st.composite
def websockets(draw: st.DrawFn) -> bytes:
    """Generate a handshake and frames: MQTT in binary frames, control frames between them, and invalid frames."""
    pieces = cut(draw(mqtt()), draw(_PLACES))
    frames: list[bytes] = []
    is_begun = False
    for piece in pieces:
        is_end = draw(st.booleans())
        frames.append(frame((0x80 if is_end else 0) | (0 if is_begun else 2), piece))
        is_begun = not is_end
        if not draw(st.integers(0, 4)):
            frames.append(draw(_CONTROL_FRAMES))
    frames += draw(_ODD_FRAMES)
    return HANDSHAKE + b"".join(frames)


def proxied() -> st.SearchStrategy[bytes]:
    """Generate a PROXY header, valid or not, followed by MQTT."""
    invented = st.builds(
        lambda command, family, said, body: V2 + bytes((command, family)) + said.to_bytes(2, "big") + body,
        st.sampled_from([0x20, 0x21, 0x22, 0x11]),
        st.sampled_from([0, 0x11, 0x12, 0x21, 0x31]),
        st.sampled_from([0, 11, 12, 36, 4096, 65_535]),
        st.binary(max_size=60),
    )
    header = st.sampled_from(HEADERS)
    return st.builds(bytes.__add__, header | damaged(header) | invented, mqtt())


# --- attacks ------------------------------------------------------------------------------------------------------------------


class Attack(NamedTuple):
    """Concurrent connections to one listener, each cut into pieces, and whether they end with a reset."""

    listener: str
    streams: list[list[bytes]]
    is_reset: bool
    seed: int
    """The seed of its variants."""


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """Cut the data at the given places, each taken modulo its length, and return the pieces."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[start:stop] for start, stop in pairwise(places)]


VARIANTS = 8
"""The number of damaged copies of each input that are checked, too. They cost far less than a new input of Hypothesis."""


CUTS = 4
"""The maximum number of places at which a stream is cut."""


def variants(data: bytes, chance: Random) -> Iterator[bytes]:
    """Yield bytes and damaged copies of them."""
    yield data
    for _ in range(VARIANTS):
        changes = [(chance.choice("scid"), chance.randrange(5000), chance.randrange(256)) for _ in range(chance.randint(1, 4))]
        yield _changed(data, changes)


def variants_of(attack: Attack) -> Iterator[Attack]:
    """Yield an attack, and copies with damaged streams and other cuts. The same attack always gives the same copies."""
    yield attack
    chance = Random(attack.seed)
    copies = [variants(b"".join(pieces), chance) for pieces in attack.streams]
    for streams in islice(zip(*copies, strict=True), 1, None):
        cuts = [chance.randrange(10_000) for _ in range(chance.randrange(CUTS))]
        yield attack._replace(streams=[cut(stream, cuts) for stream in streams], is_reset=chance.random() < 0.3)


def attacks() -> st.SearchStrategy[Attack]:
    def on(listener: str, streams: st.SearchStrategy[bytes]) -> st.SearchStrategy[Attack]:
        pieces = st.builds(cut, streams, st.lists(st.integers(0, 10_000), max_size=CUTS))
        return st.builds(
            Attack, st.just(listener), st.lists(pieces, min_size=1, max_size=3), st.booleans(), st.integers(0, 2**32)
        )

    plain = on("mqtt", mqtt())
    return st.one_of(plain, plain, on("ws", websockets() | damaged(websockets())), on("proxied", proxied()))
