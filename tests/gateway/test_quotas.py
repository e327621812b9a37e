"""Quotas: whoever takes more than its share is refused, and everybody else is served."""

from __future__ import annotations

import pytest
from prometheus_client import generate_latest
from structlog.testing import capture_logs

from penstock.gateway.options import AccessOptions, ListenerOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import CONNACK, PUBACK
from penstock.gateway.protocol.properties import Property, PropertyValues, write_properties
from penstock.gateway.protocol.reasons import SUBACK_FAILURE, ReasonCode
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import LOCAL, Causer
from penstock.store.space.quotaoptions import QuotaLimitOptions, QuotaOptions
from tests.gateway.brokers import StartBroker
from tests.gateway.lasting_sessions import LASTS, both_versions, each_end, end_node, leave, resume
from tests.gateway.logins import PASSWORD, USER, plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import connect
from tests.gateway.packet_cases_5 import connect_5
from tests.gateway.wire import CLEAN, WILL, Broker, Client, Client5
from tests.waiting import until

QUOTA_EXCEEDED = int(ReasonCode.QUOTA_EXCEEDED)
NO_VALUES: PropertyValues = {}


def limited(**limits: int) -> QuotaOptions:
    """Return quotas with limits for each client whose id begins with "flood"."""
    return QuotaOptions(limits=(QuotaLimitOptions(of="client", name="flood*", **limits),))


async def reasons(
    client: Client5, topics: list[str], *, retain: bool = False, body: bytes = b"x", about: PropertyValues = NO_VALUES
) -> list[int]:
    """Publish to topics at QoS 1, and return the reason codes of the PUBACKs, in order."""
    properties = write_properties(about)
    found = []
    for at in range(0, len(topics), 500):
        packets = [
            encode_publish(topic.encode(), body, 1, retain=retain, packet_id=number + 1, properties=properties)
            for number, topic in enumerate(topics[at : at + 500])
        ]
        await client.send(*packets)
        for _ in packets:
            answer = await client.expect(PUBACK)
            found.append(answer[2] if len(answer) > 2 else 0)
    return found


# --- the share of what is free --------------------------------------------------------------------------------------


@each_end
async def test_a_publisher_of_many_first_levels_leaves_room_for_others(start_broker: StartBroker, end: str) -> None:
    broker = await start_broker(queues_max=1000)
    flooder = await broker.connect_5("flooder")
    answers = await reasons(flooder, [f"flood-{number}" for number in range(1500)])
    assert answers == sorted(answers)
    assert answers.count(0) == 334  # As many as are left for its source, of which as many are left for others.
    honest = await broker.connect_5("honest")
    assert set(await reasons(honest, [f"honest-{number}" for number in range(100)])) == {0}
    assert await reasons(flooder, ["flood-0", "flood-1500", "honest-0"]) == [0, QUOTA_EXCEEDED, 0]
    await end_node(broker, end)
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    assert await reasons(flooder, ["flood-0", "flood-1500"]) == [0, QUOTA_EXCEEDED]
    assert await reasons(honest, ["honest-100"]) == [0]


async def test_clients_that_change_their_ids_leave_room_for_other_users(start_broker: StartBroker) -> None:
    broker = await start_broker(queues_max=1000)
    for number in range(10):
        flooder = await broker.connect_5(f"flooder-{number}")
        await reasons(flooder, [f"flood-{number}-{topic}" for topic in range(400)])
    ledger = broker.node.store.ledger
    assert ledger.held(Resource.QUEUES) < 600
    assert ledger.admit(Causer.of("", "192.0.2.7", "honest"), Resource.QUEUES)


async def test_a_refused_publisher_of_mqtt_3_1_1_is_disconnected_without_an_ack(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(queues=2))
    client = await broker.connect("flooder")
    for number in range(2):
        await client.publish(f"flood-{number}", b"x", 1)
    await client.send(encode_publish(b"flood-2", b"x", 1, packet_id=1))
    assert await client.ended() == []
    assert broker.closed(ReasonCode.QUOTA_EXCEEDED) == 1
    assert len(broker.stored()) == 2


# --- each resource --------------------------------------------------------------------------------------------------


async def test_retained_messages_of_a_client_are_limited_by_number(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(retained=2))
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    assert await reasons(flooder, ["a/1", "a/2", "a/3"], retain=True) == [0, 0, QUOTA_EXCEEDED]
    assert await reasons(flooder, ["a/3"]) == [0]
    assert await reasons(flooder, ["a/1"], retain=True, body=b"again") == [0]
    assert await reasons(honest, ["a/3"], retain=True) == [0]
    assert await reasons(flooder, ["a/3"], retain=True) == [QUOTA_EXCEEDED]
    assert await reasons(flooder, ["a/1"], retain=True, body=b"") == [0]
    assert await reasons(flooder, ["a/3"], retain=True) == [0]
    ledger = broker.node.store.ledger
    assert ledger.held(Resource.RETAINED, Causer.of("", "", "flooder")) == 2
    assert ledger.held(Resource.RETAINED, Causer.of("", "", "honest")) == 0


@each_end
async def test_retained_messages_of_a_client_are_limited_by_bytes(start_broker: StartBroker, end: str) -> None:
    broker = await start_broker(quotas=limited(retained_bytes=2000))
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    assert await reasons(flooder, ["a/1", "a/2"], retain=True, body=b"x" * 1200) == [0, QUOTA_EXCEEDED]
    await end_node(broker, end)
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    assert await reasons(flooder, ["a/1"], retain=True, body=b"x" * 1800) == [0]
    assert await reasons(flooder, ["a/2"], retain=True, body=b"x" * 200) == [QUOTA_EXCEEDED]
    assert await reasons(honest, ["a/2"], retain=True, body=b"x" * 1200) == [0]
    assert await reasons(flooder, ["a/1"], retain=True, body=b"") == [0]
    assert await reasons(flooder, ["a/2"], retain=True, body=b"x" * 1200) == [0]


@pytest.mark.parametrize("maximum", [{"retained_max": 2}, {"retained_bytes_max": 1024}])
async def test_the_retained_messages_of_a_node_are_limited(start_broker: StartBroker, maximum: dict[str, int]) -> None:
    broker = await start_broker(**maximum)
    client = await broker.connect_5("pump")
    assert await reasons(client, ["a/1", "a/2", "a/3"], retain=True, body=b"x" * 400) == [0, 0, QUOTA_EXCEEDED]


async def test_another_publisher_may_replace_a_retained_message_on_a_full_node(start_broker: StartBroker) -> None:
    broker = await start_broker(retained_max=1)
    first, second = await broker.connect_5("first"), await broker.connect_5("second")
    assert await reasons(first, ["a/1"], retain=True) == [0]
    assert await reasons(second, ["a/1", "a/2"], retain=True) == [0, QUOTA_EXCEEDED]
    ledger = broker.node.store.ledger
    assert ledger.held(Resource.RETAINED, Causer.of("", "", "first")) == 0
    assert ledger.held(Resource.RETAINED, Causer.of("", "", "second")) == 1


async def test_retained_messages_that_have_expired_count_no_longer(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(retained=2))
    flooder = await broker.connect_5("flooder")
    short = {Property.MESSAGE_EXPIRY_S: 5}
    assert await reasons(flooder, ["a/1", "a/2", "a/3"], retain=True, about=short) == [0, 0, QUOTA_EXCEEDED]
    pass_time(broker.node.gateway, 6)
    await until(lambda: len(broker.node.retained) == 0)
    assert await reasons(flooder, ["a/3", "a/4", "a/5"], retain=True) == [0, 0, QUOTA_EXCEEDED]


async def test_properties_count_among_the_bytes_of_messages(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(retained_bytes=2000, delayed_bytes=2000))
    flooder = await broker.connect_5("flooder")
    large: PropertyValues = {Property.USER_PROPERTY: [("why", "x" * 1900)]}
    assert await reasons(flooder, ["a/1", "a/2"], retain=True) == [0, 0]
    assert await reasons(flooder, ["a/1", "a/2"], retain=True, about=large) == [QUOTA_EXCEEDED, QUOTA_EXCEEDED]
    assert await reasons(flooder, ["$delayed/60/a"]) == [0]
    assert await reasons(flooder, ["$delayed/60/a"], about=large) == [QUOTA_EXCEEDED]


async def test_delayed_messages_of_a_client_are_limited(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(delayed=2))
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    later = ["$delayed/5/a", "$delayed/5/a", "$delayed/5/a"]
    assert await reasons(flooder, later) == [0, 0, QUOTA_EXCEEDED]
    assert await reasons(honest, ["$delayed/60/a"] * 3) == [0, 0, 0]
    broker.clock.advance(5000)
    broker.fire_delayed()
    assert len(broker.node.delayed) == 3
    assert await reasons(flooder, later) == [0, 0, QUOTA_EXCEEDED]


async def test_bytes_of_delayed_messages_of_a_client_are_limited(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(delayed_bytes=1000))
    flooder = await broker.connect_5("flooder")
    assert await reasons(flooder, ["$delayed/5/a"] * 2, body=b"x" * 600) == [0, QUOTA_EXCEEDED]


async def as_user(broker: Broker, name: str, client_id: str, version: int, *, flags: int = 0) -> Client:
    """Connect a client of a user, with a session that lasts; with `CLEAN`, with one that ends with it or begins anew."""
    login, flags = (name.encode(), b"secret"), flags | USER | PASSWORD
    if version == 5:
        return await broker.connect_5(client_id, *login, flags=flags, about=NO_VALUES if flags & CLEAN else LASTS)
    client = await broker.connect(client_id, *login, flags=flags, accepted=False)
    assert (await client.expect(CONNACK))[2][1] == 0
    return client


@pytest.mark.usefixtures("script")
@both_versions
async def test_subscriptions_of_a_user_are_limited_in_all_of_its_sessions(start_broker: StartBroker, version: int) -> None:
    quotas = QuotaOptions(limits=(QuotaLimitOptions(of="user", name="ann", subscriptions=3),))
    broker = await start_broker(quotas=quotas, access=plugins("Users"))
    lasting = await as_user(broker, "ann", "lasting", version)
    clean = await as_user(broker, "ann", "clean", version, flags=CLEAN)
    other = await as_user(broker, "bob", "other", version)
    refusal = QUOTA_EXCEEDED if version == 5 else SUBACK_FAILURE
    assert await lasting.subscribe(("a", 0), ("b", 0)) == [0, 0]
    assert await clean.subscribe(("a", 0), ("b", 0)) == [0, refusal]
    assert await other.subscribe(*((name, 0) for name in "abcd")) == [0, 0, 0, 0]
    assert await clean.subscribe(("a", 1)) == [1]
    await leave(lasting)
    assert await clean.subscribe(("b", 0)) == [refusal]
    lasting = await as_user(broker, "ann", "lasting", version)
    await lasting.unsubscribe("a")
    assert await clean.subscribe(("b", 0), ("c", 0)) == [0, refusal]
    await leave(clean)
    await until(lambda: "clean" not in broker.node.gateway.clients)
    assert await lasting.subscribe(("c", 0), ("d", 0), ("e", 0)) == [0, 0, refusal]


async def test_shared_subscriptions_of_a_client_are_limited(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(shared=2))
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    shares = [(f"$share/group-{number}/a", 0) for number in range(4)]
    assert await honest.subscribe(*shares[:1]) == [0]
    assert await flooder.subscribe(*shares) == [0, 0, 0, QUOTA_EXCEEDED]  # The first one exists already, and is not its own.
    assert await honest.subscribe(shares[3]) == [0]
    await flooder.unsubscribe(shares[1][0])
    assert await flooder.subscribe((f"$share/group-{len(shares)}/a", 0), (f"$share/group-{len(shares) + 1}/a", 0)) == [
        0,
        QUOTA_EXCEEDED,
    ]


async def test_subscriptions_of_a_client_whose_session_does_not_last_are_limited(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(subscriptions=2))
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    filters = [(name, 0) for name in "abc"]
    assert await flooder.subscribe(*filters) == [0, 0, QUOTA_EXCEEDED]
    assert await honest.subscribe(*filters) == [0, 0, 0]
    await leave(flooder)
    again = await broker.connect_5("flooder")
    assert await again.subscribe(*filters) == [0, 0, QUOTA_EXCEEDED]


async def test_groups_of_a_client_that_shares_are_limited(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(groups=2))
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    shares = [(f"$share/group-{number}/a", 0) for number in range(3)]
    assert await flooder.subscribe(*shares) == [0, 0, QUOTA_EXCEEDED]
    assert await honest.subscribe(shares[2]) == [0]


async def test_queues_of_filters_count_like_those_of_topics(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=QuotaOptions(limits=(QuotaLimitOptions(of="source", queues=3),)))
    lasting, clean = await broker.connect_5("lasting", about=LASTS), await broker.connect_5("clean")
    assert await lasting.subscribe(("a/1", 0), ("b/#", 0)) == [0, 0]
    assert await clean.subscribe(("a/2", 0), ("a/3", 0), ("b/#", 0), ("a/1", 0)) == [0, QUOTA_EXCEEDED, 0, QUOTA_EXCEEDED]
    assert await reasons(clean, ["b/1", "a/1"]) == [0, QUOTA_EXCEEDED]
    await clean.unsubscribe("a/2")
    assert await reasons(clean, ["a/1"]) == [0]


# --- sessions -------------------------------------------------------------------------------------------------------


async def test_a_source_with_too_many_sessions_is_refused(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=QuotaOptions(limits=(QuotaLimitOptions(of="source", sessions=2),)))
    for name in ("one", "two"):
        await leave(await broker.connect_5(name, about=LASTS))
    refused = await broker.connect_5("three", about=LASTS, accepted=False)
    assert (await refused.connack())[0] == QUOTA_EXCEEDED
    old = await broker.dial()
    await old.send(connect(0, b"four", keep_alive_s=0))
    assert await old.receive() == (CONNACK, 0, b"\0\3")
    await broker.connect_5("clean")
    await resume(broker, "one", 5)
    ended = await broker.connect_5("two")
    await leave(ended)
    await broker.connect_5("three", about=LASTS)


async def test_a_session_with_a_will_counts_until_its_client_has_gone(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(sessions=0))
    client = await broker.connect_5("pump", b"will", b"gone", flags=CLEAN | WILL)
    ledger = broker.node.store.ledger
    assert ledger.held(Resource.SESSIONS, Causer.of("", "", "pump")) == 1
    await leave(client)
    await until(lambda: not ledger.held(Resource.SESSIONS))


async def user(broker: Broker, name: str, client_id: str, *, lasts: bool = False) -> Client5:
    """Connect a client of a user."""
    about = LASTS if lasts else None
    return await broker.connect_5(client_id, name.encode(), b"secret", flags=CLEAN | USER | PASSWORD, about=about)


@pytest.mark.usefixtures("script")
async def test_at_the_limit_of_the_node_the_user_with_most_sessions_loses_one(start_broker: StartBroker) -> None:
    broker = await start_broker(sessions_max=6, access=plugins("Users"))
    await leave(await user(broker, "victim", "victim", lasts=True))
    for number in range(5):
        await leave(await user(broker, "flooder", f"flood-{number}", lasts=True))
    await until(lambda: len(broker.away()) == 6)
    await leave(await user(broker, "newcomer", "newcomer", lasts=True))
    await leave(await user(broker, "flooder", "flood-5", lasts=True))
    await until(lambda: "flood-5" in broker.away())
    assert broker.away() == ["flood-2", "flood-3", "flood-4", "flood-5", "newcomer", "victim"]


async def from_source(broker: Broker, source: str, client_id: str, *, accepted: bool = True) -> Client5:
    """Connect a client without a user name from a source, with a session that lasts."""
    client = await broker.dial_5("far")
    header = f"PROXY TCP4 {source} 192.0.2.1 1 2\r\n".encode()
    await client.send(header, connect_5(CLEAN, client_id.encode(), about=write_properties(LASTS)))
    assert ((await client.connack())[0] == 0) == accepted
    return client


FAR = ListenerOptions(name="far", proxy_from=("127.0.0.0/8",))


async def test_a_flood_of_client_ids_from_one_source_ends_its_own_sessions(start_broker: StartBroker) -> None:
    broker = await start_broker(sessions_max=6, listeners=(FAR,), access=AccessOptions(anonymous="always"))
    for number in range(2):
        await leave(await from_source(broker, "192.0.2.1", f"victim-{number}"))
    for number in range(10):
        await leave(await from_source(broker, "192.0.2.9", f"flood-{number}"))
        await until(lambda: not broker.node.gateway.clients)
    assert [name for name in broker.away() if name.startswith("victim")] == ["victim-0", "victim-1"]
    assert len(broker.away()) == 6


async def test_a_flood_of_connected_clients_ends_nobody_elses_sessions(start_broker: StartBroker) -> None:
    broker = await start_broker(sessions_max=6, listeners=(FAR,), access=AccessOptions(anonymous="always"))
    for number in range(2):
        await leave(await from_source(broker, "192.0.2.1", f"victim-{number}"))
    flood = [await from_source(broker, "192.0.2.9", f"flood-{number}") for number in range(4)]
    refused = await from_source(broker, "192.0.2.9", "flood-4", accepted=False)
    assert await refused.ended() == []
    assert broker.away() == ["victim-0", "victim-1"]
    await from_source(broker, "192.0.2.5", "newcomer")
    assert len(broker.away()) == 1
    assert len(flood) == 4


@pytest.mark.usefixtures("script")
async def test_a_user_whose_share_of_the_sessions_is_used_up_displaces_nobody(start_broker: StartBroker) -> None:
    broker = await start_broker(sessions_max=6, access=plugins("Users"), quotas=QuotaOptions(share_from=0))
    for number in range(3):
        await leave(await user(broker, f"honest-{number}", f"honest-{number}", lasts=True))
    answers = []
    for number in range(3):
        flooder = await broker.connect_5(
            f"flood-{number}", b"flooder", b"secret", flags=CLEAN | USER | PASSWORD, about=LASTS, accepted=False
        )
        answers.append((await flooder.connack())[0])
        await flooder.ended() if answers[-1] else await leave(flooder)
    assert answers == [0, QUOTA_EXCEEDED, QUOTA_EXCEEDED]
    await until(lambda: broker.away() == ["flood-0", "honest-0", "honest-1", "honest-2"])


@pytest.mark.usefixtures("script")
async def test_a_client_that_moves_to_another_source_takes_along_what_it_holds(start_broker: StartBroker) -> None:
    broker = await start_broker(access=plugins("Users"), listeners=(FAR,))
    ledger = broker.node.store.ledger
    await leave(await user(broker, "ann", "pump", lasts=True))
    assert ledger.held(Resource.SESSIONS, Causer.of("ann", LOCAL)) == 1
    far = await broker.dial_5("far")
    await far.send(
        b"PROXY TCP4 192.0.2.9 192.0.2.1 1 2\r\n",
        connect_5(USER | PASSWORD, b"pump", b"ann", b"secret", about=write_properties(LASTS)),
    )
    assert (await far.connack())[0] == 0
    assert far.session_present
    assert ledger.held(Resource.SESSIONS, Causer.of("ann", LOCAL)) == 0
    assert ledger.held(Resource.SESSIONS, Causer.of("ann", "192.0.2.9")) == 1


# --- tenants --------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("script")
async def test_users_of_one_tenant_share_its_limits(start_broker: StartBroker) -> None:
    limits = (QuotaLimitOptions(of="tenant", name="acme", retained=2),)
    broker = await start_broker(access=plugins("Users"), quotas=QuotaOptions(tenant="user", limits=limits))
    ann, bob, carl = [await user(broker, name, name) for name in ("acme/ann", "acme/bob", "other/carl")]
    assert await reasons(ann, ["a/1"], retain=True) == [0]
    assert await reasons(bob, ["a/2", "a/3"], retain=True) == [0, QUOTA_EXCEEDED]
    assert await reasons(carl, ["a/3"], retain=True) == [0]
    assert await reasons(ann, ["a/1"], retain=True, body=b"") == [0]
    assert await reasons(bob, ["a/4"], retain=True) == [0]


async def test_a_first_level_of_topics_may_be_a_tenant(start_broker: StartBroker) -> None:
    limits = (QuotaLimitOptions(of="tenant", name="acme", retained=1, delayed=1),)
    broker = await start_broker(quotas=QuotaOptions(tenant="topic", limits=limits))
    client = await broker.connect_5("pump")
    assert await reasons(client, ["acme/1", "acme/2", "other/1", "other/2"], retain=True) == [0, QUOTA_EXCEEDED, 0, 0]
    assert await reasons(client, ["$delayed/60/acme/1", "$delayed/60/acme/2", "$delayed/60/other"]) == [0, QUOTA_EXCEEDED, 0]


async def test_a_publisher_has_one_share_although_each_first_level_is_a_tenant(start_broker: StartBroker) -> None:
    broker = await start_broker(queues_max=600, quotas=QuotaOptions(tenant="topic"))
    flooder, honest = await broker.connect_5("flooder"), await broker.connect_5("honest")
    answers = await reasons(flooder, [f"flood-{number}" for number in range(300)])
    assert answers.count(0) == 200
    assert set(await reasons(honest, [f"honest-{number}" for number in range(50)])) == {0}


async def test_a_tenant_of_topics_that_is_full_keeps_nobody_from_others(start_broker: StartBroker) -> None:
    limits = (QuotaLimitOptions(of="tenant", name="acme", retained=2),)
    broker = await start_broker(quotas=QuotaOptions(tenant="topic", share_from=2, limits=limits))
    client = await broker.connect_5("pump")
    other = [f"other/{number}" for number in range(5)]
    assert set(await reasons(client, other, retain=True)) == {0}
    assert await reasons(client, ["acme/1"], retain=True) == [0]


# --- what operators see ---------------------------------------------------------------------------------------------


async def test_refusals_are_logged_with_who_caused_them(start_broker: StartBroker) -> None:
    broker = await start_broker(quotas=limited(queues=1))
    flooder = await broker.connect_5("flooder")
    with capture_logs() as lines:
        await reasons(flooder, [f"flood-{number}" for number in range(100)])
    refused = [line for line in lines if line["event"] == "quota.refused"]
    assert len(refused) == 20  # LimitOptions.log_lines_per_s
    assert (refused[0]["client"], refused[0]["source"], refused[0]["resource"]) == ("flooder", LOCAL, "queues")
    assert "quotas.limits" in refused[0]["why"]


async def test_the_state_and_the_metrics_tell_who_holds_most(start_broker: StartBroker) -> None:
    broker = await start_broker(queues_max=90, quotas=QuotaOptions(share_from=10))
    flooder = await broker.connect_5("flooder")
    answers = await reasons(flooder, [f"flood-{number}" for number in range(40)])
    broker.node.store.commit()
    found = broker.node.state()["quotas"]["queues"]
    assert found["held"] == 30
    assert found["maximum"] == 90
    assert found["refused"] == {"client": answers.count(QUOTA_EXCEEDED)}
    assert found["largest"] == [
        {"of": "source", "name": "local", "held": 30},
        {"of": "client", "name": "flooder", "part_of": ["local"], "held": 30},
    ]
    text = generate_latest(broker.node.registry).decode()
    assert 'penstock_quota_held{resource="queues"} 30.0' in text
    assert 'penstock_quota_maximum{resource="queues"} 90.0' in text
    assert 'penstock_quota_largest_held{kind="client",resource="queues"} 30.0' in text
    assert 'penstock_quota_largest_held{kind="user",resource="queues"} 0.0' in text
    assert 'penstock_quota_refused_total{kind="client",resource="queues"} 10.0' in text
