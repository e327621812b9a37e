"""`penstock access` and `penstock user`: reloading, testing, banning and disconnecting on a running node."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from prometheus_client import generate_latest

from penstock.access import passwords
from penstock.access.bans import FILE, read_bans
from penstock.access.passwords import PasswordFile
from penstock.cli.main import main
from penstock.gateway import gateway
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway.wire import Broker

RULES = """
[[rule]]
allow = ["all"]
topics = ["a/#"]
groups = ["*"]
"""


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    (tmp_path / "access.toml").write_text(RULES)
    (tmp_path / "access.toml").chmod(0o600)  # otherwise the log, which the commands here share, warns of it
    broker = await Broker(tmp_path / "data", {"access_file": str(tmp_path / "access.toml")}).start()
    yield broker
    await broker.stop()


@pytest.fixture
def run(broker: Broker, capsys: pytest.CaptureFixture[str]) -> Any:
    async def run(*arguments: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, ["access", *arguments, "--data-dir", str(broker.config.data_dir)])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


async def test_a_test_explains_what_is_in_force(broker: Broker, run: Any) -> None:
    status, said = await run("test", "ann", "pop", "a/+")
    assert (status, said.startswith("allowed  pop: rule 1 allows it: a/#")) == (0, True)
    assert (await run("test", "ann", "subscribe", "$share/g/a/+"))[0] == 0
    status, said = await run("test", "ann", "read", "b/#", "--json")
    assert status == 1
    assert [json.loads(line)["action"] for line in said.splitlines()] == ["subscribe", "receive", "pop"]


async def test_rules_and_users_are_printed(run: Any) -> None:
    _, said = await run("rules")
    assert [line.split()[:4] for line in said.splitlines()] == [
        ["number", "source", "allows", "actions"],
        ["1", "rule", "1", "True"],
    ]
    assert "a/#" in said
    assert await run("users", "--json") == (0, "")


async def test_a_file_is_tested_without_a_node(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "other.toml"
    path.write_text('[[rule]]\ndeny = "read"\ntopics = ["hr/#"]\n[[rule]]\nallow = "read"\ntopics = ["#"]\n')
    assert main(["access", "test", "ann", "subscribe", "#", "--file", str(path)]) == 1
    assert "rule 1 denies it: hr/#; '#' and it share 'hr/#'" in capsys.readouterr().out
    path.write_text("[[rule]]")
    assert main(["access", "test", "ann", "subscribe", "#", "--file", str(path)]) == 1
    assert "rule 1: give either allow or deny" in capsys.readouterr().err


async def test_a_reload_applies_or_changes_nothing(broker: Broker, run: Any, tmp_path: Path) -> None:
    (tmp_path / "access.toml").write_text(RULES.replace("a/#", "b/#"))
    assert await run("reload") == (0, "reloaded: 1 rules, 0 users, 0 bans\n")
    assert (await run("test", "", "publish", "b/1"))[0] == 0
    (tmp_path / "access.toml").write_text(RULES.replace("allow", "alow"))
    status, said = await run("reload")
    assert status == 1
    assert "nothing has changed" in said
    assert "alow" in said
    assert (await run("test", "", "publish", "b/1"))[0] == 0


async def test_a_reload_is_in_force_for_all_clients_when_the_command_ends(
    broker: Broker, run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "RECHECKED_AT_ONCE", 1)
    for number in range(20):
        await (await broker.connect(f"c{number}")).subscribe(("a/#", 1))
    (tmp_path / "access.toml").write_text(RULES.replace("a/#", "b/#"))
    assert (await run("reload"))[0] == 0
    assert broker.node.gateway.counters.subscriptions_withdrawn == 20


async def test_the_metrics_tell_of_reloads_rules_and_events(broker: Broker, run: Any, tmp_path: Path) -> None:
    await run("reload")
    (tmp_path / "access.toml").write_text("[[rule]]")
    await run("reload")
    await run("ban", "user", "mallory")
    lines = generate_latest(broker.node.registry).decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith(("penstock_access", "penstock_audit")))
    assert found["penstock_access_rules"] == found["penstock_access_bans"] == "1.0"
    assert found['penstock_access_reloads_total{result="done"}'] == "1.0"
    assert found['penstock_access_reloads_total{result="failed"}'] == "1.0"
    assert found['penstock_access_events_total{event="changed"}'] == "2.0"
    assert found["penstock_audit_lines_lost_total"] == "0.0"


async def test_bans_are_made_listed_and_lifted(broker: Broker, run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    status, said = await run("ban", "user", "mallory", "--for", "12h", "--why", "floods")
    assert (status, said.startswith("banned user mallory until 20")) == (0, True)
    assert (await run("ban", "address", "10.0.0.9/8"))[1] == "banned address 10.0.0.0/8 until the ban is lifted\n"
    with monkeypatch.context() as patched:
        patched.setattr("penstock.cli.apiclient.ROWS_MAX", 1)
        (first, second) = map(json.loads, (await run("bans", "--json"))[1].splitlines())
    assert (first["name"], first["until_ms"], second["name"], second["why"]) == ("10.0.0.0/8", 0, "mallory", "floods")
    assert (await run("lift", "user", "mallory"))[0] == 0
    assert (await run("lift", "user", "mallory"))[0] == 1
    assert len((await run("bans", "--json"))[1].splitlines()) == 1


async def test_a_ban_that_cannot_be_saved_holds_and_is_reported(broker: Broker, run: Any) -> None:
    client = await broker.connect_5("c1")
    (broker.config.data_dir / "bans.json.new").mkdir()
    status, said = await run("ban", "client", "c1")
    assert status == 1
    assert "in force until the node ends" in said
    assert (await client.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    status, said = await run("lift", "client", "c1")
    assert status == 1
    (broker.config.data_dir / "bans.json.new").rmdir()
    assert (await run("bans", "--json"))[1] == ""
    assert (await run("ban", "client", "c2"))[0] == 0
    (broker.config.data_dir / "bans.json.new").mkdir()
    assert (await run("lift", "client", "c2"))[0] == 1
    (broker.config.data_dir / "bans.json.new").rmdir()
    assert "no ban of the client" in (await run("lift", "client", "c2"))[1]
    assert read_bans(broker.config.data_dir / FILE) == [], "to ask again has saved it"


async def test_a_client_is_disconnected(broker: Broker, run: Any) -> None:
    client, other = await broker.connect_5("c1"), await broker.connect_5("c2")
    assert (await run("kick", "client", "c1"))[1].endswith("disconnected 1 clients of MQTT, ended 0 calls over gRPC\n")
    assert (await client.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    assert "disconnected 1 clients of MQTT" in (await run("kick", "address", "127.0.0.9/8"))[1]
    assert (await other.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    status, said = await run("kick", "address", "home")
    assert (status, "no address and no network" in said) == (1, True)


# --- penstock user ----------------------------------------------------------------------------------------------------


def test_users_come_and_go_and_no_password_is_an_argument(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # A hash of the real cost takes a fifth of a second.
    monkeypatch.setattr(passwords, "PasswordHasher", lambda parallelism: PasswordHasher(1, 64, parallelism))
    path = tmp_path / "passwords"
    file = ["--file", str(path)]
    monkeypatch.setattr("sys.stdin", io.StringIO("first secret\nrest\n"))
    assert main(["user", "add", "ann", "--stdin", *file]) == 0
    (tmp_path / "given").write_text("second secret\n")
    assert main(["user", "add", "bob", "--from", str(tmp_path / "given"), *file]) == 0
    users = PasswordFile(path)
    assert users.verify("ann", b"first secret")
    assert users.verify("bob", b"second secret")
    assert main(["user", "password", "ann", "--from", str(tmp_path / "given"), *file]) == 0
    assert PasswordFile(path).verify("ann", b"second secret")
    capsys.readouterr()
    assert main(["user", "list", *file]) == 0
    assert capsys.readouterr().out == "ann\nbob\n"
    assert main(["user", "delete", "ann", *file]) == 0
    assert main(["user", "delete", "ann", *file]) == 1
    monkeypatch.setattr("sys.stdin", io.StringIO("x"))
    assert main(["user", "add", "eve", *file]) == 1
    assert "no terminal" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["user", "add", "eve", "password", *file])
    assert list(PasswordFile(path).hashes) == ["bob"]
