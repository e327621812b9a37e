"""Replicas whose log ends before the leader's begins: they begin anew with a snapshot of the leader."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from penstock.cluster.bootstrap import DIRECTORY, SnapshotReceiving, install_snapshot
from penstock.cluster.errors import StreamBroken
from penstock.cluster.frames import Frame, FrameKind
from penstock.store.clock import SystemClock
from penstock.store.errors import SnapshotInvalid
from penstock.store.files import SystemFiles
from penstock.store.options import KIB, StoreOptions
from penstock.store.snapshots.snapshotreader import snapshot_path
from penstock.store.snapshots.snapshotwriter import write_empty
from penstock.store.store import Store
from tests.cluster.members import OPTIONS, ReplicaSet, replica_set
from tests.waiting import until

DROPPING = StoreOptions(segment_bytes=64 * KIB, sync_in="thread", retention_bytes=128 * KIB)


async def publish_until_dropped(found: ReplicaSet) -> None:
    """Publish at the leader until it has dropped what was published first."""
    leader, acknowledged, number = await found.leader(), list[str](), 0
    async with asyncio.timeout(60):
        while leader.store.log.start < 256 * KIB:
            for _ in range(100):
                leader.publish(f"{number} {'x' * 500}", acknowledged)
                number += 1
            await asyncio.sleep(0.02)
        await until(lambda: len(acknowledged) == number)


@pytest.mark.parametrize("is_new", [False, True], ids=["away for long", "new"])
async def test_a_replica_whose_log_ends_too_early_begins_anew(tmp_path: Path, is_new: bool) -> None:
    async with replica_set(tmp_path, options=DROPPING) as found:
        await found.in_sync(3)
        away = found.followers[0]
        await away.kill()
        if is_new:
            shutil.rmtree(away.directory)
        await publish_until_dropped(found)
        leader = await found.leader()
        assert away.replica not in found.shard.key.members
        await away.start()
        await found.in_sync(3)
        assert ["it has got the leader's snapshot" in why for why in away.restarts] == [True]
        assert away.store.log.start > 0
        assert not (away.directory / DIRECTORY).exists()
        await until(lambda: away.store.applied == leader.store.log.end)
        assert away.bodies()[-50:] == leader.bodies()[-50:]
        assert away.store.epochs.table == leader.store.epochs.table
        await leader.kill()
        assert await found.leader() is not leader, "with the one that began anew there are enough"


async def test_a_replica_that_is_in_sync_never_begins_anew(tmp_path: Path) -> None:
    async with replica_set(tmp_path, options=DROPPING) as found:
        await found.in_sync(3)
        member = found.followers[0]
        link, before = member.member._dialled, member.bodies()
        assert link is not None
        member.member._receive_snapshot(link, Frame(FrameKind.SNAPSHOT, 1, 1_000_000, 10, 0, b"x"))
        assert "is in sync" in str(member.errors.pop())
        assert member.bodies() == before
        assert not (member.directory / DIRECTORY).exists()


class Dying(SystemFiles):
    """Files of a process that dies before a call."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def _count(self) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise KeyboardInterrupt

    def rename(self, old: Path, new: Path) -> None:
        self._count()
        super().rename(old, new)

    def rmtree(self, path: Path) -> None:
        self._count()
        super().rmtree(path)

    def mkdir(self, path: Path) -> None:
        self._count()
        super().mkdir(path)

    def unlink(self, path: Path) -> None:
        self._count()
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._count()
        super().sync_directory(path)


def receive(data_dir: Path, position: int) -> None:
    """Let an empty snapshot come to a data directory."""
    source = data_dir.with_name("source")
    source.mkdir(exist_ok=True)
    write_empty(source, position, 5)
    data = snapshot_path(source, position).read_bytes()
    receiving = SnapshotReceiving(data_dir, position, len(data))
    for at in range(0, len(data), 10):
        assert not receiving.is_whole
        receiving.add(position, data[at : at + 10])
    assert receiving.is_whole
    receiving.finish()


async def test_a_snapshot_is_installed_by_the_start_after_one_that_was_killed_anywhere(tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    old = Store(data_dir, OPTIONS, SystemClock())
    old.recover()
    old.start(asyncio.get_running_loop(), lambda _: None)
    old.append_message(old.router.route(b"plant/1"), b"old")
    await old.close()
    receive(data_dir, 1_000_000)
    for calls in range(100):
        attempt = tmp_path / f"attempt{calls}"
        shutil.copytree(data_dir, attempt)
        try:
            install_snapshot(attempt, Dying(calls))
            is_done = True
        except KeyboardInterrupt:
            is_done = False
            install_snapshot(attempt)
        assert install_snapshot(attempt) is None
        store = Store(attempt, OPTIONS, SystemClock())
        store.recover()
        assert (store.log.start, store.log.end) == (1_000_000, 1_000_000)
        store.abandon()
        if is_done:
            break
    assert 8 < calls < 99


def test_a_snapshot_that_is_not_whole_is_not_installed(tmp_path: Path) -> None:
    receiving = SnapshotReceiving(tmp_path, 1_000, 10)
    receiving.add(1_000, b"half")
    receiving.close()
    assert install_snapshot(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("position", "data"), [(2_000, b"other"), (1_000, b"more than ten")])
def test_bytes_that_do_not_follow_are_refused(tmp_path: Path, position: int, data: bytes) -> None:
    receiving = SnapshotReceiving(tmp_path, 1_000, 10)
    with pytest.raises(StreamBroken, match="does not follow"):
        receiving.add(position, data)


def test_a_snapshot_that_this_version_can_not_read_is_not_installed(tmp_path: Path) -> None:
    receiving = SnapshotReceiving(tmp_path, 1_000, 4)
    receiving.add(1_000, b"what")
    with pytest.raises(SnapshotInvalid):
        receiving.finish()
    assert install_snapshot(tmp_path) is None
