"""Backups by the commands, of a node under load: what a restore has, and what kills leave."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import orjson
import pytest

from penstock.store.index.index import CHECKPOINT
from penstock.store.log.logreader import read_log
from penstock.store.record import COPY_FIXED, Kind, decode
from tests.chaos.launching import Forks
from tests.chaos.ledger import Key, key_of
from tests.chaos.nodeprocess import ServeProcess, run_command, spawn_command
from tests.chaos.scene import Scene
from tests.system.processes import NodeProcess, run_penstock
from tests.waiting import until

WINDOW = 12
"""Maximum number of messages that a writer has under way. So far may a later one be stored before an earlier one."""


@pytest.fixture
async def forks() -> AsyncIterator[Forks]:
    launcher = Forks()
    yield launcher
    await launcher.close()


@asynccontextmanager
async def load(directory: Path, seed: int, forks: Forks, *, retention_bytes: int = 0) -> AsyncIterator[Scene]:
    """Run a node with small segments and every kind of client."""
    scene = Scene(directory, Random(seed), forks)
    text = re.sub(
        r"^retention_bytes = .*", f"retention_bytes = {retention_bytes}", scene.config.read_text(), flags=re.MULTILINE
    )
    scene.config.write_text(text)
    try:
        await scene.begin()
        yield scene
    finally:
        await scene.close()


async def penstock(forks: Forks, *arguments: str | Path) -> dict[str, Any]:
    """Run a command with `--json` that must succeed, and return what it prints."""
    status, said = await run_command(*map(str, arguments), "--json", launcher=forks)
    assert status == 0, said
    found: dict[str, Any] = orjson.loads(said.strip().splitlines()[-1])
    return found


def acked(scene: Scene) -> set[Key]:
    return {key for key, one in scene.ledger.publications.items() if one.must_exist}


def stored_in(data_dir: Path) -> tuple[set[Key], set[Key]]:
    """Return the messages that a log has, and those of them that it has as copies only."""
    found, copied = set(), set()
    for record in read_log(data_dir):
        if record.kind == Kind.COPIED:
            copied.add(key_of(decode(record.body, position=COPY_FIXED.unpack(record.fixed)[0]).body))
        elif record.kind == Kind.MESSAGE:
            found.add(key_of(record.body))
    return {key for key in found | copied if key}, {key for key in copied - found if key}


def lost(expected: set[Key], data_dir: Path, *, has_retention: bool = False) -> list[Key]:
    """Return the messages that a restored log lacks, except those that retention had dropped before."""
    found, copied = stored_in(data_dir)
    first: dict[str, int] = {}
    for key in found - copied:
        first[key.writer] = min(key.number, first.get(key.writer, key.number))
    return sorted(
        key
        for key in expected - found
        if not has_retention or (key.writer in first and key.number > first[key.writer] + WINDOW)
    )


@pytest.mark.nightly
async def test_three_backups_under_load_restore_to_what_was_acknowledged(tmp_path: Path, forks: Forks) -> None:
    backup = tmp_path / "backup"
    async with load(tmp_path, 3, forks, retention_bytes=3 << 20) as scene:
        for number in range(3):
            await scene.under_load(1.0, 1.5)
            before = acked(scene)
            summary = await penstock(forks, "backup", backup, "--data-dir", scene.data_dir)
            restored = tmp_path / f"restored{number}"
            assert (await penstock(forks, "restore", backup, restored))["durable"] == summary["durable"]
            assert lost(before, restored, has_retention=summary["start"] > 0) == []
            found, _ = stored_in(restored)
            assert found <= set(scene.ledger.publications)
            assert len(found) > 100
        verified = await penstock(forks, "verify", backup)
        assert (verified["good"], verified["end"]) == (True, summary["durable"])
    again = ServeProcess(restored, scene.config, tmp_path / "again.log", forks)
    assert (await again.start()).is_ready
    assert await again.stop() == 0
    recovered = next(
        line for line in map(orjson.loads, again.log.read_text().splitlines()) if line["event"] == "store.recovered"
    )
    assert (recovered["index_rebuilt"], recovered["torn_bytes"]) == (False, 0)
    assert (await penstock(forks, "verify", restored))["good"]


@pytest.mark.nightly
async def test_kill_9_of_a_backup_leaves_the_one_before_and_ends_its_hold(tmp_path: Path, forks: Forks) -> None:
    backup = tmp_path / "backup"
    random = Random(11)
    async with load(tmp_path, 4, forks) as scene:
        await scene.under_load(1.0, 1.2)
        durable = (await penstock(forks, "backup", backup, "--data-dir", scene.data_dir))["durable"]
        for number in range(2):
            process = await spawn_command(
                "backup", str(backup), "--data-dir", str(scene.data_dir), "--mib-per-s", "3", launcher=forks
            )
            await asyncio.sleep(random.uniform(0.3, 1.5))
            if process.returncode is None:
                process.send_signal(signal.SIGKILL)
            await process.wait()
            before = acked(scene)
            restored = await penstock(forks, "restore", backup, tmp_path / f"restored{number}")
            assert restored["durable"] >= durable
            durable = restored["durable"]
        durable = (await penstock(forks, "backup", backup, "--data-dir", scene.data_dir))["durable"]
        assert (await penstock(forks, "verify", backup))["end"] == durable
        await penstock(forks, "restore", backup, tmp_path / "last")
        assert lost(before, tmp_path / "last") == []


@pytest.mark.nightly
async def test_kill_9_of_the_node_during_a_backup_leaves_the_one_before(tmp_path: Path, forks: Forks) -> None:
    backup = tmp_path / "backup"
    async with load(tmp_path, 5, forks) as scene:
        await scene.under_load(1.0, 1.2)
        durable = (await penstock(forks, "backup", backup, "--data-dir", scene.data_dir))["durable"]
        await until(lambda: not (scene.data_dir / CHECKPOINT).exists())  # The node deletes it after the command's end.
        running = asyncio.create_task(
            run_command("backup", str(backup), "--data-dir", str(scene.data_dir), "--mib-per-s", "1", launcher=forks)
        )
        await until(lambda: (scene.data_dir / CHECKPOINT).exists() or running.done())
        await scene.node.kill()
        await scene.load.disconnect()
        status, said = await running
        restored = await penstock(forks, "restore", backup, tmp_path / "restored")
        if status:  # otherwise the backup was faster than the kill
            assert "no node listens" in said or "has ended the connection" in said or "gave no answer" in said
            assert restored["durable"] == durable
        await scene.up()
        assert not (scene.data_dir / CHECKPOINT).exists()
        durable = (await penstock(forks, "backup", backup, "--data-dir", scene.data_dir))["durable"]
        assert (await penstock(forks, "verify", backup))["end"] == durable


def test_node_and_command_may_know_the_data_directory_by_different_paths(tmp_path: Path) -> None:
    node = NodeProcess(Path("data"))
    node.log = tmp_path / "node.log"
    try:
        node.start(directory=tmp_path)
        assert run_penstock("pub", "a/b", "job", "--mqtt", node.addresses["mqtt"]).returncode == 0
        ended = run_penstock("backup", str(tmp_path / "backup"), "--data-dir", str(tmp_path / "data"))
        assert ended.returncode == 0, ended.stderr
    finally:
        node.close()
    ended = run_penstock("verify", str(tmp_path / "backup"), "--json")
    assert orjson.loads(ended.stdout)["has_index"], ended.stdout


async def test_backups_that_cannot_be_made_say_why(tmp_path: Path) -> None:
    for arguments, text in (
        (
            ("backup", "b", "--data-dir", "nothing"),
            "nothing holds no CommitLog; name the data directory of a node on this machine",
        ),
        (("restore", "nothing", "r"), "nothing is no backup, since it has no backup.json"),
        (("verify", "."), "is neither a backup nor a data directory"),
    ):
        status, said = await run_command(
            *(str(tmp_path / word) if word in ["b", "r", "nothing", "."] else word for word in arguments)
        )
        assert status == 1
        assert text in said
        assert "Traceback" not in said
