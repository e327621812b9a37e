"""`penstock tables`: writes, compacts, lists and verifies the Parquet tables of a log."""

from __future__ import annotations

import sys
from pathlib import Path

import orjson

from penstock.cli.actions.output import cells_of, print_line, print_row, print_rows
from penstock.spark.parquet.files import DIRECTORY

# All functions import what needs pyarrow, an extra, when they run.


def backfill_tables(data_dir: Path, *, as_json: bool) -> None:
    """Write what the tables lack, and print a line for each segment.

    Raises:
        ReconcileError: there is no log, or the tables can't be continued.
        StoreError: the log is damaged.
        OSError: a file can't be written.
    """
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
