"""Rules of MQTT that fit into no other file of tests.

A docstring names the clauses of 5.0, followed by those of 3.1.1 where their numbers differ. docs/conformance.md lists all rules
with the tests that show them.
"""

from __future__ import annotations

from typing import Any

import pytest

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import (
    CONNACK,
    PINGRESP,
    PUBACK,
    PUBCOMP,
    PUBLISH,
    PUBLISH_WITH,
    PUBREC,
    PUBREL,
    SUBACK,
    UNSUBACK,
)
from penstock.gateway.protocol.properties import Property, PropertyValues, write_properties
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from tests.clock import ManualClock
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases import connect, packet, subscribe, unsubscribe
from tests.gateway.packet_cases_5 import NONE, connect_5, publish_5, subscribe_5, unsubscribe_5
from tests.gateway.wire import BYE, CLEAN, PING, WILL, Broker, Client, Client5, Message
from tests.waiting import until

both_versions = pytest.mark.parametrize("is_v5", [False, True], ids=["3.1.1", "5.0"])

LASTS = {Property.SESSION_EXPIRY_S: 60}


async def connected(broker: Broker, client_id: str, is_v5: bool, *, is_durable: bool = False, is_back: bool = False) -> Client:
    """Connect a client. If `is_durable`, its session outlives the connection; if `is_back`, the session must exist already."""
    flags = 0 if is_durable else CLEAN
    if is_v5:
        client = await broker.connect_5(client_id, flags=flags, about=LASTS if is_durable else None)
        assert client.session_present == is_back
        return client
    old = await broker.connect(client_id, flags=flags, accepted=False)
    assert await old.receive() == (CONNACK, 0, bytes((is_back, 0)))
    return old


async def left(broker: Broker, client: Client, client_id: str) -> None:
    """End the connection of a client with a durable session; wait until only the session is left."""
    client.reset()
    await until(lambda: client_id in broker.away())


# --- names ------------------------------------------------------------------------------------------------------------


@both_versions
async def test_topics_are_compared_without_normalization(broker: Broker, is_v5: bool) -> None:
    """[MQTT-4.7.3-4], [MQTT-1.5.4-3] 3.1.1:[MQTT-1.5.3-3]: case, normal forms, slashes and U+FEFF stay as they are."""
    names = ["a", "A", "/a", "a/", "a//b", "a/b", "e\u0301", "\u00e9", "\ufeffa", "a\ufeff", " a"]
    client = await connected(broker, "c", is_v5)
    for number, name in enumerate(names):
        other = await connected(broker, f"c-{number}", is_v5)
        await other.subscribe((name, 0))
        for topic in names:
            await client.publish(topic, b"x", 1)
        assert await other.messages() == [Message(name, b"x")]


@both_versions
async def test_client_ids_may_have_all_characters_that_the_specification_requires(broker: Broker, is_v5: bool) -> None:
    """[MQTT-3.1.3-5]."""
    letters = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
    for client_id in [letters[at : at + 23] for at in range(0, len(letters), 20)] + list(letters):
        await connected(broker, client_id, is_v5)
        assert client_id in broker.node.gateway.clients


# --- CONNECT ----------------------------------------------------------------------------------------------------------


@both_versions
async def test_a_client_without_a_session_gets_a_new_one(broker: Broker, is_v5: bool) -> None:
    """[MQTT-3.1.2-6], [MQTT-3.2.2-3] 3.1.1:[MQTT-3.1.2-4], [MQTT-3.2.2-3]."""
    client = await connected(broker, "c", is_v5, is_durable=True)
    await client.subscribe(("a", 1))
    await left(broker, client, "c")
    again = await connected(broker, "c", is_v5, is_durable=True, is_back=True)
    await again.publish("a", b"x", 1)
    assert await again.message() == Message("a", b"x", 1)


@pytest.mark.parametrize(
    "refused",
    [
        connect(0, b"", keep_alive_s=0),
        connect_5(0, b"c", about=write_properties({Property.AUTHENTICATION_METHOD: "SCRAM"})),
    ],
    ids=["3.1.1", "5.0"],
)
async def test_packets_after_a_refused_connect_are_not_processed(broker: Broker, refused: bytes) -> None:
    """[MQTT-3.1.4-6], [MQTT-3.2.2-6], [MQTT-3.2.2-7] 3.1.1:[MQTT-3.1.4-5], [MQTT-3.2.2-4], [MQTT-3.2.2-5]."""
    first = await connected(broker, "c", True, is_durable=True)
    await left(broker, first, "c")
    client = await (broker.dial_5() if refused[8] == 5 else broker.dial())
    more = (publish_5(0x32, b"a", 1, NONE), encode_publish(b"a", b"x", 1, packet_id=1), subscribe(1, (b"a", 0)))
    await client.send(refused, *more)
    answers = await client.ended()
    assert [answer[0] for answer in answers] == [CONNACK]
    assert answers[0][2][0] == 0, "the CONNACK must say that no session is present"
    assert answers[0][2][1] in (ConnectCode.IDENTIFIER_REJECTED, ReasonCode.BAD_AUTHENTICATION_METHOD)
    assert broker.stored() == []
    assert "c" in broker.away()


async def test_response_information_is_never_returned(broker: Broker) -> None:
    """[MQTT-3.1.2-28]; [MQTT-4.12.0-6]: the CONNACK has no authentication method either."""
    wishes: tuple[PropertyValues, ...] = (
        {Property.REQUEST_RESPONSE_INFORMATION: 0},
        {Property.REQUEST_RESPONSE_INFORMATION: 1},
        {},
    )
    for about in wishes:
        client = await broker.connect_5("c", about=about)
        assert not {Property.RESPONSE_INFORMATION, Property.AUTHENTICATION_METHOD} & set(client.limits), about


async def test_no_will_is_published_for_a_client_that_has_none(broker: Broker) -> None:
    """3.1.1:[MQTT-3.1.2-12]."""
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("#", 0))
    for client_id in ("a", "b"):
        client = await broker.connect(client_id)
        client.reset()
    await until(lambda: set(broker.node.gateway.clients) == {"watcher"})
    assert await watcher.messages() == []


@both_versions
async def test_retained_messages_are_not_part_of_a_session(broker: Broker, is_v5: bool) -> None:
    """3.1.1:[MQTT-3.1.2-7]; 5.0, 4.1.0."""
    client = await connected(broker, "c", is_v5)
    await client.publish("a", b"x", 1, retain=True)
    client.reset()
    await until(lambda: not broker.node.gateway.clients)
    other = await connected(broker, "c", is_v5)
    await other.subscribe(("a", 0))
    assert await other.message() == Message("a", b"x", 0, True)


# --- packet sizes that a client accepts -------------------------------------------------------------------------------


async def test_a_client_whose_limit_is_below_the_connack_gets_neither_it_nor_a_disconnect(broker: Broker) -> None:
    """[MQTT-3.1.2-24], [MQTT-3.14.0-1]: the rules hold also where a session could be resumed."""
    first = await connected(broker, "c", True, is_durable=True)
    await first.subscribe(("a", 1))
    await left(broker, first, "c")
    client = await broker.dial_5()
    about = write_properties({Property.MAXIMUM_PACKET_SIZE: 10} | LASTS)
    await client.send(connect_5(0, b"c", about=about), PING)
    assert await client.ended() == []
    assert broker.closed(ReasonCode.PACKET_TOO_LARGE) == 1
    again = await connected(broker, "c", True, is_durable=True, is_back=True)
    await again.publish("a", b"x", 1)
    assert await again.message() == Message("a", b"x", 1)


@pytest.mark.parametrize(
    ("about", "reason"),
    [({}, ReasonCode.QUOTA_EXCEEDED), ({Property.AUTHENTICATION_METHOD: "SCRAM"}, ReasonCode.BAD_AUTHENTICATION_METHOD)],
)
async def test_a_connack_leaves_out_a_reason_string_that_exceeds_the_clients_limit(
    start_broker: StartBroker, about: Any, reason: ReasonCode
) -> None:
    """[MQTT-3.2.2-19]."""
    broker = await start_broker(connections_max=1)
    await broker.connect("one")
    client = await broker.dial_5()
    await client.send(connect_5(CLEAN, b"two", about=write_properties({Property.MAXIMUM_PACKET_SIZE: 20} | about)))
    assert await client.ended() == [(CONNACK, 0, bytes((0, reason, 0)))]


@pytest.mark.parametrize(("header", "kind"), [(0x32, PUBACK), (0x34, PUBREC)])
async def test_an_ack_leaves_out_a_reason_string_that_exceeds_the_clients_limit(broker: Broker, header: int, kind: int) -> None:
    """[MQTT-3.4.2-2], [MQTT-3.5.2-2]."""
    client = await broker.connect_5("c", about={Property.MAXIMUM_PACKET_SIZE: 40})
    await client.send(packet(header, b"\0\6$SYS/x\0\1\0"))
    assert await client.receive() == (kind, 1, ReasonCode.TOPIC_NAME_INVALID)
    assert await client.drained() == []


async def test_a_disconnect_leaves_out_a_reason_string_that_exceeds_the_clients_limit(broker: Broker) -> None:
    """[MQTT-3.14.2-3]; [MQTT-3.14.2-2]: a server's DISCONNECT has no session expiry."""
    client = await broker.connect_5("c", about={Property.MAXIMUM_PACKET_SIZE: 40})
    await client.send(b"\xf0\0")
    assert await client.ended() == [(14, 0, bytes((ReasonCode.PROTOCOL_ERROR,)))]


# --- requests and their acks ------------------------------------------------------------------------------------------


@both_versions
async def test_a_suback_and_an_unsuback_name_the_packet_that_they_answer(broker: Broker, is_v5: bool) -> None:
    """[MQTT-2.2.1-6], [MQTT-3.8.4-1], [MQTT-3.8.4-2], [MQTT-3.10.4-4], [MQTT-3.10.4-5] 3.1.1:[MQTT-2.3.1-7]."""
    client = await connected(broker, "c", is_v5)
    subscribe_to, unsubscribe_from = (subscribe_5, unsubscribe_5) if is_v5 else (subscribe, unsubscribe)
    for packet_id in (1, 256, 65_535):
        await client.send(subscribe_to(packet_id, (b"a", 0)))
        assert (await client.expect(SUBACK))[2][:2] == packet_id.to_bytes(2, "big")
        await client.send(unsubscribe_from(packet_id, b"a"))
        answer = await client.expect(UNSUBACK)
        assert packet_id == (int.from_bytes(answer[2][:2], "big") if is_v5 else answer[1])


@both_versions
async def test_deliveries_that_have_begun_are_completed_after_an_unsubscribe(broker: Broker, is_v5: bool) -> None:
    """[MQTT-3.10.4-3]: the server completes them also on the client's next connection."""
    client = await connected(broker, "c", is_v5, is_durable=True)
    await client.subscribe(("a", 2))
    for qos in (1, 2):
        await client.publish("a", b"%d" % qos, qos)
    first, second = [await client.expect(PUBLISH) for _ in range(2)]
    await client.send(unsubscribe_5(9, b"a") if is_v5 else unsubscribe(9, b"a"))
    await client.expect(UNSUBACK)
    await client.send(encode_acks(PUBREC, [second[3]]))
    assert await client.expect(PUBREL) == (PUBREL, second[3])
    await left(broker, client, "c")
    again = await connected(broker, "c", is_v5, is_durable=True, is_back=True)
    repeated = await again.receive()
    assert (repeated[0], repeated[1], repeated[3]) == (PUBLISH, 8 | 1 << 1, first[3])
    assert await again.receive() == (PUBREL, second[3])
    await again.send(encode_acks(PUBACK, [first[3]]), encode_acks(PUBCOMP, [second[3]]))
    assert await again.drained() == []
    assert broker.connection("c").session.inflight.slots == {}


@both_versions
async def test_the_dup_flag_is_not_passed_on(broker: Broker, is_v5: bool) -> None:
    """[MQTT-3.3.1-3], [MQTT-4.3.2-2], [MQTT-4.3.3-2]."""
    client, other = await connected(broker, "c", is_v5), await connected(broker, "other", is_v5)
    await client.subscribe(("a", 2))
    for qos in (1, 2):
        properties = NONE if is_v5 else b""
        await other.send(encode_publish(b"a", b"x", qos, dup=True, packet_id=qos, properties=properties))
        found = await client.receive()
        assert (found[0], found[1]) == (PUBLISH, qos << 1)


@both_versions
async def test_after_its_ack_a_packet_id_names_a_new_message_regardless_of_the_dup_flag(broker: Broker, is_v5: bool) -> None:
    """[MQTT-4.3.2-5]."""
    client = await connected(broker, "c", is_v5)
    properties = NONE if is_v5 else b""
    for dup in (False, True):
        await client.send(encode_publish(b"a", b"x", 1, dup=dup, packet_id=7, properties=properties))
        assert await client.receive() == (PUBACK, 7)
    assert broker.stored() == [Message("a", b"x", 1)] * 2


async def test_after_a_refusal_a_packet_id_names_a_new_message(broker: Broker) -> None:
    """[MQTT-4.3.3-9]."""
    client = await broker.connect_5("c")
    await client.send(publish_5(0x34, b"$SYS/x", 7, NONE))
    assert await client.receive() == (PUBREC, 7, ReasonCode.TOPIC_NAME_INVALID)
    await client.send(publish_5(0x34, b"a", 7, NONE))
    assert await client.receive() == (PUBREC, 7)
    assert broker.stored() == [Message("a", b"x", 2)]


async def test_an_exchange_that_has_begun_is_completed_after_the_message_expires(broker: Broker) -> None:
    """[MQTT-4.3.3-7], [MQTT-4.3.3-13]: the expired message is sent again, and both sides complete QoS 2."""
    store = broker.node.store
    later_ms = store.now_ms() + 5000
    client = await connected(broker, "c", True, is_durable=True)
    await client.subscribe(("a", 2))
    await client.send(publish_5(0x34, b"a", 7, write_properties({Property.MESSAGE_EXPIRY_S: 1})))
    assert await client.expect(PUBREC) == (PUBREC, 7)
    found = await client.expect(PUBLISH_WITH)
    await left(broker, client, "c")
    store.clock = ManualClock(later_ms)
    again = await connected(broker, "c", True, is_durable=True, is_back=True)
    repeated = await again.receive()
    assert (repeated[1], repeated[3], repeated[4]) == (8 | 2 << 1, found[3], b"x")
    await again.send(encode_acks(PUBREC, [found[3]]), encode_acks(PUBREL, [7]))
    assert sorted([await again.receive() for _ in range(2)]) == [(PUBREL, found[3]), (PUBCOMP, 7)]
    await again.send(encode_acks(PUBCOMP, [found[3]]))
    assert await again.drained() == []
    assert broker.connection("c").session.inflight.slots == {}


@both_versions
async def test_acks_come_in_the_order_of_the_packets_that_they_answer(broker: Broker, is_v5: bool) -> None:
    """[MQTT-4.6.0-2] to [MQTT-4.6.0-4]."""
    client = await connected(broker, "c", is_v5)
    ids = [5, 1, 9, 3]
    properties = NONE if is_v5 else b""
    for qos, kind in ((1, PUBACK), (2, PUBREC)):
        await client.send(*(encode_publish(b"a", b"x", qos, packet_id=one, properties=properties) for one in ids))
        assert [await client.receive() for _ in ids] == [(kind, one) for one in ids]
    await client.send(encode_acks(PUBREL, ids))
    assert [await client.receive() for _ in ids] == [(PUBCOMP, one) for one in ids]
    await client.subscribe(("b", 2))
    await client.send(*(encode_publish(b"b", b"x", 0, properties=properties) for _ in ids))
    for _ in ids:
        await client.publish("b", b"x", 2)
    sent = [await client.receive() for _ in range(2 * len(ids))]
    under_way = [found[3] for found in sent if found[3]]
    answered = under_way[::-1]
    await client.send(encode_acks(PUBREC, answered))
    assert [await client.receive() for _ in answered] == [(PUBREL, one) for one in answered]


# --- flow control -----------------------------------------------------------------------------------------------------


async def test_only_publishes_wait_while_the_window_is_full(broker: Broker) -> None:
    """[MQTT-3.3.4-10], [MQTT-4.9.0-2], [MQTT-4.9.0-3]."""
    client, other = await broker.connect_5("c", about={Property.RECEIVE_MAXIMUM: 1}), await broker.connect_5("other")
    await client.subscribe(("a", 1))
    for _ in range(3):
        await other.publish("a", b"x", 1)
    found = await client.receive()
    assert found[0] == PUBLISH
    await client.send(PING, subscribe_5(2, (b"b", 0)), publish_5(0x32, b"c", 7, NONE), publish_5(0x34, b"c", 8, NONE))
    await client.send(encode_acks(PUBREL, [8]), unsubscribe_5(3, b"b"))
    answers = [await client.receive() for _ in range(6)]
    assert sorted(answer[0] for answer in answers) == sorted([PINGRESP, SUBACK, PUBACK, PUBREC, PUBCOMP, UNSUBACK])
    await client.send(encode_acks(PUBACK, [found[3]]))
    assert (await client.receive())[0] == PUBLISH


async def test_every_topic_alias_up_to_the_maximum_is_accepted(broker: Broker) -> None:
    """[MQTT-3.3.2-12]."""
    client: Client5 = await broker.connect_5("c")
    most = client.limits[Property.TOPIC_ALIAS_MAXIMUM]
    for topic in ("a/{}", ""):
        for alias in range(1, most + 1):
            assert await client.publish_with(topic.format(alias), b"x", {Property.TOPIC_ALIAS: alias}, 1) == 0
    assert broker.stored() == [Message(f"a/{alias}", b"x", 1) for alias in range(1, most + 1)] * 2


# --- the end of a connection ------------------------------------------------------------------------------------------


@both_versions
async def test_the_server_closes_after_a_disconnect_and_discards_the_will(broker: Broker, is_v5: bool) -> None:
    """[MQTT-3.14.4-3] 3.1.1:[MQTT-3.14.4-3], [MQTT-3.1.2-10]."""
    fields = (b"will", b"gone")
    client = await (broker.connect_5 if is_v5 else broker.connect)("c", *fields, flags=CLEAN | WILL)
    await client.send(BYE)
    assert await client.ended() == []
    assert broker.stored() == []
