"""`penstock reconcile`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.cli.commands.arguments import EXIT_USAGE, Commands, add_command, add_data_dir, duration, instant
from penstock.install import install_hint


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "reconcile", "Pair every delivery with its acknowledgement, with Apache Spark.")
    add_data_dir(command)
    command.add_argument(
        "--out", type=Path, metavar="DIR", help="Directory for Parquet tables and summary.json (none written)."
    )
    command.add_argument("--master", default="local[*]", metavar="URL", help="Spark master (%(default)s).")
    command.add_argument("--json", action="store_true", help="Print the summary as JSON.")
    command.add_argument(
        "--as-of",
        "--as-of-ms",
        type=instant,
        metavar="TIME",
        dest="as_of_ms",
        help="Time at which deadlines are judged, as ISO 8601 or in ms since 1970 (store time of the log's last record).",
    )
    command.add_argument(
        "--grace",
        "--grace-ms",
        type=duration,
        default=60_000,
        metavar="TIME",
        dest="grace_ms",
        help="Time after a deadline before an unsettled delivery counts as a finding (1min). A number alone is ms.",
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    try:
        from penstock.spark.reconcile import run
    except ModuleNotFoundError as error:
        print(f"penstock reconcile: {error.name} is not installed: {install_hint('spark')}", file=sys.stderr)
        return EXIT_USAGE
    from penstock.cli.actions.stages import Stages

    stages = Stages(is_shown=not options.json)
    return run(options.data_dir, options.out, options.master, options.json, options.as_of_ms, options.grace_ms, stages)
