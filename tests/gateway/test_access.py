"""Access control with amqtt's plugins: connecting, publishing, subscribing and receiving, also before plugins have answered."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.auth.authorizer import Authorizer
from penstock.gateway.auth.permissions import TOPICS_ASKED_MAX
from penstock.gateway.auth.plugin_host import PluginsUnavailable
from penstock.gateway.options import AccessOptions, ListenerOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import CONNACK, PINGRESP, PUBACK, PUBLISH, PUBREC
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.node.errors import ListenerExposed
from penstock.store.options import HostPort
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.logins import ANONYMOUS, BAD_PASSWORD, PASSWORD, REFUSED, SCRIPTED, USER, login, plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import connect, subscribe
from tests.gateway.scripted_plugins import BROKEN, Script
from tests.gateway.wire import CLEAN, PING, WILL, Broker, Message
from tests.waiting import WAIT_S_MAX, until

# --- anonymous clients --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "anonymous", "is_taken"),
    [
        ("127.0.0.1", "loopback", True),
        ("0.0.0.0", "always", True),
        ("127.0.0.1", "never", False),
    ],
)
async def test_anonymous_clients_are_accepted_where_the_options_allow_them(
    start_broker: StartBroker, host: str, anonymous: Any, is_taken: bool
) -> None:
    listener = ListenerOptions(name="l", listen=HostPort(host, 0))
    broker = await start_broker(listeners=(listener,), access=AccessOptions(anonymous=anonymous))
    client = await login(broker, "c", listener="l")
    assert await client.receive() == ((CONNACK, 0, b"\0\0") if is_taken else REFUSED)
    assert broker.closed(ReasonCode.NOT_AUTHORIZED) == (not is_taken)


async def test_a_node_with_anonymous_clients_opens_nothing_beyond_loopback(start_broker: StartBroker) -> None:
    with pytest.raises(ListenerExposed, match=r'listener l .*mqtt\.access\.anonymous = "always"'):
        await start_broker(listeners=(ListenerOptions(name="l", listen=HostPort("0.0.0.0", 0)),))


async def test_a_user_name_that_no_plugin_checks_does_not_authenticate(start_broker: StartBroker) -> None:
    broker = await start_broker(access=AccessOptions(anonymous="never"))
    client = await login(broker, "c", "admin", "secret")
    assert await client.receive() == REFUSED


async def test_a_client_on_a_unix_socket_counts_as_local(start_broker: StartBroker, tmp_path: Path) -> None:
    broker = await start_broker(listeners=(ListenerOptions(name="l", kind="unix", socket=str(tmp_path / "s")),))
    await broker.connect("c", listener="l")


async def test_a_client_with_a_certificate_is_not_anonymous(start_broker: StartBroker, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    listener = authority.listener("l", client_certificates="optional", username_from="cn", listen=HostPort("0.0.0.0", 0))
    broker = await start_broker(listeners=(listener,))
    context = authority.context(authority.issue_client(common_name="device-7"))
    await broker.connect("known", listener="l", context=context)
    client = await login(broker, "unknown", listener="l", context=authority.context())
    assert await client.receive() == REFUSED


# --- amqtt's rules ------------------------------------------------------------------------------------------------------


async def test_a_client_is_accepted_if_a_plugin_accepts_it_and_none_refuses(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users", "MoreUsers"))
    counts: Counter[tuple[str, str]] = Counter()
    for first, second, is_taken in (
        (True, None, True),
        (None, True, True),
        (True, True, True),
        (True, False, False),
        (False, True, False),
        (False, None, False),
        (None, None, False),
        (BROKEN, False, False),
        (False, BROKEN, False),
    ):
        script.users |= {"ann": first, "ann again": second}
        client = await login(broker, "c", "ann", "secret")
        assert await client.receive() == ((CONNACK, 0, b"\0\0") if is_taken else BAD_PASSWORD), (first, second)
        counts["connect", "allowed" if is_taken else "denied"] += 1
        assert broker.node.gateway.authorizer.questions.outcomes == counts, (first, second)


async def test_a_topic_plugin_that_has_no_opinion_is_ignored(start_broker: StartBroker, script: Script) -> None:
    """Yakifo/amqtt, docs/plugins/custom_plugins.md: "`None` will be ignored", and one plugin at least must return True."""
    broker = await start_broker(access=plugins("Topics", "MoreTopics"))
    for number, (first, second, may) in enumerate(
        ((True, None, True), (None, True, True), (False, None, False), (None, False, False), (None, None, False))
    ):
        a, b, c, d = (f"{name}/{number}" for name in "abcd")
        for action, topic in (("publish", a), ("subscribe", b), ("receive", c)):
            script.topics |= {(action, topic): first, (action, f"{topic} again"): second}
        client = await broker.connect_5("c")
        answer = await client.publish_with(a, b"x", {}, 1)
        assert answer == (ReasonCode.SUCCESS if may else ReasonCode.NOT_AUTHORIZED), number
        codes = await client.subscribe((b, 1), (c, 1), (d, 1))
        assert codes == [1 if may else ReasonCode.NOT_AUTHORIZED, 1, 1], number
        for topic in (c, d):
            await client.publish(topic, b"x", 1)
        assert [(await client.message()).topic for _ in range(2 if may else 1)] == ([c, d] if may else [d]), number


@pytest.mark.parametrize("answer", [True, False])
async def test_only_the_answer_true_allows_a_topic(start_broker: StartBroker, script: Script, answer: Any) -> None:
    broker = await start_broker(access=plugins("Users", "Topics"))
    script.topics |= {("publish", "a"): answer, ("subscribe", "b"): answer}
    client = await broker.connect("c")
    await client.publish("a", b"x", 1)
    assert await client.subscribe(("b", 1), ("c", 1)) == [1 if answer is True else 0x80, 1]
    assert broker.stored() == ([Message("a", b"x", 1)] if answer is True else [])


async def test_plugins_get_the_session_fields_that_amqtt_has(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users"))
    fields = (b"will/topic", b"gone", b"ann", b"secret")
    client = await broker.connect("c-1", *fields, flags=CLEAN | WILL | USER | PASSWORD, keep_alive_s=30)
    (session,) = script.sessions
    assert (session.client_id, session.username, session.password) == ("c-1", "ann", "secret")
    assert (session.remote_address, session.remote_port) == client.writer.get_extra_info("sockname")
    assert (session.will_topic, session.will_message, session.will_qos) == ("will/topic", b"gone", 0)
    assert (session.keep_alive, session.clean_session, session.ssl_object) == (30, True, None)


async def test_plugins_get_the_assigned_id_of_a_client_that_sent_none(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users", "Topics"))
    await broker.connect("")
    (client_id,) = broker.node.gateway.clients
    await until(lambda: script.told == [("connected", client_id)])
    assert script.sessions[0].client_id == client_id


async def test_plugins_are_told_of_clients_that_connect_and_disconnect(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users"))
    client = await broker.connect("c")
    script.users["eve"] = False
    await (await login(broker, "eve", "eve", "x")).ended()
    client.reset()
    await until(lambda: len(script.told) == 2)
    assert script.told == [("connected", "c"), ("disconnected", "c")]


async def test_a_plugin_can_publish(start_broker: StartBroker) -> None:
    broker = await start_broker(access=plugins("Herald", ANONYMOUS))
    client = await broker.connect("first")
    await client.subscribe(("#", 1))
    assert await client.message() == Message("news", b"started", 1, retain=True)
    await broker.connect("second")
    while (arrival := await client.message()) == Message("arrivals", b"first"):
        pass  # The plugin also reports this client's own arrival, before or after it subscribes.
    assert arrival == Message("arrivals", b"first,second")


@pytest.mark.parametrize(
    ("tables", "complaint"),
    [
        ({"no.such.Plugin": {}}, r"no\.such\.Plugin"),
        ({f"{SCRIPTED}.Script": {}}, r"Script is not a subclass of 'BasePlugin'"),
        ({f"{SCRIPTED}.Choosy": {}}, "secret"),
        ({f"{SCRIPTED}.Choosy": {"secret": 5}}, "secret"),
        ({f"{SCRIPTED}.Choosy": {"secret": "x", "colour": "red"}}, "colour"),
        ({"amqtt.plugins.authentication.FileAuthPlugin": {"password_file": "/none"}}, "/none"),
    ],
)
async def test_a_plugin_that_cannot_be_loaded_is_named_and_prevents_the_start(
    start_broker: StartBroker, tables: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(PluginsUnavailable, match=complaint):
        await start_broker(access=AccessOptions(plugins=tables))


# --- denied actions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_denied_message_is_acknowledged_and_dropped(start_broker: StartBroker, script: Script, qos: int) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["publish", "a"] = False
    client = await broker.connect("c")
    await client.publish("a", b"x", qos, retain=True)
    await client.publish("b", b"y", qos, packet_id=2)
    assert await client.drained() == []
    assert broker.stored() == [Message("b", b"y", qos)]
    assert broker.node.gateway.authorizer.questions.outcomes == {("publish", "denied"): 1, ("publish", "allowed"): 1}


@pytest.mark.parametrize("qos", [0, 1, 2])
async def test_a_denied_message_closes_the_connection_if_the_options_say_so(
    start_broker: StartBroker, script: Script, qos: int
) -> None:
    broker = await start_broker(access=plugins("Topics", denied_publish="close"))
    script.topics["publish", "a"] = False
    client = await broker.connect("c")
    await client.send(encode_publish(b"b", b"y", 1, packet_id=1), encode_publish(b"a", b"x", qos, packet_id=2 if qos else 0))
    assert await client.ended() == [(PUBACK, 1)]
    assert broker.stored() == [Message("b", b"y", 1)]
    assert broker.closed(ReasonCode.NOT_AUTHORIZED) == 1


async def test_a_client_that_may_not_publish_its_will_may_not_connect(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["publish", "forbidden"] = False
    await broker.connect("a", b"allowed", b"x", flags=CLEAN | WILL)
    client = await broker.connect("b", b"forbidden", b"x", flags=CLEAN | WILL, accepted=False)
    assert await client.ended() == [REFUSED]


@pytest.mark.parametrize(
    ("action", "sent", "asked"),
    [
        ("subscribe", "$share/group/a/+", "a/+"),
        ("publish", "$delayed/60/a/b", "a/b"),
        ("publish", "$delayed/60", "60"),
        ("publish", "a/$delayed/b", "a/$delayed/b"),
    ],
)
async def test_plugins_are_asked_about_the_topic_without_its_share_or_delay_prefix(
    start_broker: StartBroker, script: Script, action: str, sent: str, asked: str
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect("c")
    if action == "publish":
        await client.send(encode_publish(sent.encode(), b"x"))
        await until(lambda: bool(script.asked))
    else:
        await client.subscribe((sent, 1))
    assert script.asked == [(action, asked)]


# --- receiving ----------------------------------------------------------------------------------------------------------


async def test_a_client_gets_all_messages_except_those_that_it_may_not_receive(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    script.topics["receive", "secret"] = False
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("#", 1))
    publisher = await broker.connect("publisher")
    expected = []
    for number in range(50):
        topic = ("secret", "a", "b")[number % 3]
        await publisher.publish(topic, b"%d" % number, 1)
        if topic != "secret":
            expected.append(Message(topic, b"%d" % number, 1))
    assert [await watcher.message() for _ in expected] == expected
    assert await watcher.drained() == []
    assert script.times_asked("receive", "secret") == 1


async def test_a_client_gets_all_retained_messages_except_those_that_it_may_not_receive(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    publisher = await broker.connect("publisher")
    topics = [f"t/{number:03}" for number in range(100)]
    for topic in topics:
        await publisher.publish(topic, b"x", 1, retain=True)
    script.topics |= {("receive", topic): False for topic in topics[::3]}
    watcher = await broker.connect("watcher")
    await watcher.subscribe(("#", 0))
    expected = [Message(topic, b"x", 0, retain=True) for number, topic in enumerate(topics) if number % 3]
    assert [await watcher.message() for _ in expected] == expected
    await broker.decided()
    assert await watcher.drained() == []


async def test_messages_that_arrive_before_the_plugins_answer_are_delivered_afterwards_in_order(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    watcher, other = await broker.connect("watcher"), await broker.connect("other")
    for topic in ("a/0", "a/1"):
        await other.publish(topic, b"", 1)
    await watcher.subscribe(("a/#", 1))
    script.may_answer.clear()
    await other.publish("a/1", b"first", 1)
    await other.publish("a/1", b"second", 1)
    await other.publish("a/0", b"third", 1)
    await until(lambda: script.times_asked("receive", "a/1") == 1)
    assert await watcher.drained() == []
    script.may_answer.set()
    got = [await watcher.message() for _ in range(3)]
    assert [(message.topic, message.body) for message in got] == [("a/1", b"first"), ("a/1", b"second"), ("a/0", b"third")]


# --- cached answers -----------------------------------------------------------------------------------------------------


async def test_plugins_are_asked_once_for_each_client_topic_and_action(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    clients = [await broker.connect(name) for name in "ab"]
    for client in clients:
        await client.subscribe(("t", 0))
        for _ in range(20):
            await client.publish("t", b"x", 1)
    await broker.decided()
    assert [script.times_asked(action, "t") for action in ("publish", "subscribe", "receive")] == [2, 2, 2]


async def test_a_withdrawn_permission_is_denied_once_the_cached_answer_has_expired(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Users", "Topics", decision_ms=60_000))
    watcher, publisher = await broker.connect("watcher"), await broker.connect("publisher")
    await watcher.subscribe(("a", 1))
    await publisher.publish("a", b"1", 1)
    assert await watcher.message() == Message("a", b"1", 1)
    script.topics["receive", "a"] = False
    await publisher.publish("a", b"2", 1)
    assert await watcher.message() == Message("a", b"2", 1), "the cached answer is valid for a minute"
    pass_time(broker.node.gateway, 61)
    await publisher.publish("a", b"3", 1)
    await broker.decided()
    assert await watcher.drained() == []
    script.topics["publish", "a"] = False
    pass_time(broker.node.gateway, 61)
    await publisher.publish("a", b"4", 1)
    assert [message.body for message in broker.stored()] == [b"1", b"2", b"3"]


async def test_the_number_of_cached_answers_per_client_is_bounded(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", decisions_per_client_max=TOPICS_ASKED_MAX))
    client = await broker.connect("c")
    for number in range(100):
        await client.publish(f"t/{number}", b"x", 1)
        assert broker.node.gateway.authorizer.decisions.kept <= TOPICS_ASKED_MAX
    assert len(broker.stored()) == 100
    guard = broker.connection("c").permissions
    assert guard is not None
    client.reset()
    await until(lambda: broker.node.gateway.authorizer.decisions.kept == 0)


async def test_the_number_of_cached_answers_of_all_clients_is_bounded(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", decisions_max=50))
    clients = [await broker.connect(f"c{number}") for number in range(10)]
    for number in range(30):
        for client in clients:
            await client.publish(f"t/{number}", b"x", 1)
            assert broker.node.gateway.authorizer.decisions.kept <= 50
    assert len(broker.stored()) == 300


# --- while plugins have not answered ------------------------------------------------------------------------------------


async def test_packets_after_one_that_waits_for_an_answer_keep_their_order(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client, other = await broker.connect("c"), await broker.connect("other")
    await client.publish("known", b"0", 1)
    script.may_answer.clear()
    await client.send(
        encode_publish(b"known", b"1", 1, packet_id=1),
        encode_publish(b"new", b"2", 1, packet_id=2),
        encode_publish(b"known", b"3", 1, packet_id=3),
        PING,
    )
    await client.send(encode_publish(b"known", b"4", 2, packet_id=4))
    assert await client.receive() == (PUBACK, 1)
    assert await other.drained() == []
    assert [message.body for message in broker.stored()] == [b"0", b"1"]
    script.may_answer.set()
    answers = [await client.receive() for _ in range(4)]
    assert [answer for answer in answers if answer[0] != PINGRESP] == [(PUBACK, 2), (PUBACK, 3), (PUBREC, 4)]
    assert [message.body for message in broker.stored()] == [b"0", b"1", b"2", b"3", b"4"]


async def test_publishes_read_before_an_answer_are_stored_after_the_one_that_waits_for_it(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect("c")
    await client.publish("known", b"0", 1)
    script.may_answer.clear()
    run = b"".join(encode_publish(b"known", b"%d" % number, 1, packet_id=number) for number in range(2, 10))
    await client.send(encode_publish(b"new", b"1", 1, packet_id=1) + run[:5])
    await until(lambda: broker.node.gateway.authorizer.questions.waiting == 1)
    broker.connection("c").data_received(run[5:])  # a transport of the event loop may have read these bytes already
    script.may_answer.set()
    assert [await client.receive() for _ in range(9)] == [(PUBACK, number) for number in range(1, 10)]
    assert [message.body for message in broker.stored()] == [b"%d" % number for number in range(10)]


async def test_packets_sent_together_with_a_connect_are_handled_once_plugins_have_accepted_it(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Users", "Topics"))
    script.may_answer.clear()
    client = await broker.dial()
    publish = encode_publish(b"a", b"x", 1, packet_id=7)
    await client.send(connect(CLEAN, b"c"), subscribe(1, (b"a", 1)), publish, PING)
    await until(lambda: script.asked == [("connect", "c")])
    assert broker.node.gateway.clients == {}
    script.may_answer.set()
    kinds = [(await client.receive())[0] for _ in range(5)]
    assert kinds[0] == CONNACK
    assert sorted(kinds) == sorted([CONNACK, 9, PINGRESP, PUBACK, PUBLISH])


async def test_a_client_that_disconnects_before_the_plugins_answer_leaves_nothing(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Users", "Topics"))
    thinking = await broker.connect("thinking")
    script.may_answer.clear()
    connecting = await login(broker, "connecting", "ann", "secret")
    await thinking.send(encode_publish(b"new", b"x"))
    authorizer = broker.node.gateway.authorizer
    await until(lambda: (authorizer.questions.waiting, authorizer.logins.queue.running) == (1, 1))
    connecting.reset()
    broker.connection("thinking").close("the test says so", ReasonCode.ADMINISTRATIVE_ACTION)
    assert await thinking.ended() == []
    script.may_answer.set()
    await until(
        lambda: not (broker.node.gateway.connections or authorizer.questions.waiting or authorizer.logins.queue.running)
    )
    assert broker.stored() == []
    assert set(broker.held_resources().values()) == {0}


async def test_a_plugin_that_blocks_delays_no_other_client(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", "Sleeper"))
    good = await broker.connect("good")
    await good.publish("known", b"", 1)
    script.blocks = True
    script.may_answer.clear()
    waiting = await broker.connect("waiting")
    await waiting.send(encode_publish(b"new", b"x", 1, packet_id=1))
    await until(lambda: script.times_asked("publish", "new") == 1)
    for number in range(100):
        await good.publish("known", b"%d" % number, 1)
    assert len(broker.stored()) == 101
    script.may_answer.set()
    assert await waiting.expect(PUBACK) == (PUBACK, 1)


async def test_a_plugin_that_blocks_does_not_prevent_the_node_from_stopping(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users", plugin_timeout_ms=100))
    script.blocks = True
    script.may_answer.clear()
    await login(broker, "c", "ann", "secret")
    await until(lambda: script.asked == [("connect", "c")])
    async with asyncio.timeout(WAIT_S_MAX / 2):
        await broker.node.gateway.stop()
    script.may_answer.set()


async def test_time_in_which_the_node_does_not_read_does_not_count_as_silence(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Users", "Topics"), connect_timeout_ms=1000)
    client = await broker.connect("c", keep_alive_s=2)
    script.may_answer.clear()
    connecting = await login(broker, "connecting", "ann", "secret")
    await client.send(encode_publish(b"new", b"x", 1, packet_id=1))
    authorizer = broker.node.gateway.authorizer
    await until(lambda: (authorizer.questions.waiting, authorizer.logins.queue.running) == (1, 1))
    for _ in range(4):
        pass_time(broker.node.gateway, 1.2)
    script.may_answer.set()
    assert await connecting.receive() == (CONNACK, 0, b"\0\0")
    assert await client.receive() == (PUBACK, 1)
    pass_time(broker.node.gateway, 4)
    assert await client.ended() == []


async def test_allowed_messages_are_stored_in_order_however_the_stream_is_cut(
    start_broker: StartBroker, script: Script
) -> None:
    chance = random.Random(7)
    broker = await start_broker(access=plugins("Topics"))
    topics = [f"t/{number}" for number in range(60)]
    script.topics |= {("publish", topic): False for topic in chance.sample(topics, 20)}
    sent = [Message(chance.choice(topics), b"%d" % number, chance.randrange(2)) for number in range(400)]
    stream = b"".join(
        encode_publish(message.topic.encode(), message.body, message.qos, packet_id=number + 1 if message.qos else 0)
        for number, message in enumerate(sent)
    )
    client = await broker.connect("c")
    at = 0
    while at < len(stream):
        size = chance.randrange(1, 400)
        await client.send(stream[at : at + size])
        await asyncio.sleep(0)
        at += size
    for number, message in enumerate(sent):
        if message.qos:
            assert await client.receive() == (PUBACK, number + 1)
    await client.drained()
    assert broker.stored() == [message for message in sent if script.topics.get(("publish", message.topic), True)]


async def test_a_publish_with_a_cached_answer_does_not_ask_plugins_again(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect("c")
    await client.publish("a", b"", 1)
    asked = len(script.asked)
    await client.send(encode_publish(b"a", b"x" * 64) * 1000)
    await client.drained()
    assert (len(broker.stored()), len(script.asked)) == (1001, asked)


async def test_without_plugins_there_are_no_permissions_to_check_and_no_thread(broker: Broker) -> None:
    await broker.connect("c")
    authorizer: Authorizer = broker.node.gateway.authorizer
    assert broker.connection("c").permissions is None
    assert (authorizer._plugins, authorizer.questions.outcomes) == (None, {})
