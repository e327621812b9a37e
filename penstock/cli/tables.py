"""`penstock tables`: writes, compacts, lists and verifies the Parquet tables of a log."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import orjson

from penstock.cli.arguments import Commands, add_command, add_json, add_node, data_dir_of
from penstock.cli.commandparser import EXIT_FAILED
from penstock.cli.output import cells_of, print_line, print_row, print_rows


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "tables", "Keep the sealed segments of a log as Parquet tables; the node may be running.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    backfill = add_command(actions, "backfill", "Write the tables of all sealed segments that are not in the tables yet.")
    add_node(backfill, "data_dir")
    backfill.add_argument("--json", action="store_true", help="Print one JSON object per segment.")
    backfill.set_defaults(run=_backfill)

    compact = add_command(actions, "compact", "Join the small files of days that are over, as the node does once a day.")
    add_node(compact, "data_dir")
    compact.add_argument("--json", action="store_true", help="Print one JSON object per file of each table.")
    compact.set_defaults(run=_compact)

    listing = add_command(actions, "list", "Print the tables with their files, rows, bytes and positions.")
    add_node(listing, "data_dir")
    add_json(listing)
    listing.set_defaults(run=_list)

    verify = add_command(
        actions, "verify", "Compare the tables with the segments that the log still has. The exit status is 1 if they differ."
    )
    add_node(verify, "data_dir")
    verify.add_argument("--json", action="store_true", help="Print the findings as one JSON object.")
    verify.set_defaults(run=_verify)


def _backfill(options: argparse.Namespace) -> int:
    backfill_tables(data_dir_of(options), as_json=options.json)
    return 0


def _compact(options: argparse.Namespace) -> int:
    compact_tables(data_dir_of(options), as_json=options.json)
    return 0


def _list(options: argparse.Namespace) -> int:
    list_tables(data_dir_of(options), as_json=options.json)
    return 0


def _verify(options: argparse.Namespace) -> int:
    return 0 if verify_tables(data_dir_of(options), as_json=options.json) else EXIT_FAILED


# All functions import what needs pyarrow, an extra, when they run.


def backfill_tables(data_dir: Path, *, as_json: bool) -> None:
    """Write what the tables lack, and print a line for each segment.

    Raises:
        ReconcileError: there is no log, or the tables can't be continued.
        StoreError: the log is damaged.
        OSError: a file can't be written.
    """
    from penstock.spark.parquet.files import DIRECTORY
    from penstock.spark.parquet.writer import backfill

    count = 0
    for segment in backfill(data_dir):
        count += 1
        if as_json:
            print_row(segment._asdict(), as_json=True)
        else:
            rows = ", ".join(f"{number:,} {table}" for table, number in segment.rows.items())
            print_line(f"Segment {segment.base} to {segment.stop}: {rows}.")
            if segment.unknown:
                print_line(f"What was open at position {segment.base} is unknown: {segment.unknown}.")
    if not as_json and not count:
        print_line(f"{data_dir / DIRECTORY} has all sealed segments of the log.")


def compact_tables(data_dir: Path, *, as_json: bool) -> None:
    """Join the small files of days that are over, and print a line for the segments that share files then.

    Raises:
        TablesInvalid: a file is damaged, or another process reads or writes the tables.
        OSError: a file can't be written.
    """
    from penstock.spark.parquet.compaction import compact
    from penstock.spark.parquet.files import DIRECTORY

    count = 0
    for merged in compact(data_dir):
        count += 1
        if as_json:
            print_row(merged._asdict(), as_json=True)
        else:
            print_line(f"{merged.base} to {merged.stop}: the files of {merged.segments} segments became one of each table.")
    if not as_json and not count:
        print_line(f"{data_dir / DIRECTORY} has no small files of a day that is over.")


def list_tables(data_dir: Path, *, as_json: bool) -> None:
    """Print the extent of each table. Raises TablesInvalid if a file is damaged."""
    from penstock.spark.parquet import catalog
    from penstock.spark.parquet.files import DIRECTORY

    rows = [
        {"table": each.table, "files": each.files, "rows": each.rows, "bytes": each.size, "from": each.start, "to": each.stop}
        for each in catalog.table_sizes(data_dir)
    ]
    names = ("table", "files", "rows", "bytes", "from", "to")
    print_rows(rows, (cells_of(row, names) for row in rows), names, as_json=as_json, out=sys.stdout)
    if not rows and not as_json:
        print_line(f"{data_dir / DIRECTORY} has no tables. `penstock tables backfill` makes them.")


def verify_tables(data_dir: Path, *, as_json: bool) -> bool:
    """Compare the tables with the log, print the findings, and return whether nothing is wrong.

    Segments that are not in the tables yet are nothing wrong.

    Raises:
        ReconcileError: there is no log, or the tables can't be read.
        StoreError: the log is damaged.
    """
    from penstock.spark.parquet import catalog

    found = catalog.verify_tables(data_dir)
    unwritten = found.unwritten
    if as_json:
        row = {
            "ok": not found.problems,
            "problems": found.problems,
            "segments_compared": found.compared,
            "segments_unwritten": len(unwritten),
        }
        sys.stdout.write(orjson.dumps(row).decode() + "\n")
        return not found.problems
    for problem in found.problems:
        print_line(problem)
    if unwritten:
        print_line(
            f"{len(unwritten)} sealed segments, from position {unwritten[0].base} to {unwritten[-1].stop}, are not in the "
            f"tables yet: run `penstock tables backfill`.",
        )
    verdict = "the tables differ from the log" if found.problems else "the tables have what the log has"
    print_line(f"{found.compared} segments compared: {verdict}.")
    return not found.problems
