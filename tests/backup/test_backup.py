"""Backups of nodes that run or have stopped, and what a restore makes of them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from pathlib import Path

import pytest

from penstock import BatchFailed, Client
from penstock.access.bans import FILE as BANS
from penstock.access.bans import read_bans
from penstock.access.subject import Subject
from penstock.backup import source
from penstock.backup.backup import lock_backup
from penstock.backup.copying import Pace, SystemCopyFiles
from penstock.backup.errors import BackupFailed, BackupInvalid
from penstock.backup.manifest import is_backup, load_manifest
from penstock.backup.room import SPARE_BYTES
from penstock.backup.verify import verify
from penstock.cli.repair_log import repair_log
from penstock.node.datafiles import check_files
from penstock.node.errors import ControlRefused
from penstock.node.lastbackup import read_last_backup
from penstock.node.lock import LOCK_NAME, RESTORING, DataDirLock
from penstock.node.node import Node
from penstock.pop.core.settings import DEFAULTS
from penstock.store.errors import DataDirIncomplete
from penstock.store.files import LOST_FOUND, SYSTEM_FILES, Usage
from penstock.store.index.index import CHECKPOINT
from penstock.store.options import HOUR_MS, KIB
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from penstock.store.space.accounts import all_accounts
from penstock.store.space.causer import Causer
from tests.backup.failing import FailingFiles, Killed
from tests.backup.wiring import (
    TOPIC,
    Readings,
    bodies_of,
    config_of,
    copy_of,
    fill,
    linked_in,
    make_backup,
    make_backup_beside,
    restore,
    running,
    stored_in,
)
from tests.waiting import until


def named_by(directory: Path) -> set[str]:
    """Return the files that the manifest of a backup names."""
    return {file.stored for file in load_manifest(directory, SYSTEM_FILES).files}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    return tmp_path / "data"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "backup"


# --- a running node ---------------------------------------------------------------------------------------------------


async def test_a_backup_of_a_running_node_has_what_was_durable(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 300)
        summary = await make_backup_beside(node, directory)
        await fill(node, 300, 100)
        assert summary.durable <= node.store.durable_position
        noted = node.registry.get_sample_value("penstock_backup_last_success_timestamp_seconds")
        assert noted == read_last_backup(data_dir, SYSTEM_FILES) / 1000 > 0
    restore(directory, tmp_path / "restored")
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(300), 1)
    async with running(tmp_path / "restored") as again:
        assert (again.recovery.rebuilt, again.recovery.torn_bytes, again.store.log.start) == (False, 0, 0)
        assert again.store.log.end == summary.durable


class BanningFiles(SystemCopyFiles):
    """The files of the operating system. When a backup begins to copy, the node gets another ban."""

    def __init__(self, node: Node) -> None:
        super().__init__()
        self._node = node
        self._loop = asyncio.get_running_loop()

    def mkdir(self, path: Path) -> None:
        if path.name.isdecimal():  # the folder of a round
            asyncio.run_coroutine_threadsafe(self._ban(), self._loop).result()
        super().mkdir(path)

    async def _ban(self) -> None:
        await self._node.access.ban("user", "later", for_ms=0, why="a file of another length", by=Subject("test"))


async def test_a_backup_has_the_bans_of_its_moment_and_a_restored_node_holds_them(
    data_dir: Path, directory: Path, tmp_path: Path
) -> None:
    def restored_bans(name: str) -> list[str]:
        restore(directory, tmp_path / name)
        return [ban.name for ban in read_bans(tmp_path / name / BANS)]

    async with running(data_dir) as node:
        await fill(node, 0, 10)
        await make_backup_beside(node, directory)
        assert restored_bans("without") == []
        await node.access.ban("user", "mallory", for_ms=0, why="floods", by=Subject("test"))
        await make_backup_beside(node, directory, files=BanningFiles(node))
        assert verify(directory, meter=Readings()).is_good
        assert restored_bans("beside") == ["mallory"]
        assert (tmp_path / "beside" / BANS).stat().st_mode & 0o777 == 0o600
        await node.access.lift("user", "mallory", by=Subject("test"))
    make_backup(data_dir, directory)
    assert restored_bans("stopped") == ["later"]
    async with running(tmp_path / "beside") as again:
        assert [ban.name for _, ban in again.access.bans.at_or_after("", 10)] == ["mallory"]


async def test_a_backup_without_an_index_is_not_complete(
    data_dir: Path, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 10)
        monkeypatch.setattr(source, "CHECKPOINT", "elsewhere")
        with pytest.raises(BackupFailed, match="has no index"):
            await make_backup_beside(node, directory)
    assert not is_backup(directory, SYSTEM_FILES)


async def test_a_node_goes_on_where_its_backup_ends(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 50)
        await make_backup_beside(node, directory)
    restore(directory, tmp_path / "restored")
    async with running(tmp_path / "restored") as again:
        await fill(again, 50, 200)
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(250), 1)


async def test_a_second_backup_copies_only_what_is_new(data_dir: Path, directory: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 1_000)
        first = await make_backup_beside(node, directory)
        second = await make_backup_beside(node, directory)
        await fill(node, 1_000, 100)
        third = await make_backup_beside(node, directory)
    assert first.copied_bytes == first.bytes
    assert second.copied_bytes < 20 * KIB < first.bytes / 5
    assert third.copied_bytes < 80 * KIB < first.bytes / 2
    assert [first.round, second.round, third.round] == [1, 2, 3]


async def test_rounds_under_retention_restore_to_what_the_last_one_saw(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir, retention_bytes=64 * KIB) as node:
        for number in range(4):
            await fill(node, number * 500, 500)
            summary = await make_backup_beside(node, directory)
            for _ in range(2):
                node.store.retention.begin_due()
                await asyncio.sleep(0)
    assert stored_in(directory) == named_by(directory)
    restore(directory, tmp_path / "restored")
    async with running(tmp_path / "restored") as again:
        assert not again.recovery.rebuilt
        assert (again.store.log.start, again.store.log.end) == (summary.start, summary.durable)


def accounts_of(node: Node) -> list[bytes]:
    """Return the rows of all accounts of the ledger."""
    node.store.commit()
    return [account.row() for account in all_accounts(node.store.index)]


async def test_the_ledger_is_exact_after_a_restore_and_a_rebuild(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    ann, bob = Causer.of("ann", "192.0.2.1", "pump"), Causer.of("bob", "192.0.2.2")
    async with running(data_dir, retention_bytes=64 * KIB) as node:
        for number, causer in enumerate([ann, bob, bob, ann, ann]):
            route = node.store.router.route(f"level-{number}/a".encode(), causer)
            node.store.append_message(route, b"x" * (number + 1), encode_properties(Properties(by=causer.row())), Flag.RETAIN)
            due_ms = node.store.now_ms() + HOUR_MS
            delayed = encode_properties(Properties(deliver_at_ms=due_ms, by=causer.row()))
            node.store.append_message(route, b"x", delayed, Flag.DELAYED)
            node.pop.groups.create(f"group-{number}", "level-0/+", "latest", DEFAULTS, causer)
        for number in range(4):
            await fill(node, number * 500, 500)
            node.store.retention.begin_due()
        await until(lambda: node.store.log.start > 0)
        before = accounts_of(node)
        await node.store.durable()
        await make_backup_beside(node, directory)
    assert len(before) == 6  # of the node, two users, two sources and a client
    restore(directory, tmp_path / "restored")
    async with running(tmp_path / "restored") as again:
        assert not again.recovery.rebuilt
        assert accounts_of(again) == before
    shutil.rmtree(tmp_path / "restored" / "index")
    async with running(tmp_path / "restored") as again:
        assert again.recovery.rebuilt
        assert accounts_of(again) == before


async def test_messages_stored_during_a_backup_do_no_harm(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 500)
        backing_up = asyncio.create_task(make_backup_beside(node, directory, pace=Pace(400 * KIB)))
        await until(lambda: (data_dir / CHECKPOINT).exists())
        count = 500
        while not backing_up.done():
            await fill(node, count, 10)
            count += 10
        await backing_up
    restore(directory, tmp_path / "restored")
    found = bodies_of(tmp_path / "restored")
    assert found == dict.fromkeys(range(len(found)), 1)
    assert 500 <= len(found) <= count


async def test_a_second_backup_beside_the_first_is_refused(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 1_000)
        first = asyncio.create_task(make_backup_beside(node, directory, pace=Pace(500 * KIB)))
        await until(lambda: node.store.retention.is_held)
        with pytest.raises(BackupFailed, match="another command works on the backup"):
            await make_backup_beside(node, directory)
        with pytest.raises(ControlRefused, match="another backup of this node is running"):
            await make_backup_beside(node, tmp_path / "other")
        assert (await first).round == 1
        await until(lambda: not node.store.retention.is_held)
        assert (await make_backup_beside(node, directory)).round == 2


async def test_a_node_that_stops_during_a_backup_leaves_the_one_before(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 10)
        await make_backup_beside(node, directory)
        before = load_manifest(directory, SYSTEM_FILES)
        await fill(node, 10, 1_000)
        second = asyncio.create_task(make_backup_beside(node, directory, pace=Pace(500 * KIB)))
        await until(lambda: node.store.retention.is_held)
    with pytest.raises(
        (BackupFailed, ControlRefused), match=r"the backup is not complete, because no node listens|the node ended the backup"
    ):
        await second
    assert load_manifest(directory, SYSTEM_FILES) == before
    assert {stored[:8] for stored in stored_in(directory)} == {"00000001"}
    restore(directory, tmp_path / "restored")
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(10), 1)


async def test_a_backup_may_link_what_never_changes(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 300)
        await make_backup_beside(node, directory, may_link=True)
        linked = linked_in(directory)
        sealed = [base for base, _ in node.store.log.segments()][:-1]
        assert {name for name in linked if "commitlog" in name} == {f"00000001/commitlog.{base:020d}.log" for base in sealed}
        assert any(name.endswith(".sst") for name in linked)
        await fill(node, 300, 300)
    restore(directory, tmp_path / "restored")
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(300), 1)


async def test_what_a_backup_has_linked_never_changes(data_dir: Path, directory: Path) -> None:
    async with running(data_dir, retention_bytes=128 * KIB) as node:
        await fill(node, 0, 1_000)
        await until(lambda: node.store.retention.snapshots)
        await make_backup_beside(node, directory, may_link=True)
        before = {name: (directory / name).read_bytes() for name in stored_in(directory)}
        assert {name.split("/")[1].split(".")[0] for name in linked_in(directory)} == {"commitlog", "index", "snapshots"}
        await fill(node, 1_000, 500)
        for _ in range(2):
            node.store.retention.begin_due()
            await asyncio.sleep(0)
    shutil.rmtree(data_dir / "index")
    segments = sorted((data_dir / "commitlog").iterdir())
    os.truncate(segments[-1], 1)
    segments[-2].unlink()
    repair_log(data_dir, dry_run=False, as_json=True, out=StringIO())
    async with running(data_dir, retention_bytes=64 * KIB) as node:
        await fill(node, 1_500, 1_000)
    assert {name: (directory / name).read_bytes() for name in stored_in(directory)} == before


async def test_handles_from_before_a_backup_hold_after_a_restore_and_later_ones_do_not(
    data_dir: Path, directory: Path, tmp_path: Path
) -> None:
    """A restored node gives positions anew. A handle from the lost time must not settle what has got the same position."""

    async def pop(client: Client) -> str:
        popped = await client.pop(TOPIC, group="billing", messages_max=1, invisible=3_600.0, wait=5.0)
        return popped[0].handle

    async with running(data_dir) as node, Client(str(node.grpc)) as client:
        await fill(node, 0, 10)
        before = await pop(client)
        await make_backup_beside(node, directory)
        lost = await pop(client)
    restore(directory, tmp_path / "restored")
    async with running(tmp_path / "restored") as again, Client(str(again.grpc)) as client:
        anew = await pop(client)
        assert anew[:16] == lost[:16], "the checkpoints have the same position"
        with pytest.raises(BatchFailed) as failed:
            await client.ack([before, lost, anew], group="billing")
        assert list(failed.value.errors) == [1]


# --- a node that has stopped ------------------------------------------------------------------------------------------


async def test_a_stopped_node_is_backed_up_under_its_lock(data_dir: Path, directory: Path, tmp_path: Path) -> None:
    async with running(data_dir) as node:
        await fill(node, 0, 300)
    assert make_backup(data_dir, directory).durable == node.store.log.end
    restore(directory, tmp_path / "restored")
    async with running(tmp_path / "restored") as again:
        assert (again.recovery.replayed, again.recovery.rebuilt) == (0, False)
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(300), 1)


async def test_a_node_that_was_killed_must_be_started_first(data_dir: Path, directory: Path) -> None:
    node = Node(config_of(data_dir))
    await node.start()
    await fill(node, 0, 300)
    await node._holding.stop()
    await node._control.stop()
    node.store.abandon()
    node._lock.release()
    with pytest.raises(BackupFailed, match=r"has not stopped in order: .* Start it, and run the backup"):
        make_backup(data_dir, directory)
    await node.gateway.stop()
    await node._pop_server.stop()


def test_a_node_that_does_not_listen_for_commands_is_named(data_dir: Path, directory: Path) -> None:
    (data_dir / "commitlog").mkdir(parents=True)
    with (
        DataDirLock(data_dir),
        pytest.raises(BackupFailed, match=f"the process with pid {os.getpid()} uses .* it is starting or ending"),
    ):
        make_backup(data_dir, directory)


def test_a_directory_without_a_log_is_no_data_directory(data_dir: Path, directory: Path) -> None:
    data_dir.mkdir()
    with pytest.raises(BackupFailed, match="holds no CommitLog; name the data directory of a node on this machine"):
        make_backup(data_dir, directory)


# --- directories ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data directory of a node that has stopped, with several segments and snapshots. No test may change it."""
    data_dir = tmp_path_factory.mktemp("stopped") / "data"

    async def run() -> None:
        async with running(data_dir, retention_bytes=1024 * KIB) as node:
            await fill(node, 0, 200)
            await until(lambda: node.store.retention.snapshots)
            await node.access.ban("address", "10.0.0.7", for_ms=0, why="", by=Subject("test"))

    asyncio.run(run())
    return data_dir


@pytest.fixture
def stopped(stopped_once: Path, data_dir: Path) -> Path:
    """A copy of that directory."""
    return copy_of(stopped_once, data_dir)


SOME = pytest.mark.parametrize("every", [7, pytest.param(1, marks=pytest.mark.nightly)])
"""How far apart the places are at which something fails: `make test` takes some of them, `make nightly` takes all."""


def test_a_backup_does_not_go_into_the_data_directory(stopped: Path) -> None:
    with pytest.raises(BackupFailed, match="is in the data directory"):
        make_backup(stopped, stopped / "backup")


def test_a_directory_with_other_files_is_left_alone(stopped: Path, directory: Path) -> None:
    directory.mkdir()
    (directory / "photo.jpg").write_text("holiday")
    with pytest.raises(BackupFailed, match=r"is not empty and not a backup: it holds photo\.jpg"):
        make_backup(stopped, directory)
    assert (directory / "photo.jpg").read_text() == "holiday"


@pytest.mark.parametrize("name", ["20261130", "00000001"])
def test_folders_of_others_that_have_numbers_are_left_alone(stopped: Path, directory: Path, name: str) -> None:
    dump = directory / name / "dump.sql"
    dump.parent.mkdir(parents=True)
    dump.write_text("rows")
    for _ in range(2):
        with pytest.raises(BackupFailed, match=f"is not empty and not a backup: it holds {name}"):
            make_backup(stopped, directory)
        assert dump.exists()


def test_a_folder_of_others_that_is_put_into_a_backup_is_left_alone(stopped: Path, directory: Path) -> None:
    make_backup(stopped, directory)
    dump = directory / "20261130" / "dump.sql"
    dump.parent.mkdir()
    dump.write_text("rows")
    make_backup(stopped, directory)
    assert dump.exists()


async def test_a_backup_of_another_data_directory_is_left_alone(stopped: Path, directory: Path, tmp_path: Path) -> None:
    make_backup(stopped, directory)
    before = load_manifest(directory, SYSTEM_FILES)
    async with running(tmp_path / "other"):
        pass
    with pytest.raises(BackupFailed, match=f"has a backup of another data directory, {stopped}"):
        make_backup(tmp_path / "other", directory)
    (stopped / "secret").write_bytes(bytes(32))
    with pytest.raises(BackupFailed, match=f"has a backup of {stopped} from before its file secret was made anew"):
        make_backup(stopped, directory)
    assert load_manifest(directory, SYSTEM_FILES) == before


async def test_a_data_directory_does_not_replace_a_later_backup_of_itself(
    stopped: Path, directory: Path, tmp_path: Path
) -> None:
    make_backup(stopped, tmp_path / "monday")
    async with running(stopped) as node:
        await fill(node, 200, 10)
        await make_backup_beside(node, directory)
    restore(tmp_path / "monday", tmp_path / "restored")
    before = load_manifest(directory, SYSTEM_FILES)
    with pytest.raises(BackupFailed, match=rf"up to position {before.durable}, but the log of .* older than its backup"):
        make_backup(tmp_path / "restored", directory)
    assert load_manifest(directory, SYSTEM_FILES) == before
    restore(directory, tmp_path / "tuesday")
    assert make_backup(tmp_path / "tuesday", directory).durable == before.durable


def test_a_file_in_place_of_a_directory_is_named(stopped: Path, directory: Path, tmp_path: Path) -> None:
    make_backup(stopped, directory)
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(BackupFailed, match=f"{file} is not a directory"):
        make_backup(stopped, file)
    with pytest.raises(BackupFailed, match=f"{file} is not a directory"):
        restore(directory, file)
    with pytest.raises(BackupInvalid, match=f"{file} is no backup"):
        restore(file, tmp_path / "restored")


def test_the_root_of_a_file_system_takes_a_backup_and_a_restore(stopped: Path, tmp_path: Path) -> None:
    for name in ("backup", "restored"):
        (tmp_path / name / LOST_FOUND).mkdir(parents=True)
    make_backup(stopped, tmp_path / "backup")
    make_backup(stopped, tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "restored")
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(200), 1)
    assert check_files(tmp_path / "restored") == []
    assert (tmp_path / "backup" / LOST_FOUND).is_dir()
    assert (tmp_path / "restored" / LOST_FOUND).is_dir()


def test_only_the_index_itself_is_taken_from_its_folder(stopped: Path, directory: Path) -> None:
    (stopped / "index" / LOST_FOUND).mkdir()
    (stopped / "index" / "ballast").write_bytes(bytes(10))
    make_backup(stopped, directory)
    assert not any(stored.endswith((LOST_FOUND, "ballast")) for stored in stored_in(directory))
    assert verify(stopped, meter=Readings()).is_good


def test_a_data_directory_that_was_moved_is_compared_and_not_copied(stopped: Path, directory: Path) -> None:
    first = make_backup(stopped, directory)
    shutil.copytree(stopped, stopped.with_name("moved"))
    shutil.rmtree(stopped)
    second = make_backup(stopped.with_name("moved"), directory)
    assert (second.copied_files, second.files) == (0, first.files)
    assert make_backup(stopped.with_name("moved"), directory).copied_files == 0


def test_a_sealed_segment_with_other_content_is_copied_anew(stopped: Path, directory: Path, tmp_path: Path) -> None:
    make_backup(stopped, directory)
    segment = sorted((stopped / "commitlog").iterdir())[0]
    data = bytearray(segment.read_bytes())
    data[-1] ^= 1
    segment.write_bytes(data)
    assert make_backup(stopped, directory).copied_files == 1
    restore(directory, tmp_path / "restored")
    assert (tmp_path / "restored" / "commitlog" / segment.name).read_bytes() == data


# --- killed, and a full disk ------------------------------------------------------------------------------------------


def count_changes(work: object, *arguments: Path) -> int:
    files = FailingFiles(10**9)
    work(*arguments, files=files)  # type: ignore[operator]
    return 10**9 - files.left


@SOME
async def test_a_backup_that_is_killed_anywhere_leaves_the_one_before_or_is_complete(
    stopped: Path, directory: Path, tmp_path: Path, every: int
) -> None:
    make_backup(stopped, directory)
    before = load_manifest(directory, SYSTEM_FILES)
    async with running(stopped) as node:
        await fill(node, 200, 100)
    whole = tmp_path / "whole"
    shutil.copytree(directory, whole)
    changes = count_changes(make_backup, stopped, whole)
    after = load_manifest(whole, SYSTEM_FILES)
    assert before.durable < after.durable
    seen = set()
    for calls in range(changes - 1, -1, -every):
        part = tmp_path / f"part{calls}"
        shutil.copytree(directory, part)
        with pytest.raises(Killed):
            make_backup(stopped, part, files=FailingFiles(calls))
        found = load_manifest(part, SYSTEM_FILES)
        seen.add(found.durable)
        restored = restore(part, tmp_path / f"restored{calls}")
        assert restored.durable == found.durable
        assert len(bodies_of(tmp_path / f"restored{calls}")) == (200 if found.durable == before.durable else 300)
        assert make_backup(stopped, part).durable == after.durable
        assert stored_in(part) == named_by(part)
        shutil.rmtree(part)
        shutil.rmtree(tmp_path / f"restored{calls}")
    assert seen == {before.durable, after.durable}


async def test_a_backup_on_a_full_disk_leaves_the_one_before_and_frees_its_room(
    stopped: Path, directory: Path, tmp_path: Path
) -> None:
    make_backup(stopped, directory)
    before = load_manifest(directory, SYSTEM_FILES)
    on_disk = stored_in(directory)
    async with running(stopped) as node:
        await fill(node, 200, 100)
    changes = count_changes(make_backup, stopped, shutil.copytree(directory, tmp_path / "copy"))
    failures = 0
    for calls in range(changes):
        files = FailingFiles(calls, is_full=True)
        with suppress(OSError):
            make_backup(stopped, directory, files=files)
        if not files.has_failed:
            break
        failures += 1
        assert load_manifest(directory, SYSTEM_FILES) == before
        assert stored_in(directory) == on_disk
    assert failures > 5
    restore(directory, tmp_path / "restored")
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(300), 1)


class FewBytes(SystemCopyFiles):
    """The files of a disk on which little is free."""

    def __init__(self, free: int, *, may_clone: bool = False) -> None:
        super().__init__()
        self._free = free
        self._may_clone = may_clone

    def usage(self, path: Path) -> Usage:
        return Usage(self._free, 2**40)

    def clone(self, old: Path, new: Path, permissions: int) -> bool:
        if self._may_clone:
            shutil.copyfile(old, new)
        return self._may_clone


def test_a_backup_or_a_restore_without_room_copies_nothing_and_says_how_much_is_missing(
    stopped: Path, directory: Path, tmp_path: Path
) -> None:
    make_backup(stopped, directory)
    before, on_disk = load_manifest(directory, SYSTEM_FILES), stored_in(directory)
    needed = sum(file.size for file in before.files)
    few = FewBytes(needed + SPARE_BYTES - 1)
    for attempt, target in (
        (lambda: make_backup(stopped, tmp_path / "other", files=few), tmp_path / "other"),
        (lambda: restore(directory, tmp_path / "restored", files=few), tmp_path / "restored"),
    ):
        with pytest.raises(BackupFailed, match="free at least 1 bytes there"):
            attempt()
        assert [path.name for path in target.iterdir() if path.name != LOCK_NAME] == []
    assert make_backup(stopped, directory, files=FewBytes(0)).copied_bytes == 0, "the backup before has all of it"
    restore(directory, tmp_path / "restored", files=FewBytes(needed + SPARE_BYTES))
    restore(directory, tmp_path / "shared", files=FewBytes(0, may_clone=True))
    assert bodies_of(tmp_path / "shared") == bodies_of(tmp_path / "restored") == dict.fromkeys(range(200), 1)
    make_backup(stopped, directory, files=FewBytes(0))
    assert load_manifest(directory, SYSTEM_FILES).by_path() == before.by_path()
    assert stored_in(directory) == on_disk


def test_a_backup_of_links_needs_room_for_the_other_files_only(stopped: Path, directory: Path) -> None:
    make_backup(stopped, directory, may_link=True)
    linked = linked_in(directory)
    copied = sum(file.size for file in load_manifest(directory, SYSTEM_FILES).files if file.stored not in linked)
    assert linked
    shutil.rmtree(directory)
    with pytest.raises(BackupFailed, match="free at least 1 bytes there"):
        make_backup(stopped, directory, may_link=True, files=FewBytes(copied + SPARE_BYTES - 1))
    make_backup(stopped, directory, may_link=True, files=FewBytes(copied + SPARE_BYTES))


# --- restore ----------------------------------------------------------------------------------------------------------


@SOME
def test_a_restore_that_is_killed_anywhere_is_no_data_directory_and_can_run_again(
    stopped: Path, directory: Path, tmp_path: Path, every: int
) -> None:
    make_backup(stopped, directory)
    changes = count_changes(restore, directory, tmp_path / "whole")
    for calls in range(changes - 1, -1, -every):
        part = tmp_path / f"part{calls}"
        with pytest.raises(Killed):
            restore(directory, part, files=FailingFiles(calls))
        if (part / RESTORING).exists():
            with pytest.raises(DataDirIncomplete, match="has not ended"):
                Node(config_of(part))
        else:  # nothing is there yet, or everything
            assert not (part / "commitlog").exists() or bodies_of(part) == dict.fromkeys(range(200), 1)
        if (part / RESTORING).exists() or not (part / "commitlog").exists():
            restore(directory, part)
        assert bodies_of(part) == dict.fromkeys(range(200), 1)
        shutil.rmtree(part)


def test_a_restore_refuses_a_directory_that_is_not_empty(stopped: Path, directory: Path, tmp_path: Path) -> None:
    make_backup(stopped, directory)
    full = tmp_path / "full"
    full.mkdir()
    (full / "file").write_text("mine")
    with pytest.raises(BackupFailed, match="is not empty; name a new directory"):
        restore(directory, full)
    assert [path.name for path in full.iterdir()] == ["file"]
    (full / "file").unlink()
    restore(directory, full)


def test_a_damaged_file_is_copied_again_once_it_is_deleted(stopped: Path, directory: Path, tmp_path: Path) -> None:
    make_backup(stopped, directory)
    for file in [file for file in load_manifest(directory, SYSTEM_FILES).files if file.size][::3]:
        (directory / file.stored).write_bytes(b"damaged")
        with pytest.raises(BackupInvalid, match="delete that file and back up again"):
            restore(directory, tmp_path / "restored")
        (directory / file.stored).unlink()
    assert make_backup(stopped, directory).copied_files
    restore(directory, tmp_path / "restored")
    assert bodies_of(tmp_path / "restored") == dict.fromkeys(range(200), 1)


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: path.unlink(),
    "too short": lambda path: os.truncate(path, path.stat().st_size // 2),
    "changed": lambda path: path.write_bytes(path.read_bytes()[:-20] + bytes(20)),
}


@pytest.mark.parametrize("harm", DAMAGES)
@pytest.mark.parametrize("every", [2 * len(DAMAGES), pytest.param(1, marks=pytest.mark.nightly)])
async def test_what_a_damaged_backup_has_can_be_salvaged(
    stopped: Path, directory: Path, tmp_path: Path, harm: str, every: int
) -> None:
    """Only records of a damaged segment are lost. All else can be made anew."""
    make_backup(stopped, directory)
    files = [file for file in load_manifest(directory, SYSTEM_FILES).files if file.size]
    for number, file in list(enumerate(files))[list(DAMAGES).index(harm) % every :: every]:
        data_dir = tmp_path / f"restored{number}"
        good = (directory / file.stored).read_bytes()
        DAMAGES[harm](directory / file.stored)
        done = restore(directory, data_dir, may_be_damaged=True)
        assert [file.stored in problem for problem in done.problems] == [True]
        repair_log(data_dir, dry_run=False, as_json=True, out=StringIO())
        async with running(data_dir) as node:
            assert node.store.log.end >= done.durable
        found = bodies_of(data_dir)
        assert found == dict.fromkeys(found, 1)
        assert set(found) <= set(range(200))
        assert len(found) == 200 or ("commitlog" in file.path and len(found) > 100)
        assert verify(data_dir, meter=Readings()).is_good
        (directory / file.stored).write_bytes(good)
        shutil.rmtree(data_dir)
    assert restore(directory, tmp_path / "whole", may_be_damaged=True).problems == ()


def test_a_restore_does_not_go_into_the_backup(stopped: Path, directory: Path) -> None:
    make_backup(stopped, directory)
    with pytest.raises(BackupFailed, match=f"is in the backup {directory}; name a directory elsewhere"):
        restore(directory, directory / "restored")
    assert stored_in(directory) == named_by(directory)


def test_a_restored_data_directory_is_as_after_an_orderly_end(stopped: Path, directory: Path, tmp_path: Path) -> None:
    make_backup(stopped, directory)
    restore(directory, tmp_path / "restored")
    again = make_backup(tmp_path / "restored", tmp_path / "second")
    assert (again.start, again.durable) == restore(tmp_path / "second", tmp_path / "twice")[:2]


def test_a_file_that_is_missing_too_short_or_changed_is_named(stopped: Path, directory: Path, tmp_path: Path) -> None:
    make_backup(stopped, directory)
    for number, file in enumerate(load_manifest(directory, SYSTEM_FILES).files):
        path = directory / file.stored
        good = path.read_bytes()
        path.unlink()
        with pytest.raises(BackupInvalid, match=f"{file.stored} of the backup is missing"):
            restore(directory, tmp_path / "restored")
        if good:
            path.write_bytes(good[:-1])
            with pytest.raises(BackupInvalid, match=f"{file.stored} of the backup has {file.size - 1} bytes"):
                restore(directory, tmp_path / "restored")
            at = number * 7919 % len(good)
            path.write_bytes(good[:at] + bytes([good[at] ^ 0x10]) + good[at + 1 :])
            with pytest.raises(BackupInvalid, match=f"{file.stored} of the backup was changed: its checksum is"):
                restore(directory, tmp_path / "restored")
        path.write_bytes(good)
    restore(directory, tmp_path / "restored")
    assert (tmp_path / "restored" / "secret").stat().st_mode & 0o777 == 0o600


def test_a_backup_can_be_restored_from_a_directory_without_a_lock_and_not_during_a_backup(
    stopped: Path, directory: Path, tmp_path: Path
) -> None:
    make_backup(stopped, directory)
    with lock_backup(directory), pytest.raises(BackupFailed, match="another command works on the backup"):
        restore(directory, tmp_path / "restored")
    (directory / LOCK_NAME).unlink()
    restore(directory, tmp_path / "restored")
    assert is_backup(directory, SYSTEM_FILES)
