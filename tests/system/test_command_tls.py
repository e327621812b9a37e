"""The commands that connect to a node, over TLS."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.cli.endpoint import Endpoint, endpoint_of
from penstock.settings import SettingInvalid, Settings
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
    return ["--certificate-file", str(certificate), "--key-file", str(key)]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, authority: Authority) -> Iterator[NodeProcess]:
    """Return a node with a plain listener, one with TLS, one that wants certificates of clients, and gRPC that wants them."""
    directory = tmp_path_factory.mktemp("node")
    files = f'certificate_file = "{authority.certificate}"\nkey_file = "{authority.key}"\n'
    listener = f'kind = "tls"\nlisten = "127.0.0.1:0"\n{files}'
    (directory / "penstock.toml").write_text(
        f'[[mqtt.listeners]]\nname = "tls"\n{listener}'
        f'[[mqtt.listeners]]\nname = "mutual"\n{listener}client_certificates = "required"\n'
        f'client_ca_file = "{authority.file}"\n'
        f"[pop]\n{files}"
        f'client_ca_file = "{authority.file}"\n'
    )
    node = NodeProcess(directory / "data")
    try:
        yield node.start("--config", str(directory / "penstock.toml"))
    finally:
        node.close()


def test_pub_and_sub_speak_tls(running: NodeProcess, authority: Authority, client: list[str]) -> None:
    trusting = ["--ca-file", str(authority.file)]
    tls, mutual = running.addresses["mqtt.tls"], running.addresses["mqtt.mutual"]
    sent = run_penstock("pub", "a/1", "body", "--retain", "--mqtt", tls, *trusting)
    assert sent.returncode == 0, sent.stderr
    got = run_penstock("sub", "a/1", "--count", "1", "--json", "--mqtt", mutual, *trusting, *client)
    assert (got.returncode, json.loads(got.stdout)) == (0, {"topic": "a/1", "body": "body"}), got.stderr


def test_commands_over_grpc_have_a_certificate(running: NodeProcess, authority: Authority, client: list[str]) -> None:
    pop = ["--target", running.addresses["pop"], "--ca-file", str(authority.file), *client]
    sent = run_penstock("send", "b/1", "body", *pop)
    assert sent.returncode == 0, sent.stderr
    got = run_penstock("pop", "b/1", "--group", "g", "--wait", "5s", "--json", *pop)
    assert json.loads(got.stdout)["body"] == "body", got.stderr


@pytest.mark.parametrize(
    ("listener", "options", "told"),
    [
        ("mqtt.tls", (), "If it speaks TLS, add --tls, and --ca-file FILE"),
        ("mqtt", ("--tls",), "If it speaks plain text, add --no-tls."),
        ("pop", (), "does not answer as an MQTT broker does"),
        ("admin", (), "does not answer as an MQTT broker does"),
        ("mqtt.tls", ("--tls",), "can't be trusted: unable to get local issuer certificate. Name the file of its authority"),
        ("mqtt.mutual", ("--ca-file", "AUTHORITY"), "give one that its authority has signed with --certificate-file"),
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


@pytest.mark.parametrize(
    ("settings", "endpoint"),
    [
        ({}, Endpoint(AT)),
        ({"tls": "yes"}, Endpoint(AT, has_tls=True)),
        ({"tls": "1"}, Endpoint(AT, has_tls=True)),
        ({"tls": "False", "ca_file": "a"}, Endpoint(AT)),
        ({"ca_file": "a"}, Endpoint(AT, has_tls=True, ca_file=Path("a"))),
        ({"certificate_file": "c", "key_file": "k"}, Endpoint(AT, has_tls=True, certificate=Path("c"), key=Path("k"))),
        ({"tls": "no", "ca_file": "a", "token": "t"}, Endpoint(AT, "t")),
    ],
)
def test_files_mean_tls_unless_it_is_denied(settings: dict[str, str], endpoint: Endpoint) -> None:
    assert endpoint_of(Settings({"target": str(AT)} | settings), "target") == endpoint


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"certificate_file": "c"}, "certificate_file and key_file need each other"),
        ({"key_file": "k"}, "certificate_file and key_file need each other"),
        ({"tls": "maybe"}, "tls is 'maybe': set it to yes or no"),
        ({"target": "nowhere"}, "target is 'nowhere': it must be HOST:PORT"),
    ],
)
def test_settings_that_can_not_be_used_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(SettingInvalid, match=message):
        endpoint_of(Settings({"target": str(AT)} | settings), "target")


def test_a_file_that_can_not_be_used_is_named(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        Endpoint(AT, has_tls=True, ca_file=tmp_path / "nowhere").context()
    (tmp_path / "no.pem").write_text("no certificates")
    with pytest.raises(ValueError, match=r"no\.pem has no certificates that can be used"):
        Endpoint(AT, has_tls=True, ca_file=tmp_path / "no.pem").context()
    certificate, _ = authority.issue_client("bob@example.org", common_name="bob")
    with pytest.raises(ValueError, match="can't be used together: KEY_VALUES_MISMATCH"):
        Endpoint(AT, has_tls=True, certificate=certificate, key=authority.key).context()
