"""Access control in MQTT 5.0: reason codes for denials, and sessions that another user resumes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.options import ListenerOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK, PUBLISH
from penstock.gateway.protocol.properties import Property, write_properties
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway import scripted_plugins
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.logins import PASSWORD, USER, plugins
from tests.gateway.packet_cases_5 import connect_5
from tests.gateway.scripted_plugins import Script
from tests.gateway.wire import CLEAN, PING, Message
from tests.waiting import until

LASTS = {Property.SESSION_EXPIRY_S: 60}
ABOUT = {Property.CONTENT_TYPE: "text"}
"""Properties that keep a PUBLISH from being handled as a plain one."""


@pytest.fixture
def script() -> Iterator[Script]:
    script = scripted_plugins.new_script()
    yield script
    script.may_answer.set()


@pytest.mark.parametrize("about", [{}, ABOUT], ids=["plain", "with properties"])
@pytest.mark.parametrize("denied_publish", ["drop", "close"])
async def test_the_ack_of_a_forbidden_message_has_the_reason_not_authorized(
    start_broker: StartBroker, script: Script, about: dict[Property, str], denied_publish: str
) -> None:
    broker = await start_broker(access=plugins("Topics", denied_publish=denied_publish))
    script.topics["publish", "a"] = False
    client = await broker.connect_5("c")
    await client.publish_with("a", b"x", about)
    assert await client.drained() == []
    for qos in (1, 2, 2):  # The client may use the packet id again afterwards.
        assert await client.publish_with("a", b"x", about, qos) == ReasonCode.NOT_AUTHORIZED
    assert await client.publish_with("b", b"y", about, 2) == 0
    assert [message.topic for message in broker.stored()] == ["b"]
    assert broker.node.gateway.counters.publishes_refused == 4


async def test_plugins_are_asked_about_the_topic_that_an_alias_stands_for(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["publish", "a"] = False
    client = await broker.connect_5("c")
    alias = {Property.TOPIC_ALIAS: 1}
    for topic in ("a", ""):
        assert await client.publish_with(topic, b"x", alias, 1) == ReasonCode.NOT_AUTHORIZED
    assert await client.publish_with("b", b"y", alias, 1) == 0
    assert await client.publish_with("", b"z", alias, 1) == 0
    assert [message.body for message in broker.stored()] == [b"y", b"z"]


async def test_packets_that_wait_for_the_plugins_keep_their_order_and_their_aliases(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect_5("c")
    script.may_answer.clear()
    alias = write_properties({Property.TOPIC_ALIAS: 1})
    await client.send(
        encode_publish(b"a", b"1", 1, packet_id=1, properties=alias),
        encode_publish(b"", b"2", 1, packet_id=2, properties=alias),
        encode_publish(b"b", b"3", 1, packet_id=3, properties=b"\0"),
    )
    await until(lambda: len(script.asked) == 2)
    assert script.asked == [("publish", "a"), ("publish", "b")], "all packets of one read make one question"
    script.may_answer.set()
    assert [await client.expect(PUBACK) for _ in range(3)] == [(PUBACK, number) for number in (1, 2, 3)]
    assert [message.body for message in broker.stored()] == [b"1", b"2", b"3"]


async def test_a_suback_says_which_filters_are_forbidden(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["subscribe", "a"] = False
    client = await broker.connect_5("c")
    assert await client.subscribe(("a", 1), ("b", 1)) == [ReasonCode.NOT_AUTHORIZED, ReasonCode.GRANTED_QOS_1]


@pytest.mark.parametrize(
    ("username", "reason"), [("eve", ReasonCode.BAD_USER_NAME_OR_PASSWORD), ("", ReasonCode.NOT_AUTHORIZED)]
)
async def test_a_connack_says_why_a_client_is_refused(
    start_broker: StartBroker, script: Script, username: str, reason: ReasonCode
) -> None:
    broker = await start_broker(access=plugins("Users"))
    script.users = {"eve": False, None: False}
    fields, flags = ([b"eve", b"x"], USER | PASSWORD) if username else ([], 0)
    client = await broker.connect_5("c", *fields, flags=CLEAN | flags, accepted=False)
    assert (await client.connack())[0] == reason
    assert await client.ended() == []
    assert broker.closed(reason) == 1


async def test_packets_sent_together_with_a_connect_are_parsed_by_its_protocol_version(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Users"))
    script.may_answer.clear()
    client = await broker.dial_5()
    publish = encode_publish(b"a", b"x", 1, packet_id=7, properties=write_properties(ABOUT))
    first = connect_5(CLEAN, b"c")
    await client.send(first[:1])
    await until(lambda: broker.listener("mqtt").bytes_in == 1)
    await client.send(first[1:], publish)
    await until(lambda: script.asked == [("connect", "c")])
    await client.send(encode_publish(b"a", b"y", 1, packet_id=8, properties=b"\0"))
    script.may_answer.set()
    assert (await client.connack())[0] == 0
    assert [await client.receive() for _ in range(2)] == [(PUBACK, 7), (PUBACK, 8)]
    assert [message.body for message in broker.stored()] == [b"x", b"y"]


async def test_a_resumed_session_delivers_only_messages_that_its_present_user_may_receive(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    first = await broker.connect_5("c", flags=0, about=LASTS)
    await first.subscribe(("#", 1))
    publisher = await broker.connect("publisher")
    for topic in ("secret", "plain"):
        await publisher.publish(topic, b"under way", 1)
        assert (await first.expect(PUBLISH))[2] == topic.encode()
    first.reset()
    await until(lambda: "c" in broker.away())
    for topic in ("secret", "plain"):
        await publisher.publish(topic, b"meanwhile", 1)
    script.topics["receive", "secret"] = False
    second = await broker.connect_5("c", flags=0, about=LASTS)
    assert second.session_present
    assert [await second.message() for _ in range(2)] == [
        Message("plain", b"under way", 1),
        Message("plain", b"meanwhile", 1),
    ]
    assert await second.messages() == []
    assert not broker.connection("c").session.inflight.slots


async def test_overlapping_subscriptions_skip_messages_that_the_client_may_not_receive(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["receive", "a/secret"] = False
    client = await broker.connect_5("c")
    await client.subscribe(("a/#", 1), ("a/+", 1))
    for topic in ("a/secret", "a/plain", "a/secret", "a/plain"):
        await client.publish(topic, b"x", 1)
    assert [await client.message() for _ in range(2)] == [Message("a/plain", b"x", 1)] * 2
    assert await client.messages() == []


async def test_a_client_gets_those_of_the_nodes_own_topics_that_it_may_receive(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["receive", "$SYS/broker/version"] = False
    client = await broker.connect_5("c")
    await client.subscribe(("$SYS/broker/+", 0))
    assert (await client.message()).topic == "$SYS/broker/uptime"
    await broker.decided()
    assert await client.messages() == []


@pytest.mark.parametrize("kind", ["tls", "unix"])
async def test_a_disconnect_with_its_reason_comes_last_over_every_transport(
    start_broker: StartBroker, tmp_path: Path, kind: str
) -> None:
    authority = Authority(tmp_path)
    unix = ListenerOptions(name="l", kind="unix", socket=str(tmp_path / "s"))
    listener = authority.listener("l") if kind == "tls" else unix
    broker = await start_broker(listeners=(listener,))
    context = authority.context() if kind == "tls" else None
    client = await broker.connect_5("c", listener="l", context=context)
    await client.send(PING)
    await broker.connect_5("c")
    reason, _ = await client.disconnected()
    assert reason == ReasonCode.SESSION_TAKEN_OVER
