"""The official RocketMQ clients, each in a process of its own, against a node as a process and MQTT clients."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock import OutgoingMessage, SyncClient, group_settings
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.rocketmq.names import encode
from penstock.pop.rocketmq.status import Code
from tests.clients.rocketmq_processes import ClientFailed, ClientProcess, Kind, skip_unless_there
from tests.system.processes import NodeProcess

Start = Callable[..., ClientProcess]

CHECK_MS = 400
THOROUGH = os.environ.get("PENSTOCK_ROCKETMQ_CLIENTS", "")
"""Clients with which all tests run; `make test-clients` sets it. Otherwise only `QUICK` ones run all, the others some."""

QUICK: tuple[Kind, ...] = ("python", "node")
KINDS: tuple[Kind, ...] = tuple(THOROUGH.split()) or (*QUICK, "go", "java-5.0.7", "java-5.2.0")
WITH_TLS: tuple[Kind, ...] = tuple(kind for kind in KINDS if kind == "go" or kind.startswith("java-"))
"""Clients that use TLS by default."""

LIMIT = PopOptions().message_bytes_max


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("rocketmq")
    (folder / "node.toml").write_text(
        f"[pop]\ntransaction_check_ms = {CHECK_MS}\ntransaction_checks_max = 1000\ntls_optional = true\n"
    )
    process = NodeProcess(folder / "data").start("--config", str(folder / "node.toml"))
    yield process
    process.close()


@pytest.fixture(params=KINDS, scope="module")
def kind(request: pytest.FixtureRequest) -> Kind:
    skip_unless_there(request.param)
    return request.param


@pytest.fixture
def thorough(kind: Kind) -> None:
    """Skip a test that takes long, or changes nothing that differs between clients, unless all tests were asked for."""
    if not THOROUGH and kind not in QUICK:
        pytest.skip(f"only make test-clients runs this test with {kind}")


@pytest.fixture(scope="module")
def process(node: NodeProcess, kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientProcess]:
    made = ClientProcess(kind, node.addresses["pop"], tmp_path_factory.mktemp("home"))
    yield made
    made.close()


@pytest.fixture
def client(process: ClientProcess) -> Iterator[ClientProcess]:
    """Return a process that all tests of a kind share, because it takes a second to start. Each test has clients of its own."""
    yield process
    process.do("stop")


@pytest.fixture
def start(node: NodeProcess, kind: Kind, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts more processes. They end with the test."""
    started: list[ClientProcess] = []

    def begin(**more: Any) -> ClientProcess:
        started.append(ClientProcess(kind, node.addresses["pop"], tmp_path, **more))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """Return a topic that no other test uses."""
    return f"{request.node.name.replace('[', '/').strip(']')}/1/temp"


@pytest.fixture
def native(node: NodeProcess) -> Iterator[SyncClient]:
    with SyncClient(node.addresses["pop"]) as client:
        yield client


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["body"] for message in messages]


def test_a_message_comes_back_with_all_its_fields(client: ClientProcess, topic: str, kind: Kind) -> None:
    name = encode(topic)
    client.do("producer", topics=[name])
    client.do("simple", group="billing", topics={name: "*"})
    began_ms = time.time() * 1000
    sent = client.do("send", topic=name, body="21.5", tag="hot", keys=["k1", "k2"], properties={"unit": "°C"})
    (message,) = client.receive()
    assert message["topic"] == name
    assert (message["body"], message["id"], message["tag"]) == ("21.5", sent["id"], "hot")
    assert (message["keys"], message["properties"]) == (["k1", "k2"], {"unit": "°C"})
    assert (message["attempt"], message["corrupted"]) == (1, False)
    assert message["born_host"]
    assert began_ms - 2_000 <= message["born_ms"] <= time.time() * 1000
    client.do("ack", id=message["id"])
    if kind == "go":  # It hides an answer to an acknowledgement that is not OK.
        return
    with pytest.raises(ClientFailed, match="acknowledged before") as refused:
        client.do("ack", id=message["id"])
    assert refused.value.code == Code.INVALID_RECEIPT_HANDLE


@pytest.mark.parametrize("body_bytes", [LIMIT, LIMIT + 1])
def test_a_body_may_have_the_whole_limit_and_no_more(client: ClientProcess, topic: str, body_bytes: int, kind: Kind) -> None:
    name = encode(topic.replace(str(body_bytes), "size"))
    client.do("producer", topics=[name])
    if body_bytes > LIMIT:
        with pytest.raises(ClientFailed):
            client.do("send", topic=name, body="x" * body_bytes, tag="large")
        return
    client.do("simple", group="billing", topics={name: "*"})
    client.do("send", topic=name, body="x" * body_bytes, tag="large")
    if kind == "node":  # It can send such a body, but gRPC for Node refuses to receive a message of more than 4 MiB.
        return
    (message,) = client.receive()
    assert len(message["body"]) == body_bytes
    client.do("ack", id=message["id"])


@pytest.mark.parametrize("tls_kind", WITH_TLS)
def test_a_client_with_its_default_of_tls_reaches_the_node(node: NodeProcess, tls_kind: Kind, tmp_path: Path) -> None:
    client = ClientProcess(tls_kind, node.addresses["pop"], tmp_path, tls=True)
    try:
        client.do("producer", topics=["secure"])
        client.do("simple", group=f"tls-{tls_kind}".replace(".", "-"), topics={"secure": "*"})
        sent = client.do("send", topic="secure", body="by TLS")
        assert sent["id"] in [message["id"] for message in client.receive()]
    finally:
        client.close()


@pytest.mark.parametrize("with_namespace", WITH_TLS)
@pytest.mark.usefixtures("thorough")
def test_a_namespace_is_the_first_level_of_its_topics(
    node: NodeProcess, native: SyncClient, with_namespace: Kind, kind: Kind, tmp_path: Path
) -> None:
    if with_namespace != kind:
        pytest.skip("once for each client")
    client = ClientProcess(kind, node.addresses["pop"], tmp_path, namespace="tenant")
    topic = f"ns-{kind}".replace(".", "-")
    try:
        client.do("producer", topics=[topic])
        client.do("simple", group="billing", topics={topic: "*"})
        client.do("send", topic=topic, body="inside")
        (message,) = client.receive()
        assert (message["topic"], message["body"]) == (topic, "inside")
        (native_one,) = native.pop(f"tenant/{topic}", group="elsewhere", wait_ms=5_000)
        assert native_one.body == b"inside"
    finally:
        client.close()


@pytest.mark.usefixtures("thorough")
def test_mqtt_and_rocketmq_send_to_each_other(node: NodeProcess, client: ClientProcess, topic: str) -> None:
    device = mqtt.Client(CallbackAPIVersion.VERSION2, protocol=mqtt.MQTTv5)
    got: list[mqtt.MQTTMessage] = []
    device.on_message = lambda _client, _data, message: got.append(message)
    subscribed: list[int] = []
    device.on_subscribe = lambda _client, _data, mid, _codes, _properties: subscribed.append(mid)
    device.connect("127.0.0.1", node.port("mqtt"))
    device.loop_start()
    try:
        device.subscribe(topic, qos=1)
        wait_for(lambda: subscribed)
        client.do("simple", group="billing", topics={encode(topic.replace("/1/", "/+/")): "*"})
        properties: Any = Properties(PacketTypes.PUBLISH)  # type: ignore[no-untyped-call]
        properties.UserProperty = ("unit", "K")
        device.publish(topic, b"from a device", qos=1, properties=properties).wait_for_publish(10)
        (message,) = client.receive()
        assert (message["topic"], message["body"], message["properties"]) == (encode(topic), "from a device", {"unit": "K"})
        assert message["born_ms"] > 0
        client.do("producer", topics=[encode(topic)])
        client.do("send", topic=encode(topic), body="from a service", properties={"unit": "°C"})
        wait_for(lambda: len(got) == 2)
        assert (got[1].topic, got[1].payload, got[1].qos) == (topic, b"from a service", 1)
        back: Any = got[1].properties
        assert back.UserProperty == [("unit", "°C")]
    finally:
        device.disconnect()
        device.loop_stop()


@pytest.mark.usefixtures("thorough")
def test_fifo_delivers_a_message_group_one_by_one_in_order(client: ClientProcess, native: SyncClient, topic: str) -> None:
    name = encode(topic)
    native.groups.create("ledger", topic, settings=group_settings(fifo=True, backoff=()))
    client.do("producer", topics=[name])
    for number in range(3):
        for account in ("a", "b"):
            client.do("send", topic=name, body=f"{account}{number}", group=account)
    client.do("simple", group="ledger", topics={name: "*"})
    seen: list[tuple[str, str]] = []
    first = client.receive()
    assert sorted(bodies(first)) == ["a0", "b0"]
    client.do("change", id=first[0]["id"], invisible_s=0)  # The message comes again before the next one of its account.
    client.do("ack", id=first[1]["id"])
    while len(seen) < 5:
        for message in client.receive():
            seen.append((message["group"], message["body"]))
            client.do("ack", id=message["id"])
    for account in ("a", "b"):
        expected = [f"{account}{number}" for number in range(3)]
        assert [body for group, body in seen if group == account] == expected[0 if account == first[0]["group"] else 1 :]


@pytest.mark.usefixtures("thorough")
def test_a_delayed_message_comes_when_it_is_due_and_a_recalled_one_does_not(
    client: ClientProcess, topic: str, kind: Kind
) -> None:
    if kind == "java-5.0.7":
        pytest.skip("version 5.0.7 can't recall")
    name = encode(topic)
    client.do("producer", topics=[name])
    client.do("simple", group="billing", topics={name: "*"}, wait_s=10)
    due_s = int(time.time()) + 3
    recalled = client.do("send", topic=name, body="never", at_s=due_s)
    later = client.do("send", topic=name, body="later", at_s=due_s)
    assert client.do("recall", topic=name, handle=recalled["recall"])["id"] == recalled["id"]
    with pytest.raises(ClientFailed, match="recalled before"):
        client.do("recall", topic=name, handle=recalled["recall"])
    with pytest.raises(ClientFailed, match="not a recall handle"):
        client.do("recall", topic=name, handle="00" * 24)
    assert bodies(client.receive()) == ["later"]
    assert due_s <= time.time() < due_s + 5
    with pytest.raises(ClientFailed, match="delivered before"):
        client.do("recall", topic=name, handle=later["recall"])


@pytest.mark.usefixtures("thorough")
def test_a_transaction_is_committed_rolled_back_or_asked_about(client: ClientProcess, start: Start, topic: str) -> None:
    name = encode(topic)
    consumer, client = client, start()
    client.do("producer", topics=[name], undecided=["rolled back", "committed", "orphan"])
    consumer.do("simple", group="billing", topics={name: "*"}, wait_s=20)
    for body, commit in (("rolled back", False), ("committed", True)):
        client.do("begin", topic=name, body=body)
        client.do("end", commit=commit)
    assert bodies(consumer.receive()) == ["committed"]
    client.do("begin", topic=name, body="forgotten")
    assert bodies(consumer.receive()) == ["forgotten"]
    assert "forgotten" in client.do("checked")["bodies"]
    client.do("begin", topic=name, body="orphan")
    client.kill()
    consumer.ask("receive")
    heir = start()
    heir.do("producer", topics=[name])
    assert bodies(consumer.answer()["messages"]) == ["orphan"]
    assert "orphan" in heir.do("checked")["bodies"]


@pytest.mark.usefixtures("thorough")
def test_an_unacknowledged_message_comes_back_and_an_extended_one_comes_later(client: ClientProcess, topic: str) -> None:
    name = encode(topic)
    client.do("producer", topics=[name])
    client.do("simple", group="billing", topics={name: "*"}, wait_s=10)
    for body in ("left", "extended", "returned"):
        client.do("send", topic=name, body=body)
    first: dict[str, Any] = {}
    while len(first) < 3:
        first |= {message["body"]: message for message in client.receive(invisible_s=3)}
    client.do("change", id=first["extended"]["id"], invisible_s=60)
    client.do("change", id=first["returned"]["id"], invisible_s=0)
    again = client.receive()
    assert [(message["body"], message["attempt"]) for message in again] == [("returned", 2)]
    again = client.receive()
    assert [(message["body"], message["attempt"]) for message in again] == [("left", 2)]
    client.do("ack", id=first["extended"]["id"])


@pytest.mark.usefixtures("thorough")
def test_a_waiting_poll_gets_a_message_when_it_is_sent(client: ClientProcess, native: SyncClient, topic: str) -> None:
    client.do("simple", group="billing", topics={encode(topic): "*"}, wait_s=20)
    client.ask("receive")
    wait_for(lambda: any(each.waiting for each in described(native, topic)))
    began_s = time.monotonic()
    native.send(topic, b"now")
    assert bodies(client.answer()["messages"]) == ["now"]
    assert time.monotonic() - began_s < 5


@pytest.mark.usefixtures("thorough")
def test_filters_by_tag_and_sql_select_messages(client: ClientProcess, native: SyncClient, topic: str) -> None:
    name = encode(topic)
    for number, tag in enumerate(("a", "b", "c", "a")):
        native.send(topic, f"{tag}{number}".encode(), tag=tag, properties={"number": str(number)})
    client.do("simple", group="by-tag", topics={name: "a || c"})
    assert bodies(client.receive()) == ["a0", "c2", "a3"]
    client.do("stop")
    client.do("simple", group="by-sql", topics={name: "number > 0 AND TAGS <> 'c'"}, sql=True)
    assert bodies(client.receive()) == ["b1", "a3"]
    client.do("stop")

    client.do("simple", group="by-nonsense", topics={name: "number >"}, sql=True)
    with pytest.raises(ClientFailed, match="at character 9") as refused:
        client.receive()
    assert refused.value.code == Code.ILLEGAL_FILTER_EXPRESSION


@pytest.mark.usefixtures("thorough")
def test_a_push_consumer_gets_all_messages_retries_failures_and_keeps_slow_ones_beyond_the_invisible_time(
    start: Start, native: SyncClient, topic: str
) -> None:
    native.groups.create("billing", topic, settings=group_settings(invisible_ms=200))
    client = start()
    client.do("push", group="billing", topics={encode(topic): "*"}, failing={"2": 1}, slow_s=0.5)
    native.send_batch([OutgoingMessage(topic=topic, body=str(number).encode()) for number in range(5)])
    pushed = client.until("pushed", lambda pushed: len(pushed["done"]) == 5)
    begun = sorted((message["body"], message["attempt"]) for message in pushed["begun"])
    assert begun == [("0", 1), ("1", 1), ("2", 1), ("2", 2), ("3", 1), ("4", 1)]
    wait_for(lambda: not any(each.in_flight for each in described(native, topic)))


@pytest.mark.usefixtures("thorough")
def test_a_failed_message_waits_for_its_back_off_in_each_client(start: Start, native: SyncClient, topic: str) -> None:
    client = start()
    client.do("push", group="waiting", topics={encode(topic): "*"}, failing={"x": 1})
    native.send(topic, b"x")
    client.until("pushed", lambda pushed: len(pushed["begun"]) == 1)
    began_s = time.monotonic()
    client.until("pushed", lambda pushed: len(pushed["done"]) == 1)
    assert time.monotonic() - began_s > 0.5  # Its back-off is 1 s; a client that misreads the unit takes milliseconds.


@pytest.mark.usefixtures("thorough")
def test_a_fifo_push_consumer_retries_in_order_and_forwards_what_never_succeeds(
    start: Start, native: SyncClient, topic: str
) -> None:
    group = f"ledger-{topic.split('/')[1]}".replace(".", "-")
    native.groups.create(group, topic, settings=group_settings(fifo=True, backoff=(100,), attempts_max=3))
    client = start()
    client.do("push", group=group, topics={encode(topic): "*"}, failing={"a1": 2, "b0": 99})
    native.send_batch(
        [OutgoingMessage(topic=topic, body=f"{g}{n}".encode(), message_group=g) for n in range(3) for g in ("a", "b")]
    )
    pushed = client.until("pushed", lambda pushed: len(pushed["done"]) == 5)
    for account, expected in (("a", ["a0", "a1", "a1", "a1", "a2"]), ("b", ["b0", "b0", "b0", "b1", "b2"])):
        assert [message["body"] for message in pushed["begun"] if message["group"] == account] == expected
    wait_for(lambda: [letter.reason for letter in native.dead_letters.of_group(group)] == [pb.FORWARDED])


@pytest.mark.usefixtures("thorough")
def test_lite_topics_are_topics_below_their_parent(
    client: ClientProcess, start: Start, native: SyncClient, topic: str, kind: Kind
) -> None:
    if kind.startswith("java-5.0"):
        pytest.skip("versions 5.0 have no lite topics")
    parent = encode(topic)
    consumer, producer = start(), client
    consumer.do("lite_push", group="chat", parent=parent, lite=["session-1", "session-2"])
    producer.do("producer", topics=[parent])
    for number in (1, 2, 3):
        producer.do("send", topic=parent, body=f"to {number}", lite=f"session-{number}")
    pushed = consumer.until("pushed", lambda pushed: len(pushed["done"]) == 2)
    assert sorted((message["lite"], message["body"]) for message in pushed["done"]) == [
        ("session-1", "to 1"),
        ("session-2", "to 2"),
    ]
    assert {message["topic"] for message in pushed["done"]} == {parent}
    (third,) = native.pop(f"{topic}/session-3", group="elsewhere", wait_ms=5_000)
    assert third.body == b"to 3"


@pytest.mark.usefixtures("thorough")
def test_a_handle_stays_valid_across_a_restart_of_the_node(tmp_path: Path, kind: Kind) -> None:
    node = NodeProcess(tmp_path / "data").start()
    client = ClientProcess(kind, node.addresses["pop"], tmp_path)
    name = encode("plant/1/temp")
    try:
        client.do("producer", topics=[name])
        client.do("simple", group="billing", topics={name: "*"})
        client.do("send", topic=name, body="before")
        (message,) = client.receive()
        node.kill()
        node.start("--pop", node.addresses["pop"])
        wait_for(lambda: is_done(client, "ack", id=message["id"]))
        wait_for(lambda: is_done(client, "send", topic=name, body="after"))
        assert bodies(client.receive()) == ["after"]
    finally:
        client.close()
        node.close()


def is_done(client: ClientProcess, do: str, **wish: Any) -> bool:
    """Send a command; return False while the client has no connection for it."""
    try:
        client.do(do, **wish)
    except ClientFailed as error:
        if "UNAVAILABLE" not in str(error):
            raise
        return False
    return True


def described(native: SyncClient, topic: str) -> list[pb.GroupDescription]:
    return [each for each in native.groups.describe() if each.filter == topic]


def wait_for(condition: Callable[[], Any], within_s: float = 10) -> None:
    """Return when a condition holds; fail after a while."""
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)
