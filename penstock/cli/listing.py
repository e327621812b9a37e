"""Listings and single things of the admin API: how commands ask for them and print them."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

from penstock.cli.apiclient import ApiClient, add_api
from penstock.cli.arguments import add_json, count
from penstock.cli.output import cells_of, print_row, print_rows, time_of
from penstock.store.printable import printable

TIMES: Final = frozenset(
    ("connected_ms", "last_packet_ms", "ends_ms", "will_due_ms", "stored_ms", "expires_at_ms", "deliver_at_ms")
)
"""Fields that are points in time. Other fields in ms are durations."""

RATES: Final = ("messages_in", "messages_out", "bytes_in", "bytes_out")
"""Rates by which connected clients can be ordered."""

TRY_S: Final = 1.0
"""Seconds after which a node that has just begun to measure is asked again."""

TRIES: Final = 3
"""How often a command waits for the first figures."""

T = TypeVar("T")

Run = Callable[[argparse.Namespace], int]
"""Runs a command, and returns its exit status."""


def add_bounds(listing: argparse.ArgumentParser, what: str) -> None:
    """Add the arguments that say where a listing begins and ends. `what` is the field by which the listing is in order."""
    metavar = what.upper().replace(" ", "_")
    listing.add_argument("--after", default="", metavar=metavar, help=f"Begin after this {what} (the first).")
    listing.add_argument("--limit", type=count, default=100, help="Maximum number of rows (%(default)s).")


def finish(action: argparse.ArgumentParser, run: Run) -> None:
    """Add the arguments of every command that prints something of the admin API, and say what runs it."""
    add_json(action)
    add_api(action)
    action.set_defaults(run=run)


def awaited(read: Callable[[], T], has_figures: Callable[[T], object]) -> T:
    """Return an answer that has figures, or the last one after some tries.

    A node measures topics and clients only while somebody asks for them, so the first question begins it.

    Args:
        read: asks the node.
        has_figures: tells whether an answer has what was asked for.
    """
    for _ in range(TRIES):
        answer = read()
        if has_figures(answer):
            return answer
        time.sleep(TRY_S)
    return read()


def pages_of(api: ApiClient, path: str, options: argparse.Namespace, **query: object) -> Iterator[dict[str, Any]]:
    """Yield the pages of a listing, from `--after` on, with `--limit` rows at most in all. Raises as `ApiClient.pages`."""
    return api.pages(path, limit=options.limit, after=options.after, **query)


def rows_of(pages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of pages."""
    return [row for page in pages for row in page["items"]]


def print_listing(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], times: Mapping[str, str] | None = None, *, as_json: bool
) -> None:
    """Print rows as JSON, or some of their fields as a table.

    Args:
        rows: as the node answers them.
        columns: of the table: fields, and names in `times`.
        times: fields that are points in time, by the name of their column.
        as_json: print all fields, one JSON object a line.
    """
    shown = [{**row, **{name: time_of(row[field]) for name, field in (times or {}).items()}} for row in rows]
    print_rows(rows, (cells_of(row, columns) for row in shown), columns, as_json=as_json, out=sys.stdout)


def print_thing(thing: Mapping[str, Any], body: str | None = None) -> None:
    """Print the fields of one thing, each with its name, and below them the lines of a body."""
    fields = [(name, list(map(printable, _lines(time_of(value) if name in TIMES else value)))) for name, value in thing.items()]
    if body is not None:
        fields.append(("body", [printable(line, keep="\t") for line in body.split("\n")]))
    width = max(len(name) for name, _ in fields)
    for name, lines in fields:
        for number, line in enumerate(lines):
            sys.stdout.write(f"{'' if number else name:>{width}}  {line}\n")


def show(options: argparse.Namespace, path: str, measured: str = "") -> int:
    """Print what is at a path of the API, and return the exit status. `measured` is a field that may take a while."""
    api = ApiClient(options)
    thing = awaited(lambda: api.get(path), lambda found: not measured or found.get(measured, True) is not None)
    if options.json:
        print_row(thing, as_json=True)
    else:
        print_thing(thing)
    return 0


def _lines(value: object) -> list[str]:
    """Return a value of an answer as lines: the fields of each part of a list in one."""
    if isinstance(value, list):
        return [line for part in value for line in _lines(part)] or ["-"]
    if isinstance(value, dict):
        return [", ".join(f"{name}={part}" for name, part in value.items())]
    return [str(value) if value not in (None, "") else "-"]
