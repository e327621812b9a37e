"""Wills of clients that have gone: bans, rules, users and keys are looked at when the will is published."""

from __future__ import annotations

import json
from collections.abc import Callable
from inspect import isawaitable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm

from penstock.access.options import TokenOptions
from penstock.access.passwords import PasswordFile
from penstock.access.subject import Subject
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import PASSWORD, REFUSED, USER
from tests.gateway.moving_time import pass_time
from tests.gateway.wire import CLEAN, Broker, Client5
from tests.waiting import until

WILL = 0x04
"""The will flag of a CONNECT (MQTT 5.0, 3.1.2.5)."""

SECRET = b"0123456789abcdef0123456789abcdef"
RULES = """
[[rule]]
allow = ["publish"]
users = ["ann", "bob"]
topics = ["gone/%u"]

[[rule]]
allow = ["publish"]
roles = ["staff"]
addresses = ["127.0.0.0/8"]
topics = ["staff/#"]
"""


@pytest.fixture
async def broker(start_broker: StartBroker, tmp_path: Path) -> Broker:
    PasswordFile.empty(tmp_path / "passwords").add("ann", "anns password")
    (tmp_path / "rules.toml").write_text(RULES)
    (tmp_path / "secret").write_bytes(SECRET)
    tokens = TokenOptions(algorithms=("HS256",), keys=str(tmp_path / "secret"))
    control: dict[str, Any] = {"password_file": str(tmp_path / "passwords"), "jwt": tokens}
    control["audit_file"] = str(tmp_path / "audit")
    return await start_broker(access_file=str(tmp_path / "rules.toml"), control=control)


def token(broker: Broker, key: Any = SECRET, algorithm: str = "HS256", **more: Any) -> str:
    claims = {"sub": "bob", "roles": ["staff"], "exp": broker.node.store.now_ms() / 1000 + 6000}
    return jwt.encode(claims, key, algorithm, **more)


async def leave_will(
    broker: Broker, user: str, password: str, topic: str, *, delay_s: int = 10, client_id: str = "c"
) -> Client5:
    """Connect a client whose will waits for some seconds after its connection has broken."""
    fields = [each.encode() for each in (topic, "x", user, password)]
    return await broker.connect_5(
        client_id,
        *fields,
        flags=CLEAN | WILL | USER | PASSWORD,
        about={Property.SESSION_EXPIRY_S: 60},
        will={Property.WILL_DELAY_S: delay_s},
    )


async def breaks(broker: Broker, client: Client5) -> None:
    client.reset()
    await until(lambda: not broker.node.gateway.clients)


async def passes(broker: Broker, seconds: float) -> None:
    """Let time pass, and wait until the node has done what is due of its sessions, which may take several slices."""
    pass_time(broker.node.gateway, seconds)
    job = broker.node.gateway.lifecycle._job
    assert job is not None
    await until(lambda: not job.is_scheduled)


Change = Callable[[Broker, Path], object]
"""Makes a change, and may return something to wait for."""


def ban(kind: Any, name: str) -> Change:
    return lambda broker, _: broker.node.access.ban(kind, name, for_ms=0, why="", by=Subject("test"))


async def made(change: object) -> None:
    """Wait for a change, if there is something to wait for."""
    if isawaitable(change):
        await change


def rewrite(name: str, old: str, new: str) -> Change:
    def change(_broker: Broker, files: Path) -> None:
        (files / name).write_text((files / name).read_text().replace(old, new))

    return change


CHANGES: dict[str, tuple[str, Change, bool]] = {
    "nothing": ("ann", lambda *_: None, True),
    "another user is banned": ("ann", ban("user", "bob"), True),
    "its user is banned": ("ann", ban("user", "ann"), False),
    "its client id is banned": ("ann", ban("client", "c"), False),
    "its address is banned": ("ann", ban("address", "127.0.0.0/8"), False),
    "the rules change": ("ann", rewrite("rules.toml", "gone/%u", "away/%u"), False),
    "its user is deleted": ("ann", lambda _, files: PasswordFile(files / "passwords").delete("ann"), False),
    "its password changes": ("ann", lambda _, files: PasswordFile(files / "passwords").change("ann", "another"), False),
    "its user is in use as before": ("ann", lambda _, files: PasswordFile(files / "passwords").add("eve", "x"), True),
    "nothing, with a token": ("bob", lambda *_: None, True),
    "the role of its token loses a right": ("bob", rewrite("rules.toml", '"staff"', '"others"'), False),
    "its address loses a right": ("bob", rewrite("rules.toml", "127.0.0.0/8", "10.0.0.0/8"), False),
    "the key of its token is taken away": (
        "bob",
        lambda _, files: (files / "secret").write_bytes(SECRET[::-1]),
        False,
    ),
}


KILLED = ("nothing", "its user is banned", "the rules change", "its password changes", "the key of its token is taken away")
"""Changes that the next node must find out about, too."""


@pytest.mark.parametrize(
    ("change", "end"), [*((change, "break") for change in CHANGES), *((change, "kill") for change in KILLED)]
)
async def test_the_will_of_a_client_that_is_away_goes_by_what_is_in_force_when_it_is_published(
    broker: Broker, tmp_path: Path, change: str, end: str
) -> None:
    user, apply, comes = CHANGES[change]
    password, topic = ("anns password", "gone/ann") if user == "ann" else (token(broker), "staff/b")
    client = await leave_will(broker, user, password, topic)
    if end == "break":
        await breaks(broker, client)
        await made(apply(broker, tmp_path))
        broker.node.reload()
    else:
        if "banned" in change:  # A ban must be made by the node that is killed, and would end the connected client.
            await breaks(broker, client)
        await made(apply(broker, tmp_path))
        await broker.kill()
        await until(lambda: broker.away() == ["c"] and broker.node.gateway.lifecycle._lost_from is None)
    await passes(broker, 12)
    assert [message.topic for message in broker.stored()] == ([topic] if comes else [])
    denied = [line for line in (tmp_path / "audit").read_text().splitlines() if json.loads(line)["event"] == "denied"]
    assert len(denied) == (not comes)
    await passes(broker, 120)
    if end == "kill":
        await broker.restart()
        await passes(broker, 12)
        assert [message.topic for message in broker.stored()] == ([topic] if comes else [])
    assert broker.held_resources()["sessions"] == 0


async def test_a_client_that_leaves_before_a_reload_has_reached_it_leaves_no_will(broker: Broker, tmp_path: Path) -> None:
    await leave_will(broker, "ann", "anns password", "gone/ann", delay_s=0)
    rewrite("rules.toml", "gone/%u", "away/%u")(broker, tmp_path)
    broker.node.reload()
    broker.connection("c").close("", ReasonCode.UNSPECIFIED_ERROR)
    assert broker.stored() == []


@pytest.mark.parametrize("is_known", [True, False])
async def test_a_will_waits_until_its_author_s_key_is_known_or_is_known_to_be_gone(
    start_broker: StartBroker, is_known: bool
) -> None:
    """What nobody can decide is neither published nor dropped, and other wills don't wait for it."""
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("old", "new")}

    def key_set(*names: str) -> bytes:
        rows = [ECAlgorithm.to_jwk(keys[name].public_key(), as_dict=True) | {"kid": name} for name in names]
        return json.dumps({"keys": rows}).encode()

    fetched = TokenOptions(algorithms=("ES256",), keys="http://127.0.0.1:1/keys")  # nobody listens there
    broker = await start_broker(control={"jwt": fetched})
    broker.node.access.use_key_set(key_set("old"))
    shown = token(broker, keys["old"], "ES256", headers={"kid": "old"})
    await leave_will(broker, "bob", shown, "gone/bob", delay_s=0)
    await leave_will(broker, "bob", shown, "gone/again", delay_s=0, client_id="again")
    await broker.kill()
    gateway = broker.node.gateway
    await until(lambda: sorted(broker.away()) == ["again", "c"] and gateway.lifecycle._lost_from is None)
    await passes(broker, 30)
    assert broker.stored() == []
    assert sorted(broker.away()) == ["again", "c"]
    await passes(broker, 60)  # their sessions have expired, and wait for the wills
    assert (broker.stored(), sorted(broker.away())) == ([], ["again", "c"])
    broker.node.access.use_key_set(key_set("old", "new") if is_known else key_set("new"))
    await passes(broker, 2)
    assert sorted(message.topic for message in broker.stored()) == (["gone/again", "gone/bob"] if is_known else [])
    assert broker.away() == []


async def test_a_client_that_would_end_a_session_whose_will_waits_is_told_that_the_server_is_busy(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    keys = json.dumps({"keys": [ECAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": "k"}]}).encode()
    PasswordFile.empty(tmp_path / "passwords").add("bob", "bobs password")
    fetched = TokenOptions(algorithms=("ES256",), keys="http://127.0.0.1:1/keys")  # nobody listens there
    broker = await start_broker(control={"jwt": fetched, "password_file": str(tmp_path / "passwords")})
    broker.node.access.use_key_set(keys)
    await leave_will(broker, "bob", token(broker, key, "ES256", headers={"kid": "k"}), "gone/bob")
    await broker.kill()
    fields, flags = (b"bob", b"bobs password"), CLEAN | USER | PASSWORD
    client = await broker.connect_5("c", *fields, flags=flags, accepted=False)
    assert (await client.connack())[0] == ReasonCode.SERVER_BUSY
    broker.node.access.use_key_set(keys)
    await broker.connect_5("c", *fields, flags=flags)
    assert [message.topic for message in broker.stored()] == ["gone/bob"]


@pytest.mark.parametrize("topic", ["$delayed/5/x", "$SYS/x", "$share/group/x", "$dlq/billing", "$"])
async def test_a_will_to_a_topic_of_the_node_is_refused_when_its_client_connects(start_broker: StartBroker, topic: str) -> None:
    broker = await start_broker()
    new = await broker.connect_5("c", topic.encode(), b"x", flags=CLEAN | WILL, accepted=False)
    reason, about = await new.connack()
    assert reason == ReasonCode.TOPIC_NAME_INVALID
    assert f"The will can't be published to {topic!r}" in about[Property.REASON_STRING]
    old = await broker.connect("c", topic.encode(), b"x", flags=CLEAN | WILL, accepted=False)
    assert await old.ended() == [REFUSED]
    assert not broker.node.gateway.clients


@pytest.mark.parametrize("name", ["delay-ms", "deliver-at-ms"])
async def test_a_will_with_a_delivery_time_is_refused_when_its_client_connects(start_broker: StartBroker, name: str) -> None:
    broker = await start_broker()
    about: dict[Any, Any] = {Property.USER_PROPERTY: [("unit", "C"), (name, "60000")]}
    client = await broker.connect_5("c", b"gone", b"x", flags=CLEAN | WILL, will=about, accepted=False)
    reason, properties = await client.connack()
    assert reason == ReasonCode.IMPLEMENTATION_SPECIFIC_ERROR
    assert f"The will has the user property {name}" in properties[Property.REASON_STRING]
