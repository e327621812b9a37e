"""The official RocketMQ clients, each in a process of its own, against a node as a process and MQTT clients.

Tests of what RocketMQ itself does run with Apache's own server, too, if `PENSTOCK_ROCKETMQ_PEER` names one. Where the two
servers differ, the test says what Apache's does.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import paho.mqtt.client as mqtt
import pytest
from paho.mqtt.enums import CallbackAPIVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties

from penstock import GroupDescription, SyncClient
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.rocketmq.names import encode
from penstock.pop.rocketmq.status import Code
from tests.bounds import write_bounds
from tests.clients.rocketmq_processes import ClientFailed, ClientProcess, Kind, has, skip_unless_it_has, skip_unless_there
from tests.clients.rocketmq_servers import PEER, Server
from tests.system.processes import NodeProcess, run_penstock

pytestmark = pytest.mark.nightly

Start = Callable[..., ClientProcess]

CHECK_MS = 400
THOROUGH = os.environ.get("PENSTOCK_ROCKETMQ_CLIENTS", "")
"""Clients with which all tests run; `make test-clients` sets it. Otherwise only `QUICK` ones run all, the others some."""

QUICK: tuple[Kind, ...] = ("python", "node")
KINDS: tuple[Kind, ...] = tuple(THOROUGH.split()) or (*QUICK, "go", "rust", "java-5.0.7", "java-5.2.0")

SERVERS = ("node", "apache") if PEER else ("node",)
RUN = f"{int(time.time()):x}"
"""Part of all names on Apache's server, which keeps topics and groups from run to run."""

ACCESS = """
[[principal]]
name = "billing"
access_key = "key"
access_secret = "s3cret"
write = ["plant/#"]
read = ["plant/#"]
consume = ["billing"]
"""

LIMIT = PopOptions().message_bytes_max


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("rocketmq")
    (folder / "node.toml").write_text(f'[pop]\ntransaction_check = "{CHECK_MS}ms"\ntls_optional = true\n')
    write_bounds(folder / "node.toml", pop__transaction_checks_max=1000)
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


@pytest.fixture(params=SERVERS, scope="module")
def server(request: pytest.FixtureRequest, kind: Kind) -> Server:
    return Server(None if request.param == "apache" else request.getfixturevalue("node"))


@pytest.fixture(scope="module")
def process(server: Server, kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientProcess]:
    made = ClientProcess(kind, server.address, tmp_path_factory.mktemp("home"))
    yield made
    made.close()


@pytest.fixture
def client(process: ClientProcess) -> Iterator[ClientProcess]:
    """Return a process that all tests of a kind share, because it takes a second to start. Each test has clients of its own."""
    yield process
    process.do("stop")


@pytest.fixture
def start(server: Server, kind: Kind, tmp_path: Path) -> Iterator[Start]:
    """Return a function that starts more processes. They end with the test."""
    started: list[ClientProcess] = []

    def begin(**more: Any) -> ClientProcess:
        started.append(ClientProcess(kind, server.address, tmp_path, **more))
        return started[-1]

    yield begin
    for process in started:
        process.close()


@pytest.fixture
def topic(request: pytest.FixtureRequest, kind: Kind) -> str:
    """Return a topic that no other test uses. It is short, because names on Apache's server have 127 characters at most.

    Apache's server takes what is before a '%' for a namespace, so the topic has no levels there.
    """
    name = f"{RUN}/{zlib.crc32(request.node.name.encode()):x}/{kind}/1/temp"
    peer = "server" in request.fixturenames and request.getfixturevalue("server").is_peer
    return name.replace("/", "-").replace(".", "-") if peer else name


@pytest.fixture
def group(topic: str) -> str:
    """Return a group that no other test uses."""
    return topic.replace(".", "-").replace("/", "-")


@pytest.fixture
def native(server: Server) -> Iterator[SyncClient]:
    """Return a client of the native API, for tests that ask the node itself."""
    if server.is_peer:
        pytest.skip("the test asks the node itself")
    with SyncClient(server.address) as client:
        yield client


def bodies(messages: list[dict[str, Any]]) -> list[str]:
    return [message["body"] for message in messages]


def test_a_message_comes_back_with_all_its_fields(
    server: Server, client: ClientProcess, topic: str, group: str, kind: Kind
) -> None:
    name = encode(topic)
    server.prepare(topic, group)
    client.do("producer", topics=[name])
    client.do("simple", group=group, topics={name: "*"})
    began_ms = time.time() * 1000
    sent = client.do("send", topic=name, body="21.5", tag="hot", keys=["k1", "k2 k3"], properties={"unit": "°C"})
    (message,) = received(client, 1)
    assert message["topic"] == name
    assert (message["body"], message["id"], message["tag"]) == ("21.5", sent["id"], "hot")
    assert (message["keys"], message["properties"]) == (["k1", "k2", "k3"], {"unit": "°C"})
    assert (message["attempt"], message["corrupted"]) == (1, False)
    assert message["born_host"]
    assert began_ms - 2_000 <= message["born_ms"] <= time.time() * 1000
    client.do("ack", id=message["id"])
    if kind == "go" or server.is_peer:  # Go's hides a refused acknowledgement, and Apache's server refuses none.
        client.do("ack", id=message["id"])
        return
    with pytest.raises(ClientFailed, match="acknowledged before") as refused:
        client.do("ack", id=message["id"])
    assert refused.value.code == Code.INVALID_RECEIPT_HANDLE


@pytest.mark.parametrize("body_bytes", [LIMIT, LIMIT + 1])
def test_a_body_may_have_the_whole_limit_and_no_more(
    server: Server, client: ClientProcess, topic: str, group: str, body_bytes: int, kind: Kind
) -> None:
    name = encode(topic)
    server.prepare(topic, group)
    client.do("producer", topics=[name])
    if body_bytes > LIMIT:
        with pytest.raises(ClientFailed):
            client.do("send", topic=name, body="x" * body_bytes, tag="large")
        return
    client.do("simple", group=group, topics={name: "*"})
    client.do("send", topic=name, body="x" * body_bytes, tag="large")
    if kind in ("node", "rust"):  # They can send such a body, but their gRPC refuses to receive a message of more than 4 MiB.
        return
    (message,) = received(client, 1)
    assert len(message["body"]) == body_bytes
    client.do("ack", id=message["id"])


def test_a_client_with_its_default_of_tls_reaches_the_server(
    server: Server, start: Start, topic: str, group: str, kind: Kind
) -> None:
    skip_unless_it_has(kind, "tls")
    name = encode(topic)
    server.prepare(topic, group)
    client = start(tls=True)
    client.do("producer", topics=[name])
    client.do("simple", group=group, topics={name: "*"})
    sent = client.do("send", topic=name, body="by TLS")
    assert sent["id"] in [message["id"] for message in received(client, 1)]


@pytest.mark.usefixtures("thorough")
def test_a_namespace_is_the_first_level_of_its_topics(
    server: Server, start: Start, topic: str, group: str, kind: Kind, request: pytest.FixtureRequest
) -> None:
    skip_unless_it_has(kind, "namespace")
    name = encode(topic)
    server.prepare(topic, group)
    client = start(namespace="tenant")
    client.do("producer", topics=[name])
    client.do("simple", group=group, topics={name: "*"})
    client.do("send", topic=name, body="inside")
    (message,) = received(client, 1)
    assert (message["topic"], message["body"]) == (name, "inside")
    if server.is_peer:  # It takes namespaces, and ignores them.
        return
    native: SyncClient = request.getfixturevalue("native")
    (native_one,) = native.pop(f"tenant/{topic}", group="elsewhere", wait=5.0)
    assert native_one.body == b"inside"


@pytest.mark.usefixtures("thorough")
@pytest.mark.usefixtures("native")
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
def test_fifo_delivers_a_message_group_in_order(
    server: Server, client: ClientProcess, topic: str, group: str, kind: Kind
) -> None:
    name = encode(topic)
    server.prepare(topic, group, "FIFO", fifo=True, backoff=())
    client.do("producer", topics=[name])
    for number in range(3):
        for account in ("a", "b"):
            client.do("send", topic=name, body=f"{account}{number}", group=account)
    client.do("simple", group=group, topics={name: "*"})
    done: list[str] = []
    # Apache's server blocks the whole queue until the rest of the batch is visible again.
    returns = has(kind, "change") and not server.is_peer
    while len(done) < 6:
        returned: set[str] = set()
        for message in client.receive():
            if message["group"] in returned:
                continue
            if returns and message["body"] == "a1" and message["attempt"] == 1:
                client.do("change", id=message["id"], invisible_s=0)  # It comes again before the next one of its account.
                returned.add(message["group"])
                continue
            done.append(message["body"])
            client.do("ack", id=message["id"])
    for account in ("a", "b"):
        assert [body for body in done if body.startswith(account)] == [f"{account}{number}" for number in range(3)]


@pytest.mark.usefixtures("thorough")
def test_a_delayed_message_comes_when_it_is_due_and_a_recalled_one_does_not(
    server: Server, client: ClientProcess, topic: str, group: str, kind: Kind
) -> None:
    name = encode(topic)
    server.prepare(topic, group, "DELAY")
    client.do("producer", topics=[name])
    client.do("simple", group=group, topics={name: "*"}, wait_s=10)
    due_s = int(time.time()) + 3
    recalls = has(kind, "recall")
    if recalls:
        recalled = client.do("send", topic=name, body="never", at_s=due_s)
        assert client.do("recall", topic=name, handle=recalled["recall"])["id"] == recalled["id"]
    if recalls and not server.is_peer:  # Apache's server answers OK a second time, and has one code for all errors.
        with pytest.raises(ClientFailed, match="recalled before"):
            client.do("recall", topic=name, handle=recalled["recall"])
        with pytest.raises(ClientFailed, match="not a recall handle"):
            client.do("recall", topic=name, handle="00" * 24)
    later = client.do("send", topic=name, body="later", at_s=due_s)
    assert bodies(received(client, 1)) == ["later"]
    assert due_s <= time.time() < due_s + 5
    if recalls and not server.is_peer:
        with pytest.raises(ClientFailed, match="delivered before"):
            client.do("recall", topic=name, handle=later["recall"])


@pytest.mark.usefixtures("thorough")
def test_a_transaction_is_committed_rolled_back_or_asked_about(
    server: Server, client: ClientProcess, start: Start, topic: str, group: str
) -> None:
    name = encode(topic)
    server.prepare(topic, group, "TRANSACTION")
    consumer, client = client, start()
    client.do("producer", topics=[name], undecided=["rolled back", "committed", "orphan"])
    consumer.do("simple", group=group, topics={name: "*"}, wait_s=20)
    for body, commit in (("rolled back", False), ("committed", True)):
        client.do("begin", topic=name, body=body)
        client.do("end", commit=commit)
    (committed,) = received(consumer, 1)
    assert committed["body"] == "committed"
    consumer.do("ack", id=committed["id"])
    client.do("begin", topic=name, body="forgotten")
    (forgotten,) = received(consumer, 1)
    assert forgotten["body"] == "forgotten"
    consumer.do("ack", id=forgotten["id"])
    assert "forgotten" in client.do("checked")["bodies"]
    client.do("begin", topic=name, body="orphan")
    client.kill()
    consumer.ask("receive")
    heir = start()
    heir.do("producer", topics=[name])
    found = bodies(poll(lambda: consumer.answer()["messages"]))
    while "orphan" not in found:
        found += bodies(received(consumer, 1))
    assert found == ["orphan"] or server.is_peer  # Apache's server has delivered an acknowledged one again.
    assert "orphan" in heir.do("checked")["bodies"]


@pytest.mark.usefixtures("thorough")
def test_an_unacknowledged_message_comes_back_and_an_extended_one_comes_later(
    server: Server, client: ClientProcess, topic: str, group: str, kind: Kind
) -> None:
    name = encode(topic)
    server.prepare(topic, group)
    client.do("producer", topics=[name])
    client.do("simple", group=group, topics={name: "*"}, wait_s=10)
    changes = has(kind, "change")
    sent = ["left", "extended", "returned"] if changes else ["left"]
    for body in sent:
        client.do("send", topic=name, body=body)
    first: dict[str, Any] = {}
    while len(first) < len(sent):
        first |= {message["body"]: message for message in client.receive(invisible_s=10 if server.is_peer else 3)}
    if changes:
        client.do("change", id=first["extended"]["id"], invisible_s=60)
        client.do("change", id=first["returned"]["id"], invisible_s=0)
        again = received(client, 1)
        assert [(message["body"], message["attempt"]) for message in again] == [("returned", 2)]
    again = received(client, 1)
    assert [(message["body"], message["attempt"]) for message in again] == [("left", 2)]
    if changes:
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
def test_filters_by_tag_and_sql_select_messages(server: Server, client: ClientProcess, topic: str, group: str) -> None:
    name = encode(topic)
    for by in ("tag", "sql", "nonsense"):
        server.prepare(topic, f"{group}-{by}")
    client.do("producer", topics=[name])
    for number, tag in enumerate(("a", "b", "c", "a")):
        client.do("send", topic=name, body=f"{tag}{number}", tag=tag, properties={"number": str(number)})
    client.do("simple", group=f"{group}-tag", topics={name: "a || c"})
    assert sorted(bodies(received(client, 3))) == ["a0", "a3", "c2"]
    client.do("stop")
    client.do("simple", group=f"{group}-sql", topics={name: "number > 0 AND TAGS <> 'c'"}, sql=True)
    assert sorted(bodies(received(client, 2))) == ["a3", "b1"]
    client.do("stop")

    client.do("simple", group=f"{group}-nonsense", topics={name: "number >"}, sql=True)
    with pytest.raises(ClientFailed, match="subscription failed" if server.is_peer else "at character 9") as refused:
        client.receive()
    assert refused.value.code == Code.ILLEGAL_FILTER_EXPRESSION or server.is_peer  # It has an internal error there.


@pytest.mark.usefixtures("thorough")
def test_a_push_consumer_gets_all_messages_retries_failures_and_keeps_slow_ones_beyond_the_invisible_time(
    server: Server, start: Start, topic: str, group: str, kind: Kind, request: pytest.FixtureRequest
) -> None:
    skip_unless_it_has(kind, "push")
    name = encode(topic)
    server.prepare(topic, group, invisible=0.2)
    client = start()
    client.do("producer", topics=[name])
    client.do("push", group=group, topics={name: "*"}, failing={"2": 1}, slow_s=0.5)
    for number in range(5):
        client.do("send", topic=name, body=str(number))
    pushed = client.until("pushed", lambda pushed: len(pushed["done"]) == 5, within_s=60)
    begun = sorted((message["body"], message["attempt"]) for message in pushed["begun"])
    assert begun == [("0", 1), ("1", 1), ("2", 1), ("2", 2), ("3", 1), ("4", 1)]
    if not server.is_peer:
        native: SyncClient = request.getfixturevalue("native")
        wait_for(lambda: not any(each.in_flight for each in described(native, topic)))


@pytest.mark.usefixtures("thorough")
def test_a_failed_message_waits_for_its_back_off_in_each_client(
    server: Server, start: Start, topic: str, group: str, kind: Kind
) -> None:
    skip_unless_it_has(kind, "push")
    name = encode(topic)
    server.prepare(topic, group)
    client = start()
    client.do("producer", topics=[name])
    client.do("push", group=group, topics={name: "*"}, failing={"x": 1})
    client.do("send", topic=name, body="x")
    client.until("pushed", lambda pushed: len(pushed["begun"]) == 1)
    began_s = time.monotonic()
    client.until("pushed", lambda pushed: len(pushed["done"]) == 1, within_s=60)
    assert time.monotonic() - began_s > 0.5  # Its back-off is 1 s; a client that misreads the unit takes milliseconds.


@pytest.mark.usefixtures("thorough")
def test_a_fifo_push_consumer_retries_in_order_and_forwards_what_never_succeeds(
    server: Server, start: Start, topic: str, group: str, kind: Kind, request: pytest.FixtureRequest
) -> None:
    skip_unless_it_has(kind, "push")
    if server.is_peer and kind == "node":
        pytest.xfail("with Apache's server this client does not get a failed message of an ordered group again within 60 s")
    name = encode(topic)
    server.prepare(topic, group, "FIFO", fifo=True, backoff=(0.1,), attempts_max=3)
    client = start()
    client.do("producer", topics=[name])
    client.do("push", group=group, topics={name: "*"}, failing={"a1": 2, "b0": 99})
    for number in range(3):
        for account in ("a", "b"):
            client.do("send", topic=name, body=f"{account}{number}", group=account)
    pushed = client.until("pushed", lambda pushed: len(pushed["done"]) == 5, within_s=60)
    if not server.is_peer:  # Apache's server gives a failing message one attempt more, and others to the Go client meanwhile.
        for account, expected in (("a", ["a0", "a1", "a1", "a1", "a2"]), ("b", ["b0", "b0", "b0", "b1", "b2"])):
            assert [message["body"] for message in pushed["begun"] if message["group"] == account] == expected
        native: SyncClient = request.getfixturevalue("native")
        wait_for(lambda: [letter.reason for letter in native.dead_letters.of_group(group)] == [pb.FORWARDED])
    letters, reader = f"%DLQ%{group}", start()  # The stop of a push consumer takes 20 s in several clients.
    reader.do("simple", group=f"{group}-letters", topics={letters: "*"})
    assert [(message["topic"], message["body"]) for message in received(reader, 1)] == [(letters, "b0")]


@pytest.mark.usefixtures("thorough")
def test_lite_topics_are_topics_below_their_parent(
    client: ClientProcess, start: Start, native: SyncClient, topic: str, kind: Kind
) -> None:
    skip_unless_it_has(kind, "lite")
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
    (third,) = native.pop(f"{topic}/session-3", group="elsewhere", wait=5.0)
    assert third.body == b"to 3"
    if kind.startswith("java"):
        native.groups.delete("chat", topic_filter=f"{topic}/session-1")
        consumer.until("lite_topics", lambda found: found["names"] == ["session-2"])


ANSWERS = {"java": ("main", True), "go": ("goroutine", False), "node": ("mock stack", False)}
"""What the dump of each language's threads contains, and whether its push consumers verify messages."""


def test_an_operator_looks_into_a_client_and_lets_it_verify_a_message(
    server: Server, start: Start, native: SyncClient, topic: str, group: str, kind: Kind
) -> None:
    language = kind.partition("-")[0]
    if language not in ANSWERS:
        pytest.skip(f"the official client {kind} answers no such command")
    if not THOROUGH and kind not in ("go", "java-5.2.0"):
        pytest.skip(f"only make test-clients runs this test with {kind}")
    before = {row["client"] for row in clients_of(server)}
    client = start()
    client.do("producer", topics=[encode(topic)])
    client.do("push", group=group, topics={encode(topic): "*"}, failing={"bad": 99})
    rows = {row["type"]: row for row in clients_of(server) if row["client"] not in before}
    assert rows.keys() == {"producer", "push_consumer"}
    assert all(row["listens"] for row in rows.values())
    consumer = rows["push_consumer"]["client"]

    dump, verifies = ANSWERS[language]
    assert dump in penstock_client(server, "threads", consumer).stdout
    good, bad = (native.send(f"{topic}/aside", body).message_id for body in (b"good", b"bad"))
    verified = [penstock_client(server, "verify", consumer, message_id) for message_id in (good, bad)]
    if verifies:
        assert [each.stdout for each in verified] == ["the listener succeeds\n", "the listener fails\n"]
        assert sorted(message["body"] for message in client.do("pushed")["begun"]) == ["bad", "good"]
    else:
        assert all("NOT_IMPLEMENTED" in each.stderr for each in verified)
    assert [each.returncode for each in verified] == [0 if verifies else 1, 1]
    refused = penstock_client(server, "verify", consumer, "f" * 16)
    assert (refused.returncode, "the log has no message" in refused.stderr) == (1, True)

    for row in rows.values():
        assert penstock_client(server, "reconnect", row["client"]).returncode == 0
    wait_for(lambda: is_done(client, "send", topic=encode(topic), body="after"))
    client.until("pushed", lambda pushed: "after" in bodies(pushed["done"]))


@pytest.mark.usefixtures("thorough")
def test_messages_of_one_receive_come_by_priority(
    client: ClientProcess, native: SyncClient, topic: str, group: str, kind: Kind
) -> None:
    skip_unless_it_has(kind, "priority")
    name = encode(topic)
    native.groups.create(group, topic)
    client.do("producer", topics=[name])
    for level in (1, 3, 2):
        client.do("send", topic=name, body=str(level), priority=level)
    client.do("simple", group=group, topics={name: "*"})
    assert bodies(client.receive()) == ["3", "2", "1"]


@pytest.mark.usefixtures("thorough")
def test_a_refusal_has_its_reason_and_ends_no_checks_of_transactions(tmp_path: Path, kind: Kind) -> None:
    (tmp_path / "access.toml").write_text(ACCESS)
    (tmp_path / "node.toml").write_text(
        f'[access]\nfile = "{tmp_path}/access.toml"\n[pop]\ntransaction_check = "{CHECK_MS}ms"\n'
    )
    node = NodeProcess(tmp_path / "data").start("--config", str(tmp_path / "node.toml"))
    client = ClientProcess(kind, node.addresses["pop"], tmp_path, "key", "s3cret")
    allowed = encode("plant/1")
    try:
        client.do("producer", topics=[allowed])
        client.do("send", topic=allowed, body="first")
        with pytest.raises(ClientFailed, match="may not send 'secret/x'"):
            client.do("send", topic=encode("secret/x"), body="x")
        client.do("begin", topic=allowed, body="forgotten")
        client.until("checked", lambda checked: "forgotten" in checked["bodies"], within_s=40)
        client.do("simple", group="others", topics={allowed: "*"})
        with pytest.raises(ClientFailed, match="may not consume"):
            client.receive()
    finally:
        client.close()
        node.close()


def test_a_consumer_pulls_from_offsets_and_notes_them(
    client: ClientProcess, native: SyncClient, topic: str, group: str, kind: Kind
) -> None:
    if kind != "node":
        pytest.skip(f"the official client {kind} has no calls for pull consumers")
    name = encode(topic)
    client.do("producer", topics=[name])
    client.do("simple", group=group, topics={name: "*"})
    native.groups.create(group, topic)
    for number in range(3):
        client.do("send", topic=name, body=str(number))
    pulled = client.do("pull", group=group, topic=name, count=2)
    assert pulled == {"codes": [Code.OK] * 4, "offset": 0, "end": 3, "next": 2, "bodies": ["0", "1"]}
    pulled = client.do("pull", group=group, topic=name)
    assert (pulled["offset"], pulled["next"], pulled["bodies"]) == (2, 3, ["2"])


@pytest.mark.usefixtures("thorough", "native")
def test_a_client_is_back_within_3_s_of_a_restart_and_its_handle_is_valid(tmp_path: Path, kind: Kind) -> None:
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)  # A supervisor keeps the port open.
    node = NodeProcess(tmp_path / "data", listener=listener).start()
    client = ClientProcess(kind, node.addresses["pop"], tmp_path)
    name = encode("plant/1/temp")
    try:
        client.do("producer", topics=[name])
        client.do("simple", group="billing", topics={name: "*"})
        client.do("send", topic=name, body="before")
        (message,) = client.receive()
        node.kill()
        client.ask("send", topic=name, body="meanwhile")
        node.start()
        with suppress(ClientFailed):  # A client may have noticed the end of its connection only by this call.
            client.answer()
        wait_for(lambda: is_done(client, "ack", id=message["id"]), within_s=3)
        wait_for(lambda: is_done(client, "send", topic=name, body="after"), within_s=3)
        assert bodies(client.receive())[-1] == "after"
    finally:
        client.close()
        node.close()
        listener.close()


def penstock_client(server: Server, *arguments: str) -> subprocess.CompletedProcess[str]:
    assert server.node is not None
    return run_penstock("rocketmq", *arguments, "--data-dir", str(server.node.data_dir))


def clients_of(server: Server) -> list[dict[str, Any]]:
    return [json.loads(line) for line in penstock_client(server, "clients", "--json").stdout.splitlines()]


def poll(receive: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what a call receives. Apache's server gives no answer before the deadline of the Rust client: that is nothing."""
    try:
        return receive()
    except ClientFailed as error:
        if "Timeout expired" not in str(error):
            raise
        return []


def received(client: ClientProcess, count: int, within_s: float = 60) -> list[dict[str, Any]]:
    """Return as many messages as a SimpleConsumer receives in as many calls as it needs; fail if there are more or fewer."""
    ends_s = time.monotonic() + within_s
    found: list[dict[str, Any]] = []
    while len(found) < count:
        assert time.monotonic() < ends_s, found
        found += poll(client.receive)
    assert len(found) == count, found
    return found


def is_done(client: ClientProcess, do: str, **wish: Any) -> bool:
    """Send a command; return False while the client has no connection for it."""
    try:
        client.do(do, **wish)
    except ClientFailed as error:
        if "UNAVAILABLE" not in str(error).upper():
            raise
        return False
    return True


def described(native: SyncClient, topic: str) -> list[GroupDescription]:
    return [each for each in native.groups.describe() if each.filter == topic]


def wait_for(condition: Callable[[], Any], within_s: float = 10) -> None:
    """Return when a condition holds; fail after a while."""
    ends_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < ends_s
        time.sleep(0.01)
