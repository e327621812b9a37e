"""No answer of the plugins is neither yes nor no: nothing is acknowledged, lost, cut off for good, or held against a client."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.gateway.auth.pending import RETRY_S_MAX, RETRY_S_MIN, retry_s
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import CONNACK, PUBACK, PUBREC, SUBACK
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from tests.clock import AheadClock
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import BUSY, PASSWORD, USER, login, plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import subscribe
from tests.gateway.scripted_plugins import BROKEN, Script
from tests.gateway.share_members import group_of, member
from tests.gateway.wire import CLEAN, WILL, Broker, Message
from tests.waiting import until

LASTS = {Property.SESSION_EXPIRY_S: 600}


def outcomes(broker: Broker, action: str, *outcomes: str) -> int:
    """Return how often questions about an action had one of these outcomes."""
    found = broker.node.gateway.authorizer.questions.outcomes
    return sum(found.get((action, outcome), 0) for outcome in outcomes)


def no_answers(broker: Broker, action: str) -> int:
    """Return how often a question about an action got no answer."""
    return outcomes(broker, action, "error", "timeout", "overload")


# --- publishing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [1, 2])
async def test_a_message_without_an_answer_is_not_acknowledged_but_waits_for_one(
    start_broker: StartBroker, script: Script, qos: int
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect("c")
    script.topics["publish", "a"] = BROKEN
    await client.send(encode_publish(b"a", b"x", qos, packet_id=1), encode_publish(b"b", b"y", qos, packet_id=2))
    await until(lambda: no_answers(broker, "publish") >= 2)  # the node asks again
    assert broker.stored() == []
    script.topics["publish", "a"] = True
    kind = PUBACK if qos == 1 else PUBREC
    assert [await client.receive() for _ in range(2)] == [(kind, 1), (kind, 2)]
    assert broker.stored() == [Message("a", b"x", qos), Message("b", b"y", qos)]


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_message_is_not_acknowledged_while_the_plugins_take_too_long(
    start_broker: StartBroker, script: Script, blocks: bool
) -> None:
    broker = await start_broker(access=plugins("Topics", plugin_timeout_ms=50), clock=AheadClock())
    client = await broker.connect("c")
    script.blocks = blocks
    script.may_answer.clear()
    await client.send(encode_publish(b"a", b"x", 1, packet_id=1))
    await until(lambda: no_answers(broker, "publish") >= 1)
    assert broker.stored() == []
    script.may_answer.set()
    assert await client.receive() == (PUBACK, 1)
    assert broker.stored() == [Message("a", b"x", 1)]


async def test_a_message_is_not_acknowledged_while_too_many_questions_wait(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", questions_max=1))
    first, second = await broker.connect("first"), await broker.connect("second")
    script.may_answer.clear()
    await first.send(encode_publish(b"a", b"x", 1, packet_id=1))
    await until(lambda: script.asked == [("publish", "a")])
    await second.send(encode_publish(b"b", b"y", 1, packet_id=1))
    await until(lambda: outcomes(broker, "publish", "overload") >= 1)
    script.may_answer.set()
    assert await first.receive() == (PUBACK, 1)
    assert await second.receive() == (PUBACK, 1)
    assert broker.stored() == [Message("a", b"x", 1), Message("b", b"y", 1)]


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_connection_closes_if_the_answer_takes_too_long_and_has_no_acknowledgement(
    start_broker: StartBroker, script: Script, qos: int
) -> None:
    broker = await start_broker(access=plugins("Topics", unanswered_ms=0))
    script.topics["publish", "a"] = BROKEN
    old, new = await broker.connect("old"), await broker.connect_5("new")
    for client in (old, new):
        properties = b"" if client is old else b"\0"
        await client.send(encode_publish(b"a", b"x", qos, packet_id=1 if qos else 0, properties=properties))
    assert await old.ended() == []
    assert await new.disconnected() == (ReasonCode.SERVER_BUSY, [])
    assert broker.stored() == []
    assert broker.closed(ReasonCode.SERVER_BUSY) == 2


async def test_a_message_waits_as_long_as_the_options_say(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", unanswered_ms=60_000))
    script.topics["publish", "a"] = BROKEN
    client = await broker.connect_5("c", keep_alive_s=1)
    await client.send(encode_publish(b"a", b"x", 1, packet_id=1, properties=b"\0"))
    await until(lambda: no_answers(broker, "publish") >= 1)
    pass_time(broker.node.gateway, 59)
    assert "c" in broker.node.gateway.clients
    pass_time(broker.node.gateway, 2)
    assert await client.disconnected() == (ReasonCode.SERVER_BUSY, [])


async def test_a_no_of_one_plugin_counts_although_another_gives_no_answer(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", "MoreTopics"))
    script.topics |= {("publish", "a"): BROKEN, ("publish", "a again"): False}
    client = await broker.connect_5("c")
    assert await client.publish_with("a", b"x", {}, 1) == ReasonCode.NOT_AUTHORIZED


async def test_a_question_that_was_given_up_is_not_asked_any_more(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", plugin_timeout_ms=60_000, unanswered_ms=0))
    blocking, late = await broker.connect("blocking"), await broker.connect("late")
    script.blocks = True
    script.may_answer.clear()
    await blocking.send(encode_publish(b"a", b"x", 1, packet_id=1))
    await until(lambda: script.asked == [("publish", "a")])
    await late.send(encode_publish(b"b", b"x", 1, packet_id=1))
    await until(lambda: broker.node.gateway.authorizer.questions.waiting == 2)
    pass_time(broker.node.gateway, 62)
    assert await late.ended() == []
    script.may_answer.set()
    other = await broker.connect("other")
    await other.publish("c", b"x", 1)
    assert script.asked == [("publish", "a"), ("publish", "c")]


@pytest.mark.parametrize(("waited_s", "wanted_s"), [(0, RETRY_S_MIN), (1, 1), (3, 3), (60, RETRY_S_MAX)])
def test_the_plugins_are_asked_again_at_intervals_that_double(waited_s: float, wanted_s: float) -> None:
    assert retry_s(waited_s) == wanted_s


# --- subscribing and receiving ------------------------------------------------------------------------------------------


async def test_a_subscribe_waits_for_an_answer_about_each_filter(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect("c")
    script.topics |= {("subscribe", "a"): BROKEN, ("subscribe", "b"): False}
    await client.send(subscribe(1, (b"a", 1), (b"b", 1)))
    await until(lambda: no_answers(broker, "subscribe") >= 2)
    assert broker.node.gateway.counters.subscriptions == 0
    script.topics["subscribe", "a"] = True
    assert (await client.expect(SUBACK))[2] == b"\0\1\1\x80"


@pytest.mark.parametrize("qos", [0, 1])
async def test_a_delivery_without_an_answer_waits_at_its_cursor(start_broker: StartBroker, script: Script, qos: int) -> None:
    broker = await start_broker(access=plugins("Topics"))
    watcher, publisher = await broker.connect("watcher"), await broker.connect("publisher")
    await watcher.subscribe(("a/#", qos), ("b", qos))
    script.topics["receive", "a/1"] = BROKEN
    sent = [Message(f"a/{number % 3}", b"%d" % number, qos) for number in range(9)]
    for message in sent:
        await publisher.publish(message.topic, message.body, 1)
    await publisher.publish("b", b"other", 1)
    await until(lambda: no_answers(broker, "receive") >= 2)
    script.topics["receive", "a/1"] = True
    got = [await watcher.message() for _ in range(10)]
    assert [message for message in got if message.topic != "b"] == sent
    assert Message("b", b"other", qos) in got


async def test_retained_messages_without_an_answer_wait(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    publisher = await broker.connect("publisher")
    for topic in ("a", "b"):
        await publisher.publish(topic, b"x", 1, retain=True)
    script.topics["receive", "a"] = BROKEN
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("#", 0))
    await until(lambda: no_answers(broker, "receive") >= 2)
    script.topics["receive", "a"] = True
    assert sorted([await watcher.message() for _ in range(2)]) == [Message(each, b"x", retain=True) for each in "ab"]


async def test_what_an_earlier_connection_left_waits_for_an_answer(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    first, publisher = await broker.connect("c", flags=0), await broker.connect("publisher")
    await first.subscribe(("a", 1))
    await publisher.publish("a", b"under way", 1)
    assert (await first.receive())[4] == b"under way"
    first.reset()
    await until(lambda: broker.away() == ["c"])
    script.topics["receive", "a"] = BROKEN
    second = await broker.connect("c", flags=0, accepted=False)
    assert await second.receive() == (CONNACK, 0, b"\1\0")
    await until(lambda: no_answers(broker, "receive") >= 2)
    script.topics["receive", "a"] = True
    assert await second.message() == Message("a", b"under way", 1)


async def test_other_members_of_a_group_get_what_waits_for_an_answer_about_one(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    undecided = await member(broker, "undecided")
    publisher = await broker.connect("publisher")
    script.topics["receive", "a/1"] = BROKEN
    await publisher.publish("a/1", b"x", 1)
    await until(lambda: no_answers(broker, "receive") >= 2)
    script.topics["receive", "a/1"] = True  # The other member asks for itself.
    other = await member(broker, "other")
    taken = asyncio.create_task(other.message())
    taken_here = asyncio.create_task(undecided.message())
    done, left = await asyncio.wait({taken, taken_here}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert [task.result().body for task in done] == [b"x"]
    for task in left:
        task.cancel()


async def test_a_shared_message_without_an_answer_uses_up_no_attempt(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    only = await member(broker, "only")
    publisher = await broker.connect("publisher")
    script.topics["receive", "a/1"] = BROKEN
    await publisher.publish("a/1", b"x", 1)
    await until(lambda: no_answers(broker, "receive") >= 1)
    await until(lambda: group_of(broker).visible == 1)  # It is back in the group, for any other member.
    script.topics["receive", "a/1"] = True
    assert (await only.message()).body == b"x"


async def test_the_nodes_own_topics_wait_for_an_answer(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["receive", "$SYS/broker/version"] = BROKEN
    client = await broker.connect("c")
    await client.subscribe(("$SYS/broker/version", 0))
    await until(lambda: no_answers(broker, "receive") >= 1)
    for _ in range(5):
        pass_time(broker.node.gateway, 10)
    assert no_answers(broker, "receive") == 1, "one question at a time"
    script.topics["receive", "$SYS/broker/version"] = True
    assert (await client.message()).topic == "$SYS/broker/version"


# --- connecting ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("user", ["ann", "bob"], ids=["raises", "raises beside a yes"])
async def test_a_client_without_an_answer_is_told_that_the_server_is_busy(
    start_broker: StartBroker, script: Script, user: str
) -> None:
    broker = await start_broker(access=plugins("Users", "MoreUsers"))
    script.users = {"ann": BROKEN, "bob": True, "bob again": BROKEN}
    assert await (await login(broker, "c", user, "x")).ended() == [BUSY]
    client = await broker.connect_5("d", user.encode(), b"x", flags=CLEAN | USER | PASSWORD, accepted=False)
    assert (await client.connack())[0] == ReasonCode.SERVER_BUSY
    assert broker.closed(ReasonCode.SERVER_BUSY) == 2
    assert outcomes(broker, "connect", "error") == 2


@pytest.mark.parametrize("blocks", [False, True])
async def test_a_client_is_told_that_the_server_is_busy_if_the_plugins_take_too_long(
    start_broker: StartBroker, script: Script, blocks: bool
) -> None:
    broker = await start_broker(access=plugins("Users", plugin_timeout_ms=50), clock=AheadClock())
    script.blocks = blocks
    script.may_answer.clear()
    client = await login(broker, "late", "ann", "secret")
    assert await client.ended() == [BUSY]
    script.may_answer.set()
    assert outcomes(broker, "connect", "timeout") == 1


async def test_a_client_whose_will_gets_no_answer_is_told_that_the_server_is_busy(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["publish", "gone"] = BROKEN
    client = await broker.connect("a", b"gone", b"x", flags=CLEAN | WILL, accepted=False)
    assert await client.ended() == [BUSY]
    script.topics["publish", "gone"] = True
    client = await broker.connect("a", b"gone", b"x", flags=CLEAN | WILL, accepted=False)
    assert await client.receive() == (CONNACK, 0, b"\0\0")


async def test_being_busy_counts_as_no_error_of_the_source(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users"))
    struck: list[Any] = []
    broker.node.gateway._close_log._strike = lambda *names: struck.append(names)
    script.users["ann"] = BROKEN
    await (await login(broker, "c", "ann", "x")).ended()
    assert not struck
    script.users["ann"] = False
    await (await login(broker, "c", "ann", "x")).ended()
    assert len(struck) == 1
