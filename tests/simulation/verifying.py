"""Proves that the index of a simulated data directory is the function of its log, as `penstock verify` does."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from penstock.backup.comparison import compare, settle
from penstock.node.config import Config
from penstock.node.parts import NodeParts
from penstock.store.index import DIRECTORY, Index
from penstock.store.rocksdb import Database
from penstock.store.store import Store
from tests.simulation.disk import SimulatedFiles
from tests.simulation.process import Machine
from tests.simulation.virtualtime import LaterExecutor

WORK = Path("/work")
"""Folder for the two copies that are compared."""


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
        expected = _recovered(machine, config, WORK / "built", files)
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


def _recovered(machine: Machine, config: Config, data_dir: Path, files: SimulatedFiles) -> Store:
    options = replace(config.store, retention_ms=0, retention_bytes=0, reserve_bytes=0, ballast_bytes=0)

    def open_database(path: Path, read_only: bool) -> Database:
        return machine.databases.open(files, path, _nothing)

    clock = machine.time.clock(machine.disk.boots)
    parts = NodeParts(
        replace(config, data_dir=data_dir, store=options),
        clock,
        files=files,
        open_database=open_database,
        executor=LaterExecutor(machine.random),
    )
    parts.store.recover()
    return parts.store


def _nothing(_: str) -> None:
    """Do nothing: nobody kills these processes."""
