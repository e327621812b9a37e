"""Access control over gRPC: tokens, certificates and permissions, on a real node with TLS."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock import Client, Security, SyncClient, group_settings
from penstock.pop.access.file import AccessInvalid, load_access_policy
from penstock.pop.access.policy import AccessPolicy, Principal
from penstock.pop.errors import NodeUnavailable, NotAuthenticated, NotPermitted
from penstock.pop.grpc.access import GROUP_RULES, POP_RULES
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.rocketmq.access import RULES as ROCKETMQ_RULES
from penstock.pop.rocketmq.stubs import SERVICE
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

TOKENS = {"billing": "s3cret", "operator": "r00t"}

FILE = f"""
[[principal]]
name = "billing"
token_sha256 = "{sha256(TOKENS["billing"].encode()).hexdigest()}"
publish = ["plant/#"]
consume = ["billing", "audit-*"]

[[principal]]
name = "operator"
token_sha256 = "{sha256(TOKENS["operator"].encode()).hexdigest().upper()}"
admin = ["*"]

[[principal]]
name = "device"
certificate = "device.example.org"
publish = ["plant/#"]
"""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    (tmp_path / "access.toml").write_text(FILE)
    async with Node(tmp_path / "data", pop=PopOptions(access_file=str(tmp_path / "access.toml"))) as started:
        yield started


def client_of(node: Node, name: str) -> Client:
    return Client(node.target, security=Security(token=TOKENS.get(name, name)))


async def test_a_stranger_may_do_nothing_but_ask_for_health(node: Node) -> None:
    for stranger in ("", "wrong"):
        async with client_of(node, stranger) as client:
            for attempt in (
                client.send(TOPIC, b"a"),
                client.pop(FILTER, group="billing"),
                client.groups.describe(),
                client.transactions.begin(TOPIC, b"a", producer="x"),
                client.transactions.pending(),
            ):
                with pytest.raises(NotAuthenticated, match="token"):
                    await attempt
            with pytest.raises(NotAuthenticated):
                async with client.stream(FILTER, group="billing") as messages:
                    await anext(aiter(messages))
    assert list(node.core.groups) == []
    assert node.store.messages_stored == 0
    async with grpc.aio.insecure_channel(node.target) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_principal_may_do_what_the_file_says_and_nothing_else(node: Node) -> None:
    async with client_of(node, "billing") as client:
        await client.send(TOPIC, b"a")
        for group in ("billing", "audit-2026"):
            (message,) = await client.pop(FILTER, group=group)
            await message.ack()
        async with client.stream(FILTER, group="billing") as messages:
            await client.send(TOPIC, b"b")
            (await anext(aiter(messages))).ack()
        for refused in (
            client.send("other/topic", b"a"),
            client.pop(FILTER, group="audit"),
            client.dead_letter(["x"], group="reports"),
            client.groups.create("billing", FILTER),
            client.dead_letters.redrive("billing"),
            client.groups.describe(),
            client.transactions.pending(),
        ):
            with pytest.raises(NotPermitted, match="billing may not"):
                await refused
        with pytest.raises(NotPermitted):
            async with client.stream(FILTER, group="reports") as messages:
                await anext(aiter(messages))
    async with client_of(node, "operator") as client:
        await client.groups.create("reports", FILTER, settings=group_settings(attempts_max=2))
        assert len(await client.groups.describe()) == 3
        with pytest.raises(NotPermitted):
            await client.pop(FILTER, group="reports")
        with pytest.raises(NotPermitted):
            await client.send(TOPIC, b"a")


async def test_a_batch_with_one_topic_that_is_not_permitted_stores_nothing(node: Node) -> None:
    from penstock import OutgoingMessage

    async with client_of(node, "billing") as client:
        with pytest.raises(NotPermitted, match="secret"):
            await client.send_batch([OutgoingMessage(topic=TOPIC), OutgoingMessage(topic="secret/x")])
    assert node.store.messages_stored == 0


async def test_the_synchronous_client_shows_its_token_too(node: Node) -> None:
    def use() -> None:
        with SyncClient(node.target, security=Security(token=TOKENS["billing"])) as client:
            client.send(TOPIC, b"a")
            client.pop(FILTER, group=GROUP)[0].ack()
        with SyncClient(node.target) as client, pytest.raises(NotAuthenticated):
            client.send(TOPIC, b"a")

    await asyncio.to_thread(use)


def test_every_method_of_the_api_says_what_it_needs() -> None:
    services = [*pb.DESCRIPTOR.services_by_name.values(), SERVICE]
    tables = (POP_RULES, GROUP_RULES, ROCKETMQ_RULES)
    assert {rules.prefix + method for rules in tables for method in rules.needs} == {
        f"/{each.full_name}/{method.name}" for each in services for method in each.methods
    }


@pytest.mark.parametrize(
    ("name", "need", "permitted"),
    [
        ("a", ("publish", "plant/1"), True),
        ("a", ("publish", "plant"), True),
        ("a", ("publish", "planta"), False),
        ("a", ("consume", "audit-1"), True),
        ("a", ("consume", "audit"), False),
        ("a", ("consume", ""), False),
        ("a", ("admin", "audit-1"), False),
        ("b", ("admin", ""), True),
        ("b", ("consume", "x"), False),
        ("b", ("publish", "plant/1"), False),
    ],
)
def test_permissions_are_filters_and_patterns(name: str, need: tuple[str, str], permitted: bool) -> None:
    principals = {
        "a": Principal("a", token_sha256="00", publish=("plant/#",), consume=("audit-*", "billing")),
        "b": Principal("b", token_sha256="01", admin=("*",)),
    }
    assert AccessPolicy(principals.values()).permits(principals[name], need) is permitted


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[[principal", "not TOML"),
        ("principal = 1", "should be"),
        ("[other]", "other"),
        ("[[principal]]\ntoken_sha256 = '00'", "not be empty"),
        ("[[principal]]\nname = 'a'", "can recognize it"),
        ("[[principal]]\nname = 'a'\ntoken_sha256 = '00'", "64"),
        ("[[principal]]\nname = 'a'\ncertificate = 'c'\npublish = 'x'", "lists"),
        ("[[principal]]\nname = 'a'\ncertificate = 'c'\npublish = ['a#']", "'#'"),
        ("[[principal]]\nname = 'a'\ncertificate = 'c'\nconsum = ['a']", "consum"),
        ("[[principal]]\nname = 'a'\ncertificate = 'c'\n" * 2, "two principals"),
        ("[[principal]]\nname = 'a'\naccess_key = 'k'", "go together"),
        ("[[principal]]\nname = 'a'\nmqtt_user = 'u'\npublish = ['a/#']", "consume only"),
        ("[[principal]]\nname = 'a'\nmqtt_user = 'u'\nadmin = ['a']", "consume only"),
        (
            "".join(f"[[principal]]\nname = '{name}'\naccess_key = 'k'\naccess_secret = 's'\n" for name in "ab"),
            "two principals of one access key",
        ),
    ],
)
def test_an_access_file_that_is_wrong_says_why(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "access.toml"
    path.write_text(text)
    with pytest.raises(Exception, match=reason):
        load_access_policy(path)


@pytest.mark.parametrize(
    ("user", "group", "may_share"),
    [
        ("edge-1", "billing", True),
        ("edge", "billing", False),
        ("", "billing", False),
        ("edge-1", "audit-1", False),
        ("edge-1", "devices", True),  # no principal consumes it over gRPC
        ("", "devices", True),
        ("", "public", True),
        ("edge-1", "public", True),
        ("billing", "billing", False),  # the name of a principal is not a user name
    ],
)
def test_a_group_that_somebody_consumes_is_shared_only_with_the_users_that_consume_it(
    user: str, group: str, may_share: bool
) -> None:
    access = AccessPolicy(
        [
            Principal("billing", token_sha256="00", consume=("billing", "audit-*")),
            Principal("edges", mqtt_user="edge-*", consume=("billing",)),
            Principal("everybody", mqtt_user="*", consume=("public",)),
        ]
    )
    assert access.may_share(user, group) is may_share


def test_a_principal_that_may_consume_every_group_leaves_none_to_devices() -> None:
    assert not AccessPolicy([Principal("a", token_sha256="00", consume=("*",))]).may_share("", "devices")


def test_an_access_file_that_is_missing_says_so(tmp_path: Path) -> None:
    with pytest.raises(AccessInvalid, match="can't be read"):
        load_access_policy(tmp_path / "none.toml")


# --- TLS --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Make certificates of one authority with openssl. The certificate of the authority is `ca.crt` beside them."""
    directory = tmp_path_factory.mktemp("certificates")

    def run(*arguments: object) -> None:
        subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *new_key, "-keyout", directory / "ca.key", "-out", directory / "ca.crt", "-subj", "/CN=test ca")

    def make(name: str) -> tuple[Path, Path]:
        key, request, made = (directory / f"{name}.{suffix}" for suffix in ("key", "csr", "crt"))
        extensions = directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName=DNS:{name}")
        run("req", *new_key, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        authority = ("-CA", directory / "ca.crt", "-CAkey", directory / "ca.key", "-CAcreateserial")
        run("x509", "-req", "-in", request, *authority, "-out", made, "-extfile", extensions, "-days", "2")
        return made, key

    return make


async def started(tmp_path: Path, **options: Any) -> Node:
    (tmp_path / "access.toml").write_text(FILE)
    node = Node(tmp_path / "data", pop=PopOptions(access_file=str(tmp_path / "access.toml"), **options))
    await node.start()
    return node


@pytest.mark.slow
async def test_tls_and_a_client_s_certificate(tmp_path: Path, certificate: Callable[[str], tuple[Path, Path]]) -> None:
    made, key = certificate("localhost")
    roots = made.with_name("ca.crt")
    options = {"tls_certificate_file": str(made), "tls_key_file": str(key), "tls_client_ca_file": str(roots)}
    node = await started(tmp_path, **options)
    target = f"localhost:{node.port}"
    try:
        shown, shown_key = certificate("device.example.org")
        device = Security(root_certificates=roots.read_bytes(), certificate=shown.read_bytes(), key=shown_key.read_bytes())
        async with Client(target, security=device) as client:
            await client.send(TOPIC, b"a")
            with pytest.raises(NotPermitted, match="device may not"):
                await client.pop(FILTER, group=GROUP)
        unknown, unknown_key = certificate("stranger.example.org")
        stranger = Security(
            root_certificates=roots.read_bytes(), certificate=unknown.read_bytes(), key=unknown_key.read_bytes()
        )
        async with Client(target, security=stranger) as client:
            with pytest.raises(NotAuthenticated):
                await client.send(TOPIC, b"a")
        for security in (Security(), Security(root_certificates=roots.read_bytes())):
            async with Client(target, security=security, timeout_ms=500) as client:
                with pytest.raises(NodeUnavailable):
                    await client.send(TOPIC, b"a")
    finally:
        await node.stop()


async def test_a_token_over_tls(tmp_path: Path, certificate: Callable[[str], tuple[Path, Path]]) -> None:
    made, key = certificate("localhost")
    node = await started(tmp_path, tls_certificate_file=str(made), tls_key_file=str(key))
    try:
        security = Security(token=TOKENS["billing"], root_certificates=made.with_name("ca.crt").read_bytes())
        async with Client(f"localhost:{node.port}", security=security) as client:
            await client.send(TOPIC, b"a")
            assert len(await client.pop(FILTER, group=GROUP)) == 1
    finally:
        await node.stop()


async def test_a_certificate_that_is_missing_is_an_error_at_the_start(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(tls_certificate_file=str(tmp_path / "none"), tls_key_file="none"))
    with pytest.raises(OSError, match="none"):
        await node.start()
    await node.stop()
