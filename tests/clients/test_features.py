"""Every feature of MQTT as real clients use it. Each feature runs with each client, in each version that has the feature."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.options import AccessOptions, ListenerOptions
from penstock.gateway.protocol.packets import NO_LOCAL, RETAIN_AS_PUBLISHED
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from tests.clients.mqtt_drivers import DRIVERS, VERSIONS, Driver, Got, Will
from tests.clock import ManualClock
from tests.gateway.certificates import Authority
from tests.gateway.moving_time import pass_time
from tests.gateway.scripted_plugins import new_script
from tests.gateway.wire import ANSWER_S_MAX, FREE, Broker
from tests.waiting import until

PLUGINS: dict[str, Any] = {"tests.gateway.scripted_plugins.Users": {}, "tests.gateway.scripted_plugins.Topics": {}}


class Stage:
    """A node, and clients of one library and version."""

    def __init__(self, make: str, version: int, path: Path) -> None:
        self.make = make
        self.version = version
        self.is_5 = version == 5
        self.path = path
        self.broker: Broker
        self.clients: list[Driver] = []

    async def start(self, **options: Any) -> Broker:
        self.broker = await Broker(self.path / "data", options).start()
        return self.broker

    def client(self) -> Driver:
        """Return a client that is not connected."""
        client: Driver = DRIVERS[self.make](self.version)
        self.clients.append(client)
        return client

    @property
    def port(self) -> int:
        return self.broker.node.mqtt.port

    async def connect(self, client_id: str, **options: Any) -> Driver:
        client = self.client()
        assert (await client.connect(self.port, client_id, **options)).code == 0
        return client

    async def close(self) -> None:
        for client in self.clients:
            await client.close()
        await self.broker.stop()

    @property
    def lasting(self) -> dict[str, Any]:
        """Options of a connection whose session survives it."""
        return {"clean": False, "about": {Property.SESSION_EXPIRY_S: 3600} if self.is_5 else None}


def told(found: object, expected: object) -> bool:
    """Return whether a client tells the expected value, or tells nothing."""
    return found is None or found == expected


Feature = Callable[[Stage], Awaitable[None]]

BOTH: dict[str, Feature] = {}
ONLY_5: dict[str, Feature] = {}


def both(feature: Feature) -> Feature:
    """Add a feature of both versions."""
    BOTH[feature.__name__] = feature
    return feature


def only_5(feature: Feature) -> Feature:
    """Add a feature of MQTT 5.0."""
    ONLY_5[feature.__name__] = feature
    return feature


@pytest.fixture
async def stage(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stage]:
    make, version = request.param
    DRIVERS[make].skip_where_missing()
    made = Stage(make, version, tmp_path)
    await made.start()
    yield made
    await made.close()


# --- features of both versions --------------------------------------------------------------------------------------------


@both
async def each_qos(stage: Stage) -> None:
    client = await stage.connect("c")
    assert await client.subscribe(("a/0", 0), ("a/1", 1), ("a/2", 2)) == [0, 1, 2]
    for granted in (0, 1, 2):
        for qos in (0, 1, 2):
            assert told(await client.publish(f"a/{granted}", b"%d" % qos, qos), 0)
            assert (await client.message())[:3] == (f"a/{granted}", b"%d" % qos, min(qos, granted))
    assert len(stage.broker.stored()) == 9


@both
async def wildcards(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("plant/+/t", 1), ("alarm/#", 1))
    for topic in ("plant/1/t", "plant/1/p", "alarm", "alarm/fire/2", "plant/t"):
        await client.publish(topic)
    assert [(await client.message()).topic for _ in range(3)] == ["plant/1/t", "alarm", "alarm/fire/2"]


@both
async def overlapping_subscriptions(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("a/#", 0), ("a/+", 2))
    await client.publish("a/b", b"x", 2)
    got = [(await client.message()).qos for _ in range(1 if stage.is_5 else 2)]
    assert max(got) == 2
    await client.publish("a/b", b"last", 0)
    assert (await client.message()).body == b"last"


@both
async def shared_subscriptions(stage: Stage) -> None:
    members = [await stage.connect(f"member-{number}") for number in range(2)]
    for member in members:
        assert await member.subscribe(("$share/g/a/#", 1)) == [1]
    bodies = [b"%d" % number for number in range(10)]
    for body in bodies:
        await members[0].publish("a/b", body)
    got: list[bytes] = []

    async def take(member: Driver) -> None:
        while True:
            got.append((await member.message()).body)

    tasks = [asyncio.create_task(take(member)) for member in members]
    await until(lambda: len(got) == len(bodies))
    assert sorted(got) == bodies
    for task in tasks:
        task.cancel()


@both
async def unsubscribing(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("a", 1), ("b", 1))
    assert told(await client.unsubscribe("a"), ([0] if stage.is_5 else []))
    await client.publish("a")
    await client.publish("b")
    assert (await client.message()).topic == "b"


@both
async def retained_messages(stage: Stage) -> None:
    client = await stage.connect("c")
    for topic, body in (("state/1", b"on"), ("state/2", b"off"), ("state/1", b""), ("state/3", b"on")):
        await client.publish(topic, body, retain=True)
    await client.subscribe(("state/+", 1))
    assert [(await client.message())[:4] for _ in range(2)] == [("state/2", b"off", 1, True), ("state/3", b"on", 1, True)]
    await client.publish("state/3", b"off", retain=True)
    assert (await client.message())[:4] == ("state/3", b"off", 1, False)


@both
async def a_will(stage: Stage) -> None:
    watcher = await stage.connect("watcher")
    await watcher.subscribe(("will/#", 1))
    dies = await stage.connect("dies", will=Will("will/dies", b"gone", retain=True))
    await dies.drop()
    assert (await watcher.message())[:3] == ("will/dies", b"gone", 1)
    leaves = await stage.connect("leaves", will=Will("will/leaves", b"gone"))
    await leaves.close()
    stage.clients.remove(leaves)
    await until(lambda: "leaves" not in stage.broker.node.gateway.clients)
    await watcher.subscribe(("will/dies", 0))
    assert (await watcher.message())[:2] == ("will/dies", b"gone"), "what was retained, and not the other's will"


@both
async def a_session_that_goes_on(stage: Stage) -> None:
    client = await stage.connect("c", **stage.lasting)
    await client.subscribe(("a", 2))
    await client.drop()
    await until(lambda: "c" in stage.broker.away())
    other = await stage.connect("other")
    for qos in (1, 2):
        await other.publish("a", b"%d" % qos, qos)
    again = stage.client()
    greeting = await again.connect(stage.port, "c", **stage.lasting)
    assert greeting.code == 0
    assert told(greeting.session_present, True)
    assert [(await again.message())[:3] for _ in range(2)] == [("a", b"1", 1), ("a", b"2", 2)]


@both
async def a_takeover(stage: Stage) -> None:
    old = await stage.connect("c")
    await stage.connect("c")
    reason = await old.disconnected() if stage.is_5 or stage.make == "paho-mqtt" else 0
    assert reason == ReasonCode.SESSION_TAKEN_OVER or not stage.is_5


@both
async def pings(stage: Stage) -> None:
    client = await stage.connect("c", keep_alive_s=1)
    await client.pinged()
    await client.pinged()
    assert "c" in stage.broker.node.gateway.clients


@both
async def large_messages(stage: Stage) -> None:
    body = bytes(range(256)) * 2000
    client = await stage.connect("c")
    await client.subscribe(("a", 1))
    await client.publish("a", body)
    assert (await client.message()).body == body


@both
async def many_messages_in_order(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("a", 2))
    bodies = [b"%d" % number for number in range(30)]
    for number, body in enumerate(bodies):
        await client.publish("a", body, number % 3)
    assert [(await client.message()).body for _ in bodies] == bodies


@both
async def names_and_bodies_of_any_characters(stage: Stage) -> None:
    client = await stage.connect("Gerät-1")
    await client.subscribe(("Halle 3/+/Größe \U0001f321", 1))
    await client.publish("Halle 3/é/Größe \U0001f321", b"\0\xff")
    assert (await client.message())[:2] == ("Halle 3/é/Größe \U0001f321", b"\0\xff")


@both
async def an_assigned_client_id(stage: Stage) -> None:
    client = stage.client()
    greeting = await client.connect(stage.port, "")
    (client_id,) = stage.broker.node.gateway.clients
    assert greeting.code == 0
    assert client_id
    if stage.is_5 and greeting.about is not None:
        assert greeting.about[Property.ASSIGNED_CLIENT_ID] == client_id


@both
async def a_user_name_and_a_password(stage: Stage) -> None:
    await stage.broker.stop()
    script = new_script()
    script.users = {"eve": False}
    script.topics = {("subscribe", "secret"): False, ("publish", "secret"): False}
    await stage.start(access=AccessOptions(plugins=PLUGINS))
    refused = stage.client()
    expected = ReasonCode.BAD_USER_NAME_OR_PASSWORD if stage.is_5 else ConnectCode.BAD_USER_NAME_OR_PASSWORD
    code = (await refused.connect(stage.port, "eve", username="eve")).code
    assert code == expected or (stage.make in ("paho-mqtt", "aiomqtt") and code >= 0x80), (
        "paho calls codes of 3.1.1 by those of 5.0"
    )
    allowed = await stage.connect("bob", username="bob")
    assert await allowed.subscribe(("open", 1)) == [1]
    assert await allowed.subscribe(("secret", 1)) == [ReasonCode.NOT_AUTHORIZED if stage.is_5 else 0x80]
    assert told(await allowed.publish("secret"), (ReasonCode.NOT_AUTHORIZED if stage.is_5 else 0))
    assert told(await allowed.publish("open"), 0)
    assert (await allowed.message()).topic == "open"


@both
async def topics_of_the_node(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("$SYS/broker/version", 0))
    assert (await client.message()).body


@both
async def delayed_messages(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("later", 1))
    await client.publish("$delayed/60/later", b"second")
    await client.publish("later", b"first")
    assert (await client.message()).body == b"first"
    stage.broker.clock.advance(61_000)
    stage.broker.fire_delayed()
    assert (await client.message()).body == b"second"


@both
async def every_transport(stage: Stage) -> None:
    await stage.broker.stop()
    authority = Authority(stage.path / "authority")
    tls, wss = (authority.listener(kind, kind) for kind in ("tls", "wss"))
    await stage.start(listeners=(ListenerOptions(name="ws", kind="ws", listen=FREE), tls, wss))
    for scheme, listener in (("mqtts", "tls"), ("ws", "ws"), ("wss", "wss")):
        ca = authority.file if listener != "ws" else None
        client = stage.client()
        port = stage.broker.listener(listener).address.port
        assert (await client.connect(port, f"c-{scheme}", scheme=scheme, ca=ca)).code == 0
        await client.subscribe((scheme, 2))
        await client.publish(scheme, b"x" * 70_000, 2)
        assert (await client.message())[:3] == (scheme, b"x" * 70_000, 2)


# --- features of MQTT 5.0 ---------------------------------------------------------------------------------------------------


@only_5
async def properties_of_a_message(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("a", 2))
    about = {
        Property.PAYLOAD_FORMAT: 1,
        Property.MESSAGE_EXPIRY_S: 100,
        Property.CONTENT_TYPE: "text/plain",
        Property.RESPONSE_TOPIC: "answers",
        Property.CORRELATION_DATA: b"\x07\xff",
        Property.USER_PROPERTY: [("b", "1"), ("b", "3"), ("a", "2")],
    }
    for qos in (0, 1, 2):
        await client.publish("a", b"x", qos, about=about)
        assert (await client.message()).about == about


@only_5
async def subscription_identifiers(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.subscribe(("a/#", 1), about={Property.SUBSCRIPTION_IDENTIFIER: [7]})
    await client.subscribe(("a/b", 1), about={Property.SUBSCRIPTION_IDENTIFIER: [300]})
    await client.publish("a/b")
    assert sorted((await client.message()).about[Property.SUBSCRIPTION_IDENTIFIER]) == [7, 300]


@only_5
async def no_local(stage: Stage) -> None:
    client, other = await stage.connect("c"), await stage.connect("other")
    await client.subscribe(("a", 1), options=NO_LOCAL)
    await client.publish("a", b"own")
    await other.publish("a", b"other's")
    assert (await client.message()).body == b"other's"


@only_5
async def retain_as_published_and_retain_handling(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.publish("a", b"old", retain=True)
    await client.subscribe(("a", 1), options=RETAIN_AS_PUBLISHED | 2 << 4)
    await client.publish("a", b"new", retain=True)
    assert (await client.message())[:4] == ("a", b"new", 1, True)
    await client.subscribe(("a", 1), options=1 << 4)
    await client.subscribe(("a", 1))
    assert (await client.message())[:4] == ("a", b"new", 1, True)
    await client.publish("a", b"newer", retain=True)
    assert (await client.message())[:4] == ("a", b"newer", 1, False)


@only_5
async def topic_aliases_both_ways(stage: Stage) -> None:
    await stage.broker.stop()
    await stage.start(sent_topic_alias_max=64)
    client = await stage.connect("c", about={Property.TOPIC_ALIAS_MAXIMUM: 4})
    await client.subscribe(("long/topic/#", 1))
    for number in range(3):
        await client.publish("long/topic/name", b"%d" % number, about={Property.TOPIC_ALIAS: 2})
        assert await client.message() == Got("long/topic/name", b"%d" % number, 1)
    connection = stage.broker.connection("c")
    assert connection._publishes.aliases == {2: b"long/topic/name"}
    assert connection.outbox.aliases is not None


@only_5
async def message_expiry(stage: Stage) -> None:
    client = await stage.connect("c")
    await client.publish("a", b"expires", about={Property.MESSAGE_EXPIRY_S: 5}, retain=True)
    await client.publish("b", b"stays", about={Property.MESSAGE_EXPIRY_S: 5000}, retain=True)
    store = stage.broker.node.store
    later_ms = store.now_ms() + 10_000
    store.clock = ManualClock(later_ms)
    await client.subscribe(("a", 1), ("b", 1))
    got = await client.message()
    assert (got.body, got.about[Property.MESSAGE_EXPIRY_S]) == (b"stays", 4990)


@only_5
async def a_will_with_a_delay_and_properties(stage: Stage) -> None:
    watcher = await stage.connect("watcher")
    await watcher.subscribe(("will", 1))
    about = {Property.CONTENT_TYPE: "text/plain", Property.USER_PROPERTY: [("a", "b")]}
    will = Will("will", b"gone", about={Property.WILL_DELAY_S: 60} | about)
    client = await stage.connect("c", will=will, about={Property.SESSION_EXPIRY_S: 3600})
    await client.drop()
    await until(lambda: "c" in stage.broker.away())
    assert stage.broker.stored() == []
    pass_time(stage.broker.node.gateway, 61)
    got = await watcher.message()
    assert (got.body, got.about) == (b"gone", about)


@only_5
async def the_clients_receive_maximum(stage: Stage) -> None:
    client, other = await stage.connect("c", about={Property.RECEIVE_MAXIMUM: 2}), await stage.connect("other")
    await client.subscribe(("a", 1))
    for number in range(10):
        await other.publish("a", b"%d" % number)
    assert [(await client.message()).body for _ in range(10)] == [b"%d" % number for number in range(10)]
    assert stage.broker.connection("c").session.inflight.maximum == 2


@only_5
async def the_clients_maximum_packet_size(stage: Stage) -> None:
    client, other = await stage.connect("c", about={Property.MAXIMUM_PACKET_SIZE: 200}), await stage.connect("other")
    await client.subscribe(("a", 1))
    await other.publish("a", b"x" * 500)
    await other.publish("a", b"small")
    assert (await client.message()).body == b"small"


@only_5
async def limits_of_the_server(stage: Stage) -> None:
    await stage.broker.stop()
    await stage.start(keep_alive_s_max=30, inflight_max=50)
    client = stage.client()
    about = (await client.connect(stage.port, "c", keep_alive_s=100)).about
    assert about is not None
    assert (about[Property.SERVER_KEEP_ALIVE_S], about[Property.RECEIVE_MAXIMUM]) == (30, 50)


@only_5
async def reasons_in_acks(stage: Stage) -> None:
    client = await stage.connect("c")
    assert await client.subscribe(("a", 1), ("/" * 200, 1)) == [1, ReasonCode.TOPIC_FILTER_INVALID]
    assert told(await client.publish("$SYS/x"), ReasonCode.TOPIC_NAME_INVALID)
    assert told(await client.publish("a"), 0)
    assert told(await client.unsubscribe("a", "never"), [0, ReasonCode.NO_SUBSCRIPTION_EXISTED])


@only_5
async def a_disconnect_of_the_server(stage: Stage) -> None:
    client = await stage.connect("c")
    await stage.broker.node.gateway.stop()
    assert await client.disconnected() == ReasonCode.SERVER_SHUTTING_DOWN


@only_5
async def a_request_and_its_answer(stage: Stage) -> None:
    asker, service = await stage.connect("asker"), await stage.connect("service")
    await service.subscribe(("requests", 1))
    await asker.subscribe(("answers/1", 1))
    about = {Property.RESPONSE_TOPIC: "answers/1", Property.CORRELATION_DATA: b"\x01"}
    await asker.publish("requests", b"?", about=about)
    request = await service.message()
    answer = {Property.CORRELATION_DATA: request.about[Property.CORRELATION_DATA]}
    await service.publish(request.about[Property.RESPONSE_TOPIC], b"!", about=answer)
    assert await asker.message() == Got("answers/1", b"!", 1, False, answer)


@only_5
async def an_authentication_method_that_is_not_served(stage: Stage) -> None:
    client = stage.client()
    greeting = await client.connect(stage.port, "c", about={Property.AUTHENTICATION_METHOD: "SCRAM-SHA-256"})
    assert greeting.code == ReasonCode.BAD_AUTHENTICATION_METHOD


@only_5
async def a_limit_on_connections(stage: Stage) -> None:
    await stage.broker.stop()
    await stage.start(connections_max=1)
    await stage.connect("one")
    two = stage.client()
    assert (await two.connect(stage.port, "two")).code == ReasonCode.QUOTA_EXCEEDED


IN_THE_GATE: dict[tuple[str, int], set[str]] = {
    ("paho-mqtt", 5): {*BOTH, *ONLY_5} - {"pings"},
    ("amqtt", 4): set(BOTH),
    ("aiomqtt", 5): {"each_qos", "a_session_that_goes_on", "every_transport"},
    ("paho-mqtt", 4): {"each_qos", "a_will", "a_session_that_goes_on", "a_user_name_and_a_password"},
}
"""By client and version: the features that `make test` shows. Of clients that share their code it shows what may differ. A ping
comes after a second, so a busy machine could miss it."""


def marks_of(make: str, version: int, name: str) -> tuple[pytest.MarkDecorator, ...]:
    return () if name in IN_THE_GATE.get((make, version), ()) else (pytest.mark.nightly,)


@pytest.mark.parametrize(
    ("stage", "feature"),
    [
        pytest.param(
            (make, version),
            feature,
            id=f"{make}, {'5.0' if version == 5 else '3.1.1'}, {name}",
            marks=marks_of(make, version, name),
        )
        for make, driver in DRIVERS.items()
        for version in VERSIONS.get(make, (4, 5))
        for name, feature in (BOTH | ONLY_5 if version == 5 else BOTH).items()
        if name not in driver.untold
    ],
    indirect=["stage"],
)
async def test_a_client_uses_a_feature(stage: Stage, feature: Feature) -> None:
    async with asyncio.timeout(2 * ANSWER_S_MAX):
        await feature(stage)


def test_the_features_that_a_client_tells_nothing_about_exist() -> None:
    assert {name for driver in DRIVERS.values() for name in driver.untold} <= set(BOTH | ONLY_5)
