"""`penstock backup` and `penstock restore`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

import orjson

from penstock.backup.backup import back_up
from penstock.backup.copying import Pace
from penstock.backup.restore import restore_backup
from penstock.cli.actions.progress import ProgressBar
from penstock.store.options import MIB


def backup(data_dir: Path, directory: Path, *, may_link: bool, mib_per_s: int, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Make a backup, and print a summary.

    Args:
        data_dir, directory, may_link: as in `back_up`.
        mib_per_s: bound of the rate in MiB per second; 0 for none.
        as_json: print one JSON object, and no progress.
        out: gets the summary.

    Raises:
        Whatever `back_up` raises.
    """
    with ProgressBar(is_shown=not as_json) as bar:
        done = back_up(data_dir, directory, meter=bar, pace=Pace(mib_per_s * MIB), may_link=may_link)
    if as_json:
        out.write(orjson.dumps(done._asdict()).decode() + "\n")
        return
    out.write(
        f"Backup {done.round} in {directory} is complete: the log from position {done.start} to {done.durable}, "
        f"{done.files} files with {size_of(done.bytes)}. {done.copied_files} files with {size_of(done.copied_bytes)} were new. "
        f"It took {done.seconds:.1f} s.\n"
    )


def restore(
    directory: Path, data_dir: Path, *, may_be_damaged: bool, mib_per_s: int, as_json: bool, out: TextIO = sys.stdout
) -> bool:
    """Restore a backup, print a summary, and return whether the backup is whole.

    Args:
        directory, data_dir, may_be_damaged: as in `restore_backup`.
        mib_per_s, as_json, out: as in `backup`.

    Raises:
        Whatever `restore_backup` raises.
    """
    with ProgressBar(is_shown=not as_json) as bar:
        done = restore_backup(directory, data_dir, meter=bar, pace=Pace(mib_per_s * MIB), may_be_damaged=may_be_damaged)
    if as_json:
        out.write(orjson.dumps(done._asdict()).decode() + "\n")
        return not done.problems
    out.writelines(f"Problem: {problem}.\n" for problem in done.problems)
    then = (
        f"Run `penstock repair --data-dir {data_dir}` before you start the node"
        if done.problems
        else f"Start the node with `penstock serve --data-dir {data_dir}`"
    )
    out.write(
        f"{data_dir} is restored: the log from position {done.start} to {done.durable}, {done.files} files with "
        f"{size_of(done.bytes)}. It took {done.seconds:.1f} s. {then}.\n"
    )
    return not done.problems


def size_of(count: int) -> str:
    """Return a number of bytes as text for people."""
    return f"{count / MIB:,.1f} MiB" if count >= MIB else f"{count:,} bytes"
