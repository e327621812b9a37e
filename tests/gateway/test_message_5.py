"""MQTT 5.0: the properties of messages, and their delivery. The docstring of each test names the clauses that it covers."""

from __future__ import annotations

import pytest

from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import PUBACK, PUBLISH_WITH
from penstock.gateway.protocol.properties import Property, PropertyValues, write_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.store.options import KIB
from tests.clock import ManualClock
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases_5 import NONE, publish_5
from tests.gateway.wire import CLEAN, WILL, Broker, Message, message_of

NO_LOCAL, AS_PUBLISHED = 0x04, 0x08
NOT_IF_THERE, NEVER = 0x10, 0x20
"""Subscription options: no local, retain as published, retain handling 1 and 2."""

ALL: PropertyValues = {
    Property.PAYLOAD_FORMAT: 1,
    Property.CONTENT_TYPE: "text/plain",
    Property.RESPONSE_TOPIC: "answers/7",
    Property.CORRELATION_DATA: b"\x00\xff",
    Property.USER_PROPERTY: [("b", "1"), ("a", "2"), ("b", "")],
}


def at_time(broker: Broker) -> ManualClock:
    """Return a clock that the node uses from now on."""
    clock = ManualClock(broker.node.store.now_ms())
    broker.node.store.clock = clock
    return clock


# --- properties pass through ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_all_properties_of_a_message_come_unaltered(broker: Broker, qos: int) -> None:
    """[MQTT-3.3.2-4], [MQTT-3.3.2-15], [MQTT-3.3.2-16], [MQTT-3.3.2-17], [MQTT-3.3.2-18], [MQTT-3.3.2-20]."""
    client, old = await broker.connect_5("client"), await broker.connect("old")
    await client.subscribe(("a", 2))
    await old.subscribe(("a", 2))
    await client.publish_with("a", b"x", ALL, qos)
    assert await client.message_with() == (Message("a", b"x", qos), ALL)
    assert await old.message() == Message("a", b"x", qos)


async def test_empty_values_are_values(broker: Broker) -> None:
    client = await broker.connect_5("client")
    await client.subscribe(("a", 1))
    values: list[PropertyValues] = [
        {Property.PAYLOAD_FORMAT: 0},
        {Property.CONTENT_TYPE: ""},
        {Property.CORRELATION_DATA: b""},
        {Property.USER_PROPERTY: [("", "")]},
        {},
    ]
    for found in values:
        await client.publish_with("a", b"x", found, 1)
        assert await client.message_with() == (Message("a", b"x", 1), found)


async def test_properties_survive_a_restart(broker: Broker) -> None:
    client = await broker.connect_5("client")
    await client.publish_with("a", b"x", ALL, 1, retain=True)
    await broker.restart()
    again = await broker.connect_5("client")
    await again.subscribe(("a", 1))
    assert await again.message_with() == (Message("a", b"x", 1, retain=True), ALL)


async def test_a_message_without_properties_takes_no_room_for_them(broker: Broker) -> None:
    client = await broker.connect_5("client")
    await client.publish_with("a", b"x", {}, 1)
    (record,) = [one for one in broker.node.store.log.scan(0) if one.kind == 1]
    assert record.properties == b""


async def test_a_request_is_answered(broker: Broker) -> None:
    """4.10."""
    asker, service = await broker.connect_5("asker"), await broker.connect_5("service")
    await service.subscribe(("requests", 1))
    await asker.subscribe(("answers/7", 1))
    about: PropertyValues = {Property.RESPONSE_TOPIC: "answers/7", Property.CORRELATION_DATA: b"\x07"}
    await asker.publish_with("requests", b"?", about, 1)
    _, found = await service.message_with()
    correlation: PropertyValues = {Property.CORRELATION_DATA: found[Property.CORRELATION_DATA]}
    await service.publish_with(found[Property.RESPONSE_TOPIC], b"!", correlation, 1)
    assert await asker.message_with() == (Message("answers/7", b"!", 1), correlation)


# --- message expiry -------------------------------------------------------------------------------------------------------


async def test_an_expiry_interval_is_counted_down_while_a_message_waits(start_broker: StartBroker) -> None:
    """[MQTT-3.3.2-5], [MQTT-3.3.2-6]."""
    broker = await start_broker(inflight_max=1)
    clock = at_time(broker)
    client, old, publisher = await broker.connect_5("client"), await broker.connect("old"), await broker.connect_5("publisher")
    for one in (client, old):
        await one.subscribe(("a", 1))
    for n, expiry_s in enumerate((100, 10, 20, None)):
        about: PropertyValues = {} if expiry_s is None else {Property.MESSAGE_EXPIRY_S: expiry_s}
        await publisher.publish_with("a", b"%d" % n, about, 1)
    first, first_old = await client.receive(), await old.receive()
    clock.advance(12_500)
    await client.send(encode_acks(PUBACK, [first[3]]))
    await old.send(encode_acks(PUBACK, [first_old[3]]))
    assert await client.message_with() == (Message("a", b"2", 1), {Property.MESSAGE_EXPIRY_S: 8})  # 7.5 s, rounded up
    assert await client.message_with() == (Message("a", b"3", 1), {})
    assert [(await old.message()).body for _ in range(2)] == [b"2", b"3"]


async def test_a_retained_message_expires_and_is_forgotten(broker: Broker) -> None:
    """[MQTT-3.3.2-5]."""
    clock = at_time(broker)
    publisher = await broker.connect_5("publisher")
    await publisher.publish_with("a/1", b"x", {Property.MESSAGE_EXPIRY_S: 10}, 1, retain=True)
    await publisher.publish_with("a/2", b"y", {Property.MESSAGE_EXPIRY_S: 30}, 1, retain=True)
    await publisher.publish_with("a/3", b"z", {}, 1, retain=True)
    clock.advance(10_001)
    for topic_filter in ("a/+", "#", "+/1", "a/1"):
        client = await broker.connect_5("client")
        await client.subscribe((topic_filter, 0))
        bodies = [message.body for message in await client.messages()]
        assert bodies == ([b"y", b"z"] if topic_filter in ("a/+", "#") else [])
    await publisher.publish("other", b"", 1)
    assert len(broker.node.retained) == 2
    await publisher.publish_with("a/1", b"again", {}, 1, retain=True)
    assert len(broker.node.retained) == 3


# --- topic aliases --------------------------------------------------------------------------------------------------------


async def test_an_alias_of_the_client_stands_for_its_topic(broker: Broker) -> None:
    """3.3.2.3.4, [MQTT-3.3.2-11]: it may be changed, and ends with the connection [MQTT-3.3.2-7]."""
    client, watcher = await broker.connect_5("client"), await broker.connect("watcher")
    await watcher.subscribe(("#", 0))
    one: PropertyValues = {Property.TOPIC_ALIAS: 1}
    await client.publish_with("a", b"1", one)
    await client.publish_with("", b"2", one, 1)
    await client.publish_with("b", b"3", {Property.TOPIC_ALIAS: 64})
    await client.publish_with("", b"4", one | ALL, 2)
    await client.publish_with("c", b"5", one)
    await client.publish_with("", b"6", one)
    assert [tuple(await watcher.message())[:2] for _ in range(6)] == [
        ("a", b"1"), ("a", b"2"), ("b", b"3"), ("a", b"4"), ("c", b"5"), ("c", b"6"),
    ]  # fmt: skip
    again = await broker.connect_5("client")
    await again.publish_with("", b"7", one)
    assert await again.disconnected() == (ReasonCode.PROTOCOL_ERROR, [])


@pytest.mark.parametrize("alias", [65, 65_535])
async def test_an_alias_over_the_limit_ends_the_connection(broker: Broker, alias: int) -> None:
    """[MQTT-3.3.2-9]."""
    client = await broker.connect_5("client")
    await client.publish_with("a", b"x", {Property.TOPIC_ALIAS: alias})
    assert await client.disconnected() == (ReasonCode.TOPIC_ALIAS_INVALID, [])


async def test_the_server_gives_no_aliases_unless_an_option_says_so(broker: Broker) -> None:
    """[MQTT-3.1.2-27]."""
    client, publisher = await broker.connect_5("client", about={Property.TOPIC_ALIAS_MAXIMUM: 10}), await broker.connect("p")
    await client.subscribe(("a", 1))
    for _ in range(2):
        await publisher.publish("a", b"x", 1)
    assert [await client.message_with() for _ in range(2)] == [(Message("a", b"x", 1), {})] * 2


async def test_the_server_gives_aliases_as_far_as_the_client_takes_them(start_broker: StartBroker) -> None:
    """[MQTT-3.1.2-26], [MQTT-3.1.2-27]: the topic comes with the alias, and then the alias alone."""
    broker = await start_broker(sent_topic_alias_max=64)
    client = await broker.connect_5("client", about={Property.TOPIC_ALIAS_MAXIMUM: 2})
    none, publisher = await broker.connect_5("none"), await broker.connect("publisher")
    for one in (client, none):
        await one.subscribe(("t/#", 1))
    topics = ["t/1", "t/2", "t/1", "t/3", "t/2", "t/3"]
    for qos, topic in enumerate(topics):
        await publisher.publish(topic, b"x", qos % 2)
    got = [(message.topic, found.get(Property.TOPIC_ALIAS)) for message, found in [await client.message_with() for _ in topics]]
    assert got == [("t/1", 1), ("t/2", 2), ("", 1), ("t/3", None), ("", 2), ("t/3", None)]
    assert [await none.message_with() for _ in topics] == [(Message(topic, b"x", n % 2), {}) for n, topic in enumerate(topics)]


# --- maximum packet size ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_message_that_is_too_large_for_a_client_is_left_out_for_it(broker: Broker, qos: int) -> None:
    """[MQTT-3.1.2-24], [MQTT-3.1.2-25]."""
    small = await broker.connect_5("small", about={Property.MAXIMUM_PACKET_SIZE: 100})
    large, publisher = await broker.connect_5("large"), await broker.connect("publisher")
    for one in (small, large):
        await one.subscribe(("a", qos))
    head = 2 + 3 + 1 + 2 * qos  # fixed header, topic, properties, packet id
    sizes = [10, 100 - head, 101 - head, 5000, 10]
    await publisher.send(*(encode_publish(b"a", b"x" * size, 1, packet_id=n) for n, size in enumerate(sizes, 1)))
    await publisher.drained()
    assert [len((await large.message()).body) for _ in sizes] == sizes
    assert [len((await small.message()).body) for _ in range(3)] == [10, 100 - head, 10]
    assert broker.node.gateway.counters.deliveries_too_large == 2


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_message_that_fits_only_without_an_alias_has_none(start_broker: StartBroker, qos: int) -> None:
    """[MQTT-3.1.2-24], [MQTT-3.1.2-25]: the alias takes 3 bytes, and the second time it saves a topic of one byte."""
    broker = await start_broker(sent_topic_alias_max=64)
    client = await broker.connect_5("client", about={Property.TOPIC_ALIAS_MAXIMUM: 2, Property.MAXIMUM_PACKET_SIZE: 100})
    publisher = await broker.connect("publisher")
    await client.subscribe(("+", qos))
    fits = 100 - (2 + 3 + 1 + 2 * qos)  # fixed header, topic, properties, packet id
    sizes = [fits + 1, fits, fits - 1, fits - 2, fits - 3, fits + 1, fits, fits - 1, fits - 2]
    for size in sizes:
        await publisher.publish("a", bytes(size), 1)
    got = [
        (len(message.body) - fits, message.topic, found.get(Property.TOPIC_ALIAS))
        for message, found in await client.messages_with()
    ]
    assert got == [(0, "a", None), (-1, "a", None), (-2, "a", None), (-3, "a", 1), (0, "a", None), (-1, "a", None), (-2, "", 1)]
    assert broker.node.gateway.counters.deliveries_too_large == 2


# --- overlapping subscriptions, identifiers -----------------------------------------------------------------------------------


async def test_a_message_comes_with_the_identifier_of_its_subscription(broker: Broker) -> None:
    """[MQTT-3.3.4-3]."""
    client, publisher = await broker.connect_5("client"), await broker.connect("publisher")
    await client.subscribe_with(("a", 0), ("b/+", 1), identifier=7)
    await client.subscribe_with(("c", 0), identifier=268_435_455)
    await client.subscribe_with(("d", 0))
    for topic in ("a", "b/1", "c", "d"):
        await publisher.publish(topic, b"x")
    got = [await client.message_with() for _ in range(4)]
    assert sorted((message.topic, found.get(Property.SUBSCRIPTION_IDENTIFIER)) for message, found in got) == [
        ("a", [7]),
        ("b/1", [7]),
        ("c", [268_435_455]),
        ("d", None),
    ]


async def test_one_message_comes_for_all_subscriptions_that_match(broker: Broker) -> None:
    """[MQTT-3.3.4-2], [MQTT-3.3.4-4]: at the highest QoS, with all identifiers. MQTT 3.1.1 gets one for each."""
    client, old, publisher = await broker.connect_5("client"), await broker.connect("old"), await broker.connect("publisher")
    for identifier, (topic_filter, qos) in enumerate([("a/#", 0), ("a/+", 2), ("a/b", 1), ("other", 2)], 1):
        await client.subscribe_with((topic_filter, qos), identifier=identifier)
        await old.subscribe((topic_filter, qos))
    for n in range(3):
        await publisher.publish("a/b", b"%d" % n, 2)
    await publisher.publish("a", b"3", 2)
    got = [await client.message_with() for _ in range(4)]
    assert got == [
        *((Message("a/b", b"%d" % n, 2), {Property.SUBSCRIPTION_IDENTIFIER: [1, 2, 3]}) for n in range(3)),
        (Message("a", b"3", 0), {Property.SUBSCRIPTION_IDENTIFIER: [1]}),
    ]
    assert await client.drained() == []
    assert len(await old.messages()) == 3 * 3 + 1


async def test_subscriptions_that_no_longer_overlap_go_on_by_themselves(broker: Broker) -> None:
    client, publisher = await broker.connect_5("client"), await broker.connect("publisher")
    await client.subscribe_with(("a/+", 1), identifier=1)
    await client.subscribe_with(("a/b", 1), identifier=2)
    await client.send(b"\xa2\x08\0\2\0\0\3a/+")
    await client.drained()
    await publisher.publish("a/b", b"x", 1)
    assert await client.message_with() == (Message("a/b", b"x", 1), {Property.SUBSCRIPTION_IDENTIFIER: [2]})
    assert not any(one.overlaps for one in broker.connection("client").subscriptions.by_filter.values())


async def test_subscriptions_that_still_overlap_send_one_together(broker: Broker) -> None:
    client = await broker.connect_5("client")
    for identifier, name in enumerate(("a/b", "+/b", "a/#"), 1):
        await client.subscribe_with((name, 1), identifier=identifier)
    await client.unsubscribe("a/#")
    await client.publish("a/b", b"x", 1)
    assert await client.messages_with() == [(Message("a/b", b"x", 1), {Property.SUBSCRIPTION_IDENTIFIER: [1, 2]})]


async def test_subscribing_again_replaces_the_identifier(broker: Broker) -> None:
    """[MQTT-3.8.4-3]."""
    client = await broker.connect_5("client")
    await client.subscribe_with(("a", 0), identifier=1)
    await client.subscribe_with(("a", 1), identifier=2)
    await client.publish("a", b"x", 1)
    assert await client.message_with() == (Message("a", b"x", 1), {Property.SUBSCRIPTION_IDENTIFIER: [2]})


async def test_subscribers_on_the_same_terms_share_one_encoding(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.gateway.delivery import encoding, fanout

    calls: list[object] = []

    def counted(*arguments: object, **options: object) -> object:
        calls.append(arguments)
        return encoding.encode_batch(*arguments, **options)  # type: ignore[arg-type]

    clients = []
    for n in range(30):
        client = await (broker.connect_5(f"{n}") if n % 3 else broker.connect(f"{n}"))
        await client.subscribe(("a", 1))
        clients.append(client)
    monkeypatch.setattr(fanout, "encode_batch", counted)
    publisher = await broker.connect("publisher")
    await publisher.publish("a", b"x", 1)
    assert [await client.message() for client in clients] == [Message("a", b"x", 1)] * 30
    assert len(calls) == 2


# --- subscription options ---------------------------------------------------------------------------------------------------


async def test_no_local_keeps_a_clients_own_messages_from_it(broker: Broker) -> None:
    """[MQTT-3.8.3-3]."""
    client, other = await broker.connect_5("client"), await broker.connect_5("other")
    assert await client.subscribe_with(("a", 1 | NO_LOCAL), ("b", 1)) == [1, 1]
    await other.subscribe(("a", 1))
    await client.publish("a", b"own", 1)
    await client.publish_with("a", b"own, with properties", ALL, 1)
    await client.publish("b", b"own, and wanted", 1)
    await other.publish("a", b"other's", 1)
    assert [message.body for message in await client.messages()] == [b"own, and wanted", b"other's"]
    assert [(await other.message()).body for _ in range(3)] == [b"own", b"own, with properties", b"other's"]


async def test_no_local_of_one_overlapping_subscription_leaves_the_others(broker: Broker) -> None:
    client = await broker.connect_5("client")
    await client.subscribe_with(("a/#", 1 | NO_LOCAL), identifier=1)
    await client.subscribe_with(("a/+", 0), identifier=2)
    await client.publish("a/b", b"x", 1)
    await client.publish("a", b"y", 1)
    assert await client.messages_with() == [(Message("a/b", b"x", 0), {Property.SUBSCRIPTION_IDENTIFIER: [2]})]


async def test_retain_as_published_keeps_the_flag(broker: Broker) -> None:
    """[MQTT-3.3.1-12], [MQTT-3.3.1-13]."""
    keeps, clears, old = await broker.connect_5("keeps"), await broker.connect_5("clears"), await broker.connect("old")
    await keeps.subscribe_with(("a", 1 | AS_PUBLISHED))
    await clears.subscribe_with(("a", 1))
    await old.subscribe(("a", 1))
    publisher = await broker.connect("publisher")
    await publisher.publish("a", b"1", 1, retain=True)
    await publisher.publish("a", b"2", 1)
    assert await keeps.messages() == [Message("a", b"1", 1, retain=True), Message("a", b"2", 1)]
    for client in (clears, old):
        assert await client.messages() == [Message("a", b"1", 1), Message("a", b"2", 1)]


async def test_retain_handling_says_when_retained_messages_come(broker: Broker) -> None:
    """[MQTT-3.3.1-9], [MQTT-3.3.1-10], [MQTT-3.3.1-11]."""
    client, publisher = await broker.connect_5("client"), await broker.connect("publisher")
    await publisher.publish("a", b"x", 1, retain=True)
    kept = [Message("a", b"x", 0, retain=True)]
    for options, expected in [(NEVER, []), (NOT_IF_THERE, []), (0, kept), (0, kept), (NOT_IF_THERE, [])]:
        await client.subscribe_with(("a", options))
        assert await client.messages() == expected
    again = await broker.connect_5("again")
    await again.subscribe_with(("a", NOT_IF_THERE))
    assert await again.messages() == kept


INVALID_FILTERS = ("a/b#", "a/#/b", "#a", "a+/b", "", "$share/g/a#", "$share/g/", "$share//a", "$share/g")


async def test_an_invalid_filter_is_answered_and_the_connection_stays_open(broker: Broker) -> None:
    """[MQTT-4.7.1-1], [MQTT-4.7.1-2], [MQTT-4.7.3-1], 3.9.3, 3.11.3."""
    five, four = await broker.connect_5("five"), await broker.connect("four")
    invalid = [ReasonCode.TOPIC_FILTER_INVALID] * len(INVALID_FILTERS)
    assert await five.subscribe(("a", 1), *((each, 1) for each in INVALID_FILTERS), ("b", 2)) == [1, *invalid, 2]
    assert await five.unsubscribed("a", *INVALID_FILTERS, "c") == [0, *invalid, ReasonCode.NO_SUBSCRIPTION_EXISTED]
    assert await four.subscribe(*((each, 1) for each in INVALID_FILTERS), ("b", 1)) == [0x80] * len(invalid) + [1]
    await four.unsubscribe(*INVALID_FILTERS)
    await four.publish("b", b"x", 1)
    assert (await five.message()).body == b"x"


async def test_filters_that_are_refused_are_told_why_each_on_its_own(start_broker: StartBroker) -> None:
    """[MQTT-3.8.4-6], [MQTT-3.9.3-1]."""
    broker = await start_broker(topic_levels_max=4, subscriptions_max=3)
    client = await broker.connect_5("client")
    codes = await client.subscribe(("a", 1), ("1/2/3/4/5", 0), ("$share/group", 1))
    assert codes == [1, ReasonCode.TOPIC_FILTER_INVALID, ReasonCode.TOPIC_FILTER_INVALID]
    assert await client.subscribe(("b", 0), ("c", 0), ("d", 0)) == [0, 0, ReasonCode.QUOTA_EXCEEDED]


# --- receive maximum, of the client -------------------------------------------------------------------------------------------


async def test_no_more_deliveries_are_under_way_than_the_client_takes(broker: Broker) -> None:
    """[MQTT-3.3.4-7], [MQTT-3.3.4-8], [MQTT-4.9.0-2]: QoS 0 goes on."""
    client = await broker.connect_5("client", about={Property.RECEIVE_MAXIMUM: 3})
    publisher = await broker.connect("publisher")
    await client.subscribe(("a", 2), ("b", 0))
    for n in range(6):
        await publisher.publish("a", b"%d" % n, 1 + n % 2)
        await publisher.publish("b", b"%d" % n, 1)
    got = [message_of(found) for found in await client.drained()]
    assert [message.body for message in got if message.topic == "a"] == [b"0", b"1", b"2"]
    assert [message.body for message in got if message.topic == "b"] == [b"%d" % n for n in range(6)]
    await client.send(encode_acks(PUBACK, [1]))
    assert [message.body for message in await client.messages()] == [b"3"]


# --- wills ------------------------------------------------------------------------------------------------------------------


async def test_a_will_comes_with_its_properties(broker: Broker) -> None:
    """3.1.3.2."""
    watcher = await broker.connect_5("watcher")
    await watcher.subscribe(("will", 2))
    client = await broker.connect_5("pump", b"will", b"gone", flags=CLEAN | WILL | 0x10, will=ALL)
    client.reset()
    assert await watcher.message_with() == (Message("will", b"gone", 2), ALL)


async def test_a_stream_of_plain_and_other_publishes_keeps_its_order(broker: Broker) -> None:
    """[MQTT-4.6.0-5]."""
    client = await broker.connect_5("client")
    await client.subscribe(("a", 0))
    about = write_properties({Property.USER_PROPERTY: [("n", "1")]})
    await client.send(*(publish_5(0x30, b"a", 0, about if n % 3 else NONE, b"%d" % n) for n in range(100)))
    got = [await client.receive() for _ in range(100)]
    assert [int(item[4]) for item in got] == list(range(100))
    assert sum(item[0] == PUBLISH_WITH for item in got) == 66


async def test_messages_over_the_batch_are_read_from_the_cursor(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=8 * KIB)
    client, publisher = await broker.connect_5("client"), await broker.connect_5("publisher")
    await client.subscribe_with(("a", 1), identifier=3)
    for n in range(50):
        await publisher.publish_with("a", b"%04d" % n + b"x" * 4000, {Property.CONTENT_TYPE: "t"}, 1)
    for n in range(50):
        message, found = await client.message_with()
        assert int(message.body[:4]) == n
        assert found == {Property.CONTENT_TYPE: "t", Property.SUBSCRIPTION_IDENTIFIER: [3]}
