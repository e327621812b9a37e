"""`penstock reconcile`."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.arguments import (
    Commands,
    add_command,
    add_node,
    data_dir_of,
    duration,
    endpoint,
    instant,
    login,
)
from penstock.cli.commandparser import EXIT_USAGE

if TYPE_CHECKING:
    from penstock.spark.reconciliation.nodecheck import ReadState


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands, "reconcile", "Pair every delivery with its acknowledgement, with Spark or DuckDB; the node may be running."
    )
    command.add_argument("--out", type=Path, metavar="DIR", help="Directory for the report (none written).")
    command.add_argument(
        "--engine",
        choices=["auto", "spark", "duckdb"],
        default="auto",
        help="What runs the SQL: auto is Spark where Java and the extra `spark` are installed, else DuckDB (%(default)s).",
    )
    command.add_argument(
        "--master", default="local[*]", metavar="URL", help="Spark master, or server of Connect (%(default)s)."
    )
    command.add_argument("--json", action="store_true", help="Print the summary as JSON.")
    command.add_argument(
        "--since",
        metavar="PLACE",
        help="Begin at the last seal before a position or a date (YYYY-MM-DD), or where the report in --out ended: `last` (the "
        "beginning).",
    )
    command.add_argument(
        "--at",
        type=instant,
        metavar="INSTANT",
        dest="as_of_ms",
        help="Show the log as it was then (now if the node runs, else the last record).",
    )
    command.add_argument(
        "--grace",
        type=duration,
        default=60_000,
        metavar="TIME",
        dest="grace_ms",
        help="Time after a deadline before a delivery without an end counts as a finding (1m).",
    )
    command.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="NAME",
        dest="groups",
        help="Report only deliveries of this group. May be repeated (all groups).",
    )
    command.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="FILTER",
        dest="topics",
        help="Report only deliveries of messages that this topic filter matches. May be repeated (all topics).",
    )
    command.add_argument(
        "--check",
        action="store_true",
        help="Compare the report with the running node on --admin. The exit status is 1 if a group differs, and 7 if the node "
        "does not answer or writes another log.",
    )
    add_node(command, "data_dir", "admin")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.progress import Stages
    from penstock.node.lock import is_locked
    from penstock.spark.errors import ReadOptionInvalid
    from penstock.spark.reconciliation.command import run
    from penstock.spark.reconciliation.reconcile import ReconcileOptions

    if options.check and options.as_of_ms is not None:
        print("penstock reconcile: A node counts as of now: leave out --check or --at.", file=sys.stderr)
        return EXIT_USAGE
    as_of_ms = options.as_of_ms
    if as_of_ms is None and is_locked(data_dir_of(options)):
        as_of_ms = time.time_ns() // 1_000_000  # a quiet node appends nothing, and its deadlines pass all the same
    try:
        wanted = ReconcileOptions(
            as_of_ms=as_of_ms,
            grace_ms=options.grace_ms,
            since=options.since,
            groups=tuple(options.groups),
            topics=tuple(options.topics),
        )
    except ReadOptionInvalid as error:
        print(f"penstock reconcile: {error}", file=sys.stderr)
        return EXIT_USAGE
    return run(
        data_dir_of(options),
        options.out,
        engine=options.engine,
        master=options.master,
        json=options.json,
        options=wanted,
        stages=Stages(is_shown=not options.json),
        read_state=_state_reader(options) if options.check else None,
    )


def _state_reader(options: argparse.Namespace) -> ReadState:
    from penstock.cli.adminclient import state_reader

    return state_reader(endpoint(options, "admin"), login(options, "admin"))
