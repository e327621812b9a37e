"""TLS listeners: which clients are served, under which name, and which certificate the server shows."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import shutil
import ssl
import weakref
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import structlog

from penstock.gateway.options import AccessOptions
from penstock.gateway.transport.certificates import certificates_of
from penstock.gateway.transport.peer import username_of
from penstock.store.options import OptionInvalid
from penstock.store.pemfiles import expiry_s
from tests.gateway.brokers import StartBroker
from tests.gateway.certificates import Authority
from tests.gateway.packet_cases import connect
from tests.gateway.wire import ANSWER_S_MAX, CLEAN, Broker, Client, Message
from tests.waiting import until


@pytest.fixture(scope="module")
def shared_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def authority(shared_authority: Authority) -> Authority:
    return shared_authority


def served_certificate(client: Client) -> str:
    """Return the digest of the certificate that the server showed to a client."""
    found = client.writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    return hashlib.sha256(found).hexdigest()


async def test_messages_pass_between_tls_and_tcp(start_broker: StartBroker, authority: Authority) -> None:
    broker = await start_broker(listeners=(authority.listener("tls"),))
    plain = await broker.connect("plain")
    secure = await broker.connect("secure", listener="tls", context=authority.context())
    await plain.subscribe(("to/plain", 1))
    await secure.subscribe(("to/secure", 1))
    await secure.publish("to/plain", b"x" * 100_000, 1)
    await plain.publish("to/secure", b"y" * 100_000, 2)
    assert await plain.message() == Message("to/plain", b"x" * 100_000, 1)
    assert await secure.message() == Message("to/secure", b"y" * 100_000, 1)


async def test_a_server_that_the_client_does_not_trust_gets_no_connect(
    start_broker: StartBroker, authority: Authority, tmp_path: Path
) -> None:
    broker = await start_broker(listeners=(authority.listener("tls"),))
    with pytest.raises(ssl.SSLCertVerificationError):
        await broker.dial("tls", Authority(tmp_path).context())
    await until(lambda: sum(broker.listener("tls").admission.refused.values()) == 1)
    assert broker.listener("tls").admission.open == 0


async def test_bytes_that_are_not_tls_are_refused_and_counted(start_broker: StartBroker, authority: Authority) -> None:
    broker = await start_broker(listeners=(authority.listener("tls"),))
    client = await broker.connect("plain", listener="tls", accepted=False)
    assert [found[0] for found in await client.ended()] in ([], [0])  # at most a TLS alert, which is not MQTT
    await until(lambda: sum(broker.listener("tls").admission.refused.values()) == 1)
    assert broker.listener("tls").admission.open == 0


async def test_a_stalled_handshake_is_ended_after_the_time_limit(start_broker: StartBroker, authority: Authority) -> None:
    broker = await start_broker(listeners=(authority.listener("tls"),), tls_handshake_ms=100)
    client = await broker.dial("tls")
    assert await client.ended() == []
    assert broker.node.gateway.listeners.handshakes.open == 0
    assert broker.listener("tls").admission.open == 0


@pytest.mark.parametrize(("version", "is_served"), [(ssl.TLSVersion.TLSv1_2, False), (ssl.TLSVersion.TLSv1_3, True)])
async def test_a_listener_refuses_tls_versions_older_than_its_minimum(
    start_broker: StartBroker, authority: Authority, version: ssl.TLSVersion, is_served: bool
) -> None:
    broker = await start_broker(listeners=(authority.listener("tls", tls_version_min="1.3"),))
    context = authority.context()
    context.maximum_version = version
    if is_served:
        await broker.connect("new", listener="tls", context=context)
    else:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await broker.dial("tls", context)
        await until(lambda: broker.listener("tls").admission.refused == {"tls": 1})


# --- clients with certificates ------------------------------------------------------------------------------------------


async def test_a_listener_that_requires_certificates_refuses_clients_without_a_trusted_one(
    start_broker: StartBroker, authority: Authority, tmp_path: Path
) -> None:
    broker = await start_broker(listeners=(authority.listener("mtls", client_certificates="required"),))
    stranger = Authority(tmp_path)
    for context in (authority.context(), authority.context(stranger.issue_client("thief@example.org"))):
        client = None
        try:  # With TLS 1.3 the client learns of the refusal only when it reads.
            client = await broker.dial("mtls", context)
            await client.send(connect(CLEAN, b"thief"))
            assert await client.ended() == []
        except (ssl.SSLError, ConnectionError):
            pass
    await until(lambda: broker.listener("mtls").admission.refused.get("tls", 0) == 2)
    assert broker.node.gateway.counters.connections_accepted == 0


async def refused(broker: Broker, context: ssl.SSLContext) -> bool:
    """Return whether the listener `mtls` refuses the handshake of a client."""
    try:  # With TLS 1.3 the client learns of the refusal only when it reads.
        client = await broker.dial("mtls", context)
        await client.send(connect(CLEAN, b"c"))
        return not await client.drained()
    except (ssl.SSLError, ConnectionError):
        return True


async def test_a_revoked_certificate_is_refused_from_the_next_reload_on_and_open_connections_go_on(
    start_broker: StartBroker, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    lost, kept = (authority.issue_client(common_name=name) for name in ("lost", "kept"))
    crl = authority.revoke()
    listener = authority.listener("mtls", client_certificates="required", client_crl_file=str(crl))
    broker = await start_broker(listeners=(listener,))
    before = await broker.connect("before", listener="mtls", context=authority.context(lost))
    authority.revoke(lost)
    certificates = broker.listener("mtls").certificates
    assert certificates is not None
    assert certificates.changed()
    with structlog.testing.capture_logs() as logs:
        broker.node.reload()
        assert await refused(broker, authority.context(lost))
        await until(lambda: broker.listener("mtls").admission.refused == {"tls": 1})
    assert "certificate revoked" in str(logs)
    await broker.connect("kept", listener="mtls", context=authority.context(kept))
    assert await before.drained() == []

    crl.write_text("nothing")
    with structlog.testing.capture_logs() as logs:
        broker.node.reload()
        assert await refused(broker, authority.context(lost)), "the old list stays in force"
    assert f"{crl} can't be used for TLS: it has no certificate revocation list" in str(logs)


@pytest.mark.parametrize(("is_expired", "why"), [(True, "CRL has expired"), (False, "unable to get certificate CRL")])
async def test_without_a_list_that_is_valid_and_of_its_authority_every_certificate_is_refused(
    start_broker: StartBroker, tmp_path: Path, is_expired: bool, why: str
) -> None:
    authority = Authority(tmp_path / "authority")
    issuer = authority if is_expired else Authority(tmp_path / "other")
    crl = str(issuer.revoke(until=datetime.now(UTC) - timedelta(seconds=2) if is_expired else None))
    with structlog.testing.capture_logs() as logs:
        listener = authority.listener("mtls", client_certificates="optional", client_crl_file=crl)
        broker = await start_broker(listeners=(listener,))
        assert await refused(broker, authority.context(authority.issue_client(common_name="c")))
        await until(lambda: broker.listener("mtls").admission.refused == {"tls": 1})
    assert why in str(logs)
    assert [line["file"] for line in logs if line["event"] == "tls.crl_expired"] == ([crl] if is_expired else [])
    await broker.connect("without", listener="mtls", context=authority.context())


@pytest.mark.parametrize("content", [None, b"nothing", b"-----BEGIN X509 CRL-----\nAAAA\n-----END X509 CRL-----\n", "ca.pem"])
def test_a_file_that_is_no_revocation_list_is_refused(tmp_path: Path, content: bytes | str | None) -> None:
    authority, crl = Authority(tmp_path), tmp_path / "broken.pem"
    if isinstance(content, str):  # Its certificates would become trusted authorities.
        content = authority.revoke().read_bytes() + (tmp_path / content).read_bytes()
    if content is not None:
        crl.write_bytes(content)
    with pytest.raises(OSError, match=r"broken\.pem"):
        certificates_of(authority.listener("tls", client_certificates="required", client_crl_file=str(crl)), "tls")


def test_a_revocation_list_needs_client_certificates(authority: Authority) -> None:
    with pytest.raises(OptionInvalid, match="client_crl_file"):
        authority.listener("tls", client_crl_file="crl.pem").check("mqtt.listeners")


@pytest.mark.parametrize(
    ("taken_from", "expected"),
    [("cn", "device-7"), ("san", "device-7@example.org"), ("none", None)],
)
async def test_a_certificate_names_its_client(
    start_broker: StartBroker, authority: Authority, taken_from: str, expected: str | None
) -> None:
    listener = authority.listener("mtls", client_certificates="optional", username_from=taken_from)
    broker = await start_broker(listeners=(listener,))
    context = authority.context(authority.issue_client("device-7@example.org", common_name="device-7"))
    await broker.connect("known", listener="mtls", context=context)
    await broker.connect("unknown", listener="mtls", context=authority.context())
    assert broker.connection("known").peer.username == expected
    assert broker.connection("unknown").peer.username is None


@pytest.mark.parametrize(
    ("certificate", "cn", "san"),
    [
        ({}, None, None),
        ({"subject": ((("commonName", "a"),),)}, "a", None),
        ({"subject": ((("organizationName", "o"),), (("commonName", "a"), ("commonName", "b")))}, "a", None),
        ({"subject": ((("commonName", ""),),)}, None, None),
        ({"subject": ((("commonName", "root\0.evil"),),)}, None, None),
        ({"subjectAltName": (("IP Address", "::1"), ("URI", "spiffe://x/y"), ("DNS", "d"))}, None, "spiffe://x/y"),
        ({"subjectAltName": (("DNS", "d"), ("email", "e@f"))}, None, "d"),
        ({"subjectAltName": (("IP Address", "::1"),)}, None, None),
    ],
)
def test_the_name_in_a_certificate(certificate: dict[str, Any], cn: str | None, san: str | None) -> None:
    assert (username_of(certificate, "cn"), username_of(certificate, "san")) == (cn, san)


# --- certificates that change -------------------------------------------------------------------------------------------


async def test_a_replaced_certificate_is_served_without_a_restart_and_connections_stay_open(
    start_broker: StartBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.store.watchedfiles.WATCH_S", 0.05)
    authority = Authority(tmp_path / "authority")
    broker = await start_broker(listeners=(authority.listener("tls"),))
    before = await broker.connect("before", listener="tls", context=authority.context())
    authority.issue_server()

    async def renewed() -> Client:
        while True:
            client = await broker.dial("tls", authority.context())
            if served_certificate(client) != served_certificate(before):
                return client

    async with asyncio.timeout(ANSWER_S_MAX):
        await renewed()
    assert await before.drained() == []
    shown = broker.node.registry.get_sample_value("penstock_certificate_expires_timestamp_seconds", {"listener": "tls"})
    assert shown == expiry_s(authority.certificate)


async def test_a_bad_certificate_is_logged_and_the_previous_one_stays_in_use(start_broker: StartBroker, tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    broker = await start_broker(listeners=(authority.listener("tls"),))
    authority.certificate.write_text("no certificate")
    broker.node.reload()
    await broker.connect("a", listener="tls", context=authority.context())
    authority.issue_server()
    broker.node.reload()
    await broker.connect("b", listener="tls", context=authority.context())


def test_a_missing_certificate_file_counts_as_unchanged_until_it_is_back(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificates = certificates_of(authority.listener("tls"), "tls")
    assert not certificates.changed()
    authority.key.unlink()
    assert not certificates.changed()
    authority.issue_server()
    assert certificates.changed()
    certificates.reload()
    assert not certificates.changed()


def test_a_replaced_authority_is_no_longer_trusted(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path / "a"), Authority(tmp_path / "b")
    certificates = certificates_of(authority.listener("tls", client_certificates="required"), "tls")
    (before,) = certificates.content.get_ca_certs()
    shutil.copy(other.file, authority.file)
    certificates.reload()
    (after,) = certificates.content.get_ca_certs()
    assert before != after


@pytest.mark.parametrize("broken", ["certificate_file", "key_file", "client_ca_file"])
async def test_a_node_does_not_start_without_its_certificates(
    start_broker: StartBroker, authority: Authority, broken: str, tmp_path: Path
) -> None:
    path = tmp_path / "broken.pem"
    for text in (None, "nothing"):
        if text is not None:
            path.write_text(text)
        options: Any = {"client_certificates": "required"}
        listener = authority.listener("tls", **options)
        object.__setattr__(listener, broken, str(path))
        with pytest.raises(OSError, match=r"broken\.pem"):
            await start_broker(listeners=(listener,))


def test_an_encrypted_key_is_refused_without_a_prompt_for_its_password(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    authority = Authority(tmp_path)
    key = serialization.load_pem_private_key(authority.key.read_bytes(), None)
    authority.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(OSError, match="can't be used for TLS"):
        certificates_of(authority.listener("tls"), "tls")


async def test_the_node_stops_while_handshakes_are_under_way(start_broker: StartBroker, authority: Authority) -> None:
    broker: Broker = await start_broker(listeners=(authority.listener("tls"),))
    clients = [await broker.dial("tls") for _ in range(3)]
    await until(lambda: broker.node.gateway.listeners.handshakes.open == 3)
    await broker.node.gateway.stop()
    assert broker.node.gateway.listeners.handshakes.open == 0
    for client in clients:
        assert await client.ended() == []


PLUGINS = {
    "amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True},
    "amqtt.plugins.topic_checking.TopicTabooPlugin": {},
}


@pytest.mark.parametrize("plugins", [{}, PLUGINS], ids=["open", "plugins"])
@pytest.mark.parametrize("listener", ["mqtt", "tls"])
async def test_a_closed_connection_frees_its_objects_without_the_garbage_collector(
    start_broker: StartBroker, authority: Authority, listener: str, plugins: dict[str, Any]
) -> None:
    """A fleet that reconnects must not fill the memory until Python's cyclic garbage collector runs, which is seldom."""
    broker = await start_broker(listeners=(authority.listener("tls"),), access=AccessOptions(plugins=plugins))
    context = authority.context() if listener == "tls" else None
    client = await broker.connect_5("client", listener=listener, context=context)
    await client.subscribe(("a", 1), ("+", 1), ("$share/g/b", 1))
    for topic in ("a", "b"):
        await client.publish(topic, b"x", 1)
    await client.messages()
    held: list[weakref.ref[Any]] = [weakref.ref(broker.connection("client"))]
    if listener == "tls":
        held.append(weakref.ref(broker.connection("client").peer.ssl_object))
    gc.disable()
    try:
        client.reset()
        await until(lambda: not any(each() for each in held))
    finally:
        gc.enable()
