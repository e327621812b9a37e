"""Bridges of mosquitto: what they publish about themselves, and the configurations of the guide with a real mosquitto."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.access.passwords import PasswordFile
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import connect
from tests.gateway.wire import CLEAN, WILL, WILL_RETAIN, Broker, Client, Message
from tests.waiting import until

STATE = "$SYS/broker/connection/edge.penstock/state"
RULES = """
[[rule]]
allow = ["publish"]
topics = ["sensors/#"]
"""

# --- what a bridge says about itself ------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_the_state_of_a_bridge_is_acknowledged_and_dropped(broker: Broker, qos: int) -> None:
    bridge, bridge_5 = await broker.connect("bridge"), await broker.connect_5("bridge-5")
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("$SYS/broker/connection/#", 0), ("#", 0))
    for client in (bridge, bridge_5):
        await client.publish(STATE, b"1", qos, retain=True)
        await client.publish("a", b"1", 1)
    assert await watcher.messages() == [Message("a", b"1")] * 2
    assert len(broker.stored()) == 2


@pytest.mark.parametrize(
    "topic", ["$SYS/broker/connection/edge/states", "$SYS/broker/uptime", "$SYS/broker/connection/state", "$SYS/state"]
)
async def test_other_topics_of_the_node_are_still_refused(broker: Broker, topic: str) -> None:
    client, client_5 = await broker.connect("client"), await broker.connect_5("client-5")
    assert await client_5.publish_with(topic, b"1", qos=1) == ReasonCode.TOPIC_NAME_INVALID
    await client.publish(topic, b"1")
    assert await client.ended() == []


async def test_a_state_that_is_no_topic_still_closes_the_connection(broker: Broker) -> None:
    client = await broker.connect("client")
    await client.publish("$SYS/broker/connection/+/state", b"1")
    assert await client.ended() == []


async def test_the_will_of_a_bridge_is_accepted_and_dropped(broker: Broker) -> None:
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("$SYS/broker/connection/#", 0), ("#", 0))
    for connected in (broker.connect, broker.connect_5):
        bridge = await connected("bridge", STATE.encode(), b"0", flags=CLEAN | WILL | WILL_RETAIN)
        assert not bool(broker.connection("bridge").session.has_will)
        bridge.reset()
        await until(lambda: "bridge" not in broker.node.gateway.clients)
    assert await watcher.messages() == []


async def test_rules_that_close_connections_let_a_bridge_state_what_it_likes(start_broker: StartBroker, tmp_path: Path) -> None:
    """The state is dropped, so it needs no right. If it did, the bridge would be closed and come back for ever."""
    (tmp_path / "rules.toml").write_text(RULES)
    broker = await start_broker(access_file=str(tmp_path / "rules.toml"), access=AccessOptions(denied_publish="close"))
    bridge = await broker.dial()
    await bridge.send(connect(CLEAN | WILL | WILL_RETAIN, b"bridge", STATE.encode(), b"0"))
    assert await bridge.receive() == (CONNACK, 0, b"\0\0")
    await bridge.publish(STATE, b"1", 1, retain=True)
    await bridge.publish("sensors/1", b"1", 1)


# --- the guide, with a real mosquitto -----------------------------------------------------------------------------------

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "bridging.md").read_text("utf-8")
CONFIGURATIONS = re.findall(r"^```conf\n(.*?)^```$", GUIDE, re.MULTILINE | re.DOTALL)
(OUT, FIGURES, IN, BOTH, SECURED, BOTH_3, DEFAULTS, NOTIFIES) = CONFIGURATIONS

BEFORE = """\
user root
persistence false
sys_interval 1
listener 0 {socket}
allow_anonymous true
"""
"""What the test adds: a listener for its clients on a Unix socket, so that it needs no port."""


class Edge(NamedTuple):
    """A mosquitto whose bridge is connected to the node."""

    broker: Broker
    """The node."""
    socket: Path
    bridge_id: str
    """Client id of the bridge."""

    async def connect(self, client_id: str) -> Client:
        """Connect a client to mosquitto."""
        client = Client(*await asyncio.open_unix_connection(self.socket))
        self.broker.clients.append(client)
        await client.send(connect(CLEAN, client_id.encode()))
        assert await client.receive() == (CONNACK, 0, b"\0\0")
        return client

    @property
    def closed(self) -> dict[ReasonCode, int]:
        """How many connections the node has closed, by reason. A bridge that is refused comes back again and again."""
        return self.broker.node.gateway.counters.closed_by_reason

    async def bridged(self, *filters: str) -> None:
        """Wait until the bridge has these subscriptions in the node."""
        await until(lambda: self.broker.connection(self.bridge_id).subscriptions.by_filter.keys() >= set(filters))


StartEdge = Callable[..., Awaitable[Edge]]


@pytest.fixture
async def start_edge(start_broker: StartBroker, tmp_path: Path) -> AsyncIterator[StartEdge]:
    """Start a node, and mosquitto with a configuration of the guide, and wait until they are connected."""
    program = shutil.which("mosquitto", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("mosquitto is not installed (apt-get install mosquitto)")
    processes = []

    async def start(configuration: str, listener: str = "mqtt", ca: Path | None = None, **options: Any) -> Edge:
        broker = await start_broker(**options)
        here = tmp_path / "mosquitto.sock"
        address = broker.listener(listener).address
        configuration, count = re.subn(r"(?m)^address .*$", f"address {address.host}:{address.port}", configuration)
        assert count == 1
        if ca is not None:
            configuration = re.sub(r"(?m)^(bridge_cafile) .*$", rf"\1 {ca}", configuration)
        file = tmp_path / "mosquitto.conf"
        file.write_text(BEFORE.format(socket=here) + configuration)
        processes.append(await asyncio.create_subprocess_exec(program, "-c", str(file), stderr=asyncio.subprocess.DEVNULL))
        await until(lambda: len(broker.node.gateway.clients) == 1)
        (bridge_id,) = broker.node.gateway.clients
        return Edge(broker, here, bridge_id)

    yield start
    for process in processes:
        process.terminate()
        await process.wait()


async def test_out_takes_messages_of_the_edge_to_the_node(start_edge: StartEdge) -> None:
    edge = await start_edge(OUT)
    reader, device = await edge.broker.connect("reader"), await edge.connect("device")
    await reader.subscribe(("#", 1))
    await device.publish("elsewhere/1", b"no", 1)
    await device.publish("sensors/1", b"21.5", 1)
    assert await reader.message() == Message("sensors/1", b"21.5", 1)
    assert edge.closed == {}


@pytest.mark.nightly
async def test_figures_of_mosquitto_get_topics_of_their_own(start_edge: StartEdge) -> None:
    edge = await start_edge(FIGURES)
    reader = await edge.broker.connect("reader")
    await reader.subscribe(("mosquitto/edge-1/uptime", 0))
    assert (await reader.message()).body.endswith(b"seconds")
    assert edge.closed == {}


@pytest.mark.nightly
@pytest.mark.parametrize(("configuration", "lasts"), [(IN, True), (IN.replace("mqttv311", "mqttv50"), False)])
async def test_in_takes_messages_of_the_node_to_the_edge(start_edge: StartEdge, configuration: str, lasts: bool) -> None:
    """Only with MQTT 3.1.1 they wait for a bridge that is away."""
    edge = await start_edge(configuration)
    assert edge.bridge_id == "edge-1"
    service, device = await edge.broker.connect("service"), await edge.connect("device")
    await device.subscribe(("#", 1))
    await edge.bridged("commands/#")
    await service.publish("elsewhere/1", b"no", 1)
    await service.publish("commands/1", b"on", 1)
    assert await device.message() == Message("commands/1", b"on", 1)
    assert edge.broker.connection("edge-1").session.lasts == lasts
    assert edge.closed == {}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("configuration", "echoes", "is_retained"), [(BOTH, 0, True), (BOTH_3, 1, False)], ids=["5.0", "3.1.1"]
)
async def test_both_passes_messages_in_both_directions(
    start_edge: StartEdge, configuration: str, echoes: int, is_retained: bool
) -> None:
    """MQTT 5.0 brings nothing back, and keeps the retain flag."""
    edge = await start_edge(configuration)
    reader, device = await edge.broker.connect("reader"), await edge.connect("device")
    await edge.bridged("plant/#")
    await reader.subscribe(("plant/#", 1))
    await device.subscribe(("plant/#", 1))
    await device.publish("plant/1", b"up", 1)
    assert await reader.message() == Message("plant/1", b"up", 1)
    await reader.publish("plant/2", b"down", 1, retain=True)
    assert await reader.message() == Message("plant/2", b"down", 1)
    expected = [Message("plant/1", b"up", 1)] * (1 + echoes) + [Message("plant/2", b"down", 1)]
    assert [await device.message() for _ in expected] == expected
    assert await device.messages() == []
    late = await edge.connect("late")
    await late.subscribe(("plant/#", 1))
    assert await late.messages() == [Message("plant/2", b"down", 1, retain=True)] * is_retained
    assert len(edge.broker.stored()) == 2, "no loop"
    assert edge.closed == {}


@pytest.mark.nightly
async def test_a_bridge_logs_in_over_tls(start_edge: StartEdge, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    PasswordFile.empty(tmp_path / "passwords").add("edge-1", "s3cret")
    (tmp_path / "rules.toml").write_text(RULES)
    edge = await start_edge(
        SECURED,
        "tls",
        authority.file,
        listeners=(authority.listener("tls"),),
        control={"password_file": str(tmp_path / "passwords")},
        access_file=str(tmp_path / "rules.toml"),
    )
    device = await edge.connect("device")
    await device.publish("sensors/1", b"21.5", 1)
    await until(lambda: edge.broker.stored() == [Message("sensors/1", b"21.5", 1)])
    assert edge.broker.connection("edge-1").user == "edge-1"


@pytest.mark.nightly
async def test_a_bridge_that_tries_the_level_of_mosquitto_comes_back_with_that_of_mqtt(start_edge: StartEdge) -> None:
    edge = await start_edge(DEFAULTS)
    device = await edge.connect("device")
    await device.publish("sensors/1", b"21.5", 1)
    await until(lambda: edge.broker.stored() == [Message("sensors/1", b"21.5", 1)])
    assert edge.closed == {ReasonCode.UNSUPPORTED_PROTOCOL_VERSION: 1}


@pytest.mark.nightly
async def test_a_bridge_tells_its_state_on_a_topic_that_is_not_the_nodes_own(start_edge: StartEdge) -> None:
    edge = await start_edge(NOTIFIES)
    reader = await edge.broker.connect("reader")
    await reader.subscribe(("bridges/+", 1))
    assert (await reader.message()).body == b"1"
    edge.broker.connection("edge-1").drop("", ReasonCode.NORMAL_DISCONNECTION)
    assert await reader.message() == Message("bridges/edge-1", b"0", 1)
