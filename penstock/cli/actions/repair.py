"""`penstock repair`: reports the damaged parts of a CommitLog and other damaged files, and sets them aside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

import orjson

from penstock.node.datafiles import NEW_HANDLES, FileProblem, check_files, mend_file
from penstock.node.lock import DataDirLock
from penstock.pop.core.handle import SECRET
from penstock.store.commitlog import DIRECTORY
from penstock.store.errors import LogCorrupt, PositionUnknown
from penstock.store.files import SYSTEM_FILES
from penstock.store.index import Index
from penstock.store.placing import MARKER, misplaced, place
from penstock.store.repair import QUARANTINE, Damage, Findings, repair, survey
from penstock.store.segment import segment_name


def repair_log(data_dir: Path, *, dry_run: bool, as_json: bool, out: TextIO = sys.stdout) -> bool:
    """Repair the log and the other files of a stopped node, and print the findings. Return whether damage remains.

    Args:
        data_dir: data directory of a node.
        dry_run: change nothing.
        as_json: print one JSON object.

    Raises:
        DataDirLocked: a node is running on the directory.
        StoreError: the directory holds no log, or the log can't be repaired in place. Nothing was changed.
        OSError: a file can't be written. Run the command again after the cause is removed.
    """
    if not (data_dir / DIRECTORY).is_dir():
        raise PositionUnknown(f"{data_dir} holds no CommitLog. Name the data directory of a node.")
    with DataDirLock(data_dir):
        files, directory = SYSTEM_FILES, data_dir / DIRECTORY
        if files.exists(directory / MARKER) and dry_run:
            raise LogCorrupt(f"an earlier repair of {directory} was interrupted; run `penstock repair` without --dry-run")
        is_interrupted = files.exists(directory / MARKER)
        moves = {} if is_interrupted else misplaced(files, directory)
        if (moves or is_interrupted) and not dry_run:
            Index.destroy(data_dir)
            place(files, directory)
        findings = survey(data_dir)
        problems = check_files(data_dir)
        moved: dict[str, str] = {}
        if not dry_run:
            repair(data_dir, findings.damages)
            moved = {each.file: mend_file(data_dir, each) for each in problems if each.is_mendable}
    repaired = bool(findings.damages or moves) and not dry_run
    remains = any(each.is_damage and each.file not in moved for each in problems)
    placed = [{"segment": segment_name(base), "belongs_at": target} for base, target in moves.items()]
    if as_json:
        rows = [_row(damage) for damage in findings.damages]
        others = [_file_row(each, moved) for each in problems]
        found = {
            "damages": rows,
            "torn_bytes": findings.torn_bytes,
            "misplaced": placed,
            "repaired": repaired,
            "files": others,
        }
        out.write(orjson.dumps(found).decode() + "\n")
    else:
        for base, target in moves.items():
            out.write(f"Segment {segment_name(base)} is in a wrong place: its records belong at position {target}.\n")
        lines = [*_lines(findings, repaired), *_file_lines(problems, moved)]
        if not findings.damages and not moves and not any(each.is_damage for each in problems):
            lines.append("There is no damage.")
        out.writelines(f"{line}\n" for line in lines)
    return remains or (bool(findings.damages or moves) and dry_run)


def _row(damage: Damage) -> dict[str, object]:
    return {
        "segment": damage.segment,
        "position": damage.position,
        "length": damage.length,
        "missing": damage.missing,
        "unreadable": damage.unreadable,
        "records_behind": damage.records_behind,
        "copy": f"{QUARANTINE}/{damage.copy_name}" if damage.missing + damage.unreadable < damage.length else None,
    }


def _lines(findings: Findings, repaired: bool) -> list[str]:
    lines = []
    for damage in findings.damages:
        missing = f", {damage.missing} of them missing" if damage.missing else ""
        if damage.unreadable:
            missing += f", and the disk can't read {damage.unreadable} of them"
        lines.append(
            f"Segment {damage.segment}: {damage.length} bytes are damaged at position {damage.position}{missing}. "
            f"{damage.records_behind} records follow."
        )
        if repaired and damage.missing + damage.unreadable < damage.length:
            zeros = ", with zeros for what the disk can't read" if damage.unreadable else ""
            lines.append(f"  They are copied to {QUARANTINE}/{damage.copy_name}{zeros}.")
    if findings.torn_bytes:
        lines.append(
            f"{findings.torn_bytes} bytes after the last record are a torn tail, not damage. The next start clears them."
        )
    if repaired:
        lines.append("The log is repaired. The next start rebuilds the index.")
    return lines


def _file_row(problem: FileProblem, moved: dict[str, str]) -> dict[str, object]:
    return {
        "file": problem.file,
        "problem": problem.problem,
        "effect": problem.effect,
        "is_damage": problem.is_damage,
        "moved_to": moved.get(problem.file),
    }


def _file_lines(problems: list[FileProblem], moved: dict[str, str]) -> list[str]:
    lines = []
    for each in problems:
        if each.file in moved:
            done = f"There is a new one: {NEW_HANDLES}." if each.file == SECRET else "The next snapshot takes its place."
            lines.append(f"The file {each.file} {each.problem}. It is in {moved[each.file]} now. {done}")
        else:
            lines.append(f"The file {each.file} {each.problem}. {each.effect}")
    return lines
