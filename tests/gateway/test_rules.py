"""The rules of the access file over MQTT: what clients may publish, subscribe to and receive, also when the rules change."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import structlog.testing

from penstock.access.actions import TERMS
from penstock.access.policy import AccessPolicy
from penstock.access.rule import Rule
from penstock.access.subject import Subject
from penstock.gateway.auth.decisions import Decisions
from penstock.gateway.auth.permissions import Permissions
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from tests.gateway import scripted_plugins
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.logins import plugins
from tests.gateway.wire import CLEAN, Broker
from tests.waiting import until

RULES = """
[[rule]]
deny = ["receive"]
topics = ["plant/+/secret"]

[[rule]]
allow = ["publish"]
clients = ["sensor-*"]
topics = ["plant/%c/#", "mixed"]

[[rule]]
allow = ["subscribe"]
clients = ["viewer*"]
topics = ["plant/#", "mixed", "$SYS/broker/uptime"]

[[rule]]
allow = ["subscribe"]
clients = ["narrow"]
topics = ["b/+", "#"]

[[rule]]
allow = ["consume"]
groups = ["devices"]
"""
WILL = 0x04
"""The will flag of a CONNECT (MQTT 5.0, 3.1.2.5)."""
LASTS = {Property.SESSION_EXPIRY_S: 600}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "access.toml"
    path.write_text(RULES)
    return path


def write(file: Path, text: str) -> None:
    file.write_text(text)


@pytest.fixture
async def broker(start_broker: StartBroker, file: Path, tmp_path: Path) -> Broker:
    return await start_broker(access_file=str(file), control={"audit_file": str(tmp_path / "audit")})


def audit(tmp_path: Path, event: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (tmp_path / "audit").read_text().splitlines())
    return [line for line in lines if line["event"] == event]


async def test_the_rules_decide_about_a_first_plain_publish_on_the_fast_path(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second, viewer = [await broker.connect(name) for name in ("sensor-1", "sensor-2", "viewer")]
    await first.publish("mixed", b"x", 1)  # the node knows the topic from here on
    general: list[bytes] = []

    def may_publish(one: Permissions, topic: bytes, packets: object) -> bool:
        general.append(topic)
        return one.may_publish_at_once(topic)

    monkeypatch.setattr(Permissions, "may_publish", may_publish)
    await second.publish("mixed", b"y", 1)
    assert general == [], "a first message that is allowed needs no other path"
    await viewer.publish("mixed", b"z", 1)
    assert general == [b"mixed"], "what is denied is answered on the general path"
    assert [message.body for message in broker.stored()] == [b"x", b"y"]


async def test_decisions_by_rules_are_kept_within_their_bounds() -> None:
    decisions = Decisions(AccessOptions(decisions_max=1000, decisions_per_client_max=300))
    decisions.start(lambda: 0)
    rules = AccessPolicy([Rule("all", True, TERMS["publish"], topics=("#",))])
    asker, store, link = cast("Any", object()), cast("Any", object()), cast("Any", lambda: None)
    clients = [Permissions(asker, decisions, store, link, None, rules.rights_of(Subject(f"u{number}"))) for number in range(5)]
    for number in range(250):
        for client in clients:
            assert client.may_publish_at_once(b"t/%d" % number)
            assert decisions.kept == sum(each.kept for each in clients) <= 1000
    for number in range(400):
        assert clients[0].may_publish_at_once(b"more/%d" % number)
        assert clients[0].kept == len(clients[0].publish) <= 300
    for client in clients:
        client.close()
        assert client.may_publish_at_once(b"late")
    assert decisions.kept == 0


async def test_a_client_publishes_where_a_rule_allows_it(broker: Broker, tmp_path: Path) -> None:
    viewer, sensor, old = await broker.connect_5("viewer"), await broker.connect_5("sensor-1"), await broker.connect("sensor-2")
    assert await viewer.subscribe(("plant/#", 1)) == [1]
    for _ in range(3):  # the first is decided, and the others come on the fast path
        await sensor.publish("plant/sensor-1/t", b"x", 1)
        await old.publish("plant/sensor-2/t", b"y", 1)
        await old.publish("plant/sensor-1/t", b"z", 1)  # dropped: MQTT 3.1.1 has no way to say so
    assert await sensor.publish_with("plant/sensor-2/t", b"z", qos=1) == ReasonCode.NOT_AUTHORIZED
    assert sorted(message.body for message in await viewer.messages()) == [b"x"] * 3 + [b"y"] * 3
    denied = audit(tmp_path, "denied")
    assert [(line["client"], line["action"], line["topic"]) for line in denied] == [
        ("sensor-2", "publish", "plant/sensor-1/t"),
        ("sensor-1", "publish", "plant/sensor-2/t"),
    ]


async def test_a_delayed_message_goes_by_the_topic_that_it_goes_to(broker: Broker) -> None:
    sensor = await broker.connect("sensor-1")
    await sensor.publish("$delayed/60/plant/sensor-1/t", b"x", 1)
    await sensor.publish("$delayed/60/plant/sensor-2/t", b"x", 1)
    assert len(broker.node.delayed) == 1


async def test_a_filter_needs_a_rule_that_contains_it(broker: Broker) -> None:
    cases: tuple[tuple[str, tuple[str, ...], list[int]], ...] = (
        ("viewer", ("plant/#", "plant/+/t", "plant"), [0, 0, 0]),
        ("viewer", ("#", "+", "other"), [ReasonCode.NOT_AUTHORIZED] * 3),
        ("viewer", ("$SYS/broker/uptime", "$SYS/#"), [0, ReasonCode.NOT_AUTHORIZED]),
        ("narrow", ("b/+", "b/#", "$SYS/#"), [0, 0, ReasonCode.NOT_AUTHORIZED]),
        ("viewer", ("$share/devices/plant/#", "$share/billing/plant/#"), [0, ReasonCode.NOT_AUTHORIZED]),
        ("sensor-1", ("$share/devices/plant/#", "plant/sensor-1/t"), [ReasonCode.NOT_AUTHORIZED] * 2),
    )
    for client_id, asked, codes in cases:
        client = await broker.connect_5(client_id)
        assert await client.subscribe(*((each, 0) for each in asked)) == codes, asked
        old = await broker.connect(client_id)
        assert await old.subscribe(*((each, 0) for each in asked)) == [SUBACK_FAILURE if code else 0 for code in codes], asked


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_message_that_may_not_be_received_is_left_out_of_a_subscription(broker: Broker, qos: int) -> None:
    viewer, shared, sensor = await broker.connect("viewer"), await broker.connect("viewer2"), await broker.connect("sensor-1")
    await sensor.publish("plant/sensor-1/secret", b"retained", 1, retain=True)
    await sensor.publish("plant/sensor-1/open", b"retained", 1, retain=True)
    await viewer.subscribe(("plant/#", qos))
    await shared.subscribe(("$share/devices/plant/#", qos))
    for number in range(3):
        await sensor.publish("plant/sensor-1/secret", b"no", 1)
        await sensor.publish("plant/sensor-1/open", b"%d" % number, 1)
    assert [message.body for message in await viewer.messages()] == [b"retained", b"0", b"1", b"2"]
    assert [message.body for message in await shared.messages() if message.body == b"no"] == []


async def test_where_all_may_be_received_no_message_is_looked_at(broker: Broker) -> None:
    viewer, sensor = await broker.connect("viewer"), await broker.connect("sensor-1")
    await viewer.subscribe(("mixed", 0))
    permissions = broker.connection("viewer").permissions
    assert permissions is not None
    assert permissions.passes_all
    await sensor.publish("mixed", b"x", 1)
    assert [message.body for message in await viewer.messages()] == [b"x"]
    assert permissions.receive == {}
    await viewer.subscribe(("plant/#", 0))
    assert not permissions.passes_all


async def test_a_will_goes_by_the_rules(broker: Broker) -> None:
    for topic, code in (("plant/sensor-1/gone", 0), ("plant/other", ReasonCode.NOT_AUTHORIZED)):
        client = await broker.connect_5("sensor-1", topic.encode(), b"x", flags=CLEAN | WILL, accepted=False)
        assert (await client.connack())[0] == code


async def test_rules_about_users_go_by_the_name_in_a_certificate(start_broker: StartBroker, file: Path, tmp_path: Path) -> None:
    write(file, '[[role]]\nname = "edges"\nusers = ["edge-*"]\nwrite = ["edges/%u/#"]\n')
    authority = Authority(tmp_path / "tls")
    devices = authority.listener("devices", client_certificates="required", username_from="cn")
    broker = await start_broker(access_file=str(file), listeners=(devices,))
    context = authority.context(authority.issue_client("edge-7.example.org", common_name="edge-7"))
    client = await broker.connect("c", listener="devices", context=context)
    for topic in ("edges/edge-7/a", "edges/edge-8/a"):
        await client.publish(topic, b"x", 1)
    assert [message.topic for message in broker.stored()] == ["edges/edge-7/a"]


# --- changes ----------------------------------------------------------------------------------------------------------


async def test_a_right_that_is_withdrawn_ends_what_goes_on(broker: Broker, file: Path, tmp_path: Path) -> None:
    viewer = await broker.connect_5("viewer", about=LASTS)
    narrow, sensor = await broker.connect("narrow"), await broker.connect("sensor-1")
    await viewer.subscribe(("plant/#", 1), ("mixed", 1))
    await narrow.subscribe(("mixed", 1))
    await sensor.publish("mixed", b"1", 1)
    await sensor.publish("plant/sensor-1/t", b"1", 1)
    assert len(await viewer.messages()) == 2
    write(file, RULES.replace('topics = ["plant/#", "mixed"', 'topics = ["mixed"').replace('"plant/%c/#"', '"p/%c/#"'))
    broker.node.reload()
    reason, _ = await viewer.disconnected()
    assert reason == ReasonCode.ADMINISTRATIVE_ACTION
    await sensor.publish("mixed", b"2", 1)
    await sensor.publish("plant/sensor-1/t", b"2", 1)  # dropped
    assert [message.body for message in await narrow.messages()] == [b"1", b"2"]
    viewer = await broker.connect_5("viewer", flags=0, about=LASTS)
    assert not viewer.session_present, "it has to subscribe again"
    # The first one was not acknowledged. That of the topic which it may not receive any more does not come again.
    assert [message.topic for message in await viewer.messages()] == ["mixed", "mixed"]
    assert [message.topic for message in broker.stored()] == ["mixed", "plant/sensor-1/t", "mixed"]
    assert audit(tmp_path, "changed")[0]["what"] == "reload"


async def test_no_will_to_a_delayed_topic_is_accepted_whatever_the_rules_say_of_the_topic_after_it(broker: Broker) -> None:
    fields = (b"$delayed/1/plant/sensor-1/gone", b"x")
    client = await broker.connect_5("sensor-1", *fields, flags=CLEAN | WILL, accepted=False)
    assert (await client.connack())[0] == ReasonCode.TOPIC_NAME_INVALID
    await broker.connect("sensor-1", b"plant/sensor-1/gone", b"x", flags=CLEAN | WILL)


async def test_a_will_that_is_no_longer_allowed_is_not_published(broker: Broker, file: Path) -> None:
    def leave(name: str) -> None:
        connection = broker.connection(name)
        connection.close("", ReasonCode.UNSPECIFIED_ERROR)

    for name in ("sensor-1", "sensor-2", "sensor-3"):
        await broker.connect(name, f"plant/{name}/gone".encode(), b"x", flags=CLEAN | WILL)
    leave("sensor-1")
    await broker.node.access.ban("client", "sensor-2", for_ms=0, why="", by=Subject("test"))
    await until(lambda: len(broker.node.gateway.clients) == 1)
    write(file, RULES.replace('"plant/%c/#"', '"p/%c/#"'))
    broker.node.reload()
    await until(lambda: not broker.connection("sensor-3").session.has_will)
    leave("sensor-3")
    assert [message.topic for message in broker.stored()] == ["plant/sensor-1/gone"]


async def test_a_stored_subscription_is_looked_at_again_when_its_client_returns(broker: Broker, file: Path) -> None:
    viewer, sensor = await broker.connect_5("viewer", about=LASTS), await broker.connect("sensor-1")
    await viewer.subscribe(("plant/#", 1), ("mixed", 1), ("$share/devices/plant/#", 1))
    viewer.reset()
    write(file, RULES.replace('topics = ["plant/#", "mixed"', 'topics = ["mixed"'))
    broker.node.reload()
    viewer = await broker.connect_5("viewer", flags=0, about=LASTS)
    assert not viewer.session_present, "it has to subscribe again"
    await sensor.publish("plant/sensor-1/t", b"x", 1)
    await sensor.publish("mixed", b"x", 1)
    assert [message.topic for message in await viewer.messages()] == ["mixed"]


async def test_an_invalid_file_changes_nothing(broker: Broker, file: Path) -> None:
    sensor = await broker.connect("sensor-1")
    write(file, "[[rule]]")
    with pytest.raises(ValueError, match="rule 1: give either"):
        broker.node.reload()
    await sensor.publish("mixed", b"x", 1)
    assert len(broker.stored()) == 1


@pytest.mark.parametrize(("kind", "name"), [("client", "viewer"), ("address", "127.0.0.0/8")])
async def test_a_ban_disconnects_and_keeps_away(broker: Broker, tmp_path: Path, kind: Any, name: str) -> None:
    viewer = await broker.connect_5("viewer")
    await broker.node.access.ban(kind, name, for_ms=60_000, why="", by=Subject("test"))
    assert (await viewer.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    client = await broker.connect_5("viewer", accepted=False)
    assert (await client.connack())[0] == ReasonCode.BANNED
    (refused,) = audit(tmp_path, "refused")
    assert (refused["client"], refused["address"]) == ("viewer", "127.0.0.1")
    await broker.node.access.lift(kind, name, by=Subject("test"))
    await broker.connect_5("viewer")
    assert [line["what"] for line in audit(tmp_path, "changed")] == ["ban", "lift"]
    assert len(audit(tmp_path, "connected")) == 2


async def test_what_plugins_deny_is_audited_and_what_the_rules_deny_is_not_asked(
    start_broker: StartBroker, file: Path, tmp_path: Path
) -> None:
    script = scripted_plugins.new_script()
    script.topics["publish", "mixed"] = False
    control = {"audit_file": str(tmp_path / "audit")}
    broker = await start_broker(access_file=str(file), control=control, access=plugins("Topics"))
    sensor = await broker.connect("sensor-1")
    with structlog.testing.capture_logs() as logs:
        for topic in ("mixed", "other", "plant/sensor-1/t"):
            await sensor.publish(topic, b"x", 1)
    assert [message.topic for message in broker.stored()] == ["plant/sensor-1/t"]
    lines = [(line["client"], line["topic"], line.get("by")) for line in logs if line["event"] == "publish.denied"]
    assert lines == [("sensor-1", "mixed", "plugins"), ("sensor-1", "other", None)]
    denied = {line["topic"]: line.get("by", "rules") for line in audit(tmp_path, "denied")}
    assert denied == {"mixed": "plugins", "other": "rules"}
    assert [script.times_asked("publish", topic) for topic in ("mixed", "other")] == [1, 0]
