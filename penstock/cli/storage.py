"""`penstock storage`: what the log of a running node takes, and what keeps it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any, Final

from penstock.cli.apiclient import ApiClient
from penstock.cli.arguments import Commands, add_command
from penstock.cli.listing import finish, pages_of, print_listing, print_thing, rows_of
from penstock.cli.output import print_row, shown_bytes
from penstock.store.durations import format_duration

SEGMENT_COLUMNS: Final = ("start", "end", "size_bytes", "first_stored", "open", "snapshot")


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands, "storage", "Show what log, index and disk of a running node have room for, and what keeps old segments."
    )
    command.add_argument("--segments", action="store_true", help="List the segments of the log instead.")
    finish(command, _run)
    command.set_defaults(after="", limit=sys.maxsize)


def _run(options: argparse.Namespace) -> int:
    api = ApiClient(options)
    if options.segments:
        segments = rows_of(pages_of(api, "/storage/segments", options))
        print_listing(segments, SEGMENT_COLUMNS, {"first_stored": "first_stored_ms"}, as_json=options.json)
    elif options.json:
        print_row(api.get("/storage"), as_json=True)
    else:
        print_thing(dict(_lines_of(api.get("/storage"))))
    return 0


def _lines_of(storage: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what an operator wants to know about each part of the storage, with the name of the part."""
    disk, log, index, retention = (storage[part] for part in ("disk", "log", "index", "retention"))
    free, total = shown_bytes(disk["free_bytes"]), shown_bytes(disk["total_bytes"])
    yield "disk", f"{free} of {total} free, {shown_bytes(disk['reserve_bytes'])} of which are the reserve: {disk['why']}"
    size = f"{shown_bytes(log['size_bytes'])}, from position {log['start']} to {log['end']}, on disk up to {log['durable']}"
    yield "log", f"{size}; segments: {log['segments']:,}"
    slowed = f"slowed to {shown_bytes(index['slowed_bytes_per_s'])} a second" if index["slowed_bytes_per_s"] else "not slowed"
    writes = "stopped, because compactions are too far behind" if index["stopped"] else slowed
    pending = shown_bytes(index["pending_compaction_bytes"])
    yield "index", f"{shown_bytes(index['files_bytes'])}, {pending} of it to compact; writes are {writes}"
    yield "kept", _retention(retention)
    blocked_by = retention["blocked_by"]
    yield "kept longer by", f"{blocked_by}: {retention['waits_for']}" if blocked_by else "nothing"
    copies = f"{shown_bytes(retention['pinned_bytes'])} of old records that are still needed"
    yield "copies", f"{copies}; since the start {shown_bytes(retention['dropped_bytes'])} were deleted"
    if tables := storage["tables"]:
        yield "tables", f"{shown_bytes(tables['lag_bytes'])} behind the log; failures: {tables['failures']:,}"
    yield "queues", f"{storage['queues']:,}"


def _retention(retention: Mapping[str, Any]) -> str:
    age = f"messages for {format_duration(retention['retention_ms'])}" if retention["retention_ms"] else "messages of any age"
    size = f", at most {shown_bytes(retention['retention_bytes'])}" if retention["retention_bytes"] else ""
    return age + size
