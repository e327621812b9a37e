"""The plugins that amqtt ships, configured as for amqtt's broker: in its newer syntax by class, in its older one by name."""

from __future__ import annotations

import warnings
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from pwdlib.hashers.argon2 import Argon2Hasher

from penstock.gateway.options import AccessOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import CONNACK, PUBACK
from penstock.gateway.protocol.reasons import ConnectCode
from penstock.node.config import load_config
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.logins import BAD_PASSWORD, BUSY, PASSWORD, REFUSED, USER, login
from tests.gateway.wire import CLEAN, Broker, Client, Message
from tests.waiting import until

ACCEPTED = (CONNACK, 0, b"\0\0")
QUICK = Argon2Hasher(time_cost=1, memory_cost=64, parallelism=1)
"""Hashes that are cheap enough for tests."""

SECRET = "a secret that only the issuer and the node know, thirty-two bytes at least"


@pytest.fixture
def passwords(tmp_path: Path) -> Path:
    path = tmp_path / "passwords"
    path.write_text("".join(f"{name}:{QUICK.hash(f'{name}s password')}\n" for name in ("ann", "bob", "admin")))
    return path


def access_of(tmp_path: Path, toml: str) -> AccessOptions:
    """Return the section `[mqtt.access]` of a configuration, read as `penstock serve` reads it."""
    path = tmp_path / "penstock.toml"
    path.write_text(toml)
    return load_config(path).mqtt.access


async def user(broker: Broker, name: str, **options: Any) -> Client:
    """Connect as a user with the right password."""
    client = await login(broker, f"{name}s client", name, f"{name}s password", **options)
    assert await client.receive() == ACCEPTED
    return client


async def allowed(client: Client, broker: Broker, *topics: str) -> list[str]:
    """Return the topics to which a client may publish."""
    before = len(broker.stored())
    for topic in topics:
        await client.publish(topic, b"x", 1)
    return [message.topic for message in broker.stored()[before:]]


# --- password file ------------------------------------------------------------------------------------------------------


def new_style(path: Path) -> str:
    return f'[mqtt.access.plugins."amqtt.plugins.authentication.FileAuthPlugin"]\npassword_file = "{path}"\n'


def old_style(path: Path) -> str:
    return f'[mqtt.access.plugins.auth]\nplugins = ["auth_file"]\npassword-file = "{path}"\n'


@pytest.mark.parametrize("style", [new_style, old_style])
async def test_a_password_file_decides_who_connects(
    start_broker: StartBroker, tmp_path: Path, passwords: Path, style: Any
) -> None:
    broker = await start_broker(access=access_of(tmp_path, style(passwords)))
    client = await user(broker, "ann")
    await client.publish("a", b"x", 1)
    for name, password in (("ann", "bobs password"), ("eve", "anns password"), ("ann", "")):
        refused = await login(broker, "c", name, password)
        assert await refused.ended() == [BAD_PASSWORD], name
    assert await (await login(broker, "c")).ended() == [REFUSED]


async def test_beside_the_anonymous_plugin_a_wrong_password_is_still_wrong(
    start_broker: StartBroker, tmp_path: Path, passwords: Path
) -> None:
    text = new_style(passwords) + '[mqtt.access.plugins."amqtt.plugins.authentication.AnonymousAuthPlugin"]\n'
    broker = await start_broker(access=access_of(tmp_path, text + "allow_anonymous = true\n"))
    await broker.connect("nobody")
    await user(broker, "bob")
    assert await (await login(broker, "c", "bob", "wrong")).ended() == [BAD_PASSWORD]


async def test_the_anonymous_plugin_can_ask_for_a_user_name(start_broker: StartBroker, tmp_path: Path) -> None:
    text = '[mqtt.access.plugins]\n"amqtt.plugins.authentication.AnonymousAuthPlugin" = {allow_anonymous = false}\n'
    broker = await start_broker(access=access_of(tmp_path, text))
    assert await (await login(broker, "c")).ended() == [REFUSED]
    assert await (await login(broker, "c", "any name")).receive() == ACCEPTED


# --- lists of topics ----------------------------------------------------------------------------------------------------

RULES = """
publish_acl = {ann = ["plant/+/temperature", "log/#"], anonymous = ["lobby"]}
acl = {ann = ["plant/#"]}
"""


def new_acl(path: Path) -> str:
    return new_style(path) + '[mqtt.access.plugins."amqtt.plugins.topic_checking.TopicAccessControlListPlugin"]\n' + RULES


def old_acl(path: Path) -> str:
    rules = RULES.replace("publish_acl", "publish-acl")
    return old_style(path) + '[mqtt.access.plugins.topic-check]\nenabled = true\nplugins = ["topic_acl"]\n' + rules


@pytest.mark.parametrize("style", [new_acl, old_acl])
async def test_a_list_of_topics_decides_what_a_user_does(
    start_broker: StartBroker, tmp_path: Path, passwords: Path, style: Any
) -> None:
    with warnings.catch_warnings():
        # amqtt deprecates the old option in favour of subscribe-acl, which its newer syntax does not have.
        warnings.simplefilter("ignore", DeprecationWarning)
        broker = await start_broker(access=access_of(tmp_path, style(passwords)))
    ann, bob = await user(broker, "ann"), await user(broker, "bob")
    topics = ("plant/1/temperature", "plant/1/speed", "log/a/b", "lobby", "plant")
    assert await allowed(ann, broker, *topics) == ["plant/1/temperature", "log/a/b"]
    assert await allowed(bob, broker, *topics) == []
    assert await ann.subscribe(("plant/1/+", 1), ("plant/#", 0), ("#", 0), ("log/a", 0)) == [1, 0, 0x80, 0x80]
    assert await bob.subscribe(("plant/#", 0)) == [0x80]


@pytest.mark.parametrize("style", [new_acl, old_acl])
async def test_a_filter_is_granted_only_if_a_listed_one_contains_it(
    start_broker: StartBroker, tmp_path: Path, passwords: Path, style: Any
) -> None:
    lists = {"ann": '["b/+", "$SYS/#"]', "bob": '["#"]', "admin": '["b/#", "+/x"]'}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        rows = ", ".join(f"{name} = {filters}" for name, filters in lists.items())
        text = style(passwords).replace('ann = ["plant/#"]', rows)
        assert rows in text
        broker = await start_broker(access=access_of(tmp_path, text))
    for name, asked, is_granted in (
        ("ann", "b/#", False),
        ("bob", "$SYS/#", False),
        ("admin", "b/#", True),
        ("admin", "b/+/x", True),
        ("admin", "c/x", True),
        ("ann", "$SYS/broker/+", True),
    ):
        assert await (await user(broker, name)).subscribe((asked, 0)) == [0 if is_granted else 0x80], (name, asked)


@pytest.mark.parametrize(
    ("allowed", "asked", "is_covered"),
    [("b/+", "b/#", False), ("#", "$SYS/#", False), ("b/#/c", "b/x/c", False), ("b/+", "b/x", True), ("#", "b/#", True)],
)
def test_the_plugins_for_tokens_and_databases_go_by_containment_too(allowed: str, asked: str, is_covered: bool) -> None:
    from amqtt.plugins import TopicMatcher

    from penstock.gateway.auth.containment import use_containment

    use_containment()
    assert TopicMatcher().is_topic_allowed(asked, allowed) is is_covered


async def test_a_receive_list_decides_which_messages_are_delivered(start_broker: StartBroker, tmp_path: Path) -> None:
    text = """
        [mqtt.access.plugins.auth]
        plugins = ["auth_anonymous"]
        allow-anonymous = true
        [mqtt.access.plugins.topic-check]
        enabled = true
        plugins = ["topic_acl"]
        receive-acl = {anonymous = ["open/#"]}
    """
    broker = await start_broker(access=access_of(tmp_path, text))
    client = await broker.connect("c")
    await client.subscribe(("#", 0))
    for topic in ("open/a", "closed/a", "open/b"):
        await client.publish(topic, b"x", 1)
    assert [await client.message() for _ in range(2)] == [Message("open/a", b"x"), Message("open/b", b"x")]
    assert await client.drained() == []


async def test_only_admin_may_use_taboo_topics(start_broker: StartBroker, tmp_path: Path, passwords: Path) -> None:
    text = new_style(passwords) + '[mqtt.access.plugins."amqtt.plugins.topic_checking.TopicTabooPlugin"]\n'
    broker = await start_broker(access=access_of(tmp_path, text))
    ann, admin = await user(broker, "ann"), await user(broker, "admin")
    for client in (ann, admin):
        assert await client.subscribe(("#", 0)) == [0]
    assert await allowed(ann, broker, "prohibited", "free") == ["free"]
    assert await allowed(admin, broker, "prohibited", "data/classified") == ["prohibited", "data/classified"]
    await broker.decided()
    assert await ann.drained() == [(3, 0, b"free", 0, b"x")]
    assert [message.topic for message in await admin.messages()] == ["free", "prohibited", "data/classified"]


# --- JWT ----------------------------------------------------------------------------------------------------------------


def token(**claims: Any) -> str:
    return jwt.encode(claims, SECRET, "HS256")


@pytest.fixture
async def jwt_broker(start_broker: StartBroker, tmp_path: Path) -> Broker:
    text = f"""
        [mqtt.access.plugins."amqtt.contrib.jwt.UserAuthJwtPlugin"]
        secret_key = "{SECRET}"
        user_claim = "sub"
        [mqtt.access.plugins."amqtt.contrib.jwt.TopicAuthJwtPlugin"]
        secret_key = "{SECRET}"
        publish_claim = "pub"
        subscribe_claim = "sub_to"
        receive_claim = "get"
    """
    return await start_broker(access=access_of(tmp_path, text))


async def test_a_token_in_place_of_a_password_lists_the_topics_of_its_user(jwt_broker: Broker) -> None:
    password = token(sub="ann", pub=["a/#"], sub_to=["#"], get=["a/+"])
    client = await login(jwt_broker, "c", "ann", password)
    assert await client.receive() == ACCEPTED
    assert await allowed(client, jwt_broker, "a/b", "a/b/c", "b") == ["a/b", "a/b/c"]
    assert await client.subscribe(("#", 0)) == [0]
    await client.publish("a/b/c", b"x", 1)
    await client.publish("a/d", b"x", 1)
    assert await client.message() == Message("a/d", b"x")
    assert await client.drained() == []


async def test_a_token_that_is_not_valid_lets_nobody_in(jwt_broker: Broker) -> None:
    for password in (
        jwt.encode({"sub": "ann"}, "another secret, which the node does not know, but long", "HS256"),
        jwt.encode({"sub": "ann"}, "", "none"),
        token(sub="bob"),
        token(),
        token(sub="ann", exp=datetime.now(UTC) - timedelta(seconds=1)),
        "no token",
    ):
        assert await (await login(jwt_broker, "c", "ann", password)).ended() == [BAD_PASSWORD], password


# --- HTTP ---------------------------------------------------------------------------------------------------------------


class Service:
    """An HTTP service that decides about users and topics."""

    def __init__(self) -> None:
        self.port = 0
        self.asked: list[dict[str, Any]] = []
        self.fails = False
        self.mode = "status"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/user", self._user)
        app.router.add_route("*", "/acl", self._acl)
        self.runner = web.AppRunner(app)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        self.port = self.runner.addresses[0][1]

    async def _params(self, request: web.Request) -> dict[str, Any]:
        params = await request.json() if request.content_type == "application/json" else dict(await request.post())
        self.asked.append(params)
        return params

    async def _user(self, request: web.Request) -> web.Response:
        params = await self._params(request)
        return web.json_response({"ok": params["password"] == f"{params['username']}s password"})

    async def _acl(self, request: web.Request) -> web.Response:
        params = await self._params(request)
        if params["topic"] == "ann/later" and self.fails:
            return web.Response(status=500)
        may = params["topic"].startswith(params["username"])
        if self.mode == "json":
            return web.json_response({"ok": may})
        return web.Response(status=200 if may else 403, text="ok" if may else "")


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    await service.start()
    yield service
    await service.runner.cleanup()


async def test_an_http_service_decides_about_users_and_topics(
    start_broker: StartBroker, tmp_path: Path, service: Service
) -> None:
    text = f"""
        [mqtt.access.plugins."amqtt.contrib.http.UserAuthHttpPlugin"]
        host = "127.0.0.1"
        port = {service.port}
        request_method = "post"
        [mqtt.access.plugins."amqtt.contrib.http.TopicAuthHttpPlugin"]
        host = "127.0.0.1"
        port = {service.port}
        request_method = "post"
        params_mode = "form"
        response_mode = "status"
    """
    broker = await start_broker(access=access_of(tmp_path, text))
    client = await user(broker, "ann")
    assert service.asked == [{"username": "ann", "password": "anns password", "client_id": "anns client"}]
    assert await (await login(broker, "c", "ann", "wrong")).ended() == [BAD_PASSWORD]
    assert await allowed(client, broker, "ann/a", "ann/a", "bob/a") == ["ann/a", "ann/a"]
    assert await client.subscribe(("ann/#", 1), ("#", 1)) == [1, 0x80]
    assert [(params["topic"], params["acc"]) for params in service.asked if params.get("topic") == "ann/a"] == [("ann/a", "2")]


@pytest.mark.parametrize("mode", ["status", "json", "text"])
async def test_a_message_waits_for_an_http_service_that_fails(
    start_broker: StartBroker, tmp_path: Path, service: Service, mode: str
) -> None:
    text = f"""
        [mqtt.access.plugins."amqtt.contrib.http.TopicAuthHttpPlugin"]
        host = "127.0.0.1"
        port = {service.port}
        request_method = "post"
        params_mode = "form"
        response_mode = "{mode}"
    """
    broker = await start_broker(access=access_of(tmp_path, text))
    client = await broker.connect("c", b"ann", b"secret", flags=CLEAN | USER | PASSWORD)
    service.mode, service.fails = mode, True
    await client.send(encode_publish(b"ann/later", b"x", 1, packet_id=1))
    await until(lambda: len(service.asked) >= 2)  # the node asks again
    assert broker.stored() == []
    service.fails = False
    assert await client.receive() == (PUBACK, 1)
    assert [message.topic for message in broker.stored()] == ["ann/later"]


async def test_a_service_that_is_down_lets_nobody_in(start_broker: StartBroker, tmp_path: Path, service: Service) -> None:
    await service.runner.cleanup()
    text = f'[mqtt.access.plugins."amqtt.contrib.http.UserAuthHttpPlugin"]\nhost = "127.0.0.1"\nport = {service.port}\n'
    broker = await start_broker(access=access_of(tmp_path, text))
    assert await (await login(broker, "c", "ann", "anns password")).ended() == [BUSY]
    assert broker.node.gateway.authorizer.questions.outcomes == {("connect", "error"): 1}


# --- certificates, databases --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("uri", "client_id", "code"),
    [
        ("spiffe://test.example/device/press-1", "press-1", ConnectCode.ACCEPTED),
        ("spiffe://test.example/device/press-1", "press-2", ConnectCode.NOT_AUTHORIZED),
        ("spiffe://other.example/device/press-1", "press-1", ConnectCode.NOT_AUTHORIZED),
    ],
)
async def test_a_certificate_is_valid_for_one_client_id(
    start_broker: StartBroker, tmp_path: Path, uri: str, client_id: str, code: ConnectCode
) -> None:
    authority = Authority(tmp_path / "authority")
    text = '[mqtt.access.plugins."amqtt.contrib.cert.UserAuthCertPlugin"]\nuri_domain = "test.example"\n'
    broker = await start_broker(
        listeners=(authority.listener("mtls", client_certificates="required"),), access=access_of(tmp_path, text)
    )
    context = authority.context(authority.issue_device(uri))
    client = await login(broker, client_id, listener="mtls", context=context)
    assert await client.receive() == (CONNACK, 0, bytes((0, code)))


async def test_a_database_decides_who_connects(start_broker: StartBroker, tmp_path: Path) -> None:
    from amqtt.contrib.auth_db.managers import UserManager
    from amqtt.contrib.auth_db.models import PasswordHasher

    connection = f"sqlite+aiosqlite:///{tmp_path}/users.db"
    PasswordHasher(schemes=["argon2"])
    users = UserManager(connection)
    await users.db_sync()
    await users.create_user_auth("ann", "anns password")
    await users.close()
    text = f"""
        [mqtt.access.plugins."amqtt.contrib.auth_db.UserAuthDBPlugin"]
        connection = "{connection}"
        sync_schema = true
        hash_schemes = ["argon2"]
    """
    broker = await start_broker(access=access_of(tmp_path, text))
    await user(broker, "ann")
    assert await (await login(broker, "c", "ann", "wrong")).ended() == [BAD_PASSWORD]
