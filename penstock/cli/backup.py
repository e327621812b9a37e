"""`penstock backup`, `penstock restore` and `penstock verify`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import orjson

from penstock.cli.apiclient import ApiClient, add_api, is_remote
from penstock.cli.arguments import Commands, add_command, data_dir_of
from penstock.cli.arguments import count as whole_number
from penstock.cli.commandparser import EXIT_FAILED
from penstock.cli.output import print_line
from penstock.store.options import MIB

if TYPE_CHECKING:
    import structlog

    from penstock.backup.verify import Verification


def add_to(commands: Commands) -> None:
    """Add the commands."""
    backup = add_command(
        commands, "backup", "Back up a data directory while its node runs. A later backup copies only what is new."
    )
    backup.add_argument(
        "directory",
        type=Path,
        metavar="DIR",
        help="Directory of the backup: a new one, or one with an earlier backup. With --admin, its name below the "
        "admin.backup_dir of the node, which makes the backup on its own machine.",
    )
    add_api(backup)
    backup.add_argument(
        "--link",
        action="store_true",
        help="Link files that never change in place of copying them. DIR must be on the same file system.",
    )
    backup.add_argument(
        "--no-wait",
        action="store_true",
        help="With --admin, return when the backup has begun. Otherwise Ctrl-C cancels it.",
    )
    _add_shared(backup, "0, and 100 with --admin")
    backup.set_defaults(run=_backup, mib_per_s=None)  # which of both it is depends on the node that is named

    restore = add_command(commands, "restore", "Restore a backup into an empty directory, on which a node can start then.")
    restore.add_argument("directory", type=Path, metavar="DIR", help="Directory of the backup.")
    restore.add_argument("data_dir", type=Path, metavar="DATA_DIR", help="Data directory to restore: a new or an empty one.")
    restore.add_argument(
        "--salvage",
        action="store_true",
        help="Restore what a damaged backup has. The exit status is 1 if it is damaged; run `penstock repair` then.",
    )
    _add_shared(restore)
    restore.set_defaults(run=_restore)

    verify = add_command(
        commands,
        "verify",
        "Verify every byte and record of a backup or a stopped node's data directory. The exit status is 1 if any is wrong.",
    )
    verify.add_argument("directory", type=Path, metavar="DIR", help="Directory of the backup, or data directory of the node.")
    verify.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="Directory for an index that is built anew, as large as the stored one (that for temporary files).",
    )
    _add_shared(verify)
    verify.set_defaults(run=_verify)


def _add_shared(command: argparse.ArgumentParser, default: str = "0") -> None:
    command.add_argument(
        "--mib-per-s",
        type=whole_number,
        default=0,
        metavar="N",
        help=f"Read at most N MiB per second; 0 for no bound ({default}).",
    )
    command.add_argument("--json", action="store_true", help="Print the summary as one JSON object, and no progress.")


def _backup(options: argparse.Namespace) -> int:
    if is_remote(options):
        return _back_up_remotely(options)
    if options.no_wait:
        raise ValueError("--no-wait needs --admin: without it, the command itself copies the files.")
    backup(
        data_dir_of(options), options.directory, may_link=options.link, mib_per_s=options.mib_per_s or 0, as_json=options.json
    )
    return 0


def _back_up_remotely(options: argparse.Namespace) -> int:
    from penstock.cli import remotebackup
    from penstock.cli.progress import ProgressBar

    api = ApiClient(options)
    begun = remotebackup.begin(api, str(options.directory), may_link=options.link, mib_per_s=options.mib_per_s)
    if options.no_wait:
        as_text = f"The node has begun the backup in {begun['directory']}."
        print_line(orjson.dumps(begun).decode() if options.json else as_text)
        return 0
    with ProgressBar(is_shown=not options.json) as bar:
        done = remotebackup.watch(api, begun, bar)
    _print_summary(done, done["directory"], as_json=options.json, out=sys.stdout)
    return 0


def _restore(options: argparse.Namespace) -> int:
    is_whole = restore(
        options.directory,
        options.data_dir,
        may_be_damaged=options.salvage,
        mib_per_s=options.mib_per_s,
        as_json=options.json,
    )
    return 0 if is_whole else EXIT_FAILED


def _verify(options: argparse.Namespace) -> int:
    is_good = verify(options.directory, work_dir=options.work_dir, mib_per_s=options.mib_per_s, as_json=options.json)
    return 0 if is_good else EXIT_FAILED


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
    from penstock.backup.backup import back_up
    from penstock.backup.copying import Pace
    from penstock.cli.progress import ProgressBar

    with ProgressBar(is_shown=not as_json) as bar:
        done = back_up(data_dir, directory, meter=bar, pace=Pace(mib_per_s * MIB), may_link=may_link)
    _print_summary(done._asdict(), directory, as_json=as_json, out=out)


def _print_summary(done: dict[str, Any], directory: Path | str, *, as_json: bool, out: TextIO) -> None:
    """Print what a backup has done, whose fields are those of `BackupSummary`, and others for JSON."""
    if as_json:
        out.write(orjson.dumps(done).decode() + "\n")
        return
    out.write(
        f"Backup {done['round']} in {directory} is complete: the log from position {done['start']} to {done['durable']}, "
        f"{done['files']} files with {size_of(done['bytes'])}. {done['copied_files']} files with "
        f"{size_of(done['copied_bytes'])} were new. It took {done['seconds']:.1f} s.\n"
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
    from penstock.backup.copying import Pace
    from penstock.backup.restore import restore_backup
    from penstock.cli.progress import ProgressBar

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
    import structlog

    from penstock.backup.copying import Pace
    from penstock.backup.verify import verify as run
    from penstock.cli.progress import ProgressBar

    structlog.configure(processors=[_drop])  # the recoveries of the working copies are not a node's
    with ProgressBar(is_shown=not as_json) as bar:
        found = run(directory, meter=bar, pace=Pace(mib_per_s * MIB), work_dir=work_dir)
    if as_json:
        out.write(orjson.dumps({"good": found.is_good, **asdict(found)}).decode() + "\n")
    else:
        out.writelines(f"{line}\n" for line in _lines(directory, found))
    return found.is_good


def _drop(_logger: object, _method: str, _event: structlog.types.EventDict) -> structlog.types.EventDict:
    import structlog

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
