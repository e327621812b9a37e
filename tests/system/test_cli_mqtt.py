"""`penstock pub` and `penstock sub`: what they say about mistakes, the versions of MQTT, and properties. Nothing hangs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.cli import endpoint, mqttconnection
from penstock.cli.endpoint import Endpoint
from penstock.store.options import HostPort
from tests.system.processes import ROOT, NodeProcess, run_penstock


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path_factory.mktemp("node") / "data")
    try:
        yield made.start()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("pub", "a/#", "x"), "the topic 'a/#' has the wildcard '#' in it"),
        (("pub", "", "x"), "the topic '' is empty"),
        (("sub", "a/#/b"), "the filter 'a/#/b' has '#' before its last level"),
        (("sub", ""), "the filter '' is empty"),
        (("sub", "$share/g/a/#/b"), "the filter 'a/#/b' has '#' before its last level"),
        (("sub", "$share/g"), "refused the filter '$share/g': topic filter invalid"),
        (("pub", "$SYS/a", "x"), "refused the message: topic name invalid (the topic '$SYS/a' begins with '$'"),
        (("pub", "$SYS/a", "x", "--qos", "2"), "refused the message. With --qos 1, this command can say why."),
        (("pub", "$SYS/a", "x", "--mqtt-version", "3.1.1"), "With --mqtt-version 5 a node says why."),
        (("pub", "a", "x", "--mqtt-version", "3.1.1", "--property", "a=b"), "MQTT 3.1.1 have no properties"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_is_wrong(node: NodeProcess, arguments: tuple[str, ...], told: str) -> None:
    ended = run_penstock(*arguments, "--mqtt", node.addresses["mqtt"])
    assert ended.returncode == 1
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1, "the message is one line, not a traceback"


def test_a_body_that_the_node_does_not_take_is_not_sent(node: NodeProcess) -> None:
    ended = run_penstock("pub", "a", "-", "--mqtt", node.addresses["mqtt"], text="x" * 20_000_000)
    assert ended.returncode == 1
    assert "takes packets of at most" in ended.stderr


@pytest.mark.parametrize("version", ["3.1.1", "5"])
@pytest.mark.parametrize("qos", ["0", "1", "2"])
def test_both_versions_publish_and_subscribe(node: NodeProcess, version: str, qos: str) -> None:
    given = ("--mqtt-version", version, "--qos", qos, "--mqtt", node.addresses["mqtt"])
    sent = run_penstock("pub", "both/1", f"{version} {qos}", "--retain", *given)
    assert sent.returncode == 0, sent.stderr
    got = run_penstock("sub", "both/#", "--count", "1", "--json", *given)
    assert json.loads(got.stdout) == {"topic": "both/1", "body": f"{version} {qos}"}


def test_a_message_has_properties(node: NodeProcess) -> None:
    given = ("--property", "unit=degC", "--property", "unit=K", "--content-type", "text/plain", "--expiry", "10min")
    reply = ("--response-topic", "r", "--correlation-data", "7", "--retain")
    mqtt = ("--mqtt", node.addresses["mqtt"])
    sent = run_penstock("pub", "properties", "x", *given, *reply, *mqtt)
    assert sent.returncode == 0, sent.stderr
    row = json.loads(run_penstock("sub", "properties", "--count", "1", "--json", *mqtt).stdout)
    expiry_s = row["properties"].pop("expiry_s")
    assert 540 < expiry_s <= 600
    assert row["properties"] == {
        "content_type": "text/plain",
        "response_topic": "r",
        "correlation_data": "7",
        "user": [["unit", "degC"], ["unit", "K"]],
    }
    assert run_penstock("sub", "properties", "--count", "1", *mqtt).stdout == "properties  x\n"


def test_many_messages_are_on_their_way_at_a_time(node: NodeProcess) -> None:
    mqtt, pop = ("--mqtt", node.addresses["mqtt"]), ("--target", node.addresses["pop"])
    created = run_penstock("group", "create", "many", "many/#", *pop)
    assert created.returncode == 0, created.stderr
    assert run_penstock("pub", "many/1", "x", "--count", "1500", *mqtt).returncode == 0
    (group,) = map(json.loads, run_penstock("group", "list", "many", "--json", *pop).stdout.splitlines())
    assert group["visible"] == 1500


def test_what_was_not_printed_returns_to_the_group(node: NodeProcess) -> None:
    mqtt, pop = ("--mqtt", node.addresses["mqtt"]), ("--target", node.addresses["pop"])
    assert run_penstock("group", "create", "counted", "counted/#", *pop).returncode == 0
    for number in range(5):
        assert run_penstock("pub", "counted/1", str(number), *mqtt).returncode == 0
    seen = run_penstock("sub", "$share/counted/counted/#", "--count", "2", "--json", *mqtt)
    assert [json.loads(line)["body"] for line in seen.stdout.splitlines()] == ["0", "1"], seen.stderr
    rest = run_penstock("pop", "counted/#", "--group", "counted", "--count", "5", "--wait", "5s", "--json", *pop)
    assert sorted(json.loads(line)["body"] for line in rest.stdout.splitlines()) == ["2", "3", "4"], rest.stderr


def test_a_host_that_does_not_answer_at_all_is_told_from_one_that_speaks_something_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(endpoint, "PROBE_S", 0.2)
    with socket.socket() as full, socket.socket() as first, socket.socket() as second:
        full.bind(("127.0.0.1", 0))
        full.listen(0)  # Linux takes one connection more than that, and drops the packets of all further ones
        for waiting in (first, second):
            waiting.setblocking(False)
            waiting.connect_ex(full.getsockname())
        node = Endpoint(HostPort("127.0.0.1", full.getsockname()[1]))
        cause = endpoint.probe(node, endpoint.GRPC)
        assert isinstance(cause, TimeoutError)
        assert "No gRPC listener of a node answers" in endpoint.why_unconnected(node, endpoint.GRPC, cause)


def test_a_listener_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mqttconnection, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        at = HostPort("127.0.0.1", silent.getsockname()[1])
        with pytest.raises(ConnectionError, match="does not answer as an MQTT broker does"):
            mqttconnection.MqttConnection(Endpoint(at), None, "5")


def test_a_subscriber_connects_again_when_its_node_is_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    other = NodeProcess(tmp_path_factory.mktemp("other") / "data").start()
    try:
        mqtt = ("--mqtt", other.addresses["mqtt"])
        assert run_penstock("pub", "a", os.fsdecode(b"\xff\xfe"), "--retain", *mqtt).returncode == 0
        command = [sys.executable, "-m", "penstock", "sub", "a", "--json", "--count", "2", *mqtt]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as sub:
            assert sub.stdout is not None
            retained = {"topic": "a", "body": "//4=", "encoding": "base64"}
            assert json.loads(sub.stdout.readline()) == retained
            other.kill()
            other.start(*mqtt)
            again, told = sub.communicate(timeout=60)
    finally:
        other.close()
    assert (sub.returncode, json.loads(again)) == (0, retained)
    assert told.count("\n") == 1
    assert told.endswith("Connecting again.\n")


@pytest.mark.parametrize("command", [("pop", "a", "--group", "g"), ("send", "a", "x"), ("group", "list"), ("timer", "count")])
def test_a_command_over_grpc_ends_at_once_where_no_node_answers(node: NodeProcess, command: tuple[str, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    ended = run_penstock(*command, "--target", f"127.0.0.1:{free}")
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert "No gRPC listener of a node answers" in ended.stderr
    for listener in ("mqtt", "admin"):
        ended = run_penstock(*command, "--target", node.addresses[listener])
        assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
        assert "does not answer as the gRPC listener of a node does" in ended.stderr
