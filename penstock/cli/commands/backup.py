"""`penstock backup`, `penstock restore` and `penstock verify`."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.commands.arguments import EXIT_FAILED, Commands, add_command, add_data_dir, count


def add_to(commands: Commands) -> None:
    """Add the commands."""
    backup = add_command(
        commands, "backup", "Back up a data directory while its node runs. A later backup copies only what is new."
    )
    backup.add_argument(
        "directory", type=Path, metavar="DIR", help="Directory of the backup: a new one, or one with an earlier backup."
    )
    add_data_dir(backup)
    backup.add_argument(
        "--link",
        action="store_true",
        help="Link files that never change in place of copying them. DIR must be on the same file system, so this does not "
        "protect from a failed disk.",
    )
    _add_shared(backup)
    backup.set_defaults(run=_backup)

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
        "Verify a backup, or the data directory of a stopped node: every byte and record, and that the index follows from the "
        "log. The exit status is 1 if something is wrong.",
    )
    verify.add_argument("directory", type=Path, metavar="DIR", help="Directory of the backup, or data directory of the node.")
    verify.add_argument(
        "--work-dir",
        type=Path,
        metavar="DIR",
        help="Directory for an index that is built anew, which takes as much room as the stored one (the system's directory "
        "for temporary files).",
    )
    _add_shared(verify)
    verify.set_defaults(run=_verify)


def _add_shared(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--mib-per-s", type=count, default=0, metavar="N", help="Read at most N MiB per second; 0 for no bound (%(default)s)."
    )
    command.add_argument("--json", action="store_true", help="Print the summary as one JSON object, and no progress.")


def _backup(options: argparse.Namespace) -> int:
    from penstock.cli.actions.backup import backup

    backup(options.data_dir, options.directory, may_link=options.link, mib_per_s=options.mib_per_s, as_json=options.json)
    return 0


def _restore(options: argparse.Namespace) -> int:
    from penstock.cli.actions.backup import restore

    is_whole = restore(
        options.directory,
        options.data_dir,
        may_be_damaged=options.salvage,
        mib_per_s=options.mib_per_s,
        as_json=options.json,
    )
    return 0 if is_whole else EXIT_FAILED


def _verify(options: argparse.Namespace) -> int:
    from penstock.cli.actions.verify import verify

    is_good = verify(options.directory, work_dir=options.work_dir, mib_per_s=options.mib_per_s, as_json=options.json)
    return 0 if is_good else EXIT_FAILED
