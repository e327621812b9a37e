"""Logins by the node's own password file and by signed tokens, and the roles of tokens and certificates."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from penstock.access.options import TokenOptions
from penstock.access.passwords import PasswordFile
from penstock.access.subject import Subject
from penstock.gateway.auth.loop_thread import LOGIN_NICENESS
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway import scripted_plugins
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.logins import PASSWORD, USER, plugins
from tests.gateway.wire import CLEAN, Broker, Client5
from tests.waiting import WAIT_S_MAX, until

SECRET = b"0123456789abcdef0123456789abcdef"
RULES = """
[[role]]
name = "staff"
write = ["staff/%u"]
read = ["jobs/#"]
consume = ["jobs"]

[[role]]
name = "everybody"
users = ["*"]
write = ["own/%u"]
"""
ACCEPTED = 0


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    users = PasswordFile.empty(path)
    users.add("ann", "anns password")
    return path


@pytest.fixture
def control(tmp_path: Path, passwords: Path) -> dict[str, Any]:
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "rules.toml").write_text(RULES)
    tokens = TokenOptions(algorithms=("HS256",), keys=str(tmp_path / "secret"), leeway_s=0)
    return {"password_file": str(passwords), "jwt": tokens}


@pytest.fixture
async def broker(start_broker: StartBroker, control: dict[str, Any], tmp_path: Path) -> Broker:
    return await start_broker(access_file=str(tmp_path / "rules.toml"), control=control)


def token(broker: Broker, seconds: float = 600, key: bytes = SECRET, **claims: Any) -> str:
    return jwt.encode({"sub": "bob", "exp": broker.node.store.now_ms() / 1000 + seconds} | claims, key, "HS256")


async def login(broker: Broker, user: str | None, password: str | None, client_id: str = "c") -> tuple[Client5, int]:
    """Log in with MQTT 5.0, in which a password needs no user name. Return the client, and the reason of the CONNACK."""
    flags = CLEAN | (USER if user is not None else 0) | (PASSWORD if password is not None else 0)
    fields = [each.encode() for each in (user, password) if each is not None]
    client = await broker.connect_5(client_id, *fields, flags=flags, accepted=False)
    return client, (await client.connack())[0]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has a niceness for each thread")
async def test_the_threads_that_hash_passwords_give_way_to_the_loop(broker: Broker) -> None:
    threads = [each for each in threading.enumerate() if each.name.startswith("penstock-login")]
    niceness = {os.getpriority(os.PRIO_PROCESS, each.native_id) for each in threads if each.native_id is not None}
    assert niceness == {min(os.getpriority(os.PRIO_PROCESS, 0) + LOGIN_NICENESS, 19)}
    assert (await login(broker, "ann", "anns password"))[1] == ACCEPTED


async def test_the_password_file_decides_who_connects(broker: Broker) -> None:
    client, reason = await login(broker, "ann", "anns password", "ann")
    assert reason == ACCEPTED
    assert await client.publish_with("own/ann", b"x", qos=1) == 0
    assert await client.publish_with("own/bob", b"x", qos=1) == ReasonCode.NOT_AUTHORIZED
    for user, password in (("ann", "wrong"), ("ann", None), ("eve", "anns password"), ("", "anns password")):
        assert (await login(broker, user, password))[1] == ReasonCode.BAD_USER_NAME_OR_PASSWORD, (user, password)
    assert (await login(broker, None, None))[1] == ReasonCode.NOT_AUTHORIZED


async def test_a_token_names_the_user_and_its_roles(broker: Broker) -> None:
    for user in (None, "", "bob"):
        client, reason = await login(broker, user, token(broker, roles=["staff"]))
        assert reason == ACCEPTED, user
        assert [await client.publish_with(topic, b"x", qos=1) for topic in ("own/bob", "staff/bob")] == [0, 0], user
        assert await client.subscribe(("$share/jobs/jobs/#", 1)) == [1], user
        other, reason = await login(broker, user, token(broker), "other")
        assert await other.subscribe(("$share/jobs/jobs/#", 1)) == [ReasonCode.NOT_AUTHORIZED], user
        assert await other.publish_with("staff/bob", b"x", qos=1) == ReasonCode.NOT_AUTHORIZED, user


async def test_a_token_that_does_not_hold_is_refused(broker: Broker) -> None:
    for user, shown in (
        ("ann", token(broker)),  # the token of another user
        (None, token(broker, -1)),
        (None, token(broker, key=b"x" * 32)),
        (None, token(broker)[:-2]),
    ):
        _, reason = await login(broker, user, shown)
        assert reason in (ReasonCode.BAD_USER_NAME_OR_PASSWORD, ReasonCode.NOT_AUTHORIZED)


async def test_a_token_is_neither_right_nor_wrong_while_there_are_no_keys(
    start_broker: StartBroker, control: dict[str, Any]
) -> None:
    keys = TokenOptions(algorithms=("ES256",), keys="http://127.0.0.1:1/keys")  # nobody listens there
    broker = await start_broker(control=control | {"jwt": keys})
    assert (await login(broker, None, token(broker)))[1] == ReasonCode.SERVER_BUSY
    assert (await login(broker, "ann", "anns password"))[1] == ACCEPTED


async def test_a_client_is_disconnected_when_its_token_ends(broker: Broker) -> None:
    brief, _ = await login(broker, None, token(broker, 60), "brief")
    lasting, _ = await login(broker, None, token(broker, 7200), "lasting")
    broker.clock.advance(62_000)
    broker.node.gateway.authorizer.expire()
    assert (await brief.disconnected())[0] == ReasonCode.MAXIMUM_CONNECT_TIME
    assert await lasting.publish_with("own/bob", b"x", qos=1) == 0


@pytest.mark.slow
async def test_a_user_whose_password_changes_or_who_is_deleted_is_disconnected(broker: Broker, passwords: Path) -> None:
    PasswordFile(passwords).add("carl", "carls password")
    broker.node.reload()
    ann, _ = await login(broker, "ann", "anns password", "a")
    carl, _ = await login(broker, "carl", "carls password", "c")
    bob, _ = await login(broker, None, token(broker), "b")
    PasswordFile(passwords).change("ann", "another")
    PasswordFile(passwords).delete("carl")
    broker.node.reload()
    assert (await ann.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    assert (await carl.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    assert (await login(broker, "ann", "anns password", "a"))[1] == ReasonCode.BAD_USER_NAME_OR_PASSWORD
    assert (await login(broker, "ann", "another", "a"))[1] == ACCEPTED
    assert await bob.publish_with("own/bob", b"x", qos=1) == 0


@pytest.mark.parametrize("change", ["password", "user"])
async def test_a_password_that_is_hashed_while_its_user_changes_lets_nobody_in(
    broker: Broker, passwords: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    is_right, may_answer, verify = threading.Event(), threading.Event(), PasswordFile.verify

    def held(users: PasswordFile, user: str, password: bytes) -> bool:
        found = verify(users, user, password)
        is_right.set()
        may_answer.wait(WAIT_S_MAX)
        return found

    monkeypatch.setattr(PasswordFile, "verify", held)
    client = await broker.connect_5("c", b"ann", b"anns password", flags=CLEAN | USER | PASSWORD, accepted=False)
    await until(is_right.is_set)
    if change == "password":
        PasswordFile(passwords).change("ann", "another")
    else:
        PasswordFile(passwords).delete("ann")
    broker.node.reload()
    may_answer.set()
    assert (await client.connack())[0] == ReasonCode.BAD_USER_NAME_OR_PASSWORD
    assert broker.node.gateway.clients.get("c") is None


async def test_a_client_that_waits_for_answers_about_topics_while_its_user_is_deleted_is_refused(
    start_broker: StartBroker, control: dict[str, Any], passwords: Path
) -> None:
    script = scripted_plugins.new_script()
    broker = await start_broker(control=control, access=plugins("Topics"))
    fields, flags, lasts = (b"ann", b"anns password"), USER | PASSWORD, {Property.SESSION_EXPIRY_S: 600}
    ann = await broker.connect_5("c", *fields, flags=flags, about=lasts)
    assert await ann.subscribe(("jobs", 1)) == [1]
    ann.reset()
    await until(lambda: broker.node.gateway.clients.get("c") is None)
    script.may_answer.clear()
    asked = len(script.asked)
    ann = await broker.connect_5("c", *fields, flags=flags, about=lasts, accepted=False)
    await until(lambda: len(script.asked) > asked)
    PasswordFile(passwords).delete("ann")
    broker.node.reload()
    script.may_answer.set()
    assert (await ann.connack())[0] == ReasonCode.BAD_USER_NAME_OR_PASSWORD


async def test_a_client_whose_token_was_signed_with_a_key_that_is_taken_away_is_disconnected(
    broker: Broker, tmp_path: Path
) -> None:
    bob, _ = await login(broker, None, token(broker), "b")
    ann, _ = await login(broker, "ann", "anns password", "a")
    broker.node.reload()
    assert await bob.publish_with("own/bob", b"x", qos=1) == ACCEPTED
    other = SECRET[::-1]
    (tmp_path / "secret").write_bytes(other)
    broker.node.reload()
    assert (await bob.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    assert (await login(broker, None, token(broker), "b"))[1] == ReasonCode.NOT_AUTHORIZED
    assert (await login(broker, None, token(broker, key=other), "b"))[1] == ACCEPTED
    assert await ann.publish_with("own/ann", b"x", qos=1) == ACCEPTED


async def test_a_fetched_key_set_without_a_key_disconnects_the_clients_of_that_key(
    start_broker: StartBroker, control: dict[str, Any]
) -> None:
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("old", "new")}

    def key_set(*names: str) -> bytes:
        return json.dumps(
            {"keys": [ECAlgorithm.to_jwk(keys[name].public_key(), True) | {"kid": name} for name in names]}
        ).encode()

    fetched = TokenOptions(algorithms=("ES256",), keys="http://127.0.0.1:1/keys")  # nobody listens there
    broker = await start_broker(control=control | {"jwt": fetched})
    access, ends_s = broker.node.access, broker.node.store.now_ms() / 1000 + 600
    access.use_key_set(key_set("old", "new"))
    clients = {}
    for name, key in keys.items():
        shown = jwt.encode({"sub": name, "exp": ends_s}, key, "ES256", {"kid": name})
        clients[name], reason = await login(broker, None, shown, name)
        assert reason == ACCEPTED
    access.use_key_set(key_set("new", "old"))
    assert await clients["old"].publish_with("a", b"x", qos=1) == ACCEPTED
    access.use_key_set(key_set("new"))
    assert (await clients["old"].disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    assert await clients["new"].publish_with("a", b"x", qos=1) == ACCEPTED


async def test_a_ban_of_a_user_outlasts_a_new_login(broker: Broker) -> None:
    ann, _ = await login(broker, "ann", "anns password")
    await broker.node.access.ban("user", "ann", for_ms=0, why="", by=Subject("test"))
    assert (await ann.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    assert (await login(broker, "ann", "anns password"))[1] == ReasonCode.BANNED


async def test_plugins_are_asked_about_whom_the_node_does_not_know(
    start_broker: StartBroker, control: dict[str, Any], tmp_path: Path
) -> None:
    scripted_plugins.new_script()
    rules = str(tmp_path / "rules.toml")
    broker = await start_broker(access_file=rules, control=control, access=plugins("Users"))
    assert (await login(broker, "ann", "wrong"))[1] == ReasonCode.BAD_USER_NAME_OR_PASSWORD
    client, reason = await login(broker, "dora", "x")
    assert reason == ACCEPTED
    assert await client.publish_with("own/dora", b"x", qos=1) == 0


async def test_the_units_of_a_certificate_are_roles(start_broker: StartBroker, tmp_path: Path) -> None:
    rules, authority = tmp_path / "rules.toml", Authority(tmp_path / "tls")
    rules.write_text(RULES)
    devices = authority.listener("devices", client_certificates="required", username_from="cn", roles_from="ou")
    broker = await start_broker(access_file=str(rules), listeners=(devices,))
    for name, unit, reason in (("d1", "staff", 0), ("d2", None, ReasonCode.NOT_AUTHORIZED)):
        context = authority.context(authority.issue_client(f"{name}.example.org", common_name=name, unit=unit))
        client = await broker.connect_5(name, listener="devices", context=context)
        assert await client.publish_with(f"staff/{name}", b"x", qos=1) == reason
