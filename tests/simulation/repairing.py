"""What an operator does when a node refuses to start: the real code of `penstock repair`, on the simulated disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.node.datafiles import check_files, mend_file
from penstock.store.index.rocksdb import Database
from penstock.store.log.placing import MARKER, misplaced
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.recovery.indexplan import IndexPlan
from penstock.store.recovery.repair import Damage, put_in_places, repair, survey
from tests.simulation.disk import ProcessDead, SimulatedFiles
from tests.simulation.process import DATA_DIR, Machine
from tests.simulation.sent import Violation


def repair_data_dir(machine: Machine, on_damage: Callable[[list[Damage]], None], fuse: int | None) -> IndexPlan:
    """Do what `penstock repair` does, and return what became of the index.

    Args:
        machine: has the disk. No process has the data directory open.
        on_damage: called with the damaged ranges, before anything is changed.
        fuse: number of operations after which the command is killed; None for never.

    Raises:
        ProcessDead: it was killed.
        LogCorrupt: the log can't be repaired in place.
        Violation: something is still damaged afterwards.
    """
    steps = 0

    def step(name: str) -> None:
        nonlocal steps
        steps += 1
        if fuse is not None and steps > fuse:
            raise ProcessDead

    files, directory = SimulatedFiles(machine.disk, step), DATA_DIR / LOG_DIRECTORY

    def open_database(path: Path, read_only: bool) -> Database:
        return machine.databases.open(files, path, step)

    if files.exists(directory / MARKER) or misplaced(files, directory):
        put_in_places(DATA_DIR, files=files)
    findings = survey(DATA_DIR, files=files)
    on_damage(findings.damages)
    problems = check_files(DATA_DIR, files=files)
    planned = repair(DATA_DIR, findings.damages, files=files, open_database=open_database, forget_beginning=True)
    for problem in problems:
        if problem.is_mendable and files.exists(DATA_DIR / problem.file):  # the repair may have set it aside
            mend_file(DATA_DIR, problem, files=files)
    left = survey(DATA_DIR, files=files).damages
    if left:
        raise Violation(f"the log is damaged after its repair: {left}")
    return planned
