"""Strikes: who is held off after errors, so that one device does not shut out those that share its address."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.access.passwords import PasswordFile
from penstock.gateway.counters import Traffic
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import AccessOptions, LimitOptions, ListenerOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sources import Sources
from penstock.gateway.transport.strikes import Claim, Strikes
from penstock.store.options import KIB
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import BAD_PASSWORD, BUSY, PASSWORD, USER
from tests.gateway.moving_time import pass_time
from tests.gateway.packet_cases import packet
from tests.gateway.packet_cases_5 import connect_5
from tests.gateway.wire import CLEAN, FREE, Broker, Client

NAT = b"PROXY TCP4 203.0.113.1 203.0.113.1 1 2\r\n"
"""The address of all devices of a test."""
ACCEPTED = (CONNACK, 0, b"\0\0")
SUBSCRIBE_WITH_WRONG_FLAGS = packet(0x80)
LISTENERS = (ListenerOptions(name="nat", listen=FREE, proxy_from=("127.0.0.1",)),)
LIMITS = LimitOptions(strikes_max=20, hold_off_ms=5000)
"""A client is held off after two strikes, a source after twenty."""
MANY = LimitOptions(strikes_max=1_000_000, sources_max=100)


@pytest.fixture
async def broker(start_broker: StartBroker) -> Broker:
    return await start_broker(listeners=LISTENERS, limits=LIMITS, access=AccessOptions(anonymous="always"))


@pytest.fixture
async def logins(start_broker: StartBroker, tmp_path: Path) -> Broker:
    """A node with the users ann and bob."""
    users = PasswordFile.empty(tmp_path / "passwords")
    for user in ("ann", "bob"):
        users.add(user, f"{user}s password")
    return await start_broker(listeners=LISTENERS, limits=LIMITS, control={"password_file": str(tmp_path / "passwords")})


async def connect(broker: Broker, client_id: str, user: str = "", password: str = "") -> Client:
    """Connect from the shared address. The caller receives the CONNACK."""
    fields = [user.encode(), password.encode()] if user else []
    flags = CLEAN | (USER | PASSWORD if user else 0)
    return await broker.connect(client_id, *fields, flags=flags, accepted=False, listener="nat", head=NAT)


async def answer(broker: Broker, client_id: str, user: str = "", password: str = "") -> object:
    """Return the CONNACK of a client that connects, or `()` if its socket is closed."""
    client = await connect(broker, client_id, user, password)
    found = await client.receive()
    client.reset()
    return found


async def err(broker: Broker, client_id: str, user: str = "") -> object:
    """Let a client send a wrong packet after its CONNECT; return the CONNACK."""
    client = await connect(broker, client_id, user, f"{user}s password")
    found = await client.receive()
    await client.send(SUBSCRIBE_WITH_WRONG_FLAGS)
    await client.ended()
    return found


# --- clients --------------------------------------------------------------------------------------------------------------


async def test_a_client_that_errs_is_held_off_and_its_neighbours_are_not(broker: Broker) -> None:
    with capture_logs() as log:
        assert [await err(broker, "old") for _ in range(2)] == [ACCEPTED] * 2
        assert [await err(broker, "old") for _ in range(40)] == [BUSY] * 40
    assert [line for line in log if line["event"].endswith("held_off")] == [
        {"event": "client.held_off", "log_level": "info", "client": "old", "user": "", "source": "203.0.113.1", "for_ms": 5000}
    ]
    assert await answer(broker, "new") == ACCEPTED
    assert broker.node.gateway.traffic.held_off == 1
    pass_time(broker.node.gateway, 4.999)
    assert await answer(broker, "old") == BUSY
    pass_time(broker.node.gateway, 0.001)
    assert await answer(broker, "old") == ACCEPTED


async def test_a_client_of_mqtt_5_learns_that_it_is_held_off(broker: Broker) -> None:
    for _ in range(2):
        await err(broker, "old")
    client = await broker.dial_5("nat")
    await client.send(NAT, connect_5(CLEAN, b"old"))
    assert (await client.connack())[0] == ReasonCode.CONNECTION_RATE_EXCEEDED


async def test_an_old_password_holds_off_its_device_only(logins: Broker) -> None:
    """Neither other devices of the user nor other users at that address."""
    assert [await answer(logins, "ann-1", "ann", "old") for _ in range(2)] == [BAD_PASSWORD] * 2
    assert [await answer(logins, "ann-1", "ann", "old") for _ in range(40)] == [BUSY] * 40
    assert await answer(logins, "ann-2", "ann", "anns password") == ACCEPTED
    assert await answer(logins, "bob-1", "bob", "bobs password") == ACCEPTED


async def test_a_source_that_tries_many_names_is_held_off(logins: Broker) -> None:
    """Each name counts once for the source, whatever part of it changes."""
    for number in range(10):
        assert await answer(logins, f"guess-{number}", "ann", "wrong") == BAD_PASSWORD
        assert await answer(logins, "guess", f"user-{number}", "wrong") == BAD_PASSWORD
    assert await answer(logins, "bob-1", "bob", "bobs password") == ()


async def test_clients_without_any_name_count_against_their_source(broker: Broker) -> None:
    assert [await err(broker, "") for _ in range(20)] == [ACCEPTED] * 20
    assert await answer(broker, "new") == ()


async def test_many_clients_of_a_user_that_err_hold_off_the_user_and_not_its_address(logins: Broker) -> None:
    assert [await err(logins, f"ann-{number}", "ann") for number in range(20)] == [ACCEPTED] * 20
    assert await answer(logins, "ann-new", "ann", "anns password") == BUSY
    assert await answer(logins, "bob-1", "bob", "bobs password") == ACCEPTED


async def test_nobody_is_held_off_if_the_option_says_so(start_broker: StartBroker) -> None:
    open_to_all = AccessOptions(anonymous="always")
    broker = await start_broker(listeners=LISTENERS, limits=LimitOptions(strikes_max=0), access=open_to_all)
    assert [await err(broker, "old") for _ in range(3)] == [ACCEPTED] * 3


def test_the_table_of_clients_is_bounded_and_its_names_are_short(broker: Broker) -> None:
    strikes = Strikes(Sources(MANY), Traffic(), Logbook(1), lambda: 0, MANY)
    peer = Peer(broker.listener("nat"), "203.0.113.1", 1)
    for number in range(110):
        strikes.add(peer, "", Claim.of("u" * 60_000, f"{number}"))
    assert len(strikes.clients) == 100
    assert [len(name) for name in Claim.of("u" * 60_000, "c" * 1000)] == [128, 128]


# --- the log --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [KIB + 1, 3 * KIB], ids=["payload", "packet"])
async def test_the_log_names_the_topic_of_a_message_that_is_too_large(start_broker: StartBroker, size: int) -> None:
    broker = await start_broker(message_bytes_max=KIB, packet_bytes_max=2 * KIB)
    client = await broker.connect("c")
    with capture_logs() as log:
        await client.send(encode_publish(b"plant/1/press", bytes(size), 1, packet_id=1))
        await client.ended()
    (why,) = [line["why"] for line in log if line["event"] == "connection.closed"]
    assert "'plant/1/press'" in why
