"""Access control over gRPC: tokens, certificates and permissions, on a real node with TLS."""

from __future__ import annotations

import asyncio
import json
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import jwt
import pytest
import structlog.testing
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock import Client, Security, SyncClient, group_settings
from penstock.access.errors import AccessInvalid
from penstock.access.options import TokenOptions
from penstock.access.subject import Subject
from penstock.pop.errors import NodeUnavailable, NotAuthenticated, NotPermitted
from penstock.pop.grpc.access import GROUP_RULES, POP_RULES, SCHEDULE_RULES, TIMER_RULES
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.rocketmq.access import RULES as ROCKETMQ_RULES
from penstock.pop.rocketmq.stubs import SERVICE
from penstock.store.pemfiles import expiry_s
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX

TOKENS = {"billing": "s3cret", "operator": "r00t"}

FILE = f"""
[[principal]]
name = "billing"
token_sha256 = "{sha256(TOKENS["billing"].encode()).hexdigest()}"
write = ["plant/#"]
read = ["plant/#"]
consume = ["billing", "audit-*"]

[[principal]]
name = "operator"
token_sha256 = "{sha256(TOKENS["operator"].encode()).hexdigest().upper()}"
read = ["plant/#"]
admin = ["*"]

[[principal]]
name = "device"
certificate = "device.example.org"
write = ["plant/#"]
"""


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    (tmp_path / "access.toml").write_text(FILE)
    async with Node(tmp_path / "data", access=tmp_path / "access.toml") as started:
        yield started


def is_settled(node: Node) -> bool:
    group = node.core.groups.get("billing", FILTER)
    return group is not None and not group.in_flight


def client_of(node: Node, name: str) -> Client:
    return Client(node.target, security=Security(token=TOKENS.get(name, name)))


async def test_a_stranger_may_do_nothing_but_ask_for_health(node: Node) -> None:
    for stranger, why in (
        ("", "the call has no token. Show"),
        ("wrong", "doesn't know the token or signature of the call. Show"),
    ):
        async with client_of(node, stranger) as client:
            for attempt in (
                client.send(TOPIC, b"a"),
                client.pop(FILTER, group="billing"),
                client.groups.describe(),
                client.transactions.begin(TOPIC, b"a", producer="x"),
                client.transactions.pending(),
            ):
                with pytest.raises(NotAuthenticated, match=why):
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


async def test_a_group_shows_nobody_how_much_comes_to_topics_that_its_creator_may_not_read(node: Node) -> None:
    async with client_of(node, "operator") as operator:
        for topic_filter in ("hr/#", "#"):
            with pytest.raises(NotPermitted, match="may not pop"):
                await operator.groups.create("reports", topic_filter)
        await operator.groups.create("reports", "plant/1/#")
        assert [group.filter for group in await operator.groups.describe()] == ["plant/1/#"]


async def test_a_signed_token_names_a_user_with_roles(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef")
    (tmp_path / "access.toml").write_text('[[role]]\nname = "senders"\nwrite = ["plant/#"]\n')
    tokens = TokenOptions(algorithms=("HS256",), keys=str(secret))
    async with Node(tmp_path / "data", access=tmp_path / "access.toml", tokens=tokens) as node:

        def client(exp: int, *roles: str) -> Client:
            claims = {"sub": "ann", "exp": exp, "roles": roles}
            return Client(node.target, security=Security(token=jwt.encode(claims, secret.read_bytes(), "HS256")))

        now_s = node.store.now_ms() // 1000
        async with client(now_s + 60, "senders") as sender:
            await sender.send(TOPIC, b"a")
        async with client(now_s + 60) as other:
            with pytest.raises(NotPermitted, match="ann may not send"):
                await other.send(TOPIC, b"a")
        async with client(now_s - 60, "senders") as late:
            with pytest.raises(NotAuthenticated):
                await late.send(TOPIC, b"a")


async def test_a_stream_ends_with_the_token_of_its_caller_and_a_pop_that_waits_with_its_right(tmp_path: Path) -> None:
    secret, rules = tmp_path / "secret", tmp_path / "access.toml"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef")
    rules.write_text('[[rule]]\nallow = "all"\ntopics = ["#"]\ngroups = ["*"]\n')
    tokens = TokenOptions(algorithms=("HS256",), keys=str(secret), leeway_s=0)
    async with Node(tmp_path / "data", access=rules, tokens=tokens) as node:

        def client(seconds: float) -> Client:
            claims = {"sub": "ann", "exp": node.store.now_ms() / 1000 + seconds}
            return Client(node.target, security=Security(token=jwt.encode(claims, secret.read_bytes(), "HS256")))

        async with client(0.5) as brief, brief.stream(FILTER, group="g") as messages:
            with pytest.raises(NotAuthenticated):
                await anext(aiter(messages))
        async with client(600) as lasting:
            waiting = asyncio.create_task(lasting.pop(FILTER, group="g", wait=60.0))
            await node.until(lambda: any(group.polls for group in node.core.groups))
            rules.write_text('[[rule]]\nallow = "all"\ntopics = ["other/#"]\ngroups = ["*"]\n')
            node.access.reload(Subject("test"))
            with pytest.raises(NotPermitted, match="may not pop"):
                await waiting
        assert not any(group.polls for group in node.core.groups)


async def test_the_audit_log_names_who_was_denied_and_who_changed_a_group(tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(FILE)
    async with Node(tmp_path / "data", access=tmp_path / "access.toml", audit=tmp_path / "audit") as node:
        async with client_of(node, "operator") as operator:
            await operator.groups.create("reports", FILTER)
            with pytest.raises(NotPermitted):
                await operator.send(TOPIC, b"a")
        async with client_of(node, "wrong") as stranger:
            with pytest.raises(NotAuthenticated):
                await stranger.send(TOPIC, b"a")
    lines = [json.loads(line) for line in (tmp_path / "audit").read_text().splitlines()]
    assert [(line["event"], line.get("user"), line["address"]) for line in lines] == [
        ("changed", "operator", "127.0.0.1"),
        ("denied", "operator", "127.0.0.1"),
        ("refused", None, "127.0.0.1"),
    ]
    assert (lines[0]["what"], lines[0]["group"], lines[0]["filter"]) == ("CreateGroup", "reports", FILTER)
    assert (lines[1]["action"], lines[1]["name"]) == ("send", TOPIC)


async def test_a_banned_user_is_refused_and_its_stream_ends(node: Node) -> None:
    async with client_of(node, "billing") as client, client.stream(FILTER, group="billing") as messages:
        await client.send(TOPIC, b"a")
        (await anext(aiter(messages))).ack()
        await node.until(lambda: is_settled(node))
        await node.access.ban("user", "billing", for_ms=0, why="", by=Subject("test"))
        with pytest.raises(NotPermitted, match="banned"):
            await anext(aiter(messages))
        with pytest.raises(NotPermitted, match="banned"):
            await client.send(TOPIC, b"a")
        await node.access.lift("user", "billing", by=Subject("test"))
        await client.send(TOPIC, b"a")


async def test_a_ban_of_an_address_holds_without_an_access_file(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        await client.send(TOPIC, b"a")
        waiting = asyncio.create_task(client.pop("other/#", group="g", wait=60.0))
        await node.until(lambda: any(group.polls for group in node.core.groups))
        async with client.stream(FILTER, group="billing") as messages:
            (await anext(aiter(messages))).ack()
            await node.until(lambda: is_settled(node))
            await node.access.ban("address", "127.0.0.0/8", for_ms=0, why="", by=Subject("test"))
            with pytest.raises(NotPermitted, match=r"address 127\.0\.0\.0/8 is banned"):
                await anext(aiter(messages))
        with pytest.raises(NotPermitted, match="banned"):
            await waiting
        stored = node.store.messages_stored
        for refused in (client.send(TOPIC, b"b"), client.pop(FILTER, group="g"), client.groups.describe()):
            with pytest.raises(NotPermitted, match="banned"):
                await refused
        assert node.store.messages_stored == stored
        await node.access.lift("address", "127.0.0.0/8", by=Subject("test"))
        await client.send(TOPIC, b"b")


async def test_a_ban_of_a_user_holds_without_an_access_file_for_callers_with_its_token(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"0123456789abcdef0123456789abcdef")
    tokens = TokenOptions(algorithms=("HS256",), keys=str(secret))
    async with Node(tmp_path / "data", tokens=tokens) as node:

        def client(user: str) -> Client:
            claims = {"sub": user, "exp": node.store.now_ms() // 1000 + 60}
            return Client(node.target, security=Security(token=jwt.encode(claims, secret.read_bytes(), "HS256")))

        async with client("ann") as ann, client("bob") as bob:
            await ann.send(TOPIC, b"a")
            await node.access.ban("user", "ann", for_ms=0, why="", by=Subject("test"))
            with pytest.raises(NotPermitted, match="user ann is banned"):
                await ann.send(TOPIC, b"a")
            await bob.send(TOPIC, b"a")


async def test_an_operator_ends_the_calls_of_a_user_or_an_address_once(node: Node) -> None:
    async with client_of(node, "billing") as client:
        waiting = asyncio.create_task(client.pop("plant/none", group="billing", wait=60.0))
        await node.until(lambda: any(group.polls for group in node.core.groups))
        assert node.kick("user", "operator") == node.kick("address", "10.0.0.0/8") == node.kick("client", "") == 0
        assert node.kick("user", "billing") == 1
        with pytest.raises(NodeUnavailable, match="an operator has ended the call"):
            await waiting
        assert not any(group.polls for group in node.core.groups)
        waiting = asyncio.create_task(client.pop("plant/none", group="billing", wait=60.0))
        await node.until(lambda: any(group.polls for group in node.core.groups))
        assert node.kick("address", "127.0.0.1") == 1
        with pytest.raises(NodeUnavailable):
            await waiting
        await client.send(TOPIC, b"a")  # it is no ban


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
    tables = (POP_RULES, GROUP_RULES, SCHEDULE_RULES, TIMER_RULES, ROCKETMQ_RULES)
    assert {rules.prefix + method for rules in tables for method in rules.needs} == {
        f"/{each.full_name}/{method.name}" for each in services for method in each.methods
    }


async def test_a_consumer_pops_only_by_filters_that_it_may_read(node: Node) -> None:
    async with client_of(node, "billing") as client:
        for refused in ("hr/#", "#", "+/1", "$dlq/reports"):
            with pytest.raises(NotPermitted, match="billing may not pop"):
                await client.pop(refused, group="billing")
            with pytest.raises(NotPermitted, match="billing may not pop"):
                async with client.stream(refused, group="billing") as messages:
                    await anext(aiter(messages))
        assert await client.pop("plant/+/x", group="billing") == []


async def test_only_who_may_send_to_a_topic_recalls_its_messages_and_ends_its_transactions(node: Node) -> None:
    async with client_of(node, "billing") as client, client_of(node, "operator") as other:
        sent = await client.send(TOPIC, b"a", delay=60.0)
        assert sent.recall_handle is not None
        with pytest.raises(NotPermitted, match="operator may not send"):
            await other.recall(sent.recall_handle)
        assert len(node.delayed) == 1
        half = await client.transactions.begin(TOPIC, b"a", producer="p")
        with pytest.raises(NotPermitted, match="operator may not send"):
            await other.transactions.end(half.handle, commit=True)
        assert len(node.transactions) == 1
        await half.commit()
        await client.recall(sent.recall_handle)


async def test_only_who_may_send_to_a_topic_has_to_do_with_its_schedules(node: Node) -> None:
    async with client_of(node, "billing") as client, client_of(node, "operator") as other:
        await client.schedules.create("s", TOPIC, every=60.0)
        refused = [
            other.schedules.create("t", TOPIC, every=60.0),
            other.schedules.describe("s"),
            other.schedules.pause("s"),
            other.schedules.resume("s"),
            other.schedules.run("s"),
            other.schedules.delete("s"),
            client.schedules.create("s", "hr/1", every=60.0, replace=True),
        ]
        for call in refused:
            with pytest.raises(NotPermitted, match="may not send"):
                await call
        assert await other.schedules.list() == []
        (listed,) = await client.schedules.list()
        assert (listed.schedule.name, listed.schedule.topic, listed.paused) == ("s", TOPIC, False)


async def test_only_who_may_send_to_a_topic_finds_and_changes_its_pending_messages(node: Node) -> None:
    async with client_of(node, "billing") as client, client_of(node, "operator") as other:
        sent = await client.send(TOPIC, b"a", delay=60.0, timer_key="k")
        for call in (
            other.timers.find(sent.recall_handle),
            other.timers.find(topic=TOPIC, key="k"),
            other.timers.cancel(sent.recall_handle),
            other.timers.cancel(topic=TOPIC, key="k"),
            other.timers.reschedule(sent.recall_handle, delay=0.001),
            other.timers.reschedule(topic=TOPIC, key="k", delay=0.001),
        ):
            with pytest.raises(NotPermitted, match="may not send"):
                await call
        assert list((await other.timers.list()).timers) == []
        assert await other.timers.cancel_all("#") == 0
        assert [timer.key for timer in (await client.timers.list()).timers] == ["k"]
        with pytest.raises(NotPermitted, match="may not admin"):
            await client.timers.count()
        assert (await other.timers.count()).pending == 1
        await client.timers.cancel(topic=TOPIC, key="k")


async def test_a_right_that_is_withdrawn_ends_calls_and_streams(node: Node, tmp_path: Path) -> None:
    async with client_of(node, "billing") as client, client.stream(FILTER, group="billing") as messages:
        await client.send(TOPIC, b"a")
        (await anext(aiter(messages))).ack()
        await node.until(lambda: is_settled(node))
        (tmp_path / "access.toml").write_text(FILE.replace('read = ["plant/#"]', 'read = ["other/#"]'))
        node.access.reload(Subject("test"))
        with pytest.raises(NotPermitted, match="may not pop"):
            await anext(aiter(messages))
        with pytest.raises(NotPermitted):
            await client.pop(FILTER, group="billing")
        (tmp_path / "access.toml").write_text(FILE.replace("billing", "biling").replace("[[principal]]", "[[principle]]"))
        with pytest.raises(AccessInvalid, match="principle"):
            node.access.reload(Subject("test"))
        await client.send(TOPIC, b"a")  # by what the file said before


async def test_a_producer_is_asked_about_the_messages_that_it_may_send_and_nobody_else_is(node: Node, tmp_path: Path) -> None:
    def ask() -> None:
        node.advance(PopOptions().transaction_check_ms + 1)

    async with client_of(node, "billing") as client, client_of(node, "operator") as other:
        begun = await client.transactions.begin(TOPIC, b"half", producer="shop")
        ask()
        assert await other.transactions.poll("shop") == []
        (asked,) = await client.transactions.poll("shop")
        assert (asked.message_id, asked.message.body) == (begun.message_id, b"half")
        waiting = asyncio.create_task(client.transactions.poll("shop", wait=60.0))
        await node.until(lambda: node.transactions.waiting == 1)
        (tmp_path / "access.toml").write_text(FILE.replace('write = ["plant/#"]', 'write = ["other/#"]'))
        node.access.reload(Subject("test"))
        ask()
        assert await client.transactions.poll("shop") == []
        assert not waiting.done()
        (tmp_path / "access.toml").write_text(FILE)
        node.access.reload(Subject("test"))
        ask()
        assert [each.message_id for each in await waiting] == [begun.message_id]
        await client.transactions.end(asked.transaction_handle, commit=True)


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
    node = Node(tmp_path / "data", access=tmp_path / "access.toml", pop=PopOptions(**options))
    await node.start()
    return node


@pytest.mark.slow
async def test_tls_and_a_client_s_certificate(tmp_path: Path, certificate: Callable[[str], tuple[Path, Path]]) -> None:
    made, key = certificate("localhost")
    roots = made.with_name("ca.crt")
    options = {"certificate_file": str(made), "key_file": str(key), "client_ca_file": str(roots)}
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
            async with Client(target, security=security, timeout=0.5) as client:
                with pytest.raises(NodeUnavailable):
                    await client.send(TOPIC, b"a")
    finally:
        await node.stop()


async def test_a_token_over_tls(tmp_path: Path, certificate: Callable[[str], tuple[Path, Path]]) -> None:
    made, key = certificate("localhost")
    node = await started(tmp_path, certificate_file=str(made), key_file=str(key))
    try:
        security = Security(token=TOKENS["billing"], root_certificates=made.with_name("ca.crt").read_bytes())
        async with Client(f"localhost:{node.port}", security=security) as client:
            await client.send(TOPIC, b"a")
            assert len(await client.pop(FILTER, group=GROUP)) == 1
    finally:
        await node.stop()


async def test_a_certificate_that_is_replaced_counts_after_a_reload_and_one_that_is_not_valid_changes_nothing(
    tmp_path: Path, certificate: Callable[[str], tuple[Path, Path]]
) -> None:
    made, key = certificate("localhost")
    other, other_key = certificate("other.example.org")
    served, served_key = tmp_path / "served.crt", tmp_path / "served.key"
    served.write_bytes(made.read_bytes())
    served_key.write_bytes(key.read_bytes())
    node = await started(tmp_path, certificate_file=str(served), key_file=str(served_key))

    async def shown() -> bytes:
        text = await asyncio.to_thread(ssl.get_server_certificate, ("localhost", node.port))
        return ssl.PEM_cert_to_DER_cert(text)

    def is_of(path: Path) -> bytes:
        return ssl.PEM_cert_to_DER_cert(path.read_text())

    try:
        assert node._server is not None
        assert await shown() == is_of(made)
        security = Security(token=TOKENS["billing"], root_certificates=made.with_name("ca.crt").read_bytes())
        async with Client(f"localhost:{node.port}", security=security) as client:
            await client.send(TOPIC, b"before")
            served.write_bytes(other.read_bytes())
            with structlog.testing.capture_logs() as logs:
                node._server.reload()  # the key is that of the old one
            assert [each["event"] for each in logs] == ["tls.reload_failed"]
            assert node._server.certificates is not None
            assert node._server.certificates.expires_s == expiry_s(made), "the certificate that is in force counts"
            assert f"{served_key} can't be used for TLS: the key is not that of the certificate in {served}" in logs[0]["why"]
            assert await shown() == is_of(made)
            served_key.write_bytes(other_key.read_bytes())
            node._server.reload()
            assert await shown() == is_of(other)
            await client.send(TOPIC, b"on the connection that is open")
    finally:
        await node.stop()


async def test_a_replaced_certificate_is_served_without_a_reload(
    tmp_path: Path, certificate: Callable[[str], tuple[Path, Path]]
) -> None:
    made, key = certificate("localhost")
    other, other_key = certificate("other.example.org")
    served, served_key = tmp_path / "served.crt", tmp_path / "served.key"
    served.write_bytes(made.read_bytes())
    served_key.write_bytes(key.read_bytes())
    node = await started(tmp_path, certificate_file=str(served), key_file=str(served_key))
    try:
        served_key.write_bytes(other_key.read_bytes())
        served.write_bytes(other.read_bytes())
        async with asyncio.timeout(WAIT_S_MAX):
            while await asyncio.to_thread(ssl.get_server_certificate, ("localhost", node.port)) != other.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
    finally:
        await node.stop()


async def test_the_authority_of_clients_can_be_replaced(
    tmp_path: Path, certificate: Callable[[str], tuple[Path, Path]]
) -> None:
    made, key = certificate("localhost")
    roots, stranger = made.with_name("ca.crt").read_bytes(), certificate("stranger.example.org")[0].read_bytes()
    trusted = tmp_path / "trusted.crt"
    trusted.write_bytes(roots)
    node = await started(tmp_path, certificate_file=str(made), key_file=str(key), client_ca_file=str(trusted))
    shown, shown_key = certificate("device.example.org")
    device = Security(root_certificates=roots, certificate=shown.read_bytes(), key=shown_key.read_bytes())

    async def send(timeout_ms: int) -> None:
        async with Client(f"localhost:{node.port}", security=device, timeout=timeout_ms / 1000) as client:
            await client.send(TOPIC, b"a")

    try:
        assert node._server is not None
        await send(60_000)
        trusted.write_bytes(stranger)
        node._server.reload()
        with pytest.raises(NodeUnavailable):
            await send(500)
        trusted.write_bytes(roots)
        node._server.reload()
        await send(60_000)
    finally:
        await node.stop()


async def test_a_certificate_that_is_missing_is_an_error_at_the_start(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(certificate_file=str(tmp_path / "none"), key_file="none"))
    with pytest.raises(OSError, match="none"):
        await node.start()
    await node.stop()
