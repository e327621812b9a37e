"""The commands that connect to a node, over TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.endpoint import Endpoint, endpoint_of
from penstock.store.options import HostPort
from tests.gateway.certificates import Authority
from tests.system.processes import NodeProcess, run_penstock


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def client(authority: Authority) -> list[str]:
    """Return the options of a command that has a certificate of the authority."""
    certificate, key = authority.issue_client("ann@example.org", common_name="ann")
    return ["--tls-certificate", str(certificate), "--tls-key", str(key)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[NodeProcess]:
    """Return a node with a plain listener, one with TLS, one that wants certificates of clients, and gRPC that wants them."""
    directory = tmp_path_factory.mktemp("node")
    listener = f'kind = "tls"\nlisten = "127.0.0.1:0"\ncertificate = "{authority.certificate}"\nkey = "{authority.key}"\n'
    (directory / "penstock.toml").write_text(
        f'[[mqtt.listeners]]\nname = "tls"\n{listener}'
        f'[[mqtt.listeners]]\nname = "mutual"\n{listener}client_ca = "{authority.file}"\nclient_certificates = "required"\n'
        f'[pop]\ntls_certificate_file = "{authority.certificate}"\ntls_key_file = "{authority.key}"\n'
        f'tls_client_ca_file = "{authority.file}"\n'
    )
    node = NodeProcess(directory / "data")
    try:
        yield node.start("--config", str(directory / "penstock.toml"))
    finally:
        node.close()


def test_pub_and_sub_speak_tls(running: NodeProcess, authority: Authority, client: list[str]) -> None:
    trusting = ["--tls-ca-file", str(authority.file)]
    tls, mutual = running.addresses["mqtt.tls"], running.addresses["mqtt.mutual"]
    sent = run_penstock("pub", "a/1", "body", "--retain", "--mqtt", tls, *trusting)
    assert sent.returncode == 0, sent.stderr
    got = run_penstock("sub", "a/1", "--count", "1", "--json", "--mqtt", mutual, *trusting, *client)
    assert (got.returncode, json.loads(got.stdout)) == (0, {"topic": "a/1", "body": "body"}), got.stderr


def test_commands_over_grpc_have_a_certificate(running: NodeProcess, authority: Authority, client: list[str]) -> None:
    pop = ["--pop", running.addresses["pop"], "--tls-ca-file", str(authority.file), *client]
    sent = run_penstock("send", "b/1", "body", *pop)
    assert sent.returncode == 0, sent.stderr
    got = run_penstock("pop", "b/1", "--group", "g", "--wait-ms", "5000", "--json", *pop)
    assert json.loads(got.stdout)["body"] == "body", got.stderr


@pytest.mark.parametrize(
    ("listener", "options", "told"),
    [
        ("mqtt.tls", (), "If it speaks TLS, add --tls, and --tls-ca-file FILE"),
        ("mqtt", ("--tls",), "If it speaks plain text, add --no-tls."),
        ("pop", (), "does not answer as an MQTT broker does"),
        ("admin", (), "does not answer as an MQTT broker does"),
        ("mqtt.tls", ("--tls",), "can't be trusted: unable to get local issuer certificate. Name the file of its authority"),
        ("mqtt.mutual", ("--tls-ca-file", "AUTHORITY"), "give one that its authority has signed with --tls-certificate"),
    ],
)
def test_what_does_not_fit_is_told(
    running: NodeProcess, authority: Authority, listener: str, options: tuple[str, ...], told: str
) -> None:
    given = [str(authority.file) if option == "AUTHORITY" else option for option in options]
    ended = run_penstock("pub", "a/1", "body", "--mqtt", running.addresses[listener], *given)
    assert ended.returncode == 1
    assert told in ended.stderr
    assert ended.stderr.count("\n") == 1, "the message is one line, not a traceback"


AT = HostPort("127.0.0.1", 1)


def test_files_mean_tls_unless_it_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_CA_FILE", raising=False)
    given = {"ca_file": None, "certificate": None, "key": None}
    assert endpoint_of(AT, tls=None, **given) == Endpoint(AT)
    assert endpoint_of(AT, tls=True, **given).has_tls
    assert endpoint_of(AT, tls=None, ca_file=None, certificate=Path("c"), key=Path("k")).has_tls
    monkeypatch.setenv("PENSTOCK_CA_FILE", "of the environment")
    assert endpoint_of(AT, tls=None, **given) == Endpoint(AT, has_tls=True, ca_file=Path("of the environment"))
    assert endpoint_of(AT, tls=None, ca_file=Path("given"), certificate=None, key=None).ca_file == Path("given")
    assert endpoint_of(AT, tls=False, **given) == Endpoint(AT), "the way to speak plain text in such an environment"


@pytest.mark.parametrize("half", ["certificate", "key"])
def test_a_certificate_and_its_key_need_each_other(half: str) -> None:
    files: dict[str, Path | None] = {"ca_file": None, "certificate": None, "key": None}
    with pytest.raises(ValueError, match="--tls-certificate and --tls-key need each other"):
        endpoint_of(AT, tls=None, **{**files, half: Path("file")})
    with pytest.raises(ValueError, match="--no-tls has no use for"):
        endpoint_of(AT, tls=False, **{**files, "ca_file": Path("file")})


def test_a_file_that_can_not_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Endpoint(AT, has_tls=True, ca_file=tmp_path / "nowhere").context()
    (tmp_path / "no.pem").write_text("no certificates")
    with pytest.raises(ValueError, match=r"no\.pem has no certificates that can be used"):
        Endpoint(AT, has_tls=True, ca_file=tmp_path / "no.pem").context()
    certificate, _ = authority.issue_client("bob@example.org", common_name="bob")
    with pytest.raises(ValueError, match="can't be used together: KEY_VALUES_MISMATCH"):
        Endpoint(AT, has_tls=True, certificate=certificate, key=authority.key).context()
