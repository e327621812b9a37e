"""Delayed messages over MQTT: `$delayed/{seconds}/{topic}`, and the user properties `delay-ms` and `deliver-at-ms`."""

from __future__ import annotations

import pytest

from penstock.gateway.protocol.delays import parse_delayed
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.fields import read_varint
from penstock.gateway.protocol.packets import PUBACK, PUBREC
from penstock.gateway.protocol.properties import Property, PropertyValues, read_properties, write_properties
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.store.errors import LimitExceeded, TopicInvalid
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.space.accounts import Resource
from penstock.timer.options import YEAR_MS
from tests.clock import ManualClock
from tests.gateway.brokers import StartBroker
from tests.gateway.wire import Broker, Client5, Message


@pytest.mark.parametrize(
    ("topic", "expected"),
    [
        (b"$delayed/5/a/b", (b"a/b", 6_000)),
        (b"$delayed/0/a", (b"a", 0)),
        (b"$delayed/60//", (b"/", 61_000)),
        (b"$delayed/007/a", (b"a", 8_000)),
        (b"$delayed/1.5/a", (b"a", 2_500)),
        (b"$delayed/0.25/a/b", (b"a/b", 1_250)),
        (b"$delayed/0.0001/a", (b"a", 1_001)),
        (b"$delayed/0.000/a", (b"a", 0)),
        (b"$delayed/60.000/a", (b"a", 61_000)),
        (b"$delayed/" + b"0" * 100 + b"1/a", (b"a", 2_000)),
    ],
)
def test_a_delayed_topic_names_its_delay_and_its_destination(topic: bytes, expected: tuple[bytes, int]) -> None:
    assert parse_delayed(topic, 1_000, 60_000) == expected


@pytest.mark.parametrize(
    ("topic", "error"),
    [
        (b"$delayed/", TopicInvalid),
        (b"$delayed/5", TopicInvalid),
        (b"$delayed/5/", TopicInvalid),
        (b"$delayed//a", TopicInvalid),
        (b"$delayed/-1/a", TopicInvalid),
        (b"$delayed/1./a", TopicInvalid),
        (b"$delayed/.5/a", TopicInvalid),
        (b"$delayed/1e3/a", TopicInvalid),
        (b"$delayed/+1/a", TopicInvalid),
        (b"$delayed/nan/a", TopicInvalid),
        (b"$delayed/inf/a", TopicInvalid),
        (b"$delayed/\xd9\xa1/a", TopicInvalid),
        (b"$delayed/61/a", LimitExceeded),
        (b"$delayed/60.0001/a", LimitExceeded),
        (b"$delayed/" + b"9" * 4000 + b"/a", LimitExceeded),
    ],
)
def test_an_invalid_delayed_topic_is_refused(topic: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        parse_delayed(topic, 1_000, 60_000)


def at_time(broker: Broker) -> ManualClock:
    clock = ManualClock(broker.node.store.now_ms())
    broker.node.store.clock = clock
    return clock


def fire(broker: Broker) -> None:
    while broker.node.delayed.fire_due():
        pass
    broker.node.store.commit()


@pytest.mark.parametrize("version", [4, 5])
async def test_a_delayed_message_is_delivered_when_it_is_due_and_not_before(broker: Broker, version: int) -> None:
    clock = at_time(broker)
    client = await (broker.connect_5("client") if version == 5 else broker.connect("client"))
    await client.subscribe(("plant/#", 1))
    await client.publish("$delayed/30/plant/1", b"later", 1)
    await client.publish("plant/1", b"now", 1)
    assert await client.message() == Message("plant/1", b"now", 1)
    clock.advance(29_990)
    fire(broker)
    assert await client.messages() == []
    clock.advance(11)
    fire(broker)
    assert await client.message() == Message("plant/1", b"later", 1)
    assert await client.drained() == []


async def test_a_delayed_message_is_retained_when_it_is_due(broker: Broker) -> None:
    clock = at_time(broker)
    client = await broker.connect("client")
    await client.publish("$delayed/30/plant/1", b"later", 1, retain=True)
    await client.subscribe(("plant/1", 0))
    assert await client.messages() == []
    clock.advance(30_001)
    fire(broker)
    assert await client.messages() == [Message("plant/1", b"later")]
    again = await broker.connect("again")
    await again.subscribe(("plant/+", 0))
    assert await again.messages() == [Message("plant/1", b"later", retain=True)]


async def test_the_expiry_of_a_delayed_message_counts_from_its_publication(broker: Broker) -> None:
    clock = at_time(broker)
    client = await broker.connect_5("client")
    await client.subscribe(("a", 1))
    await client.publish_with("$delayed/30/a", b"x", {Property.MESSAGE_EXPIRY_S: 40}, 1)
    clock.advance(30_000)
    fire(broker)
    assert await client.message_with() == (Message("a", b"x", 1), {Property.MESSAGE_EXPIRY_S: 10})


async def test_limits_of_delayed_messages_are_reported(start_broker: StartBroker) -> None:
    broker = await start_broker()
    broker.node.store.ledger.limit(Resource.DELAYED, 2, "raise timer.pending_max")
    client = await broker.connect_5("client")
    for _ in range(2):
        assert await client.publish_with("$delayed/30/a", b"x", qos=1) == 0
    assert await client.publish_with("$delayed/30/a", b"x", qos=1) == ReasonCode.QUOTA_EXCEEDED
    assert await client.publish_with("$delayed/30/a", b"x", qos=2) == ReasonCode.QUOTA_EXCEEDED
    assert await client.publish_with("$delayed/99999999999/a", b"x", qos=1) == ReasonCode.QUOTA_EXCEEDED
    old = await broker.connect("old")
    await old.send(encode_publish(b"$delayed/30/a", b"x", 1, packet_id=1))
    assert await old.ended() == []
    assert broker.closed(ReasonCode.QUOTA_EXCEEDED) == 1


# --- user properties --------------------------------------------------------------------------------------------------------


def wishing(**wishes: object) -> PropertyValues:
    """Return user properties: `delay_ms=5` stands for `delay-ms: 5`."""
    return {Property.USER_PROPERTY: [(name.replace("_", "-"), str(value)) for name, value in wishes.items()]}


async def ack_of(client: Client5, topic: str, about: PropertyValues, qos: int = 1) -> tuple[int, PropertyValues]:
    """Publish; return the reason code and the properties of the PUBACK or PUBREC."""
    await client.send(encode_publish(topic.encode(), b"x", qos, packet_id=1, properties=write_properties(about)))
    data = await client.reader.readexactly(2)
    while data[-1] & 0x80:
        data += await client.reader.readexactly(1)
    kind = PUBACK if qos == 1 else PUBREC
    assert data[0] >> 4 == kind
    body = await client.reader.readexactly(read_varint(data, 1, "length")[0])
    assert body[:2] == b"\0\1"
    return body[2] if len(body) > 2 else 0, read_properties(body, 3, kind)[0] if len(body) > 3 else {}


@pytest.mark.parametrize(("wish", "qos"), [("delay-ms", 1), ("deliver-at-ms", 2)])
async def test_user_properties_delay_a_message_and_the_ack_has_its_recall_handle(broker: Broker, wish: str, qos: int) -> None:
    clock = at_time(broker)
    client = await broker.connect_5("client")
    await client.subscribe(("a", 0))
    value = 1_500 if wish == "delay-ms" else clock.now_ms() + 1_500
    about: PropertyValues = {Property.USER_PROPERTY: [("unit", "C"), (wish, str(value))]}
    reason, told = await ack_of(client, "a", about, qos)
    ((name, handle),) = told[Property.USER_PROPERTY]
    named = broker.node._handles.read_recall(handle)
    assert (reason, name) == (0, "recall-handle")
    assert named is not None
    assert named[1] == broker.node.delayed.due_ms(named[0]) == clock.now_ms() + 1_500
    clock.advance(1_499)
    fire(broker)
    assert await client.messages() == []
    clock.advance(1)
    fire(broker)
    assert await client.message_with() == (Message("a", b"x"), about)  # [MQTT-3.3.2-17]


async def test_a_message_whose_record_was_damaged_meanwhile_reaches_nobody_and_the_others_do(broker: Broker) -> None:
    clock = at_time(broker)
    client = await broker.connect_5("client")
    await client.subscribe(("a", 1))
    for body in (b"1" * 100, b"2" * 100):
        await client.publish_with("a", body, wishing(delay_ms=1_500), 1)
    (segment,) = (broker.node.store.data_dir / LOG_DIRECTORY).iterdir()
    with segment.open("r+b") as log:
        log.seek(segment.read_bytes().index(b"1" * 100))
        log.write(b"0")
    clock.advance(1_500)
    fire(broker)
    assert [message.body for message in await client.messages()] == [b"2" * 100]


async def test_a_time_in_the_past_means_at_once(broker: Broker) -> None:
    client, watcher = await broker.connect_5("client"), await broker.connect_5("watcher")
    await watcher.subscribe(("a", 0))
    for about in (wishing(deliver_at_ms=5), wishing(delay_ms=0), wishing(deliver_at_ms=0)):
        assert await ack_of(client, "a", about) == (0, {})
    assert await watcher.messages() == [Message("a", b"x")] * 3


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_delivery_time_that_is_none_is_refused_with_the_reason(broker: Broker, qos: int) -> None:
    twice: PropertyValues = {Property.USER_PROPERTY: [("delay-ms", "1"), ("delay-ms", "2")]}
    cases: list[tuple[str, PropertyValues, str]] = [
        ("a", wishing(delay_ms=-1), "delay-ms is '-1'"),
        ("a", wishing(deliver_at_ms=-1), "deliver-at-ms is '-1'"),
        ("a", wishing(delay_ms="nan"), "delay-ms is 'nan'"),
        ("a", wishing(deliver_at_ms="inf"), "deliver-at-ms is 'inf'"),
        ("a", wishing(delay_ms="1.5"), "delay-ms is '1.5'"),
        ("a", wishing(delay_ms="\u0661"), "with the digits 0 to 9 only"),
        ("a", wishing(delay_ms=""), "delay-ms is ''"),
        ("a", wishing(delay_ms=1, deliver_at_ms=2), "use one of them, once"),
        ("a", twice, "use one of them, once"),
        ("$delayed/5/a", wishing(delay_ms=1), "begins with $delayed/"),
        ("a", {**wishing(delay_ms=5_000), Property.MESSAGE_EXPIRY_S: 5}, "before it is due"),
        ("$delayed/5/a", {Property.MESSAGE_EXPIRY_S: 5}, "before it is due"),
    ]
    client = await broker.connect_5("client")
    for topic, about, says in cases:
        reason, told = await ack_of(client, topic, about, qos)
        assert reason == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
        assert says in told[Property.REASON_STRING]
    assert (len(broker.stored()), len(broker.node.delayed)) == (0, 0)
    assert broker.node.gateway.counters.publishes_refused == len(cases)


async def test_a_delivery_time_that_is_too_far_away_is_refused(broker: Broker) -> None:
    client = await broker.connect_5("client")
    for about in (wishing(delay_ms=10 * YEAR_MS + 1), wishing(delay_ms="9" * 4_000), wishing(deliver_at_ms=10**15)):
        reason, told = await ack_of(client, "a", about)
        assert reason == ReasonCode.QUOTA_EXCEEDED
        assert "the longest" in told[Property.REASON_STRING]
    assert await client.publish_with("a", b"x", wishing(delay_ms=10 * YEAR_MS), 1) == 0
    assert len(broker.node.delayed) == 1


async def test_a_client_that_wants_no_reasons_gets_no_handle(broker: Broker) -> None:
    """[MQTT-3.1.2-29]."""
    client = await broker.connect_5("client", about={Property.REQUEST_PROBLEM_INFORMATION: 0})
    assert await ack_of(client, "a", wishing(delay_ms=5)) == (0, {})


async def test_a_handle_that_exceeds_the_clients_packet_size_is_left_out(broker: Broker) -> None:
    """[MQTT-3.4.2-3]."""
    client = await broker.connect_5("client", about={Property.MAXIMUM_PACKET_SIZE: 60})
    assert await ack_of(client, "a", wishing(delay_ms=5)) == (0, {})


async def test_a_message_that_is_repeated_at_qos_2_gets_its_handle_again(broker: Broker) -> None:
    first = await broker.connect_5("client", about={Property.SESSION_EXPIRY_S: 60})
    _, told = await ack_of(first, "a", wishing(delay_ms=60_000), 2)
    again = await broker.connect_5("client", flags=0)
    assert again.session_present
    assert await ack_of(again, "a", wishing(delay_ms=60_000), 2) == (0, told)
    assert len(broker.node.delayed) == 1


async def test_messages_with_and_without_a_delay_are_acknowledged_in_order(broker: Broker) -> None:
    """[MQTT-4.6.0-2]."""
    client = await broker.connect_5("client")
    plain, late = write_properties({}), write_properties(wishing(delay_ms=60_000))
    abouts = [plain, late, plain, late]
    await client.send(*(encode_publish(b"a", b"x", 1, packet_id=n, properties=about) for n, about in enumerate(abouts, 1)))
    assert [(await client.receive())[:2] for _ in abouts] == [(PUBACK, 1), (PUBACK, 2), (PUBACK, 3), (PUBACK, 4)]
