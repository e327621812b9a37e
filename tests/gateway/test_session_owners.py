"""A session belongs to a user: nobody else gets it by its client id, and it has no filter that its user may no longer have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from penstock.gateway.auth.client_ids import ClientIdPattern
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import CONNACK, PUBLISH
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.sessions.stored_session import StoredSession
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.lasting_sessions import ENDS, end_node, resume
from tests.gateway.logins import PASSWORD, USER, login, plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.scripted_plugins import BROKEN, Script
from tests.gateway.share_members import SHARED, group_of
from tests.gateway.wire import CLEAN, Broker, Client5
from tests.waiting import until

LASTS = {Property.SESSION_EXPIRY_S: 600}
REJECTED = (CONNACK, 0, bytes((0, ConnectCode.IDENTIFIER_REJECTED)))


async def enter(broker: Broker, user: str, client_id: str = "c", *, flags: int = 0, **options: Any) -> Client5:
    """Connect as a user, with a session that lasts unless `flags` say otherwise."""
    fields = [user.encode(), b"x"] if user else []
    flags |= USER | PASSWORD if user else 0
    return await broker.connect_5(client_id, *fields, flags=flags, about=LASTS, **options)


async def refused(broker: Broker, user: str, client_id: str = "c", flags: int = 0) -> ReasonCode:
    client = await enter(broker, user, client_id, flags=flags, accepted=False)
    return ReasonCode((await client.connack())[0])


async def away(broker: Broker, client: Client5, client_id: str = "c") -> None:
    client.reset()
    await until(lambda: client_id not in broker.node.gateway.clients)


async def publish(broker: Broker, *topics: str) -> None:
    publisher = await broker.connect("publisher", b"publisher", b"x", flags=CLEAN | USER | PASSWORD)
    for topic in topics:
        await publisher.publish(topic, b"x", 1)
    publisher.reset()
    await until(lambda: "publisher" not in broker.node.gateway.clients)


async def topics(client: Client5) -> list[str]:
    """Return the topics of the messages that a client has been sent."""
    return [message.topic for message in await client.messages()]


# --- owners -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [0, CLEAN], ids=["resumes", "clean start"])
async def test_another_user_is_refused_the_client_id_of_a_session_that_waits(
    start_broker: StartBroker, script: Script, flags: int
) -> None:
    broker = await start_broker(access=plugins("Users"))
    ann = await enter(broker, "ann")
    await ann.subscribe(("a", 1))
    await away(broker, ann)
    await publish(broker, "a")
    assert await refused(broker, "eve", flags=flags) == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    assert await (await login(broker, "c", "eve", "x")).ended() == [REJECTED]
    ann = await enter(broker, "ann")
    assert ann.session_present
    assert await topics(ann) == ["a"]


@pytest.mark.parametrize("about", [{}, LASTS], ids=["ends with the connection", "lasts"])
async def test_another_user_does_not_take_over_a_connected_client(
    start_broker: StartBroker, script: Script, about: Any
) -> None:
    broker = await start_broker(access=plugins("Users"))
    ann = await broker.connect_5("c", b"ann", b"x", flags=CLEAN | USER | PASSWORD, about=about)
    await ann.subscribe(("a", 1))
    assert await refused(broker, "eve", flags=CLEAN) == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    await publish(broker, "a")
    assert await topics(ann) == ["a"]


@pytest.mark.parametrize("end", ENDS)
async def test_the_owner_of_a_session_outlives_the_node(start_broker: StartBroker, script: Script, end: str) -> None:
    broker = await start_broker(access=plugins("Users"))
    ann = await enter(broker, "ann")
    await ann.subscribe(("a", 1))
    if end == "stop":
        await away(broker, ann)
    broker.node.store.commit()
    await end_node(broker, end)
    assert await refused(broker, "eve") == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    assert (await enter(broker, "ann")).session_present


async def test_a_session_without_an_owner_is_open_and_gets_one(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users"))
    nobody = await enter(broker, "")
    await nobody.subscribe(("a", 1))
    await away(broker, nobody)
    ann = await enter(broker, "ann")
    assert ann.session_present
    await away(broker, ann)
    for user in ("", "eve"):
        assert await refused(broker, user) == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID


async def test_a_name_that_nothing_vouches_for_owns_nothing(broker: Broker) -> None:
    ann = await enter(broker, "ann")
    await away(broker, ann)
    assert (await enter(broker, "eve")).session_present, "without authentication all clients are the same"


async def test_the_client_id_of_a_session_that_is_over_is_free(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users"))
    await away(broker, await enter(broker, "ann"))
    broker.clock.advance(601_000)
    eve = await enter(broker, "eve")
    assert not eve.session_present


async def test_the_name_in_a_certificate_owns_a_session(start_broker: StartBroker, script: Script, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    devices = authority.listener("devices", client_certificates="required", username_from="cn")
    broker = await start_broker(listeners=(devices,), access=plugins("Users"))
    context = authority.context(authority.issue_client("ann.example.org", common_name="ann"))
    device = await broker.connect_5("c", listener="devices", context=context, about=LASTS)
    await away(broker, device)
    assert await refused(broker, "eve") == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    assert (await enter(broker, "ann")).session_present


def test_a_row_of_the_index_keeps_the_owner() -> None:
    for user in ("", "ann", "jörg"):
        stored = StoredSession("c")
        stored.user, stored.received = user, {7: 70, 9: 90}
        found = StoredSession.from_row("c", stored.row())
        assert (found.user, found.received, found.row()) == (user, stored.received, stored.row())


# --- the filters of a session that is resumed ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 5])
async def test_a_session_is_resumed_without_the_filters_that_are_no_longer_allowed(
    start_broker: StartBroker, script: Script, version: int
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await (broker.connect_5("c", flags=0, about=LASTS) if version == 5 else broker.connect("c", flags=0))
    await client.subscribe(("secret/#", 1), ("plain", 1), ("+/open", 1))
    publisher = await broker.connect("publisher")
    for topic in ("secret/1", "plain"):
        await publisher.publish(topic, b"under way", 1)
        assert (await client.expect(PUBLISH))[2] == topic.encode()
    client.reset()
    await until(lambda: broker.away() == ["c"])
    for topic in ("secret/2", "secret/open", "plain"):
        await publisher.publish(topic, b"meanwhile", 1)
    script.topics["subscribe", "secret/#"] = False
    with structlog.testing.capture_logs() as logs:
        client = await resume(broker, "c", version, is_present=False)
        got = sorted([(await client.message()).topic for _ in range(3)])
    assert got == ["plain", "plain", "secret/open"]
    await publisher.publish("secret/3", b"later", 1)
    await broker.decided()
    assert await client.messages() == []
    assert [line["filter"] for line in logs if line["event"] == "subscription.withdrawn"] == ["secret/#"]
    assert broker.node.gateway.counters.subscriptions_withdrawn == 1
    script.topics["subscribe", "secret/#"] = True
    client.reset()
    await until(lambda: broker.away() == ["c"])
    client = await resume(broker, "c", version, is_present=False)
    assert sorted(broker.connection("c").held_filters()) == ["+/open", "plain"], "it has ended, and does not come back"
    assert not broker.connection("c").session.inflight.slots


async def test_a_shared_filter_that_is_no_longer_allowed_gets_nothing(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect_5("c", flags=0, about=LASTS)
    await client.subscribe((SHARED, 1))
    other = await broker.connect_5("other")
    await other.subscribe((SHARED, 1))
    await away(broker, client)
    script.topics["subscribe", "a/#"] = False
    client = await broker.connect_5("c", flags=0, about=LASTS)
    await publish(broker, "a/1", "a/2")
    assert await topics(client) == []
    assert sorted(await topics(other)) == ["a/1", "a/2"]
    assert group_of(broker).visible == 0


async def test_without_an_answer_about_its_filters_a_session_is_not_resumed_and_loses_none(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect_5("c", flags=0, about=LASTS)
    await client.subscribe(("a", 1), ("b", 1))
    await away(broker, client)
    await publish(broker, "a", "b")
    script.topics["subscribe", "b"] = BROKEN
    assert await refused(broker, "") == ReasonCode.SERVER_BUSY
    script.topics["subscribe", "b"] = True
    client = await broker.connect_5("c", flags=0, about=LASTS)
    assert sorted([(await client.message()).topic for _ in range(2)]) == ["a", "b"]


async def test_a_client_that_starts_clean_is_not_asked_about_old_filters(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics"))
    client = await broker.connect_5("c", flags=0, about=LASTS)
    await client.subscribe(("a", 1))
    await away(broker, client)
    await broker.connect_5("c", flags=CLEAN, about=LASTS)
    assert script.times_asked("subscribe", "a") == 1


async def test_a_client_that_takes_over_while_the_older_one_waits_for_an_answer_gets_the_session(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Topics"))
    older = await broker.connect_5("c", flags=0, about=LASTS)
    await older.subscribe(("a", 1))
    script.topics["publish", "b"] = BROKEN
    await older.send(encode_publish(b"b", b"x", 1, packet_id=1, properties=b"\0"))
    await until(lambda: script.times_asked("publish", "b") >= 1)
    newer = await broker.connect_5("c", flags=0, about=LASTS)
    assert newer.session_present
    assert (await older.disconnected())[0] == ReasonCode.SESSION_TAKEN_OVER
    script.topics["publish", "b"] = True
    assert await newer.publish_with("b", b"x", {}, 1) == 0
    assert len(broker.stored()) == 1, "what was not acknowledged to the older one is not stored"


async def test_subscriptions_are_looked_at_again_while_a_client_is_connected(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Topics", subscriptions_ms=60_000))
    client, other = await broker.connect_5("c"), await broker.connect_5("other")
    await client.subscribe(("a", 1), ("b", 1))
    await other.subscribe(("b", 1))
    script.topics["subscribe", "a"] = BROKEN
    pass_time(broker.node.gateway, 61)
    await until(lambda: script.times_asked("subscribe", "a") == 2)
    await broker.decided()
    assert len(broker.node.gateway.clients) == 2, "no answer is no reason to end anything"
    script.topics["subscribe", "a"] = False
    pass_time(broker.node.gateway, 61)
    assert (await client.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    assert await topics(other) == []
    assert broker.node.gateway.counters.subscriptions_withdrawn == 1


# --- client ids ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "client_id", "user", "certificate", "is_allowed"),
    [
        ("*", "anything", "", "", True),
        ("%u", "ann", "ann", "", True),
        ("%u", "anna", "ann", "", False),
        ("%u", "", "", "", False),
        ("%u-*", "ann-1", "ann", "", True),
        ("%u-*", "ann", "ann", "", False),
        ("%u-*", "anna-1", "ann", "", False),
        ("%u-*", "-1", "", "", False),
        ("*-%u", "1-ann", "ann", "", True),
        ("d/*/%u/*", "d/1/ann/2", "ann", "", True),
        ("d/*/%u/*", "d/ann/2", "ann", "", False),
        ("a*a", "a", "", "", False),
        ("*b*b*", "abcb", "", "", True),
        ("*b*b*", "abc", "", "", False),
        ("%n", "press-7", "ann", "press-7", True),
        ("%n", "press-8", "ann", "press-7", False),
        ("%n", "", "ann", "", False),
        ("%u/%n", "ann/press-7", "ann", "press-7", True),
        ("%u-*", "*-1", "*", "", True),
        ("%u-*", "ann-1", "*", "", False),
        ("%u", "%n", "%n", "press-7", True),
    ],
)
def test_a_pattern_binds_client_ids_to_names(
    pattern: str, client_id: str, user: str, certificate: str, is_allowed: bool
) -> None:
    assert ClientIdPattern(pattern).matches(client_id, user, certificate) == is_allowed


@pytest.mark.parametrize("pattern", ["*", "%u", "%u-*", "*/%n/*"])
def test_client_ids_that_the_node_assigns_match_the_pattern(pattern: str) -> None:
    found = ClientIdPattern(pattern)
    client_id = found.assign("ann", "press-7")
    assert client_id is not None
    assert found.matches(client_id, "ann", "press-7")


async def test_a_client_id_is_bound_to_the_user(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users", client_id="%u-*"))
    await enter(broker, "ann", "ann-1")
    for user, client_id in (("eve", "ann-1"), ("eve", "ann-2"), ("ann", "ann"), ("", "ann-3")):
        assert await refused(broker, user, client_id) == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
    assigned = await enter(broker, "bob", "", flags=CLEAN)
    assert assigned.limits[Property.ASSIGNED_CLIENT_ID].startswith("bob-")
    assert set(broker.node.gateway.clients) == {"ann-1", assigned.limits[Property.ASSIGNED_CLIENT_ID]}


async def test_a_client_id_is_bound_to_the_certificate(start_broker: StartBroker, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    devices = authority.listener("devices", client_certificates="required")
    broker = await start_broker(listeners=(devices,), access=AccessOptions(client_id="%n"))
    context = authority.context(authority.issue_client("press-7.example.org", common_name="press-7"))
    await broker.connect_5("press-7", listener="devices", context=context)
    other = await broker.connect_5("press-8", listener="devices", context=context, accepted=False)
    assert (await other.connack())[0] == ReasonCode.CLIENT_IDENTIFIER_NOT_VALID
