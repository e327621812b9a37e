"""Passwords: the node's own file and amqtt's, unknown users, and credentials that the node remembers."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import argon2
import pytest
from argon2 import PasswordHasher

from penstock.access.subject import Subject
from penstock.gateway.auth.verified import Verified, VerifiedCredentials
from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.packets import CONNACK
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import BAD_PASSWORD, BUSY, REFUSED, login, plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.scripted_plugins import Script
from tests.gateway.wire import Broker, Client
from tests.waiting import WAIT_S_MAX, until

ACCEPTED = (CONNACK, 0, b"\0\0")
FILE = "amqtt.plugins.authentication.FileAuthPlugin"
QUICK = PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
"""Hashes that are cheap enough for tests."""

NOTHING = Verified()


class Hashes:
    """Counts the passwords that are compared with a hash."""

    def __init__(self) -> None:
        self.compared: list[str] = []
        self.may_begin = threading.Event()
        self.may_begin.set()


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch) -> Hashes:
    """Count what is hashed, by all that hashes with Argon2."""
    found = Hashes()
    verify = argon2.PasswordHasher.verify

    def counted(self: Any, stored: Any, password: Any) -> Any:
        found.compared.append(password if isinstance(password, str) else password.decode())
        found.may_begin.wait(WAIT_S_MAX)
        return verify(self, stored, password)

    monkeypatch.setattr(argon2.PasswordHasher, "verify", counted)
    return found


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    write(path, ann="anns password", bob="bobs password")
    return path


def write(path: Path, **users: str) -> None:
    path.write_text("".join(f"{name}:{QUICK.hash(password)}\n" for name, password in users.items()))


def append(path: Path, line: str) -> None:
    path.write_text(f"{path.read_text()}{line}\n")


def amqtts(path: Path, **options: Any) -> dict[str, Any]:
    """Return options of a node with amqtt's password file."""
    return {"access": AccessOptions(plugins={FILE: {"password_file": str(path)}}, **options)}


def own(path: Path, **options: Any) -> dict[str, Any]:
    """Return options of a node with its own password file."""
    return {"access": AccessOptions(**options), "control": {"password_file": str(path)}}


both = pytest.mark.parametrize("style", [amqtts, own])


async def enter(broker: Broker, user: str, password: str, client_id: str = "") -> Client:
    client = await login(broker, client_id or user, user, password)
    assert await client.receive() == ACCEPTED
    return client


async def leave(broker: Broker, client: Client) -> None:
    client.reset()
    await until(lambda: not broker.node.gateway.clients)


# --- who is let in ------------------------------------------------------------------------------------------------------


@both
async def test_a_password_file_decides_who_connects(start_broker: StartBroker, passwords: Path, style: Any) -> None:
    broker = await start_broker(**style(passwords))
    await enter(broker, "ann", "anns password")
    for user, password in (("ann", "bobs password"), ("eve", "anns password"), ("ann", "")):
        assert await (await login(broker, "c", user, password)).ended() == [BAD_PASSWORD]
    assert await (await login(broker, "c")).ended() == [REFUSED]


async def test_the_user_of_a_client_is_the_one_whose_password_it_has(start_broker: StartBroker, passwords: Path) -> None:
    broker = await start_broker(**own(passwords))
    await enter(broker, "ann", "anns password", "device")
    assert broker.connection("device").session.user == "ann"


async def test_a_damaged_hash_is_no_answer(start_broker: StartBroker, passwords: Path) -> None:
    append(passwords, "damaged:$argon2id$v=19$m=64,t=1,p=1$damaged")
    broker = await start_broker(**own(passwords))
    assert await (await login(broker, "c", "damaged", "x")).ended() == [BUSY]


# --- unknown users ------------------------------------------------------------------------------------------------------


async def each_wrong_password_is_hashed(broker: Broker, hashes: Hashes) -> None:
    for number, user in enumerate(("ann", "nobody"), 1):
        assert await (await login(broker, "c", user, "wrong")).ended() == [BAD_PASSWORD]
        assert hashes.compared == ["wrong"] * number, user


@both
async def test_a_wrong_password_is_hashed_whether_the_user_exists_or_not(
    start_broker: StartBroker, passwords: Path, hashes: Hashes, style: Any
) -> None:
    await each_wrong_password_is_hashed(await start_broker(**style(passwords)), hashes)


async def test_beside_plugins_a_wrong_password_is_hashed_whether_the_user_is_in_the_file_or_not(
    start_broker: StartBroker, script: Script, passwords: Path, hashes: Hashes
) -> None:
    broker = await start_broker(access=plugins("Users"), control={"password_file": str(passwords)})
    script.users["nobody"] = False
    await each_wrong_password_is_hashed(broker, hashes)


@pytest.mark.nightly
async def test_a_database_hashes_a_wrong_password_whether_the_user_exists_or_not(
    start_broker: StartBroker, tmp_path: Path, hashes: Hashes
) -> None:
    from amqtt.contrib.auth_db.managers import UserManager
    from amqtt.contrib.auth_db.models import PasswordHasher as Hasher

    connection = f"sqlite+aiosqlite:///{tmp_path}/users.db"
    Hasher(schemes=["argon2"])
    users = UserManager(connection)
    await users.db_sync()
    await users.create_user_auth("ann", "anns password")
    await users.close()
    tables = {"amqtt.contrib.auth_db.UserAuthDBPlugin": {"connection": connection, "hash_schemes": ["argon2"]}}
    broker = await start_broker(access=AccessOptions(plugins=tables))
    await each_wrong_password_is_hashed(broker, hashes)
    await enter(broker, "ann", "anns password")


# --- credentials that the node remembers --------------------------------------------------------------------------------


@both
async def test_a_client_that_comes_again_needs_no_other_hash(
    start_broker: StartBroker, passwords: Path, hashes: Hashes, style: Any
) -> None:
    broker = await start_broker(**style(passwords, verified_for_ms=60_000))
    for client_id in ("first", "second", "third"):
        await leave(broker, await enter(broker, "ann", "anns password", client_id))
    assert hashes.compared == ["anns password"]
    assert await (await login(broker, "c", "ann", "wrong")).ended() == [BAD_PASSWORD]
    assert hashes.compared == ["anns password", "wrong"]
    verified = broker.node.gateway.authorizer.logins.verified
    assert verified is not None
    assert verified.hits == 2


@both
async def test_credentials_are_remembered_for_a_while_after_their_last_client_has_left(
    start_broker: StartBroker, passwords: Path, hashes: Hashes, style: Any
) -> None:
    broker = await start_broker(**style(passwords, verified_for_ms=60_000))
    client = await enter(broker, "ann", "anns password")
    pass_time(broker.node.gateway, 3600)
    await leave(broker, client)
    pass_time(broker.node.gateway, 59)
    await leave(broker, await enter(broker, "ann", "anns password"))
    assert len(hashes.compared) == 1
    pass_time(broker.node.gateway, 61)
    assert len(broker.node.gateway.authorizer.logins.verified or ()) == 0
    await enter(broker, "ann", "anns password")
    assert len(hashes.compared) == 2


async def test_a_changed_password_and_a_deleted_user_count_at_once(
    start_broker: StartBroker, passwords: Path, hashes: Hashes
) -> None:
    broker = await start_broker(**own(passwords))
    for user in ("ann", "bob"):
        await leave(broker, await enter(broker, user, f"{user}s password"))
    write(passwords, ann="another password")
    broker.node.access.reload(Subject("test"))
    for user in ("ann", "bob"):
        assert await (await login(broker, "c", user, f"{user}s password")).ended() == [BAD_PASSWORD]
    await leave(broker, await enter(broker, "ann", "another password"))
    compared = len(hashes.compared)
    append(passwords, f"bob:{QUICK.hash('bobs password')}")
    broker.node.access.reload(Subject("test"))
    await leave(broker, await enter(broker, "ann", "another password"))
    assert len(hashes.compared) == compared, "another user's change does not matter"


async def test_clients_that_wait_with_the_same_credentials_need_few_hashes(
    start_broker: StartBroker, passwords: Path, hashes: Hashes
) -> None:
    broker = await start_broker(**own(passwords, authentication_threads=1))
    hashes.may_begin.clear()
    clients = [await login(broker, f"c{number}", "ann", "anns password") for number in range(20)]
    await until(lambda: broker.node.gateway.authorizer.logins.queue.waiting == 19)
    hashes.may_begin.set()
    for client in clients:
        assert await client.receive() == ACCEPTED
    assert len(hashes.compared) == 1
    later = await enter(broker, "ann", "anns password", "later")
    for client_id in (*(f"c{number}" for number in range(20)), "later"):
        identity = broker.connection(client_id).identity
        assert identity is not None
        assert (broker.connection(client_id).user, identity.user) == ("ann", "ann")
    later.reset()


async def test_nothing_is_remembered_if_the_options_say_so(start_broker: StartBroker, passwords: Path, hashes: Hashes) -> None:
    broker = await start_broker(**own(passwords, verified="none"))
    for _ in range(2):
        await leave(broker, await enter(broker, "ann", "anns password"))
    assert len(hashes.compared) == 2


async def test_what_other_plugins_have_verified_is_not_remembered(start_broker: StartBroker, script: Script) -> None:
    broker = await start_broker(access=plugins("Users"))
    for _ in range(2):
        await leave(broker, await enter(broker, "ann", "x"))
    assert script.asked == [("connect", "ann")] * 2


async def test_what_any_plugin_has_verified_is_remembered_for_one_client_if_the_options_say_so(
    start_broker: StartBroker, script: Script
) -> None:
    broker = await start_broker(access=plugins("Renamer", verified="all", verified_for_ms=60_000))
    client = await enter(broker, "ann", "x", "c")
    await enter(broker, "ann", "x", "d")
    assert script.asked == [("connect", "c"), ("connect", "d")]
    client.reset()
    await until(lambda: "c" not in broker.node.gateway.clients)
    await enter(broker, "ann", "x", "c")
    assert script.asked == [("connect", "c"), ("connect", "d")]
    assert broker.connection("c").session.user == "renamed ann", "what the plugin changed is remembered, too"
    session = broker.connection("c").plugin_session
    assert session is not None
    assert session.attributes == {"role": "of ann"}
    pass_time(broker.node.gateway, 61)  # It counts from the verification, although the client is connected.
    await enter(broker, "ann", "x", "c")
    assert script.asked == [("connect", "c"), ("connect", "d"), ("connect", "c")]


class Memory:
    """Credentials, with a clock that the test moves."""

    def __init__(self, *, keep_s: float = 10, count_max: int = 100, while_connected: bool = True) -> None:
        self.now_s = 1000.0
        self.verified = VerifiedCredentials(keep_s, count_max, while_connected=while_connected)
        self.verified.start(lambda: self.now_s)

    def name(self, *parts: str) -> bytes:
        return self.verified.name_of(part.encode() for part in parts)


def test_a_name_of_credentials_stands_for_one_user_and_one_password_in_one_process() -> None:
    memory = Memory()
    assert memory.name("ann", "x") == memory.name("ann", "x")
    assert len({memory.name(*parts) for parts in (("ann", "x"), ("an", "nx"), ("annx", ""), ("annx",))}) == 4
    assert memory.name("ann", "x") != Memory().name("ann", "x")


def test_the_oldest_credentials_make_room_and_those_of_connected_clients_last() -> None:
    memory = Memory(count_max=2)
    held = memory.verified.add(b"held", NOTHING)
    memory.verified.connected(held)
    memory.verified.add(b"old", NOTHING)
    memory.verified.add(b"new", NOTHING)
    assert [memory.verified.find(name) is not None for name in (b"held", b"old", b"new")] == [True, False, True]
    memory.verified.connected(memory.verified.add(b"newer", NOTHING))
    memory.verified.add(b"newest", NOTHING)
    assert memory.verified.find(b"held") is not None or memory.verified.find(b"newer") is not None
    memory.verified.left(held)
    assert len(memory.verified) == 2


def test_credentials_are_remembered_as_long_as_one_of_several_clients_is_connected() -> None:
    memory = Memory()
    held = memory.verified.add(b"a", NOTHING)
    memory.verified.connected(held)
    memory.verified.connected(held)
    memory.verified.left(held)
    memory.now_s += 100
    memory.verified.expire()
    assert memory.verified.find(b"a") is held
    memory.verified.left(held)
    memory.now_s += 9
    assert memory.verified.find(b"a") is held
    memory.now_s += 2
    assert memory.verified.find(b"a") is None
    memory.verified.expire()
    assert len(memory.verified) == 0


def test_what_is_forgotten_is_not_remembered_again_by_a_verification_under_way() -> None:
    memory = Memory()
    name = memory.name("ann", "x")
    memory.verified.forget()
    memory.verified.add(name, NOTHING)
    assert memory.verified.find(memory.name("ann", "x")) is None
