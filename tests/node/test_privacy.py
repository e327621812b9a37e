"""Who may enter what a node writes."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import structlog.testing

from penstock.access.options import AccessControlOptions, TokenOptions
from penstock.gateway.options import GatewayOptions, ListenerOptions
from penstock.node.adminoptions import AdminOptions
from penstock.node.config import Config
from penstock.node.privacy import keep_private, warn_of_open_files
from tests.gateway.wire import Broker


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


async def test_a_node_keeps_its_data_directory_to_itself(tmp_path: Path) -> None:
    broker = await Broker(tmp_path / "new" / "data", {}).start()
    data_dir = broker.config.data_dir
    await (await broker.connect("c")).publish("a", b"x", 1)
    assert mode_of(data_dir) == 0o700
    written = [path for path in data_dir.rglob("*") if path.is_file() and "index" not in path.parts]
    assert {path.name for path in written} >= {"secret"}
    assert {path.name: oct(mode_of(path)) for path in written if mode_of(path) != 0o600} == {}
    assert [path for path in data_dir.iterdir() if path.is_dir() and path.name != "index" and mode_of(path) != 0o700] == []
    await broker.stop()


@pytest.mark.parametrize(("before", "after"), [(0o755, 0o750), (0o777, 0o770), (0o750, 0o750), (0o1777, 0o1777)])
def test_others_lose_their_rights_to_a_directory_that_exists(tmp_path: Path, before: int, after: int) -> None:
    tmp_path.chmod(before)
    keep_private(tmp_path)
    assert mode_of(tmp_path) == after


FILES = {  # mode: why it is logged
    "rules.toml": (0o644, "read"),
    "passwords": (0o604, "read"),
    "server.key": (0o646, "change"),
    "server.pem": (0o644, ""),
    "ca.pem": (0o666, "change"),
    "crl.pem": (0o666, "change"),
}


@pytest.mark.parametrize(("algorithm", "why"), [("HS256", "read"), ("ES256", "")])
def test_the_log_names_the_files_of_secrets_that_others_may_read(tmp_path: Path, algorithm: str, why: str) -> None:
    for name, (mode, _) in FILES.items():
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    (tmp_path / "secret").touch(0o644)
    listener = ListenerOptions(
        name="tls",
        kind="tls",
        certificate_file=str(tmp_path / "server.pem"),
        key_file=str(tmp_path / "server.key"),
        client_certificates="required",
        client_ca_file=str(tmp_path / "ca.pem"),
        client_crl_file=str(tmp_path / "crl.pem"),
    )
    config = Config(
        access=AccessControlOptions(
            file=str(tmp_path / "rules.toml"),
            password_file=str(tmp_path / "passwords"),
            jwt=TokenOptions(algorithms=(algorithm,), keys=str(tmp_path / "secret")),
        ),
        mqtt=GatewayOptions(listeners=(listener,)),
        admin=AdminOptions(client_ca_file=str(tmp_path / "missing")),
    )
    with structlog.testing.capture_logs() as logs:
        warn_of_open_files(config)
    found = {Path(line["path"]).name: line["why"] for line in logs if line["event"] == "file.open_to_others"}
    expected = {name: said for name, (_, said) in FILES.items() if said} | ({"secret": why} if why else {})
    assert {name: said.split()[2] for name, said in found.items()} == expected


async def test_a_start_and_a_reload_look_at_the_files(tmp_path: Path) -> None:
    passwords = tmp_path / "passwords"
    passwords.touch(0o644)
    with structlog.testing.capture_logs() as logs:
        broker = await Broker(tmp_path / "data", {"control": {"password_file": str(passwords)}}).start()
        passwords.chmod(0o600)
        broker.node.reload()
        passwords.chmod(0o644)
        broker.node.reload()
        await broker.stop()
    assert [line["mode"] for line in logs if line["event"] == "file.open_to_others"] == ["0644", "0644"]
