"""Who gets what from the admin listener: host names, tokens, passwords, certificates, roles, proxies and pages."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import jwt
import pytest
from argon2 import PasswordHasher
from prometheus_client import CollectorRegistry

from penstock.access.control import AccessControl
from penstock.access.options import AccessControlOptions, TokenOptions
from penstock.access.subject import Subject
from penstock.node import adminaccess
from penstock.node.admin import Admin, NodeViews
from penstock.node.adminoptions import AdminOptions
from penstock.node.errors import AdminUnavailable
from penstock.node.loginturns import LoginsCrowded, LoginTurns
from penstock.store.options import HostPort
from tests.gateway.certificates import Authority
from tests.waiting import until

STATE, METRICS = "/api/v1/state", "/metrics"
HERE, EVERYWHERE = HostPort("127.0.0.1", 0), HostPort("0.0.0.0", 0)

ACCESS = f"""
[[role]]
name = "viewer"
users = ["ann"]

[[principal]]
name = "prometheus"
token_sha256 = "{sha256(b"s3cret").hexdigest()}"
roles = ["viewer"]

[[principal]]
name = "billing"
token_sha256 = "{sha256(b"b1lling").hexdigest()}"
certificate = "billing.example.org"

[[principal]]
name = "grafana"
certificate = "grafana.example.org"
roles = ["operator"]
"""

CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
PASSWORD = "open sesame"
SECRET = b"0123456789abcdef0123456789abcdef"

Start = Callable[..., Awaitable["Listening"]]


async def no_timers(_: Mapping[str, str]) -> dict[str, Any]:
    return {}


class Listening:
    """An admin listener, and what its callers see of it."""

    def __init__(self, admin: Admin, access: AccessControl, port: int, *, is_tls: bool) -> None:
        self.admin = admin
        self.access = access
        self.url = f"http{'s' * is_tls}://127.0.0.1:{port}"

    async def ask(self, path: str = STATE, *, method: str = "GET", context: Any = None, **headers: str) -> int:
        """Return the status of a response. Names of headers have underscores for dashes."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context or True)) as session,
            session.request(method, self.url + path, headers=sent) as response,
        ):
            return response.status

    async def log_in(self, user: str, password: str) -> int:
        return await self.ask(Authorization=aiohttp.encode_basic_auth(user, password))

    async def show(self, token: str | bytes) -> int:
        return await self.ask(Authorization=f"Bearer {token if isinstance(token, str) else token.decode()}")


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[Start]:
    started: list[Admin] = []
    (tmp_path / "access.toml").write_text(ACCESS)
    (tmp_path / "secret").write_bytes(SECRET)
    (tmp_path / "passwords").write_text("".join(f"{user}:{CHEAP.hash(PASSWORD)}\n" for user in ("ann", "bob")))

    async def start(listen: HostPort = HERE, *, has_access: bool = True, **options: Any) -> Listening:
        control = AccessControlOptions(
            file=str(tmp_path / "access.toml"),
            password_file=str(tmp_path / "passwords"),
            jwt=TokenOptions(algorithms=("HS256",), keys=str(tmp_path / "secret")),
            audit_file=str(tmp_path / "audit"),
        )
        access = AccessControl(control if has_access else AccessControlOptions(), tmp_path, lambda: 1_700_000_000_000)
        chosen = AdminOptions(listen=listen, **options)
        admin = Admin(chosen, access, NodeViews(CollectorRegistry(), lambda: True, dict, no_timers))
        started.append(admin)
        return Listening(admin, access, await admin.start(), is_tls=bool(chosen.certificate_file))

    yield start
    for admin in started:
        await admin.stop()


# --- who ----------------------------------------------------------------------------------------------------------------


async def test_beyond_loopback_nothing_is_shown_to_strangers_but_health(start: Start) -> None:
    listening = await start(EVERYWHERE)
    for path, status in (("/healthz", 200), ("/readyz", 200), ("/", 401), (STATE, 401), (METRICS, 401), ("/none", 401)):
        assert await listening.ask(path) == status, path
    assert await listening.ask(method="POST") == 401
    async with aiohttp.ClientSession() as session, session.get(listening.url + STATE) as response:
        assert response.headers["WWW-Authenticate"].startswith("Bearer")
        assert "role viewer" in (await response.json())["error"]


async def test_a_token_of_a_principal_needs_a_role(start: Start) -> None:
    listening = await start(EVERYWHERE)
    assert await listening.show("s3cret") == 200
    assert await listening.show("b1lling") == 403
    assert await listening.show("guess") == 401


async def test_a_user_logs_in_with_a_password_and_needs_a_role(start: Start) -> None:
    listening = await start(EVERYWHERE)
    assert await listening.log_in("ann", PASSWORD) == 200
    assert await listening.log_in("ann", PASSWORD) == 200
    assert await listening.log_in("ann", "guess") == 401
    assert await listening.log_in("bob", PASSWORD) == 403
    assert await listening.log_in("nobody", PASSWORD) == 401
    assert await listening.ask(Authorization="Basic ???") == 400


async def test_a_password_that_was_right_is_wrong_after_it_has_changed(start: Start, tmp_path: Path) -> None:
    listening = await start(EVERYWHERE)
    assert await listening.log_in("ann", PASSWORD) == 200
    (tmp_path / "passwords").write_text(f"ann:{CHEAP.hash('another')}\n")
    listening.access.reload(Subject("test"))
    assert await listening.log_in("ann", PASSWORD) == 401
    assert await listening.log_in("ann", "another") == 200


async def test_a_password_that_changes_while_it_is_hashed_is_wrong(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listening = await start(EVERYWHERE)
    is_right, may_go_on = asyncio.Event(), asyncio.Event()

    async def to_thread(prove: Any, *arguments: Any) -> Any:
        found = prove(*arguments)
        is_right.set()
        await may_go_on.wait()
        return found

    monkeypatch.setattr("penstock.node.adminaccess.asyncio.to_thread", to_thread)
    waiting = asyncio.create_task(listening.log_in("ann", PASSWORD))
    await is_right.wait()
    (tmp_path / "passwords").write_text(f"ann:{CHEAP.hash('another')}\n")
    listening.access.reload(Subject("test"))
    may_go_on.set()
    assert await waiting == 401


async def test_a_signed_token_brings_its_roles(start: Start) -> None:
    listening = await start(EVERYWHERE)
    claims = {"sub": "eve", "exp": 1_700_000_060}
    assert await listening.show(jwt.encode(claims | {"roles": ["operator"]}, SECRET, "HS256")) == 200
    assert await listening.show(jwt.encode(claims | {"roles": ["publisher"]}, SECRET, "HS256")) == 403
    assert await listening.show(jwt.encode(claims | {"roles": ["operator"], "exp": 1_600_000_000}, SECRET, "HS256")) == 401


async def test_a_banned_address_gets_nothing_and_costs_no_hash(start: Start) -> None:
    listening = await start(EVERYWHERE)
    assert await listening.log_in("ann", PASSWORD) == 200
    await listening.access.ban("address", "127.0.0.0/8", for_ms=0, why="", by=Subject("test"))
    for status in (await listening.log_in("ann", "wrong"), await listening.show("s3cret"), await listening.ask(METRICS)):
        assert status == 403  # 401 would mean that the password was hashed
    assert await listening.ask("/healthz") == 200
    await listening.access.lift("address", "127.0.0.0/8", by=Subject("test"))
    assert await listening.log_in("ann", PASSWORD) == 200


async def test_whoever_is_banned_gets_nothing(start: Start) -> None:
    listening = await start(EVERYWHERE)
    await listening.access.ban("user", "prometheus", for_ms=0, why="", by=Subject("test"))
    assert await listening.show("s3cret") == 403


BILLING = "Bearer b1lling"


@pytest.mark.parametrize(
    ("status", "headers", "line"),
    [
        (401, {}, {"event": "refused", "reason": "UNAUTHORIZED", "why": "the request shows no credentials"}),
        (401, {"Authorization": "Bearer x"}, {"event": "refused", "reason": "UNAUTHORIZED", "why": "the token is not known"}),
        (401, {"Authorization": aiohttp.encode_basic_auth("ann", "guess")}, {"event": "refused", "claimed": "ann"}),
        (400, {"Authorization": "Basic ???"}, {"event": "refused", "reason": "BAD_REQUEST"}),
        (421, {"Host": "rebound.example.com"}, {"event": "refused", "reason": "MISDIRECTED_REQUEST"}),
        (403, {"Origin": "http://evil.example.com"}, {"event": "refused", "reason": "FORBIDDEN", "method": "POST"}),
        (403, {"Authorization": "Bearer s3cret"}, {"event": "refused", "user": "prometheus", "reason": "BANNED"}),
        (403, {"Authorization": BILLING}, {"event": "denied", "user": "billing", "method": "GET", "path": STATE}),
        (200, {"Authorization": aiohttp.encode_basic_auth("ann", PASSWORD)}, None),
    ],
)
async def test_each_request_that_is_refused_has_a_line_in_the_audit_log(
    start: Start, tmp_path: Path, status: int, headers: dict[str, str], line: dict[str, str] | None
) -> None:
    listening = await start(EVERYWHERE, hosts=("admin.example.org",))
    await listening.access.ban("user", "prometheus", for_ms=0, why="", by=Subject("test"))
    method = "POST" if "Origin" in headers else "GET"
    assert await listening.ask(method=method, **headers) == status
    found = [json.loads(each) for each in (tmp_path / "audit").read_text().splitlines()][1:]
    assert len(found) == (line is not None)
    for each in found:
        expected = {"over": "admin", "address": "127.0.0.1"} | (line or {})
        assert {name: each.get(name) for name in expected} == expected
        assert each["why"]


async def test_logins_that_nobody_has_time_for_are_told_to_come_again(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    listening = await start(EVERYWHERE)
    may_go_on = asyncio.Event()
    asked: list[Any] = []

    async def to_thread(prove: Any, *arguments: Any) -> Any:
        asked.append(arguments)
        await may_go_on.wait()
        return prove(*arguments)

    monkeypatch.setattr("penstock.node.adminaccess.asyncio.to_thread", to_thread)
    waiting = [asyncio.create_task(listening.log_in("ann", f"guess {n}")) for n in range(adminaccess.LOGINS_MAX + 1)]
    await until(lambda: len(listening.admin._access._turns) == adminaccess.LOGINS_MAX)
    assert len(asked) == 1, "one password is hashed at a time"
    assert await listening.log_in("ann", PASSWORD) == 503
    assert await listening.show("s3cret") == 200, "tokens wait for no hash"
    may_go_on.set()
    assert set(await asyncio.gather(*waiting)) == {401}
    assert await listening.log_in("ann", PASSWORD) == 200


async def test_sources_take_turns_and_the_one_that_floods_gives_way() -> None:
    turns = LoginTurns(4)
    may_go_on = asyncio.Event()
    order: list[str] = []

    async def log_in(name: str) -> None:
        async with turns.turn(name[0]):
            await may_go_on.wait()
            order.append(name)

    async with asyncio.TaskGroup() as group:
        flood = [group.create_task(_crowded(log_in(f"a{n}"))) for n in range(6)]
        await asyncio.sleep(0)
        assert [each.done() for each in flood] == [False] * 5 + [True], "one is under way, and four wait"
        others = [group.create_task(_crowded(log_in(name))) for name in ("b0", "c0")]
        await asyncio.sleep(0)
        gone = group.create_task(log_in("d0"))
        await asyncio.sleep(0)
        gone.cancel()
        may_go_on.set()
    assert order == ["a0", "a1", "b0", "c0"]
    assert [await each for each in (*flood, *others)] == [False, False, True, True, True, True, False, False]
    assert len(turns) == 0
    await log_in("e0")


async def test_logins_whose_callers_hang_up_leave_their_places() -> None:
    turns = LoginTurns(2)
    may_go_on = asyncio.Event()

    async def log_in(source: str) -> None:
        async with turns.turn(source):
            await may_go_on.wait()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(log_in("a")) for _ in range(3)]
        await asyncio.sleep(0)
        for task in tasks[1:]:
            task.cancel()
        late = group.create_task(log_in("b"))  # it runs before those that are cancelled
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert len(turns) == 1
        may_go_on.set()
    assert not late.cancelled()


async def _crowded(login: Coroutine[Any, Any, None]) -> bool:
    """Return whether there is no place for a login."""
    try:
        await login
    except LoginsCrowded:
        return True
    return False


async def test_metrics_may_be_opened_by_themselves(start: Start) -> None:
    listening = await start(EVERYWHERE, metrics="open")
    assert (await listening.ask(METRICS), await listening.ask(STATE)) == (200, 401)


# --- from where ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("anonymous", "status"), [("loopback", 200), ("always", 200), ("never", 401)])
async def test_requests_of_this_machine_need_no_authentication_unless_an_option_says_so(
    start: Start, anonymous: str, status: int
) -> None:
    assert await (await start(anonymous=anonymous)).ask() == status


async def test_wrong_credentials_are_refused_also_where_none_are_needed(start: Start) -> None:
    listening = await start(metrics="open")
    expired = jwt.encode({"sub": "eve", "exp": 1_600_000_000}, SECRET, "HS256")
    for shown, why in (
        ("Bearer guess", "the token is not known"),
        (f"Bearer {expired}", "the token has expired"),
        ("Digest x", "neither Bearer nor Basic"),
        (aiohttp.encode_basic_auth("ann", "guess"), "not right"),
    ):
        headers = {"Authorization": shown}
        async with aiohttp.ClientSession() as session, session.get(listening.url + STATE, headers=headers) as response:
            assert (response.status, why in (await response.json())["error"]) == (401, True)
        for path in ("/healthz", "/readyz", METRICS):
            assert await listening.ask(path, **headers) == 200
    assert await listening.log_in("ann", PASSWORD) == 200
    assert await listening.show("b1lling") == 200, "it needs no role there"
    await listening.access.ban("user", "billing", for_ms=0, why="", by=Subject("test"))
    assert await listening.show("b1lling") == 403, "it counts for whom it names"
    without = await start(has_access=False)
    assert await without.show("guess") == 200, "a node that knows nobody can't tell"


@pytest.mark.parametrize("name", adminaccess.FORWARDED)
async def test_what_a_proxy_forwards_is_not_of_this_machine(start: Start, name: str) -> None:
    listening = await start()
    assert await listening.ask(**{name: "for=203.0.113.7"}) == 401
    assert await listening.ask(**{name: "203.0.113.7"}, Authorization="Bearer s3cret") == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:8080", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("LOCALHOST.", 200),
        ("admin.example.org:8080", 200),
        ("rebound.example.com", 421),
        ("localhost.example.com", 421),
        ("203.0.113.7:8080", 421),
        ("", 421),
        ("[", 421),
    ],
)
async def test_a_loopback_listener_answers_to_its_own_names_only(start: Start, host: str, status: int) -> None:
    listening = await start(hosts=("admin.example.org",))
    assert await listening.ask(Host=host) == status


async def test_beyond_loopback_a_name_must_be_configured_if_any_is(start: Start) -> None:
    for listening, expected in (
        (await start(EVERYWHERE, anonymous="always"), (200, 200, 200)),
        (await start(EVERYWHERE, anonymous="always", hosts=("admin.example.org",)), (200, 200, 421)),
    ):
        found = [await listening.ask(Host=host) for host in ("admin.example.org", "203.0.113.7:1", "rebound.example.com")]
        assert tuple(found) == expected


async def test_a_probe_may_use_any_name(start: Start) -> None:
    assert await (await start()).ask("/healthz", Host="10.0.0.7") == 200


async def test_no_page_of_another_origin_may_change_anything(start: Start) -> None:
    listening = await start()
    assert await listening.ask(method="POST", Origin="http://evil.example.com") == 403
    assert await listening.ask(method="POST", Origin="null") == 403
    assert await listening.ask(method="POST", Origin=listening.url) == 405, "it may, but there is nothing to change"
    assert await listening.ask(method="POST") == 405


# --- TLS ----------------------------------------------------------------------------------------------------------------


def tls(authority: Authority, **options: Any) -> dict[str, Any]:
    return {
        "certificate_file": str(authority.certificate),
        "key_file": str(authority.key),
        "client_ca_file": str(authority.file),
    } | options


async def test_a_certificate_identifies_a_principal(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    listening = await start(EVERYWHERE, **tls(authority, client_certificates="optional"))
    for name, status in (("grafana.example.org", 200), ("billing.example.org", 403), ("other.example.org", 401)):
        context = authority.context(authority.issue_client(common_name=name))
        assert await listening.ask(context=context) == status, name
    assert await listening.ask(context=authority.context()) == 401
    assert await listening.ask(context=authority.context(), Authorization="Bearer s3cret") == 200


async def test_certificates_alone_can_protect_the_listener(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    listening = await start(EVERYWHERE, has_access=False, **tls(authority, client_certificates="required"))
    assert await listening.ask(context=authority.context(authority.issue_client(common_name="any"))) == 200
    with pytest.raises(aiohttp.ClientConnectionError):
        await listening.ask(context=authority.context())


async def test_a_revoked_certificate_is_refused(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    lost, kept = (authority.issue_client(common_name=name) for name in ("lost", "kept"))
    crl = str(authority.revoke(lost))
    options = tls(authority, client_certificates="required", client_crl_file=crl)
    listening = await start(EVERYWHERE, has_access=False, **options)
    assert await listening.ask(context=authority.context(kept)) == 200
    with pytest.raises(aiohttp.ClientConnectionError):
        await listening.ask(context=authority.context(lost))


async def test_a_replaced_certificate_is_served_after_a_reload(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    listening = await start(**tls(authority))
    port = int(listening.url.rpartition(":")[2])

    def served() -> str:
        return ssl.get_server_certificate(("127.0.0.1", port))

    before = await asyncio.to_thread(served)
    assert await listening.ask(context=authority.context()) == 200
    authority.issue_server()
    listening.admin.reload()
    assert await asyncio.to_thread(served) != before
    authority.key.write_text("damaged")
    listening.admin.reload()
    assert await listening.ask(context=authority.context()) == 200, "the earlier certificate stays"


async def test_handshakes_that_never_end_keep_nobody_out(start: Start, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    listening = await start(**tls(authority))
    port = int(listening.url.rpartition(":")[2])
    idle = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
    assert await listening.ask(context=authority.context()) == 200
    assert listening.admin.closed_early >= 8
    for _, writer in idle:
        writer.close()


async def test_a_certificate_that_is_missing_is_named(start: Start, tmp_path: Path) -> None:
    with pytest.raises(AdminUnavailable, match="nowhere"):
        await start(certificate_file=str(tmp_path / "nowhere.pem"), key_file=str(tmp_path / "nowhere.key"))
