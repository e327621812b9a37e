"""Nodes, data directories and backups for the tests of backups."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from penstock.backup.backup import SYSTEM_COPY_FILES, BackupSummary, back_up
from penstock.backup.copying import CopyFiles, Pace
from penstock.backup.restore import Restored, restore_backup
from penstock.gateway.options import GatewayOptions
from penstock.node.adminoptions import AdminOptions
from penstock.node.config import Config
from penstock.node.node import Node
from penstock.pop.options import PopOptions
from penstock.store.log.logreader import read_log
from penstock.store.options import KIB, HostPort, StoreOptions
from penstock.store.record import Kind
from tests.store.wiring import publish

FREE = HostPort("127.0.0.1", 0)

TOPIC = "plant/1/temperature"


class Readings:
    """A meter that keeps what it is told."""

    def __init__(self) -> None:
        self.expected: list[tuple[int, str]] = []
        self.advanced = 0

    def expect(self, size: int, what: str) -> None:
        self.expected.append((size, what))
        self.advanced = 0

    def advance(self, size: int) -> None:
        self.advanced += size


def config_of(data_dir: Path, **options: Any) -> Config:
    """Return options of a node with small segments on free ports. `options` are those of `StoreOptions`."""
    return Config(
        data_dir=data_dir,
        store=StoreOptions(**{"segment_bytes": 16 * KIB, "sync_in": "thread", **options}),
        mqtt=GatewayOptions(listen=FREE),
        pop=PopOptions(listen=FREE),
        admin=AdminOptions(listen=FREE),
    )


@asynccontextmanager
async def running(data_dir: Path, **options: Any) -> AsyncIterator[Node]:
    """Run a node on a data directory within the context, and stop it in order."""
    node = Node(config_of(data_dir, **options))
    await node.start()
    try:
        yield node
    finally:
        await node.stop()


async def fill(node: Node, first: int, count: int) -> None:
    """Store messages with the bodies `first` to `first + count - 1`, and wait until they are durable."""
    for number in range(first, first + count):
        publish(node.store, TOPIC, f"{number:0200d}")
    node.store.commit()
    await node.store.durable()


def bodies_of(data_dir: Path) -> Counter[int]:
    """Return how often each message is in the log of a data directory."""
    return Counter(int(record.body) for record in read_log(data_dir) if record.kind == Kind.MESSAGE)


def make_backup(
    data_dir: Path, directory: Path, *, may_link: bool = False, pace: Pace | None = None, files: CopyFiles = SYSTEM_COPY_FILES
) -> BackupSummary:
    return back_up(data_dir, directory, meter=Readings(), pace=pace, may_link=may_link, files=files)


async def make_backup_beside(node: Node, directory: Path, **options: Any) -> BackupSummary:
    """Make a backup of a running node on another thread, as the command does in its process."""
    return await asyncio.to_thread(make_backup, node.config.data_dir, directory, **options)


def restore(directory: Path, data_dir: Path, *, may_be_damaged: bool = False, files: CopyFiles = SYSTEM_COPY_FILES) -> Restored:
    return restore_backup(directory, data_dir, meter=Readings(), may_be_damaged=may_be_damaged, files=files)


def stored_in(directory: Path) -> set[str]:
    """Return the files of all rounds in the directory of a backup, with the folder of the round."""
    return {f"{path.parent.name}/{path.name}" for path in directory.glob("*/*")}


def linked_in(directory: Path) -> set[str]:
    """Return those that are hard links."""
    return {f"{path.parent.name}/{path.name}" for path in directory.glob("*/*") if path.stat().st_nlink > 1}


def copy_of(directory: Path, target: Path) -> Path:
    """Copy a data directory that nobody uses, or a backup, and return the copy."""
    return shutil.copytree(directory, target, ignore=shutil.ignore_patterns("*.sock"))
