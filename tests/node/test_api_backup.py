"""Backups that callers of the admin API, such as `penstock backup NAME --admin`, begin, watch and cancel."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from penstock.backup.copying import Identity, SystemCopyFiles
from penstock.cli import remotebackup
from penstock.cli.adminclient import AdminClient
from penstock.cli.main import main
from penstock.node import backups
from penstock.node.adminoptions import AdminOptions
from penstock.node.config import load_config
from penstock.node.errors import ConfigError
from penstock.store.log.logreader import read_log
from penstock.store.record import Kind
from tests.backup.wiring import restore
from tests.gateway.wire import Broker
from tests.node.adminapi import Api, api, audited, start_broker
from tests.store.wiring import publish
from tests.waiting import WAIT_S_MAX, until

__all__ = ["api"]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A node with a directory for backups, and some messages."""
    (tmp_path / "backups").mkdir()
    broker = await start_broker(tmp_path, admin=AdminOptions(backup_dir=str(tmp_path / "backups")))
    await fill(broker, 0, 5)
    yield broker
    await broker.stop()


async def fill(broker: Broker, first: int, count: int) -> None:
    for number in range(first, first + count):
        publish(broker.node.store, "plant/1", str(number))
    broker.node.store.commit()
    await broker.node.store.durable()


def bodies(data_dir: Path) -> list[int]:
    return [int(record.body) for record in read_log(data_dir) if record.kind == Kind.MESSAGE]


class Gate(SystemCopyFiles):
    """Files of a backup that waits before it copies the first one until a test opens the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.is_reached = Event()
        self.is_open = Event()

    def identity(self, path: Path) -> Identity:
        self.is_reached.set()
        self.is_open.wait(WAIT_S_MAX)
        return super().identity(path)


async def begin_at_a_gate(broker: Broker, api: Api, name: str = "plant") -> tuple[Gate, Any]:
    """Begin a backup, and return when it waits at the gate, with what the API shows then."""
    gate = Gate()
    broker.node.backups._files = gate
    await api("admin").ok("POST", "/backup", {"name": name})
    await until(gate.is_reached.is_set)
    return gate, await api("viewer").get("/backup")


async def ended(broker: Broker, api: Api) -> Any:
    """Return what the API shows of a backup that has ended."""
    made = broker.node.backups
    await until(lambda: made.run is not None and made.run.is_over)
    return await api("viewer").get("/backup")


async def test_a_backup_is_begun_watched_complete_and_restored_and_the_next_one_adds_to_it(
    broker: Broker, api: Api, tmp_path: Path
) -> None:
    idle = await api("viewer").get("/backup")
    assert (idle["state"], idle["held"], idle["last_complete"], idle["last_backup_ms"]) == ("idle", False, None, 0)
    gate, running = await begin_at_a_gate(broker, api)
    assert (running["state"], running["name"], running["held"], running["why"]) == ("running", "plant", True, "")
    assert (running["step"], running["done_bytes"], running["ended_ms"]) == ("Copying", 0, 0)
    assert running["expected_bytes"] > 0
    gate.is_open.set()
    shown = await ended(broker, api)
    assert (shown["state"], shown["id"], shown["held"]) == ("complete", running["id"], False)
    assert shown["done_bytes"] == shown["expected_bytes"] == shown["last_complete"]["bytes"]
    assert shown["last_complete"]["directory"] == shown["directory"] == str(tmp_path / "backups" / "plant")
    assert shown["begun_ms"] <= shown["last_backup_ms"] <= shown["ended_ms"]
    metrics = {"penstock_backup_last_success_timestamp_seconds": shown["last_backup_ms"] / 1000}
    assert {name: broker.node.registry.get_sample_value(name) for name in metrics} == metrics
    await fill(broker, 5, 3)
    await api("admin").ok("POST", "/backup", {"name": "plant", "link": True, "mib_per_s": 0})
    last = (await ended(broker, api))["last_complete"]
    assert (last["round"], last["durable"]) == (2, broker.node.store.log.end)
    assert 0 < last["copied_files"] < last["files"]
    restore(tmp_path / "backups" / "plant", tmp_path / "restored")
    assert bodies(tmp_path / "restored") == [*range(8)]
    assert [(line["event"], line["user"], line["what"], line["name"]) for line in audited(broker)] == [
        ("changed", "admin", "beginBackup", "plant")
    ] * 2


async def test_one_backup_runs_at_a_time_and_is_cancelled_with_the_earlier_one_as_it_was(
    broker: Broker, api: Api, tmp_path: Path
) -> None:
    admin = api("admin")
    await admin.ok("POST", "/backup", {"name": "plant"})
    first = await ended(broker, api)
    gate, running = await begin_at_a_gate(broker, api)
    for role, method, status in (("operator", "POST", 403), ("operator", "DELETE", 403), ("", "GET", 200)):
        assert (await api(role).call(method, "/api/v1/backup", {"name": "x"} if method == "POST" else None))[0] == status
    assert (await admin.refused("POST", "/backup", {"name": "x"}))[1].startswith("the backup 'plant' is running")
    assert (await admin.refused("DELETE", f"/backup?id={first['id']}"))[0] == 409
    cancelling = await admin.ok("DELETE", f"/backup?id={running['id']}")
    assert (cancelling["state"], cancelling["held"]) == ("cancelling", False)
    assert (await admin.ok("DELETE", "/backup"))["state"] == "cancelling"
    assert "is cancelling" in (await admin.refused("POST", "/backup", {"name": "x"}))[1]
    gate.is_open.set()
    shown = await ended(broker, api)
    assert (shown["state"], shown["why"], shown["last_complete"]) == (
        "cancelled",
        "an operator has cancelled it",
        first["last_complete"],
    )
    assert [path.name for path in (tmp_path / "backups" / "plant").glob("0*")] == ["00000001"]
    grant = broker.node._holding.begin()  # as `penstock backup` does
    assert "another backup of this node is running" in (await admin.refused("POST", "/backup", {"name": "x"}))[1]
    assert "ends with its command" in (await admin.refused("DELETE", "/backup"))[1]
    broker.node._holding.release(grant)
    await admin.ok("POST", "/backup", {"name": "plant"})
    assert (await ended(broker, api))["last_complete"]["round"] == 2


async def test_a_backup_that_fails_says_why(broker: Broker, api: Api, tmp_path: Path) -> None:
    directory = tmp_path / "backups"

    async def why() -> str:
        await api("admin").ok("POST", "/backup", {"name": "plant"})
        shown = await ended(broker, api)
        assert (shown["state"], shown["held"], shown["last_backup_ms"]) == ("failed", False, 0)
        return str(shown["why"])

    (directory / "plant").symlink_to(tmp_path / "data")
    assert "is in the data directory" in await why()
    (directory / "plant").unlink()
    (directory / "plant").mkdir()
    (directory / "plant" / "holiday.jpg").touch()
    assert "holds holiday.jpg" in await why()
    directory.rename(tmp_path / "unmounted")
    assert await why() == (
        f"admin.backup_dir is {directory}, which does not exist; mount its disk, or create it for the node's user"
    )
    directory.touch()
    assert f"{directory} is not a directory" in await why()
    directory.unlink()
    directory.mkdir()
    gate, _ = await begin_at_a_gate(broker, api)
    assert broker.node.backups.run is not None
    broker.node._holding.end(broker.node.backups.run.grant, "the disk is nearly full")
    gate.is_open.set()
    shown = await ended(broker, api)
    assert (shown["state"], shown["why"]) == ("failed", "the disk is nearly full")


async def test_a_drain_cancels_the_backup_and_the_stop_waits_for_its_end(broker: Broker, api: Api, tmp_path: Path) -> None:
    gate, _ = await begin_at_a_gate(broker, api)
    run = broker.node.backups.run
    assert run is not None
    await broker.node.draining.begin(0)
    assert run.state == "cancelling"
    assert "because the node drains" in (await api("admin").refused("POST", "/backup", {"name": "x"}))[1]
    gate.is_open.set()
    await broker.restart()
    assert (run.state, run.why) == ("cancelled", "the node drains")
    assert [path.name for path in (tmp_path / "backups" / "plant").iterdir()] == ["lock"]


async def test_a_disk_of_backups_that_hangs_does_not_keep_the_node_from_stopping(
    broker: Broker, api: Api, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(backups, "STOP_S", 0)
    gate, _ = await begin_at_a_gate(broker, api)
    await broker.restart()
    gate.is_open.set()
    await until(lambda: "penstock-backup" not in [thread.name for thread in threading.enumerate()])
    assert [path.name for path in (tmp_path / "backups" / "plant").iterdir()] == ["lock"]


NAMES = ("", ".", "..", ".hidden", "a/b", "/backup", "a\\b", "a\n", "a b", "plänt", "a\0", "a" * 65)


async def test_a_name_that_is_no_component_of_a_path_is_refused(broker: Broker, api: Api) -> None:
    for name in NAMES:
        status, why = await api("admin").refused("POST", "/backup", {"name": name})
        assert (status, "can't be used: give 1 to 64 letters" in why) == (400, True), (name, why)
    assert (await api("admin").refused("DELETE", "/backup"))[1] == "no backup of the admin API is running"
    broker.node.backups._directory = None
    status, why = await api("admin").refused("POST", "/backup", {"name": "plant"})
    assert (status, "admin.backup_dir is empty" in why) == (409, True)


def test_the_directory_of_backups_is_outside_of_the_data_directory(tmp_path: Path) -> None:
    options = {"data_dir": str(tmp_path), "admin.backup_dir": str(tmp_path / "x")}
    with pytest.raises(ConfigError, match="must be a directory outside of the data directory"):
        load_config(overrides=options)
    assert load_config(overrides=options | {"data_dir": str(tmp_path / "y")}).admin.backup_dir == str(tmp_path / "x")


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_ADMIN", str(broker.node.admin))

    async def run(*arguments: str, role: str = "admin") -> tuple[int, str]:
        """Run `penstock backup` as somebody with a role, and return its status and what it says."""
        monkeypatch.setenv("PENSTOCK_TOKEN", role)
        status = await asyncio.to_thread(main, ["backup", *arguments])
        captured = capsys.readouterr()
        lines = (captured.out + captured.err).splitlines(keepends=True)
        return status, "".join(line for line in lines if not line[:4].isdigit())  # the node logs to the same stream

    return run


async def test_the_command_prints_the_summary_of_what_the_node_has_done(
    broker: Broker, api: Api, run: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "backups" / "plant"
    status, said = await run("plant", "--admin", str(broker.node.admin))
    assert (status, said.startswith(f"Backup 1 in {directory} is complete: the log from position 0 to ")) == (0, True)
    status, said = await run("plant", "--json")
    found = json.loads(said)
    assert (status, found["round"], found["directory"], found["copied_files"] < found["files"]) == (0, 2, str(directory), True)
    assert await run("plant", "--no-wait") == (0, f"The node has begun the backup in {directory}.\n")
    assert (await ended(broker, api))["state"] == "complete"


async def test_the_command_says_what_is_refused_and_why_a_backup_has_failed(broker: Broker, run: Any, tmp_path: Path) -> None:
    status, said = await run("/backup/plant")
    assert (status, "below its admin.backup_dir: give the NAME" in said) == (1, True)
    assert "--no-wait needs --admin" in (await run("plant", "--no-wait", "--data-dir", str(broker.config.data_dir)))[1]
    assert "has no role admin" in (await run("plant", role="operator"))[1]
    assert "can't be used: give 1 to 64 letters" in (await run(".hidden"))[1]
    taken = tmp_path / "backups" / "plant"
    taken.touch()
    why = f"{taken} is not a directory; name a directory, or move the file away"
    assert await run("plant") == (1, f"penstock backup: the backup plant has failed: {why}\n")


def at_its_pauses(monkeypatch: pytest.MonkeyPatch, *acts: Callable[[], object]) -> None:
    """Let something happen each time that the command pauses between two looks at the node."""
    left = [*acts]

    def sleep(seconds: float) -> None:
        if left:
            left.pop(0)()
        time.sleep(seconds)

    monkeypatch.setattr(remotebackup, "time", SimpleNamespace(sleep=sleep, monotonic=time.monotonic))


async def test_ctrl_c_cancels_the_backup_and_any_other_end_is_a_failure(
    broker: Broker, api: Api, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, loop = broker.node.backups, asyncio.get_running_loop()
    gate = made._files = Gate()

    def interrupt() -> NoReturn:
        raise KeyboardInterrupt

    def cancel() -> None:
        assert made.run is not None
        loop.call_soon_threadsafe(made.cancel, made.run, "another operator has cancelled it")
        gate.is_open.set()

    def begin_another() -> None:
        assert made.run is not None
        made.run.grant.id = "another"

    def break_the_network() -> None:
        def request(*_: object) -> NoReturn:
            raise ConnectionError("Nothing answers.")

        monkeypatch.setattr(AdminClient, "request", request)

    at_its_pauses(monkeypatch, interrupt, gate.is_open.set)
    status, said = await run("plant")
    assert (status, said.splitlines()[-1]) == (130, "The backup is cancelled. The one before, if there is any, is as it was.")
    gate.is_open.clear()
    at_its_pauses(monkeypatch, cancel)
    why = "the backup plant was cancelled: another operator has cancelled it"
    assert await run("plant") == (1, f"penstock backup: {why}\n")
    gate.is_open.clear()
    at_its_pauses(monkeypatch, begin_another)
    assert "does not know any more how the backup plant has ended" in (await run("plant"))[1]
    gate.is_open.set()
    await ended(broker, api)
    gate.is_open.clear()
    monkeypatch.setattr(remotebackup, "SILENCE_S_MAX", 0)
    at_its_pauses(monkeypatch, break_the_network)
    status, said = await run("plant")
    assert (status, "Nothing answers. Whether the backup goes on is unknown" in said) == (1, True)
    gate.is_open.set()
