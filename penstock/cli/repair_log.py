"""`penstock repair`: reports the damaged parts of a CommitLog and other damaged files, and sets them aside."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import orjson

from penstock.node.datafiles import NEW_HANDLES, FileProblem, check_files, mend_file
from penstock.node.lock import DataDirLock
from penstock.pop.core.handle import SECRET
from penstock.store.errors import LogCorrupt, PositionUnknown
from penstock.store.files import SYSTEM_FILES
from penstock.store.log.placing import MARKER, misplaced
from penstock.store.log.segment import LOG_DIRECTORY, segment_name
from penstock.store.recovery.indexplan import Fate, IndexPlan
from penstock.store.recovery.repair import QUARANTINE, Damage, Findings, plan, put_in_places, repair, survey
from penstock.store.snapshots import snapshotwriter
from penstock.store.snapshots.snapshotreader import DIRECTORY as SNAPSHOTS
from penstock.store.snapshots.snapshotreader import snapshot_path

_FORGOTTEN = (
    "the records that the log still has stay, but the sessions, subscriptions, groups, retained and delayed messages, open "
    "deliveries and dead letters from before that position are lost"
)


def repair_log(
    data_dir: Path, *, dry_run: bool, as_json: bool, forget_beginning: bool = False, out: TextIO = sys.stdout
) -> bool:
    """Repair the log and the other files of a stopped node, and print the findings. Return whether damage remains.

    Args:
        data_dir: data directory of a node.
        dry_run: change nothing.
        as_json: print one JSON object.
        forget_beginning: let the log begin anew where nothing tells what it held before.

    Raises:
        DataDirLocked: a node is running on the directory.
        StoreError: the directory holds no log, or the log can't be repaired in place. Nothing was changed.
        OSError: a file can't be written. Run the command again after the cause is removed.
    """
    if not (data_dir / LOG_DIRECTORY).is_dir():
        raise PositionUnknown(f"{data_dir} holds no CommitLog. Name the data directory of a node.")
    with DataDirLock(data_dir):
        files, directory = SYSTEM_FILES, data_dir / LOG_DIRECTORY
        if files.exists(directory / MARKER) and dry_run:
            raise LogCorrupt(f"an earlier repair of {directory} was interrupted; run `penstock repair` without --dry-run")
        is_interrupted = files.exists(directory / MARKER)
        renamed = {} if dry_run else snapshotwriter.give_own_names(data_dir)
        moves = {} if is_interrupted else misplaced(files, directory)
        if (moves or is_interrupted) and not dry_run:
            put_in_places(data_dir)
        findings = survey(data_dir)
        problems = check_files(data_dir)
        moved: dict[str, str] = {}
        if dry_run:
            planned = plan(data_dir, findings.damages)
        else:
            planned = repair(data_dir, findings.damages, forget_beginning=forget_beginning)
            gone = {f"{SNAPSHOTS}/{snapshot_path(data_dir, each).name}" for each in planned.outdated}
            moved = {each.file: mend_file(data_dir, each) for each in problems if each.is_mendable and each.file not in gone}
            moved |= dict.fromkeys(gone, QUARANTINE)
    is_damaged = bool(findings.damages or moves) or planned.fate in (Fate.ADJUSTED, Fate.LOST)
    repaired = is_damaged and not dry_run
    remains = any(each.is_damage and each.file not in moved for each in problems)
    placed = [{"segment": segment_name(base), "belongs_at": target} for base, target in moves.items()]
    if as_json:
        rows = [_row(damage) for damage in findings.damages]
        others = [_file_row(each, moved) for each in problems]
        found = {
            "damages": rows,
            "torn_bytes": findings.torn_bytes,
            "misplaced": placed,
            "renamed": {f"{SNAPSHOTS}/{name}": f"{SNAPSHOTS}/{own}" for name, own in renamed.items()},
            "repaired": repaired,
            "index": _index_row(planned),
            "files": others,
        }
        out.write(orjson.dumps(found).decode() + "\n")
    else:
        for base, target in moves.items():
            out.write(f"Segment {segment_name(base)} is in a wrong place: its records belong at position {target}.\n")
        out.writelines(f"The snapshot {name} had the name of another. It is {own} now.\n" for name, own in renamed.items())
        lines = [*_lines(findings, repaired), *_file_lines(problems, moved)]
        if is_damaged:
            lines += _index_lines(planned, dry_run)
        if not is_damaged and not any(each.is_damage for each in problems):
            lines.append("There is no damage.")
        out.writelines(f"{line}\n" for line in lines)
    return remains or (is_damaged and dry_run)


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
        lines.append("The log is repaired.")
    return lines


def _index_row(planned: IndexPlan) -> dict[str, object]:
    return {
        "fate": planned.fate.value,
        "log_begins": planned.begin,
        "covered": planned.covered,
        "snapshot": planned.snapshot,
        "reason": planned.reason,
        "rows": dict(planned.rows),
        "entries_lost": planned.entries_lost,
    }


def _index_lines(planned: IndexPlan, dry_run: bool) -> Iterator[str]:
    """Say what becomes of the index, and what that loses."""
    will = "would be" if dry_run else "is"
    if planned.outdated:
        some = ", ".join(str(position) for position in planned.outdated)
        yield (
            f"The snapshots at these positions {'would be' if dry_run else 'are'} set aside, since they know damaged records "
            f"that the index will not know: {some}. New ones take their places."
        )
    lost = "What the damaged records said, messages or changes of sessions and groups, is lost."
    if planned.fate is Fate.KEPT:
        yield f"The index {will} kept: it covers the log up to position {planned.covered}, before any damage. {lost}"
    elif planned.fate is Fate.REBUILT:
        source = "from the log" if planned.snapshot is None else f"from the snapshot at position {planned.snapshot} and the log"
        why = f" ({planned.reason})" if planned.reason else ""
        yield f"The index {will} deleted{why}, and the next start rebuilds it {source}. {lost}"
        if planned.snapshot is not None and planned.snapshot > planned.begin:
            yield (
                f"  The index can't be used ({planned.reason}), and the snapshot at position {planned.begin} is not whole. So "
                f"messages before position {planned.snapshot} that nobody has got yet are lost to sessions and groups."
            )
    elif planned.fate is Fate.ADJUSTED:
        yield (
            f"The index {will} kept, and knows what the damaged records said. It has sessions, groups, retained messages, "
            f"timers and open deliveries as of position {planned.covered}: "
            + ", ".join(f"{count} rows of {name}" for name, count in planned.rows)
            + "."
        )
        yield (
            f"  Lost are the messages in the damaged ranges, to which queues refer {planned.entries_lost} times; readers leave "
            "them out. Changes of sessions and groups in damaged records after that position are lost too."
        )
    elif dry_run:
        yield (
            f"Nothing tells what the log held before position {planned.begin}: the index can't be used ({planned.reason}), and "
            "no snapshot is whole. Restore one of them from a backup. `penstock repair --forget-beginning` lets the log begin "
            f"anew: {_FORGOTTEN}."
        )
    else:
        yield f"The log begins anew at position {planned.begin}: {_FORGOTTEN}."


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
