"""The audit log over MQTT: a line for each client that comes, is refused, is denied something, or goes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jwt
import pytest

from penstock.access.options import AccessControlOptions, TokenOptions
from penstock.access.subject import Subject
from penstock.gateway.options import AccessOptions, ListenerOptions
from penstock.gateway.protocol.packets import CONNACK
from penstock.gateway.protocol.properties import Property, write_properties
from penstock.gateway.protocol.reasons import REASONS, ReasonCode
from penstock.store.options import GIB, KIB
from tests.gateway.brokers import StartBroker
from tests.gateway.disk_space import free
from tests.gateway.logins import PASSWORD, USER, plugins
from tests.gateway.packet_cases import connect
from tests.gateway.packet_cases_5 import connect_5
from tests.gateway.scripted_plugins import BROKEN, Script
from tests.gateway.wire import BYE, CLEAN, FREE, PING, WILL, Broker
from tests.waiting import until

LASTS = {Property.SESSION_EXPIRY_S: 600}
SECRET = b"0123456789abcdef0123456789abcdef"
FAR_FUTURE_S = 4_000_000_000
RULES = """
[[rule]]
allow = "all"
topics = ["plant/#"]
groups = ["devices"]
"""


class Audit:
    """The lines of an audit log. Each call returns what was written since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def lines(self, *events: str) -> list[dict[str, Any]]:
        found = [json.loads(line) for line in self.path.read_text().splitlines()]
        new, self._read = found[self._read :], len(found)
        return [line for line in new if not events or line["event"] in events]


@pytest.fixture
def audit(tmp_path: Path) -> Audit:
    (tmp_path / "access.toml").write_text(RULES)
    (tmp_path / "secret").write_bytes(SECRET)
    return Audit(tmp_path / "audit")


@pytest.fixture
def start(start_broker: StartBroker, audit: Audit, tmp_path: Path) -> StartBroker:
    """Start a node with an audit log, rules, and tokens as passwords."""

    async def start(*, has_tokens: bool = False, **options: Any) -> Broker:
        control: dict[str, Any] = {"audit_file": str(audit.path)}
        if has_tokens:
            control["jwt"] = TokenOptions(algorithms=("HS256",), keys=str(tmp_path / "secret"))
        return await start_broker(access_file=str(tmp_path / "access.toml"), control=control, **options)

    return start


def token(user: str) -> bytes:
    return jwt.encode({"sub": user, "exp": FAR_FUTURE_S}, SECRET, "HS256").encode()


# --- refused ------------------------------------------------------------------------------------------------------------

Before = Callable[[Broker], Awaitable[object]]


@dataclass(frozen=True)
class Refusal:
    """A CONNECT that is refused.

    Parameters:
        name: what is wrong.
        sent: what the client sends.
        reason: the reason in the line.
        line: other fields of the line.
        options: of the node.
        before: what happens before.
    """

    name: str
    sent: bytes
    reason: ReasonCode
    line: dict[str, str] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    before: Before | None = None
    listener: str = "mqtt"


def ban(kind: Any, name: str) -> Before:
    async def before(broker: Broker) -> None:
        await broker.node.access.ban(kind, name, for_ms=0, why="", by=Subject("test"))

    return before


def enter(client_id: str, *fields: bytes, **options: Any) -> Before:
    async def before(broker: Broker) -> None:
        await broker.connect_5(client_id, *fields, **options)

    return before


async def fill_disk(broker: Broker) -> None:
    free(broker, GIB // 2)


R = ReasonCode
DEV = {"client": "dev"}
EVE = {"client": "dev", "claimed": "eve"}
LOGIN = CLEAN | USER | PASSWORD
LASTING = write_properties(LASTS)
METHOD = write_properties({Property.AUTHENTICATION_METHOD: "SCRAM"})
MANY = write_properties({Property.USER_PROPERTY: [("a", "b")] * 3})
ONE_A_SECOND = ListenerOptions(name="limited", listen=FREE, connections_per_s=1)

REFUSALS = [
    Refusal("a reserved flag", connect(CLEAN | 1, b"dev"), R.MALFORMED_PACKET),
    Refusal("no MQTT", b"GET / HTTP/1.1\r\n\r\n", R.MALFORMED_PACKET),
    Refusal("no CONNECT", PING, R.PROTOCOL_ERROR),
    Refusal("another version", connect(CLEAN, b"dev", level=9), R.UNSUPPORTED_PROTOCOL_VERSION),
    Refusal("too many bytes", b"\x10\xff\xff\xff\x7f", R.PACKET_TOO_LARGE),
    Refusal("an authentication method", connect_5(CLEAN, b"dev", about=METHOD), R.BAD_AUTHENTICATION_METHOD),
    Refusal("a will to a filter", connect(CLEAN | WILL, b"dev", b"a/#", b"x"), R.TOPIC_NAME_INVALID),
    Refusal("too many properties", connect_5(CLEAN, b"dev", about=MANY), R.QUOTA_EXCEEDED, options={"user_properties_max": 2}),
    Refusal("no client id", connect(0, b""), R.CLIENT_IDENTIFIER_NOT_VALID),
    Refusal("nobody's name", connect(CLEAN, b"dev"), R.NOT_AUTHORIZED, DEV, {"access": AccessOptions(anonymous="never")}),
    Refusal("a banned client id", connect(CLEAN, b"dev"), R.BANNED, DEV, before=ban("client", "dev")),
    Refusal("a banned address", connect_5(CLEAN, b"dev"), R.BANNED, DEV, before=ban("address", "127.0.0.1")),
    Refusal(
        "a banned user who shows a token and no user name",
        connect_5(CLEAN | PASSWORD, b"dev", token("ann")),
        R.BANNED,
        {"client": "dev", "user": "ann"},
        {"has_tokens": True},
        ban("user", "ann"),
    ),
    Refusal(
        "a user's client id",
        connect_5(CLEAN | PASSWORD, b"dev", token("ann")),
        R.CLIENT_IDENTIFIER_NOT_VALID,
        {"client": "dev", "user": "ann"},
        {"has_tokens": True, "access": AccessOptions(client_id="%u-*")},
    ),
    Refusal(
        "a wrong token",
        connect_5(LOGIN, b"dev", b"eve", token("ann")),
        R.BAD_USER_NAME_OR_PASSWORD,
        EVE,
        {"has_tokens": True},
    ),
    Refusal(
        "a user whom a plugin does not know",
        connect_5(LOGIN, b"dev", b"eve", b"x"),
        R.BAD_USER_NAME_OR_PASSWORD,
        EVE,
        {"access": plugins("Users")},
    ),
    Refusal(
        "a plugin without an answer",
        connect_5(LOGIN, b"dev", b"broken", b"x"),
        R.SERVER_BUSY,
        {"client": "dev", "claimed": "broken"},
        {"access": plugins("Users")},
    ),
    Refusal("a denied will", connect(CLEAN | WILL, b"dev", b"hr/1", b"x"), R.NOT_AUTHORIZED, DEV),
    Refusal(
        "a large will",
        connect(CLEAN | WILL, b"dev", b"plant/1", bytes(KIB + 1)),
        R.QUOTA_EXCEEDED,
        DEV,
        {"message_bytes_max": KIB},
    ),
    Refusal("too many clients", connect(CLEAN, b"dev"), R.QUOTA_EXCEEDED, DEV, {"connections_max": 1}, enter("other")),
    Refusal(
        "too many sessions",
        connect_5(CLEAN, b"dev", about=LASTING),
        R.QUOTA_EXCEEDED,
        DEV,
        {"sessions_max": 1},
        enter("other", about=LASTS),
    ),
    Refusal("a full disk", connect_5(CLEAN, b"dev", about=LASTING), R.QUOTA_EXCEEDED, DEV, {"reserve_bytes": GIB}, fill_disk),
    Refusal(
        "another user's session",
        connect_5(LOGIN, b"dev", b"bob", token("bob")),
        R.CLIENT_IDENTIFIER_NOT_VALID,
        {"client": "dev", "user": "bob"},
        {"has_tokens": True},
        enter("dev", b"ann", token("ann"), flags=LOGIN, about=LASTS),
    ),
    Refusal(
        "too many clients a second",
        connect_5(CLEAN, b"dev"),
        R.CONNECTION_RATE_EXCEEDED,
        DEV,
        {"listeners": (ONE_A_SECOND,)},
        enter("other", listener="limited"),
        "limited",
    ),
]

NEVER = {
    R.UNSPECIFIED_ERROR,
    R.IMPLEMENTATION_SPECIFIC_ERROR,
    R.SERVER_UNAVAILABLE,  # in MQTT 5.0 there is a reason that says more
    R.PAYLOAD_FORMAT_INVALID,
    R.RETAIN_NOT_SUPPORTED,
    R.QOS_NOT_SUPPORTED,
    R.USE_ANOTHER_SERVER,
    R.SERVER_MOVED,
}
"""Reasons with which the node refuses no CONNECT."""


def test_the_table_has_each_reason_for_which_a_connect_is_refused() -> None:
    failures = {reason for reason in REASONS[CONNACK] if reason >= R.UNSPECIFIED_ERROR}
    covered = {case.reason for case in REFUSALS}
    assert covered & NEVER == set()
    assert covered | NEVER == failures


@pytest.mark.parametrize("case", REFUSALS, ids=lambda case: case.name)
async def test_each_client_that_is_refused_has_a_line(start: StartBroker, audit: Audit, script: Script, case: Refusal) -> None:
    script.users = {"eve": False, "broken": BROKEN}
    broker = await start(**case.options)
    if case.before is not None:
        await case.before(broker)
    audit.lines()
    client = await broker.dial_5(case.listener)
    await client.send(case.sent)
    await client.reader.read()
    await until(audit.path.read_text)
    (line,) = audit.lines("refused", "connected", "disconnected")
    assert line.pop("at")
    assert line.pop("why")
    expected = {"event": "refused", "address": "127.0.0.1", "listener": case.listener, "reason": case.reason.name}
    assert line == expected | case.line


async def test_a_flood_of_refusals_writes_few_lines_and_hides_no_other_reason(start: StartBroker, audit: Audit) -> None:
    broker = await start()
    broker.node.gateway.heartbeat.stop()  # so that the second does not end
    limit, counts = AccessControlOptions().audit_lines_per_s, broker.node.access.audit.counts
    for wish in [connect(CLEAN, b"flood", level=9)] * (limit + 50) + [connect(0, b"")]:
        client = await broker.dial()
        await client.send(wish)
        await client.reader.read()
    await until(lambda: counts["refused"] == limit + 51)
    flood, other = "UNSUPPORTED_PROTOCOL_VERSION", "CLIENT_IDENTIFIER_NOT_VALID"
    assert [line["reason"] for line in audit.lines("refused")] == [flood] * limit + [other]
    broker.node.access.audit.turn_page()
    (left_out,) = audit.lines("left_out")
    assert (left_out["of"], left_out["reason"], left_out["lines"]) == ("refused", flood, 50)


# --- denied -------------------------------------------------------------------------------------------------------------


async def test_each_action_that_is_denied_has_a_line(start: StartBroker, audit: Audit, tmp_path: Path) -> None:
    text = '[[rule]]\ndeny = ["receive"]\ntopics = ["hr/secret"]\n[[rule]]\nallow = ["subscribe"]\ntopics = ["hr/#"]\n'
    (tmp_path / "access.toml").write_text(text + RULES)
    broker = await start(has_tokens=True)
    client = await broker.connect_5("dev", b"ann", token("ann"), flags=LOGIN)
    audit.lines()
    assert await client.publish_with("hr/1", b"x", qos=1) == R.NOT_AUTHORIZED
    assert await client.subscribe(("other/#", 1), ("$share/billing/plant/#", 1)) == [R.NOT_AUTHORIZED] * 2
    await client.subscribe(("hr/#", 1))
    broker.node.store.append_message(broker.node.store.router.route(b"hr/secret"), b"x", b"", 1)
    broker.node.store.commit()
    assert await client.messages() == []
    found = audit.lines()
    assert [(line["action"], line["topic"]) for line in found] == [
        ("publish", "hr/1"),
        ("subscribe", "other/#"),
        ("subscribe", "$share/billing/plant/#"),
        ("receive", "hr/secret"),
    ]
    for line in found:
        assert (line["event"], line["user"], line["client"], line["address"]) == ("denied", "ann", "dev", "127.0.0.1")


# --- connected and disconnected -----------------------------------------------------------------------------------------


async def test_a_client_that_comes_and_goes_has_two_lines(start: StartBroker, audit: Audit) -> None:
    broker = await start(has_tokens=True)
    clients = broker.node.gateway.clients

    async def leave(how: Callable[[Any], Awaitable[object]]) -> dict[str, Any]:
        client = await broker.connect_5("dev", b"ann", token("ann"), flags=LOGIN)
        (come,) = audit.lines()
        assert (come["event"], come["user"], come["client"], come["listener"]) == ("connected", "ann", "dev", "mqtt")
        await how(client)
        await until(lambda: not clients)
        (gone,) = audit.lines("disconnected", "refused")
        assert (gone["event"], gone["user"], gone["client"]) == ("disconnected", "ann", "dev")
        assert (gone["address"], gone["listener"]) == ("127.0.0.1", "mqtt")
        return gone

    async def says_so(client: Any) -> None:
        await client.send(BYE)

    async def closes(client: Any) -> None:
        client.writer.write_eof()

    async def vanishes(client: Any) -> None:
        client.reset()

    async def breaks(client: Any) -> None:
        await client.send(connect(CLEAN, b"again"))

    async def is_kicked(_client: Any) -> None:
        broker.node.gateway.disconnect("client", "dev")

    async def is_banned(_client: Any) -> None:
        await broker.node.access.ban("user", "ann", for_ms=0, why="", by=Subject("test"))

    gone = await leave(says_so)
    assert (gone["why"], gone.get("reason")) == ("the client has sent a DISCONNECT", None)
    gone = await leave(closes)
    assert (gone["why"], gone.get("reason")) == ("the client has closed the connection without a DISCONNECT", None)
    gone = await leave(vanishes)
    assert gone["why"].startswith(("the connection was lost", "the client has closed"))
    gone = await leave(breaks)
    assert (gone["reason"], "second CONNECT" in gone["why"]) == ("PROTOCOL_ERROR", True)
    gone = await leave(is_kicked)
    assert (gone["reason"], "an operator" in gone["why"]) == ("ADMINISTRATIVE_ACTION", True)
    gone = await leave(is_banned)
    assert (gone["reason"], "banned" in gone["why"]) == ("ADMINISTRATIVE_ACTION", True)


async def test_a_takeover_and_a_stop_of_the_node_disconnect(start: StartBroker, audit: Audit) -> None:
    broker = await start()
    await broker.connect_5("dev")
    await broker.connect_5("dev")
    assert [(line["event"], line.get("reason")) for line in audit.lines()] == [
        ("connected", None),
        ("disconnected", "SESSION_TAKEN_OVER"),
        ("connected", None),
    ]
    connected = broker.clients[:]  # held, so that they do not close
    broker.clients.clear()
    await broker.restart()
    (gone,) = audit.lines()
    assert (gone["event"], gone["client"], gone["reason"]) == ("disconnected", "dev", "SERVER_SHUTTING_DOWN")
    broker.clients += connected


async def test_a_client_that_was_refused_does_not_leave(start: StartBroker, audit: Audit) -> None:
    broker = await start(access=AccessOptions(anonymous="never"))
    client = await broker.connect_5("dev", accepted=False)
    await client.reader.read()
    await until(lambda: not broker.node.gateway.connections)
    assert [line["event"] for line in audit.lines()] == ["refused"]
