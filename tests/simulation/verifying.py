"""Proves that the index of a simulated data directory is the function of its log, as `penstock verify` does.

In every other run the index to compare with is built as a follower builds it: in portions, with backfills in between.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

from penstock.backup.comparison import compare, settle
from penstock.node.config import Config
from penstock.node.parts import NodeParts
from penstock.store.index.index import DIRECTORY, Index
from penstock.store.index.rocksdb import Database
from penstock.store.store import Platform, Store
from tests.simulation.disk import SimulatedFiles
from tests.simulation.process import Machine
from tests.simulation.virtualtime import LaterExecutor

WORK = Path("/work")
"""Folder for the two copies that are compared."""

PORTION_BYTES = 50_000
"""Bytes of log that a follower applies at a time, at most."""


def index_differences(machine: Machine, config: Config, data_dir: Path) -> list[str]:
    """Return how the index of a data directory, which no process has open, differs from one that is built from the log anew.

    Raises what a start raises.
    """
    disk, databases = machine.disk, machine.databases
    files = SimulatedFiles(disk, _nothing)
    files.mkdir(WORK)
    try:
        for name in ("stored", "built"):
            disk.copy_tree(data_dir, WORK / name)
        databases.detach(files, WORK / "stored" / DIRECTORY)
        Index.destroy(WORK / "built", files)
        stored = _recovered(machine, config, WORK / "stored", files)
        expected = _recovered(machine, config, WORK / "built", files, is_following=stored.log.end % 2 == 1)
        if stored.index.adjusted() > expected.entries_from:
            return []  # a repair has kept the index, so it knows more than the log
        try:
            settle(stored)
            settle(expected)
            return [str(difference) for difference in compare(stored, expected, lambda size: None)]
        finally:
            stored.abandon()
            expected.abandon()
    finally:
        disk.remove_tree(WORK)


def _recovered(machine: Machine, config: Config, data_dir: Path, files: SimulatedFiles, *, is_following: bool = False) -> Store:
    options = replace(config.store, retention_ms=0, retention_bytes=0, reserve_bytes=0, ballast_bytes=0)

    def open_database(path: Path, read_only: bool) -> Database:
        return machine.databases.open(files, path, _nothing)

    clock = machine.time.clock(machine.disk.boots)
    parts = NodeParts(
        replace(config, data_dir=data_dir, store=options),
        clock,
        platform=Platform(files, open_database, executor=LaterExecutor(machine.random)),
    )
    if not is_following:
        parts.store.recover()
        return parts.store
    store, random = parts.store, Random(parts.store.log.end)
    store.load()
    while store.applied < store.log.end:
        store.apply_to(_record_before(store, store.applied + random.randint(1, PORTION_BYTES)), lambda: False)
        if random.random() < 0.5:
            store.queues.backfill(applied=store.applied)
    store.catch_up()
    return store


def _record_before(store: Store, position: int) -> int:
    """Return where the last record that begins up to `position` ends, but at least one record after what is applied."""
    found = next(store.log.scan(store.applied))
    for found in store.log.scan(store.applied):
        if found.position + found.size > position:
            break
    return found.position + found.size


def _nothing(_: str) -> None:
    """Do nothing: nobody kills these processes."""
