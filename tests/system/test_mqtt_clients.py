"""MQTT clients in six languages, each in a process of its own, against a node as a process.

`make test` runs the tests with one client, `make test-clients` with all.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from penstock.store.options import MIB
from tests.clients.mqtt_processes import DRIVERS, Arrived, MqttProcess
from tests.system.processes import NodeProcess

pytestmark = pytest.mark.nightly

Connect = Callable[..., MqttProcess]

THOROUGH = os.environ.get("PENSTOCK_MQTT_CLIENTS", "")
"""Clients with which the tests run; `make test-clients` sets it."""

KINDS = tuple(THOROUGH.split()) or ("go-5",)


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> str:
    if not DRIVERS[request.param].exists():
        pytest.skip(f"the MQTT client {request.param} is not installed: run tests/clients/install")
    return str(request.param)


@pytest.fixture(scope="module")
def options(kind: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Return the options of the node.

    With MQTT 5.0, Paho for Java uses a topic alias on a new connection that it has set on the one before.
    """
    path = tmp_path_factory.mktemp("options") / "node.toml"
    path.write_text("[mqtt]\ntopic_alias_max = 0\n" if kind == "paho-5" else "")
    return ("--config", str(path))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory, options: tuple[str, ...]) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path_factory.mktemp("mqtt") / "data").start(*options)
    yield process
    process.close()


@pytest.fixture
def connect(node: NodeProcess, kind: str, tmp_path: Path) -> Iterator[Connect]:
    """Return a function that connects one more client. The processes end with the test."""
    processes: list[MqttProcess] = []

    def begin(client_id: str, *, clean: bool = True, will: str = "-", was_there: bool = False) -> MqttProcess:
        process = MqttProcess(kind, tmp_path)
        processes.append(process)
        assert process.connect(node.port("mqtt"), f"{kind}-{client_id}", clean=clean, will=will) == was_there
        return process

    yield begin
    for process in processes:
        process.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Return a topic that no other test uses."""
    return request.node.name.replace("[", "/").strip("]")


def test_messages_arrive_as_they_were_sent(connect: Connect, topic: str) -> None:
    client = connect("client")
    assert client.subscribe(f"{topic}/+", 2) == 2
    for number in range(6):  # Twice to each topic: an alias of the topic would have no name in it.
        client.publish(f"{topic}/{number % 3}", str(number), number % 3)
        assert client.next() == Arrived(f"{topic}/{number % 3}", number % 3, False, str(number))


def test_a_retained_message_waits_and_a_will_tells_of_a_death(connect: Connect, topic: str) -> None:
    dies = connect("dies", will=f"{topic}/will")
    dies.publish(f"{topic}/state", "on", retain=True)
    watcher = connect("watcher")
    watcher.subscribe(f"{topic}/#", 1)
    assert watcher.next() == Arrived(f"{topic}/state", 1, True, "on")
    dies.close()
    assert watcher.next() == Arrived(f"{topic}/will", 1, False, "gone")


def test_members_of_a_share_get_each_message_once(connect: Connect, topic: str) -> None:
    members = [connect(f"member-{number}") for number in range(2)]
    for member in members:
        assert member.subscribe(f"$share/workers/{topic}/#", 1) == 1
    publisher = connect("publisher")
    for number in range(10):
        publisher.publish(f"{topic}/{number}", str(number))
    waiting = [0, 0]
    while sum(waiting) < 10:  # pytest-timeout ends a test that waits for ever.
        waiting = [int(member.do("waiting")) for member in members]
    got = [member.next().body for member, count in zip(members, waiting, strict=True) for _ in range(count)]
    assert sorted(got) == [str(number) for number in range(10)]


def test_a_session_keeps_what_comes_while_its_client_is_away(connect: Connect, topic: str) -> None:
    client = connect("lasts", clean=False)
    assert client.subscribe(topic, 1) == 1
    client.close()
    publisher = connect("publisher")
    for number in range(20):
        publisher.publish(topic, str(number))
    again = connect("lasts", clean=False, was_there=True)
    assert [again.next().body for _ in range(20)] == [str(number) for number in range(20)]


def test_a_payload_may_have_all_the_bytes_of_the_limit(connect: Connect, topic: str) -> None:
    client = connect("client")
    client.subscribe(topic, 1)
    client.do("blob", topic, MIB)
    assert client.next() == Arrived(topic, 1, False, f"#{MIB}")


def test_a_filter_that_is_refused_leaves_the_connection_open(connect: Connect, kind: str, topic: str) -> None:
    client = connect("client")
    too_deep = "/" * 200
    assert client.subscribe(too_deep, 1) == (ReasonCode.TOPIC_FILTER_INVALID if kind.endswith("5") else SUBACK_FAILURE)
    client.subscribe(topic, 1)
    client.publish(topic, "x")
    assert client.next().body == "x"


def test_nothing_acknowledged_is_lost_when_the_node_is_killed(
    node: NodeProcess, options: tuple[str, ...], connect: Connect, topic: str
) -> None:
    count = 150
    subscriber, publisher = connect("subscriber", clean=False), connect("publisher", clean=False)
    subscriber.subscribe(topic, 1)
    publisher.do("stream", topic, count)
    got = [int(subscriber.next().body)]
    for killed_at in (count // 3, 2 * count // 3):
        while got[-1] < killed_at:
            got.append(int(subscriber.next().body))
        port = node.port("mqtt")
        node.kill()
        node.start(*options, "--mqtt", f"127.0.0.1:{port}")
    while count - 1 not in got:
        got.append(int(subscriber.next().body))
    assert sorted(set(got)) == list(range(count))
