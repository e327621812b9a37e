"""`penstock repair`: reports the damaged parts of a CommitLog, and sets them aside."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

import orjson

from penstock.node.lock import DataDirLock
from penstock.store.commitlog import DIRECTORY
from penstock.store.errors import PositionUnknown
from penstock.store.repair import QUARANTINE, Damage, Findings, repair, survey


def repair_log(data_dir: Path, *, dry_run: bool, as_json: bool, out: TextIO = sys.stdout) -> bool:
    """Repair the log of a stopped node, and print the findings. Return whether damage remains.

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
        findings = survey(data_dir)
        if not dry_run:
            repair(data_dir, findings.damages)
    repaired = bool(findings.damages) and not dry_run
    if as_json:
        rows = [_row(damage) for damage in findings.damages]
        found = {"damages": rows, "torn_bytes": findings.torn_bytes, "repaired": repaired}
        out.write(orjson.dumps(found).decode() + "\n")
    else:
        out.writelines(f"{line}\n" for line in _lines(findings, repaired))
    return bool(findings.damages) and dry_run


def _row(damage: Damage) -> dict[str, object]:
    return {
        "segment": damage.segment,
        "position": damage.position,
        "length": damage.length,
        "missing": damage.missing,
        "records_behind": damage.records_behind,
        "copy": f"{QUARANTINE}/{damage.copy_name}" if damage.missing < damage.length else None,
    }


def _lines(findings: Findings, repaired: bool) -> list[str]:
    lines = []
    for damage in findings.damages:
        missing = f", {damage.missing} of them missing" if damage.missing else ""
        lines.append(
            f"Segment {damage.segment}: {damage.length} bytes are damaged at position {damage.position}{missing}. "
            f"{damage.records_behind} records follow."
        )
        if repaired and damage.missing < damage.length:
            lines.append(f"  They are copied to {QUARANTINE}/{damage.copy_name}.")
    if findings.torn_bytes:
        lines.append(
            f"{findings.torn_bytes} bytes after the last record are a torn tail, not damage. The next start clears them."
        )
    if repaired:
        lines.append("The log is repaired. The next start rebuilds the index.")
    elif not findings.damages:
        lines.append("There is no damage.")
    return lines
