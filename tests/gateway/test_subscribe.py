"""SUBSCRIBE and UNSUBSCRIBE, retained messages and wills, over a real connection."""

from __future__ import annotations

import pytest

from penstock.gateway.delivery import retained_messages
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBLISH, SUBACK, UNSUBACK
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases import subscribe, unsubscribe
from tests.gateway.wire import BYE, CLEAN, PING, WILL, WILL_RETAIN, Broker, Client, Message, message_of
from tests.waiting import until

# --- which messages -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic_filter", "matched", "others"),
    [
        ("a/b", ["a/b"], ["a", "a/b/c", "a/c", "A/b", "/a/b", "a/b/"]),
        ("a/+", ["a/b", "a/"], ["a", "a/b/c", "b/a"]),
        ("+/b", ["a/b", "/b"], ["b", "a/b/c", "a/c"]),
        ("+", ["a", "b"], ["a/b", "/a"]),
        ("a/#", ["a", "a/b", "a/b/c", "a/"], ["b", "ab", "b/a"]),
        ("#", ["a", "a/b", "/", "/a"], []),
        ("/#", ["/", "/a", "/a/b"], ["a", "a/"]),
        ("+/+/c", ["a/b/c", "//c"], ["a/c", "a/b/c/d"]),
        ("a/+/#", ["a/b", "a/b/c/d", "a/"], ["a", "b/a"]),
        ("\u00e9t\u00e9/+", ["\u00e9t\u00e9/1"], ["\u00e9/1"]),
    ],
)
async def test_a_filter_gets_the_topics_that_it_matches(
    broker: Broker, topic_filter: str, matched: list[str], others: list[str]
) -> None:
    before, after, publisher = [await broker.connect(name) for name in ("before", "after", "publisher")]
    assert await before.subscribe((topic_filter, 0)) == [0]
    for topic in (*matched, *others):
        await publisher.publish(topic, b"1", 1)
    await after.subscribe((topic_filter, 0))  # Now the topics are known and have routes.
    for topic in (*others, *matched):
        await publisher.publish(topic, b"2", 1)
    assert await before.messages() == [Message(topic, body) for body in (b"1", b"2") for topic in matched]
    assert await after.messages() == [Message(topic, b"2") for topic in matched]


async def test_a_leading_wildcard_never_matches_topics_of_the_node(broker: Broker) -> None:
    client = await broker.connect("pump")
    assert await client.subscribe(("#", 0), ("+/uptime", 0), ("+/broker/uptime", 0)) == [0, 0, 0]
    assert await client.messages() == []
    bad = await broker.connect("bad")
    await bad.send(encode_publish(b"$SYS/uptime", b"0"))
    await bad.ended()
    assert await client.messages() == []


async def test_each_of_overlapping_subscriptions_gets_its_copy(broker: Broker) -> None:
    # [MQTT-3.3.5-1] allows a copy for each subscription. Each copy has the QoS of its subscription.
    client, publisher = await broker.connect("pump"), await broker.connect("publisher")
    assert await client.subscribe(("a/#", 2), ("a/+", 0), ("a/b", 1)) == [2, 0, 1]
    await publisher.publish("a/b", b"x", 2)
    copies = await client.messages()
    assert sorted(copies) == [Message("a/b", b"x", qos) for qos in (0, 1, 2)]


async def test_a_message_is_delivered_at_the_lower_of_its_qos_and_the_granted_one(broker: Broker) -> None:
    client, publisher = await broker.connect("pump"), await broker.connect("publisher")
    for granted in (0, 1, 2):
        assert await client.subscribe((f"a/{granted}", granted)) == [granted]
        for qos in (0, 1, 2):
            await publisher.publish(f"a/{granted}", b"x", qos)
        assert [(await client.message()).qos for _ in range(3)] == [min(qos, granted) for qos in (0, 1, 2)], granted


async def test_messages_of_a_topic_come_in_order(broker: Broker) -> None:
    client, one, two = [await broker.connect(name) for name in ("pump", "one", "two")]
    await client.subscribe(("a/+", 2))
    count = 500
    for n in range(0, count, 100):
        for publisher, topic in ((one, b"a/1"), (two, b"a/2")):
            await publisher.send(
                *(encode_publish(topic, b"%d" % m, m % 3, packet_id=m % 3 and m + 1) for m in range(n, n + 100))
            )
    got = [message_of(await client.expect(PUBLISH)) for _ in range(2 * count)]
    for name in ("a/1", "a/2"):
        assert [int(message.body) for message in got if message.topic == name] == list(range(count))


async def test_a_publish_before_the_subscribe_in_one_read_is_not_delivered(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.send(encode_publish(b"a", b"before"), subscribe(1, (b"a", 0)), encode_publish(b"a", b"behind"))
    assert [item[0] for item in (await client.receive(), await client.receive())] == [SUBACK, PUBLISH]
    assert await client.drained() == []
    assert [message.body for message in broker.stored()] == [b"before", b"behind"]


# --- what is refused ----------------------------------------------------------------------------------------------------


async def test_each_refused_filter_has_a_reason_code_of_its_own(start_broker: StartBroker) -> None:
    broker = await start_broker(topic_levels_max=4, topic_bytes_max=20)
    client = await broker.connect("pump")
    codes = await client.subscribe(("a", 1), ("1/2/3/4/5", 0), ("b/#", 2), ("x" * 21, 1), ("$share/group", 1), ("c", 0))
    assert codes == [1, SUBACK_FAILURE, 2, SUBACK_FAILURE, SUBACK_FAILURE, 0]
    assert broker.node.gateway.counters.subscriptions_refused == 3
    await client.publish("b/c", b"x")
    assert await client.message() == Message("b/c", b"x")


@pytest.mark.parametrize("flags", [CLEAN, 0])
async def test_queues_of_the_node_that_no_topic_reaches_are_refused(broker: Broker, flags: int) -> None:
    client, newer = await broker.connect("pump", flags=flags), await broker.connect_5("five", flags=flags)
    for name in ("$dlq/billing", "$dlq/#", "$retry/1"):
        assert await client.subscribe((name, 1), ("a", 1)) == [SUBACK_FAILURE, 1], name
        assert await newer.subscribe((name, 1), ("a", 1)) == [ReasonCode.TOPIC_FILTER_INVALID, 1], name


async def test_a_subscription_beyond_the_limit_is_refused_until_another_ends(start_broker: StartBroker) -> None:
    broker = await start_broker(subscriptions_max=2)
    client = await broker.connect("pump")
    assert await client.subscribe(("a", 0), ("b", 0)) == [0, 0]
    assert await client.subscribe(("c", 0), ("a", 1)) == [SUBACK_FAILURE, 1]
    await client.unsubscribe("a")
    assert await client.subscribe(("c", 2)) == [2]


async def test_of_the_filters_of_a_subscribe_a_session_gets_as_many_as_it_may_have(start_broker: StartBroker) -> None:
    broker = await start_broker(subscriptions_max=2)
    client = await broker.connect("pump")
    assert await client.subscribe(*[("a", 1)] * 1000) == [1, 1] + [SUBACK_FAILURE] * 998
    assert len(broker.connection("pump").subscriptions) == 1


async def test_a_filter_over_the_limit_of_queues_is_refused(start_broker: StartBroker) -> None:
    broker = await start_broker(queues_max=2)
    client, other = await broker.connect("pump"), await broker.connect("other")
    assert await client.subscribe(("a", 0), ("b", 0), ("c", 0)) == [0, 0, SUBACK_FAILURE]
    assert await other.subscribe(("a", 0), ("c", 0)) == [0, SUBACK_FAILURE]  # It shares the queue of the filter a.


# --- subscribing again, unsubscribing -----------------------------------------------------------------------------------


async def test_subscribing_again_changes_the_qos_and_interrupts_nothing(broker: Broker) -> None:
    client, publisher = await broker.connect("pump"), await broker.connect("publisher")
    await client.subscribe(("a", 0))
    await publisher.publish("a", b"1", 2)
    await client.subscribe(("a", 2))
    await publisher.publish("a", b"2", 2)
    await client.send(subscribe(1, (b"a", 0), (b"a", 1)))
    await publisher.publish("a", b"3", 2)
    got = [message_of(found) for found in await client.drained() if found[0] == PUBLISH]
    assert got == [Message("a", b"1", 0), Message("a", b"2", 2), Message("a", b"3", 1)]
    assert len(broker.connection("pump").subscriptions) == 1


async def test_subscribing_again_keeps_its_queue_when_another_serves_the_filter_by_now(broker: Broker) -> None:
    client, publisher = await broker.connect("pump"), await broker.connect("publisher")
    await client.subscribe(("plant/#", 0))  # The first level has no queue yet.
    for body in (b"1", b"2", b"3"):
        await publisher.publish("plant/x", body)
        assert (await client.message()).body == body
    await client.subscribe(("plant/#", 0))
    await publisher.publish("plant/x", b"4")
    assert (await client.message()).body == b"4"
    late = await broker.connect("late")
    await late.subscribe(("plant/#", 0))
    await publisher.publish("plant/x", b"5")
    assert (await client.message()).body == (await late.message()).body == b"5"
    for end in (client, publisher, late):
        end.reset()
    await until(lambda: not broker.node.gateway.connections)
    assert set(broker.held_resources().values()) == {0}


async def test_after_an_unsubscribe_nothing_is_sent(broker: Broker) -> None:
    client, publisher = await broker.connect("pump"), await broker.connect("publisher")
    await client.subscribe(("a/#", 1), ("a/b", 0), ("c", 0))
    await client.unsubscribe("a/#", "c", "never/subscribed")
    await publisher.publish("a/b", b"x", 1)
    await publisher.publish("c", b"x", 1)
    assert await client.messages() == [Message("a/b", b"x")]
    await client.unsubscribe("a/b")
    assert broker.held_resources()["queues"] == broker.held_resources()["fanouts"] == 0


async def test_an_unsubscribe_from_an_unknown_filter_is_answered(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.send(unsubscribe(9, b"a", b"b/+"))
    assert await client.receive() == (UNSUBACK, 9)


async def test_an_unsubscribe_from_one_filter_leaves_the_others(broker: Broker) -> None:
    one, two, publisher = [await broker.connect(name) for name in ("one", "two", "publisher")]
    for client in (one, two):
        await client.subscribe(("a/+", 0))
    await one.unsubscribe("a/+")
    await publisher.publish("a/b", b"x", 1)
    assert await one.messages() == []
    assert await two.messages() == [Message("a/b", b"x")]


# --- retained messages --------------------------------------------------------------------------------------------------


async def retain(broker: Broker, *messages: tuple[str, bytes]) -> Client:
    """Publish retained messages and return the client that published them."""
    publisher = await broker.connect("publisher")
    for topic, body in messages:
        await publisher.publish(topic, body, 1, retain=True)
    return publisher


async def test_a_new_subscription_gets_the_last_retained_message_with_the_flag(broker: Broker) -> None:
    await retain(broker, ("a", b"1"), ("a", b"2"), ("b", b"3"))
    client = await broker.connect("pump")
    await client.subscribe(("a", 2))
    assert await client.messages() == [Message("a", b"2", 1, retain=True)]


async def test_an_existing_subscription_gets_the_message_without_the_flag(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.subscribe(("a", 0))
    await retain(broker, ("a", b"1"))
    assert await client.messages() == [Message("a", b"1", 0, retain=False)]  # [MQTT-3.3.1-9]


async def test_an_empty_message_clears_the_topic_and_is_delivered_like_any_other(broker: Broker) -> None:
    client = await broker.connect("pump")
    await client.subscribe(("a", 0))
    await retain(broker, ("a", b"1"), ("a", b""), ("never/there", b""))
    assert await client.messages() == [Message("a", b"1"), Message("a", b"")]
    late = await broker.connect("late")
    await late.subscribe(("#", 0))
    assert await late.messages() == []


async def test_a_message_without_the_flag_leaves_the_retained_one(broker: Broker) -> None:
    publisher = await retain(broker, ("a", b"kept"))
    await publisher.publish("a", b"passes", 1)
    await publisher.publish("a", b"", 1)
    await publisher.subscribe(("a", 0))
    assert await publisher.messages() == [Message("a", b"kept", 0, retain=True)]


async def test_a_wildcard_gets_all_retained_messages_that_it_matches(broker: Broker) -> None:
    await retain(broker, *((topic, topic.encode()) for topic in ("b/b", "a/c", "a", "ab", "a/b/c", "a/b", "a/")))
    cases: dict[str, list[str]] = {
        "a/b": ["a/b"],
        "a/+": ["a/", "a/b", "a/c"],
        "a/#": ["a", "a/", "a/b", "a/b/c", "a/c"],
        "+": ["a", "ab"],
        "+/b": ["a/b", "b/b"],
        "#": ["a", "a/", "a/b", "a/b/c", "a/c", "ab", "b/b"],
        "a/+/c": ["a/b/c"],
        "c/#": [],
    }
    for topic_filter, matched in cases.items():
        client = await broker.connect("pump")
        await client.subscribe((topic_filter, 1))
        got = await client.messages()
        assert sorted(got) == [Message(topic, topic.encode(), 1, retain=True) for topic in matched], topic_filter


async def test_subscribing_again_sends_the_retained_messages_again(broker: Broker) -> None:
    client = await retain(broker, ("a", b"1"))
    for _ in range(3):
        await client.subscribe(("a", 0))
        assert await client.messages() == [Message("a", b"1", 0, retain=True)]  # [MQTT-3.8.4-3]


async def test_retained_messages_survive_a_restart(broker: Broker) -> None:
    await retain(broker, ("a", b"1"), ("b", b"2"), ("c", b"3"), ("a", b"4"), ("b", b""))
    for _ in range(2):
        await broker.restart()
        client = await broker.connect("pump")
        await client.subscribe(("#", 1))
        assert await client.messages() == [Message("a", b"4", 1, retain=True), Message("c", b"3", 1, retain=True)]


async def test_a_retained_message_of_the_same_read_is_sent_once(broker: Broker) -> None:
    client = await broker.connect("pump")
    packets = [encode_publish(b"a", body, 0, retain=True) for body in (b"1", b"2")]
    await client.send(packets[0], subscribe(1, (b"a", 0)), packets[1])
    assert await client.messages() == [Message("a", b"1", 0, retain=True), Message("a", b"2", 0, retain=False)]


async def test_retained_messages_wait_for_the_window_and_new_messages_follow_them_once(
    start_broker: StartBroker,
) -> None:
    broker = await start_broker(inflight_max=2)
    publisher = await retain(broker, *((f"a/{n}", b"old") for n in range(6)))
    client = await broker.connect("pump")
    await client.subscribe(("a/#", 1))
    await publisher.publish("a/5", b"new", 1, retain=True)  # The first two wait for their acknowledgements.
    await publisher.publish("a/9", b"new", 1, retain=True)
    assert [await client.message() for _ in range(8)] == [
        *(Message(f"a/{n}", b"old", 1, retain=True) for n in range(6)),
        Message("a/5", b"new", 1),
        Message("a/9", b"new", 1),
    ]
    assert await client.drained() == []


async def test_a_retained_message_that_is_replaced_before_it_is_sent_comes_once(start_broker: StartBroker) -> None:
    broker = await start_broker(inflight_max=1)
    publisher = await retain(broker, ("a", b"old"))
    client = await broker.connect("pump")
    await client.subscribe(("first", 1))
    await publisher.publish("first", b"", 1)
    await client.subscribe(("a", 1))  # Nothing can be sent before the acknowledgement.
    await publisher.publish("a", b"new", 1, retain=True)
    assert [await client.message() for _ in range(2)] == [Message("first", b"", 1), Message("a", b"new", 1)]
    assert await client.drained() == []


async def test_a_long_search_for_retained_messages_pauses_and_finds_them_all(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retained_messages, "SCAN_ROWS", 7)
    publisher = await broker.connect("publisher")
    topics = [f"site/{n:04}/{'wanted' if n % 100 == 0 else 'other'}" for n in range(1000)]
    await publisher.send(*(encode_publish(topic.encode(), b"x", retain=True) for topic in topics))
    await publisher.drained()
    client = await broker.connect("pump")
    await client.subscribe(("site/+/wanted", 0), ("+/+/wanted", 1), ("+/+/missing", 0))
    got = [(await client.message()).topic for _ in range(20)]
    assert sorted(got) == sorted([f"site/{n:04}/wanted" for n in range(0, 1000, 100)] * 2)
    await until(lambda: not broker.connection("pump").outbox.lagging)
    assert await client.drained() == []


async def test_hundreds_of_retained_messages_are_sent_in_the_order_of_their_topics(broker: Broker) -> None:
    publisher = await broker.connect("publisher")
    await publisher.send(*(encode_publish(b"a/%05d" % n, b"%d" % n, retain=True) for n in range(500)))
    await publisher.drained()
    client = await broker.connect("pump")
    await client.subscribe(("a/#", 1))
    assert [int((await client.message()).body) for _ in range(500)] == list(range(500))


# --- wills --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_will_is_published_when_the_connection_breaks(broker: Broker, qos: int) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will/#", 2))
    client = await broker.connect("pump", b"will/pump", b"gone", flags=CLEAN | WILL | qos << 3)
    client.reset()
    assert await watcher.message() == Message("will/pump", b"gone", qos)


async def test_a_will_is_published_when_the_server_closes_for_an_error(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL)
    await client.send(b"\xf0\0")
    assert await watcher.message() == Message("will", b"gone")
    await client.ended()
    assert await watcher.messages() == []


async def test_a_will_is_not_published_after_a_disconnect(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("will", 0))
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL)
    await client.send(PING, BYE)
    await client.ended()
    assert await watcher.messages() == []  # [MQTT-3.14.4-3]


async def test_a_will_may_be_retained_and_an_empty_one_clears(broker: Broker) -> None:
    flags = CLEAN | WILL | WILL_RETAIN
    for body, kept in ((b"gone", [Message("will", b"gone", 0, retain=True)]), (b"", [])):
        client = await broker.connect("pump", b"will", body, flags=flags)
        client.reset()
        await until(lambda: "pump" not in broker.node.gateway.clients)
        watcher = await broker.connect("watcher")
        await watcher.subscribe(("will", 0))
        assert await watcher.messages() == kept


async def test_a_client_does_not_get_its_own_will(broker: Broker) -> None:
    client = await broker.connect("pump", b"will", b"gone", flags=CLEAN | WILL)
    await client.subscribe(("will", 0))
    await client.send(b"\xf0\0")
    assert await client.ended() == []


async def test_a_will_that_the_store_refuses_ends_the_connection_like_any_other(start_broker: StartBroker) -> None:
    broker = await start_broker(retained_max=1)
    client = await broker.connect("pump", b"gone", b"x", flags=CLEAN | WILL | WILL_RETAIN)
    await client.send(encode_publish(b"here", b"x", 0, retain=True), b"\xf0\0")
    assert await client.ended() == []
    assert broker.closed(ReasonCode.MALFORMED_PACKET) == 1
    assert broker.stored() == [Message("here", b"x", retain=True)]
    assert not broker.node.gateway.clients
