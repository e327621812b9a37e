"""Stored subscriptions that are no longer allowed: nothing forbidden is delivered, and nothing allowed is lost."""

from __future__ import annotations

from pathlib import Path

import pytest
from pwdlib.hashers.argon2 import Argon2Hasher

from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBREC
from penstock.store.queues.queues import ROOT
from tests.gateway.brokers import StartBroker
from tests.gateway.lasting_sessions import LASTS, each_end, end_node, leave
from tests.gateway.logins import PASSWORD, USER
from tests.gateway.wire import CLEAN, Broker, Client5
from tests.waiting import until

QUICK = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1)
"""Hashes that are cheap enough for tests."""

WIDE = """
[[rule]]
allow = ["all"]
users = ["sensor"]
topics = ["#"]

[[rule]]
allow = ["subscribe"]
users = ["viewer", "other"]
topics = ["plant/#", "mixed"]

[[rule]]
allow = ["consume"]
groups = ["g"]
"""
NARROW = WIDE.replace('topics = ["plant/#", "mixed"]', 'topics = ["mixed"]')
WITHOUT_SECRETS = '[[rule]]\ndeny = ["receive"]\ntopics = ["plant/secret"]\n' + WIDE

SHARED = "$share/g/plant/#"


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "access.toml"
    path.write_text(WIDE)
    return path


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    path.write_text("".join(f"{name}:{QUICK.hash('secret')}\n" for name in ("viewer", "other", "sensor")))
    return path


@pytest.fixture
async def broker(start_broker: StartBroker, rules: Path, passwords: Path) -> Broker:
    return await start_broker(access_file=str(rules), control={"password_file": str(passwords)})


def write(path: Path, text: str) -> None:
    path.write_text(text)


def read(path: Path) -> str:
    return path.read_text()


async def enter(broker: Broker, user: str, *, flags: int = 0) -> Client5:
    """Connect as a user, with a session that lasts unless `flags` say otherwise."""
    return await broker.connect_5(user, user.encode(), b"secret", flags=flags | USER | PASSWORD, about=LASTS)


async def publish(broker: Broker, *topics: str, retain: bool = False) -> None:
    sensor = await enter(broker, "sensor", flags=CLEAN)
    for topic in topics:
        await sensor.publish(topic, topic.encode(), 1, retain=retain)
    await leave(sensor)


async def topics_of(client: Client5) -> list[str]:
    """Return the topics of the messages that a client is sent, without acknowledging them."""
    return [message.topic for message in await client.messages()]


async def resumed(broker: Broker, user: str) -> Client5:
    client = await enter(broker, user)
    assert client.session_present
    return client


async def curtailed(broker: Broker, user: str) -> Client5:
    """Connect as a user whose session has lost a subscription: the client is told that it must subscribe again."""
    client = await enter(broker, user)
    assert not client.session_present
    return client


def queues(broker: Broker) -> set[str]:
    """Return the filters of the light queues that a stored session or a group needs."""
    return {queue.filter for queue in broker.node.store.queues if queue.owners - {ROOT}}


@each_end
async def test_what_is_no_longer_allowed_ends_when_the_client_returns_to_another_node(
    broker: Broker, rules: Path, end: str
) -> None:
    viewer = await enter(broker, "viewer")
    await viewer.subscribe(("plant/#", 1), ("mixed", 1), (SHARED, 1))
    await leave(viewer)
    await publish(broker, "plant/1", "mixed", "plant/2")
    write(rules, NARROW)
    await end_node(broker, end)
    await publish(broker, "plant/3", "mixed")
    viewer = await curtailed(broker, "viewer")
    assert await topics_of(viewer) == ["mixed", "mixed"]
    assert sorted(broker.connection("viewer").held_filters()) == ["mixed"]
    assert queues(broker) == {"mixed"}, "nobody needs the others, and they take no more room"
    await leave(viewer)
    write(rules, WIDE)
    await end_node(broker, end)
    viewer = await curtailed(broker, "viewer")
    await publish(broker, "plant/4")
    assert await topics_of(viewer) == ["mixed", "mixed"], "what has ended does not come back"
    assert await viewer.subscribe(("mixed", 1), ("plant/#", 1)) == [1, 1]
    await publish(broker, "plant/5")
    assert (await topics_of(viewer)) == ["plant/5"], "the client has subscribed again, as it does without a session"
    await leave(viewer)
    await end_node(broker, end)
    await resumed(broker, "viewer")


async def test_a_client_whose_right_is_taken_away_while_it_is_connected_is_told_to_subscribe_again(
    broker: Broker, rules: Path
) -> None:
    viewer = await enter(broker, "viewer")
    await viewer.subscribe(("plant/#", 1), ("mixed", 1))
    write(rules, NARROW)
    broker.node.reload()
    await viewer.disconnected()
    write(rules, WIDE)
    broker.node.reload()
    viewer = await curtailed(broker, "viewer")
    await viewer.subscribe(("mixed", 1))  # It has this one already.
    await leave(viewer)
    viewer = await curtailed(broker, "viewer")
    await viewer.subscribe(("plant/#", 1), ("mixed", 1))
    await leave(viewer)
    await publish(broker, "plant/1", "mixed")
    assert sorted(await topics_of(await resumed(broker, "viewer"))) == ["mixed", "plant/1"]


async def test_a_client_that_is_told_to_subscribe_again_may_use_its_packet_ids_for_other_messages(
    broker: Broker, rules: Path
) -> None:
    viewer = await enter(broker, "viewer")
    write(rules, WIDE.replace('users = ["sensor"]', 'users = ["sensor", "viewer"]'))
    broker.node.reload()
    await viewer.subscribe(("plant/#", 1))
    await viewer.send(encode_publish(b"mixed", b"1", 2, packet_id=7, properties=b"\0"))
    assert await viewer.receive() == (PUBREC, 7)
    await leave(viewer)
    write(rules, NARROW.replace('allow = ["all"]\nusers = ["sensor"]', 'allow = ["publish"]\nusers = ["sensor", "viewer"]'))
    broker.node.reload()
    viewer = await curtailed(broker, "viewer")
    await viewer.send(encode_publish(b"mixed", b"2", 2, packet_id=7, properties=b"\0"))
    assert await viewer.receive() == (PUBREC, 7)
    assert [message.body for message in broker.stored()] == [b"1", b"2"]


@each_end
async def test_what_was_forbidden_while_the_client_was_away_and_is_allowed_again_is_not_lost(
    broker: Broker, rules: Path, end: str
) -> None:
    viewer = await enter(broker, "viewer")
    await viewer.subscribe(("plant/#", 1), ("mixed", 1))
    await leave(viewer)
    await publish(broker, "plant/1", "mixed")
    write(rules, NARROW)
    broker.node.reload()
    await broker.node.gateway.rechecked()
    await publish(broker, "plant/2")
    await end_node(broker, end)
    await publish(broker, "plant/3")
    write(rules, WIDE)
    broker.node.reload()
    viewer = await resumed(broker, "viewer")
    assert sorted(await topics_of(viewer)) == ["mixed", "plant/1", "plant/2", "plant/3"]


@each_end
async def test_a_user_who_is_deleted_and_added_again_loses_nothing(broker: Broker, passwords: Path, end: str) -> None:
    viewer = await enter(broker, "viewer")
    await viewer.subscribe(("plant/#", 1))
    known = read(passwords)
    write(passwords, "".join(line for line in known.splitlines(keepends=True) if not line.startswith("viewer")))
    broker.node.reload()
    await viewer.disconnected()
    await publish(broker, "plant/1")
    await end_node(broker, end)
    refused = await broker.connect_5("viewer", b"viewer", b"secret", flags=USER | PASSWORD, about=LASTS, accepted=False)
    assert (await refused.connack())[0] >= 0x80
    other = await broker.connect_5("viewer", b"other", b"secret", flags=USER | PASSWORD, about=LASTS, accepted=False)
    assert (await other.connack())[0] >= 0x80, "the session is that of the deleted user"
    write(passwords, known)
    broker.node.reload()
    assert await topics_of(await resumed(broker, "viewer")) == ["plant/1"]


async def test_messages_that_may_not_be_received_any_more_are_left_out_of_what_waits(broker: Broker, rules: Path) -> None:
    viewer = await enter(broker, "viewer")
    await viewer.subscribe(("plant/#", 1))
    await publish(broker, "plant/secret", "plant/1")
    assert await topics_of(viewer) == ["plant/secret", "plant/1"]
    viewer.reset()  # without an acknowledgement
    await until(lambda: "viewer" not in broker.node.gateway.clients)
    await publish(broker, "plant/secret", "plant/2")
    write(rules, WITHOUT_SECRETS)
    broker.node.reload()
    viewer = await resumed(broker, "viewer")
    assert await topics_of(viewer) == ["plant/1", "plant/2"]
    await publish(broker, "plant/secret", "plant/3")
    assert await topics_of(viewer) == ["plant/3"]


async def test_retained_messages_go_by_the_rules_of_the_moment(broker: Broker, rules: Path) -> None:
    await publish(broker, "plant/secret", "plant/1", retain=True)
    viewer = await enter(broker, "viewer")
    await viewer.subscribe(("plant/#", 1))
    assert sorted(await topics_of(viewer)) == ["plant/1", "plant/secret"]
    write(rules, WITHOUT_SECRETS)
    broker.node.reload()
    await broker.node.gateway.rechecked()
    await viewer.subscribe(("plant/+", 1))
    assert await topics_of(viewer) == ["plant/1"]


async def test_what_a_member_may_no_longer_have_goes_to_the_others(broker: Broker, rules: Path) -> None:
    viewer, other = await enter(broker, "viewer"), await enter(broker, "other")
    for client in (viewer, other):
        await client.subscribe((SHARED, 1))
    sent = [f"plant/{number}" for number in range(6)]
    await publish(broker, *sent)
    taken, got = await topics_of(viewer), await topics_of(other)  # not acknowledged
    assert (len(taken), sorted(taken + got)) == (3, sent)
    write(rules, WIDE.replace('users = ["viewer", "other"]', 'users = ["other"]'))
    broker.node.reload()
    await viewer.disconnected()
    assert sorted([(await other.message()).topic for _ in taken]) == sorted(taken)
    viewer = await curtailed(broker, "viewer")
    await publish(broker, "plant/later")
    assert (broker.connection("viewer").held_filters(), await topics_of(viewer)) == ([], [])
    assert await topics_of(other) == ["plant/later"]
