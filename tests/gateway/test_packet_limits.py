"""Packets that are cheap to send and would be expensive to parse are refused before they are parsed."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

from penstock.gateway.protocol.connect import parse_connect
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.disconnect import parse_disconnect
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.errors import TooManyFields
from penstock.gateway.protocol.fixed_header import FROM_CLIENT_5
from penstock.gateway.protocol.packets import DISCONNECT, MALFORMED, PUBACK, PUBLISH, Packet
from penstock.gateway.protocol.properties import Property, parse_properties, write_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.protocol.subscribe import parse_subscribe, parse_unsubscribe
from penstock.store.options import KIB, MIB
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases import connect, packet, subscribe, unsubscribe
from tests.gateway.packet_cases_5 import connect_5, subscribe_5, unsubscribe_5
from tests.gateway.websocket_client import CONNACK, WS, dial
from tests.gateway.wire import CLEAN, PING, WILL, Broker, Client5


@cache
def many() -> bytes:
    """Most of 1 MB: the smallest user properties that there are."""
    return write_properties({Property.USER_PROPERTY: [("", "")] * 170_000})


REFUSAL_BYTES_MAX = MIB
"""Memory: more than a refusal takes, and far less than the fields of any of these packets take."""


def body_of(data: bytes) -> Packet:
    """Return the one packet in `data`, as the server decodes it."""
    packets, used = decode(data, 2 * MIB, FROM_CLIENT_5, False, 256)
    assert used == len(data) or packets[-1][0] == MALFORMED
    return packets[0]


def parse_publish(found: Packet) -> None:
    parse_properties(found[5], PUBLISH, 256)


def raise_error(found: Packet) -> None:
    raise found[1]


EXPENSIVE: dict[str, tuple[Callable[[], bytes], Callable[[Packet], Any]]] = {
    "CONNECT": (lambda: connect_5(CLEAN, b"c", about=many()), lambda found: parse_connect(found[2], user_properties_max=256)),
    "will": (
        lambda: connect_5(CLEAN | WILL, b"c", b"w", b"", will=many()),
        lambda found: parse_connect(found[2], user_properties_max=256),
    ),
    "PUBLISH": (lambda: encode_publish(b"a", b"", properties=many()), parse_publish),
    "PUBACK": (lambda: packet(PUBACK << 4, b"\0\1\0" + many()), raise_error),
    "SUBSCRIBE": (
        lambda: subscribe_5(1, (b"a", 0), about=many()),
        lambda found: parse_subscribe(found[2], is_v5=True, user_properties_max=256),
    ),
    "UNSUBSCRIBE": (
        lambda: unsubscribe_5(1, b"a", about=many()),
        lambda found: parse_unsubscribe(found[2], is_v5=True, user_properties_max=256),
    ),
    "DISCONNECT": (lambda: packet(DISCONNECT << 4, b"\0" + many()), lambda found: parse_disconnect(found[2], 256)),
    "filters of a SUBSCRIBE": (
        lambda: subscribe(1, *[(b"a", 0)] * 200_000),
        lambda found: parse_subscribe(found[2], filters_max=1000),
    ),
    "filters of an UNSUBSCRIBE": (
        lambda: unsubscribe(1, *[b"a"] * 200_000),
        lambda found: parse_unsubscribe(found[2], filters_max=1000),
    ),
}


@pytest.mark.parametrize("name", EXPENSIVE)
def test_a_packet_with_too_many_fields_is_refused_before_it_is_parsed(name: str) -> None:
    make, parse = EXPENSIVE[name]
    packet = body_of(make())
    tracemalloc.start()
    try:
        with pytest.raises(
            TooManyFields, match=r"has more than (256 user properties|1000 topic filters)\. Send fewer in each\."
        ) as found:
            parse(packet)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.value.reason is ReasonCode.QUOTA_EXCEEDED
    assert peak < REFUSAL_BYTES_MAX


def test_as_many_fields_as_allowed_are_parsed() -> None:
    pairs = [("k", "v")] * 256
    assert parse_properties(write_properties({Property.USER_PROPERTY: pairs})[2:], PUBLISH, 256) == {
        Property.USER_PROPERTY: pairs
    }
    assert len(parse_subscribe(subscribe(1, *[(b"a", 0)] * 9)[2:], filters_max=9).filters) == 9
    assert len(parse_unsubscribe(unsubscribe_5(1, *[b"a"] * 9)[2:], is_v5=True, filters_max=9).filters) == 9
    with pytest.raises(TooManyFields):
        parse_subscribe(subscribe_5(1, *[(b"a", 0)] * 10)[2:], is_v5=True, filters_max=9)


async def refused(broker: Broker, data: bytes) -> tuple[Client5, int]:
    """Send a CONNECT; return the client, and the reason of the CONNACK that refuses it."""
    client = await broker.dial_5()
    await client.send(data)
    reason, _ = await client.connack()
    return client, reason


async def test_a_client_that_is_not_yet_known_may_send_no_large_connect(start_broker: StartBroker) -> None:
    broker = await start_broker(connect_bytes_max=2 * KIB)
    _, reason = await refused(broker, connect_5(CLEAN | WILL, b"c", b"w", bytes(2 * KIB)))
    assert reason == ReasonCode.PACKET_TOO_LARGE
    older = await broker.dial()
    await older.send(connect(CLEAN | WILL, b"c", b"w", bytes(2 * KIB))[:100])
    assert await older.ended() == []
    accepted = await broker.connect_5("c", b"w", bytes(KIB), flags=CLEAN | WILL)
    await accepted.publish("a", bytes(100 * KIB), 1)


async def test_a_websocket_client_that_is_not_yet_known_may_send_no_large_message(start_broker: StartBroker) -> None:
    broker = await start_broker(listeners=(WS,), connect_bytes_max=2 * KIB)
    client, _ = await dial(broker)
    client.frames.send_binary(bytes(2 * KIB + 1))
    await client.send()
    assert await client.close_code() == 1009
    client, _ = await dial(broker)
    await client.packets(connect(CLEAN, b"c"), expected=CONNACK)
    await client.packets(encode_publish(b"a", bytes(100 * KIB)) + PING, expected=b"\xd0\0")
    client.writer.transport.abort()


@pytest.mark.parametrize("fields", ["properties", "filters"])
async def test_a_client_with_too_many_fields_learns_it(start_broker: StartBroker, fields: str) -> None:
    broker = await start_broker(user_properties_max=16, packet_filters_max=16)
    client = await broker.connect_5("c")
    about = write_properties({Property.USER_PROPERTY: [("k", "v")] * 17})
    many = (
        subscribe_5(1, *[(b"a", 0)] * 17)
        if fields == "filters"
        else encode_publish(b"a", b"", 1, packet_id=1, properties=about)
    )
    await client.send(many)
    assert (await client.disconnected())[0] == ReasonCode.QUOTA_EXCEEDED
    if fields == "properties":
        _, reason = await refused(broker, connect_5(CLEAN, b"c", about=about))
        assert reason == ReasonCode.QUOTA_EXCEEDED


async def test_an_expensive_connect_is_refused_while_others_are_served(broker: Broker) -> None:
    honest = await broker.connect("honest")
    for name in ("CONNECT", "will"):
        client = await broker.dial_5()
        await client.send(EXPENSIVE[name][0]())
        assert await honest.drained() == []
        assert (await client.connack())[0] == ReasonCode.PACKET_TOO_LARGE, name
