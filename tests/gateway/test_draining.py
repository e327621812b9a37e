"""Overlapping subscriptions of which some end while they lag: the messages that the others skipped are still sent, once."""

from __future__ import annotations

import io
import random
from collections import Counter

import orjson
import pytest

from penstock.cli.inspect_index import inspect_sessions
from penstock.gateway.protocol.encode import encode_acks, encode_publish
from penstock.gateway.protocol.packets import CONNACK, PUBACK, PUBLISH, PUBLISH_WITH, UNSUBACK
from penstock.gateway.protocol.properties import Property, parse_properties
from penstock.gateway.sessions.stored_sessions import OWNER
from penstock.store import topics
from penstock.store.options import KIB
from tests.depth import DEPTH
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases_5 import subscribe_5, unsubscribe_5
from tests.gateway.wire import Broker, Client5, Message, message_of
from tests.waiting import until

LASTS = {Property.SESSION_EXPIRY_S: 600}
FEW = {Property.RECEIVE_MAXIMUM: 3}


async def publish(broker: Broker, *messages: tuple[str, bytes]) -> None:
    """Publish messages at QoS 1."""
    publisher = await broker.connect("publisher")
    await publisher.send(*(encode_publish(topic.encode(), body, 1, packet_id=n) for n, (topic, body) in enumerate(messages, 1)))
    for _ in messages:
        await publisher.expect(PUBACK)
    publisher.reset()


async def take_all(broker: Broker, client: Client5) -> list[tuple[int, list[int]]]:
    """Return all messages that the client still gets, as `take` returns them."""
    connection = broker.connection("client")
    got = []
    while connection.outbox.lagging or connection.session.inflight.slots:
        got += await take(client, 1)
    return got + await take(client, 1)


async def take(client: Client5, times: int) -> list[tuple[int, list[int]]]:
    """Read what has arrived and acknowledge it, `times` times; return the numbers and identifiers of the messages."""
    got = []
    for _ in range(times):
        packets = [packet for packet in await client.drained() if packet[0] in (PUBLISH, PUBLISH_WITH)]
        for packet in packets:
            found = parse_properties(packet[5] if len(packet) > 5 else b"", PUBLISH)
            got.append((number_of(message_of(packet)), found.get(Property.SUBSCRIPTION_IDENTIFIER, [])))
        await client.send(encode_acks(PUBACK, [packet[3] for packet in packets if packet[1] & 6]))
    return got


def number_of(message: Message) -> int:
    return int(message.body[:8])


def numbered(*numbers: int, topic: str = "a/b") -> list[tuple[str, bytes]]:
    return [(topic, b"%08d" % number + bytes(4 * KIB)) for number in numbers]


async def lagging(
    start_broker: StartBroker, *filters: str, about: dict[Property, int], **options: int
) -> tuple[Broker, Client5]:
    """Connect a client that reads so little that the oldest of its subscriptions is behind the others.

    The messages 0 to 599 are published to a/b, and 600 to 619 to a/c/d.
    """
    broker = await start_broker(send_buffer_bytes=16 * KIB, **options)
    client = await broker.connect_5("client", about=about)
    for identifier, name in enumerate(filters, 1):
        await client.subscribe_with((name, 1), identifier=identifier)
    broker.limit_send_buffer("client")
    await publish(broker, *numbered(*range(600)), *numbered(*range(600, 620), topic="a/c/d"))
    oldest, *others = broker.connection("client").subscriptions.by_filter.values()
    read = []
    while not all(one.live for one in others):
        read.append(await client.receive())
    client.unread(read)
    assert 10 < oldest.cursor < 400, "more messages must remain than the buffers on the way can hold"
    return broker, client


async def end(broker: Broker, client: Client5, *filters: str) -> None:
    """Unsubscribe a client that reads nothing."""
    await client.send(unsubscribe_5(2, *(name.encode() for name in filters)))
    await until(lambda: not broker.connection("client").subscriptions.by_filter.keys() & set(filters))


async def gone(broker: Broker) -> None:
    """Return when no subscription is draining any more."""
    await until(lambda: not broker.connection("client").subscriptions.draining)


@pytest.mark.parametrize("about", [{}, LASTS], ids=["clean", "lasting"])
async def test_messages_skipped_by_younger_subscriptions_are_sent_when_the_oldest_ends(
    start_broker: StartBroker, about: dict[Property, int]
) -> None:
    """[MQTT-3.3.4-2], [MQTT-3.10.4-2]."""
    broker, client = await lagging(start_broker, "a/#", "a/+", about=about)
    await end(broker, client, "a/#")
    await publish(broker, *numbered(620, 621), *numbered(622, topic="a/c/d"))
    await client.expect(UNSUBACK)
    got = await take_all(broker, client)
    assert [number for number, _ in got] == [*range(600), 620, 621], (
        "each message comes once and in order; those that no remaining subscription matches don't come"
    )
    when = [tuple(identifiers) for _, identifiers in got].index((2,))
    assert 10 < when < 590
    assert {tuple(identifiers) for _, identifiers in got[when:]} == {(2,)}, (
        "the identifier of the ended subscription must not occur"
    )
    await gone(broker)
    (left,) = broker.connection("client").subscriptions.by_filter.values()
    assert not left.is_own, "the remaining subscription is back on the shared path"
    client.reset()
    if not about:
        await until(lambda: not any(broker.held_resources().values()))


@pytest.mark.parametrize("how", ["restart", "kill"])
async def test_a_draining_subscription_goes_on_after_a_restart_of_the_node(start_broker: StartBroker, how: str) -> None:
    broker, client = await lagging(start_broker, "a/#", "a/+", about=LASTS)
    await end(broker, client, "a/#")
    await publish(broker, *numbered(620), *numbered(621, topic="a/c/d"))
    await getattr(broker, how)()
    again = await broker.connect_5("client", flags=0, about=LASTS)
    assert again.session_present
    numbers = [number for number, _ in await take_all(broker, again)]
    assert numbers == [*range(600), 620], "deliveries under way are sent again"
    await gone(broker)
    stored = broker.node.gateway.lifecycle.sessions.get("client")
    assert stored is not None
    assert not stored.draining
    await again.unsubscribe("a/+")
    broker.node.store.commit()
    assert not [queue.filter for queue in broker.node.store.queues if OWNER in queue.owners]


async def test_a_draining_subscription_ends_with_its_session(start_broker: StartBroker) -> None:
    broker, client = await lagging(start_broker, "a/#", "a/+", about=LASTS)
    await end(broker, client, "a/#")
    await broker.restart()
    await broker.connect_5("client")
    broker.node.store.commit()
    assert not [queue.filter for queue in broker.node.store.queues if OWNER in queue.owners]
    assert not list(broker.node.store.index.rows(b"Sl"))


async def test_an_operator_sees_draining_subscriptions(start_broker: StartBroker) -> None:
    broker, client = await lagging(start_broker, "a/#", "a/+", about=LASTS)
    await end(broker, client, "a/#")
    await broker.restart()  # A restart flushes the index.
    out = io.StringIO()
    inspect_sessions(broker.config.data_dir, client_id="client", limit=0, as_json=True, out=out)
    (row,) = map(orjson.loads, out.getvalue().splitlines())
    assert [one["filter"] for one in row["subscriptions"]] == ["a/+"]
    (left,) = row["draining"]
    assert left["filter"] == "a/#"
    assert 10 < left["cursor"] < left["stop"] == 620


async def test_a_client_that_returns_with_3_1_1_gets_the_rest_of_a_draining_subscription(start_broker: StartBroker) -> None:
    broker, client = await lagging(start_broker, "a/#", "a/+", about=LASTS)
    await end(broker, client, "a/#")
    client.reset()
    await until(lambda: "client" not in broker.node.gateway.clients)
    old = await broker.connect("client", flags=0, accepted=False)
    await old.expect(CONNACK)
    numbers: set[int] = set()
    while len(numbers) < 600:
        numbers.add(number_of(await old.message()))
    assert numbers == set(range(600))
    await gone(broker)


async def test_the_second_subscription_to_end_drains_for_the_last(start_broker: StartBroker) -> None:
    broker, client = await lagging(start_broker, "a/#", "+/b", "a/b", about={})
    await end(broker, client, "a/#")
    await publish(broker, *numbered(*range(620, 640)))
    await end(broker, client, "+/b")
    await publish(broker, *numbered(640), *numbered(641, topic="x/b"))
    got = await take_all(broker, client)
    assert [number for number, _ in got] == [*range(600), *range(620, 641)]
    assert got[-1] == (640, [3])
    await gone(broker)


async def test_when_all_subscriptions_end_nothing_more_is_sent_and_nothing_is_kept(start_broker: StartBroker) -> None:
    broker, client = await lagging(start_broker, "a/#", "a/+", "+/b", about={})
    await end(broker, client, "a/#", "a/+", "+/b")
    under_way = len(broker.connection("client").session.inflight.slots)
    assert [number for number, _ in await take_all(broker, client)] == [*range(under_way)]
    await gone(broker)
    assert not any(queue.transient for queue in broker.node.store.queues)


async def test_a_client_that_subscribes_again_gets_messages_from_then_on(start_broker: StartBroker) -> None:
    broker, client = await lagging(start_broker, "a/#", "a/+", about={})
    await end(broker, client, "a/#")
    await publish(broker, *numbered(620, topic="a/c/d"))
    await client.subscribe_with(("a/#", 1), identifier=9)
    await publish(broker, *numbered(621), *numbered(622, topic="a/c/d"))
    got = await take_all(broker, client)
    assert sorted(number for number, _ in got) == [*range(600), 621, 622]
    assert {number: identifiers for number, identifiers in got if number > 599} == {621: [2, 9], 622: [9]}
    await gone(broker)
    await client.unsubscribe("a/#")
    await publish(broker, *numbered(623))
    assert await take_all(broker, client) == [(623, [2])]


async def test_draining_subscriptions_count_against_the_limit(start_broker: StartBroker) -> None:
    broker, client = await lagging(start_broker, "a/#", "a/+", about={}, subscriptions_max=2)
    await end(broker, client, "a/#")
    await client.send(subscribe_5(1, (b"b", 1)))
    refused = broker.node.gateway.counters
    await until(lambda: refused.subscriptions_refused == 1)  # Otherwise a client could keep any number of queues.
    await take_all(broker, client)
    await gone(broker)
    assert await client.subscribe(("b", 1)) == [1]


FILTERS = ["a/#", "a/+", "a/b", "+/b", "#"]
TOPICS = ["a/b", "a/c", "x/b", "a"]


@pytest.mark.parametrize("seed", range(3 * DEPTH))
async def test_any_of_many_subscriptions_may_end_at_any_time(broker: Broker, seed: int) -> None:
    """A message is sent once if a subscription that matched it on arrival still exists, never twice, and in order."""
    rng = random.Random(seed)
    about = LASTS if seed % 2 else {}
    client = await broker.connect_5("client", about=about | FEW)
    there: dict[str, set[int]] = {}
    """By filter: the messages that were published while the client was subscribed to it."""
    got: list[int] = []
    topic_of: list[str] = []
    count = 0
    for _ in range(60):
        what = rng.random()
        name = rng.choice(FILTERS)
        if what < 0.25:
            qos = 1 if about else rng.choice([0, 1])  # Deliveries under way at QoS 0 are lost with the connection.
            await client.subscribe_with((name, qos), identifier=1 + FILTERS.index(name))
            there.setdefault(name, set())
        elif what < 0.45 and name in there:
            await client.unsubscribe(name)
            del there[name]
        elif what < 0.7:
            burst = [(rng.choice(TOPICS), b"%08d" % n) for n in range(count, count + rng.randint(1, 30))]
            for topic, body in burst:
                for each, seen in there.items():
                    if topics.matches(each, topic):
                        seen.add(int(body))
            count += len(burst)
            topic_of += [topic for topic, _ in burst]
            await publish(broker, *burst)
        elif what < 0.75 and about:
            got += [number_of(message) for message in await client.messages()]
            client.reset()
            await until(lambda: "client" not in broker.node.gateway.clients)
            got_before = set(got)
            await broker.restart()
            client = await broker.connect_5("client", flags=0, about=about | FEW)
            got += [
                number for number, _ in await take(client, 1) if number not in got_before
            ]  # Repeated deliveries have the flag DUP.
        else:
            got += [number for number, _ in await take(client, rng.randint(1, 3))]
    got += [number for number, _ in await take_all(broker, client)]
    for topic in TOPICS:
        of_topic = [number for number in got if topic_of[number] == topic]
        assert of_topic == sorted(of_topic)
    counts = Counter(got)
    assert not [number for number, times in counts.items() if times > 1]
    assert {number for seen in there.values() for number in seen} <= counts.keys()
    assert not broker.connection("client").subscriptions.draining
