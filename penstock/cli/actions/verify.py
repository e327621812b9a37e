"""`penstock verify`."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import orjson
import structlog

from penstock.backup.copying import Pace
from penstock.backup.verify import Verification
from penstock.backup.verify import verify as run
from penstock.cli.actions.backup import size_of
from penstock.cli.actions.progress import ProgressBar
from penstock.store.options import MIB


def verify(directory: Path, *, work_dir: Path | None, mib_per_s: int, as_json: bool, out: TextIO = sys.stdout) -> bool:
    """Verify a backup or a data directory, print what was found, and return whether everything is right.

    Args:
        directory, work_dir: as in `penstock.backup.verify`.
        mib_per_s: bound of the rate in MiB per second; 0 for none.
        as_json: print one JSON object, and no progress.
        out: gets the findings.

    Raises:
        Whatever `penstock.backup.verify` raises.
    """
    structlog.configure(processors=[_drop])  # the recoveries of the working copies are not a node's
    with ProgressBar(is_shown=not as_json) as bar:
        found = run(directory, meter=bar, pace=Pace(mib_per_s * MIB), work_dir=work_dir)
    if as_json:
        out.write(orjson.dumps({"good": found.is_good, **asdict(found)}).decode() + "\n")
    else:
        out.writelines(f"{line}\n" for line in _lines(directory, found))
    return found.is_good


def _drop(_logger: object, _method: str, _event: structlog.types.EventDict) -> structlog.types.EventDict:
    raise structlog.DropEvent


def _lines(directory: Path, found: Verification) -> list[str]:
    lines = [f"Problem: {problem}." for problem in found.problems]
    for space, count in found.counts.items():
        lines.append(f"Index, {space}: {count} rows are not what the log says.")
        lines += [f"  {difference}" for difference in found.differences[space]]
        if count > len(found.differences[space]):
            lines.append(f"  and {count - len(found.differences[space])} more")
    lines += [f"Note: {note}." for note in found.notes]
    if found.counts:
        lines.append("To rebuild the index from the log, delete the folder `index` of the stopped node, and start it.")
    if found.is_good:
        rows = f"an index ({size_of(found.rows_bytes)}) that follows from"
        what = rows if found.has_index else "no index, but one can be built from"
        lines.append(
            f"The {found.kind} {directory} is good: the log from position {found.start} to {found.end}, {found.snapshots} "
            f"snapshots, and {what} {found.built_from}. It took {found.seconds:.1f} s."
        )
    else:
        lines.append(f"The {found.kind} {directory} is not good. It took {found.seconds:.1f} s.")
    return lines
