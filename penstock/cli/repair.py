"""`penstock repair`."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.arguments import Commands, add_command
from penstock.cli.commandparser import EXIT_FAILED


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "repair",
        "Set damaged parts of a stopped node's CommitLog, and other damaged files, aside, so that the node can start.",
    )
    command.add_argument(
        "--data-dir", type=Path, required=True, metavar="DIR", help="Data directory of a node that is stopped."
    )
    command.add_argument("--dry-run", action="store_true", help="Change nothing. The exit status is 1 if there is damage.")
    command.add_argument("--json", action="store_true", help="Print the findings as one JSON object.")
    command.add_argument(
        "--forget-beginning",
        action="store_true",
        help="If nothing tells what the log held before its beginning, let it begin anew there: sessions, groups, retained and "
        "delayed messages from before are lost. Without this option, the command changes nothing then.",
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.repair_log import repair_log

    remains = repair_log(
        options.data_dir, dry_run=options.dry_run, as_json=options.json, forget_beginning=options.forget_beginning
    )
    return EXIT_FAILED if remains else 0
