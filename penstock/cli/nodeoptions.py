"""`penstock options` and `penstock log-level`: the options with which a node runs, and what it logs."""

from __future__ import annotations

import argparse
import sys
from typing import Final

import orjson

from penstock.cli.apiclient import ApiClient
from penstock.cli.arguments import Commands, add_command
from penstock.cli.listing import finish, pages_of, rows_of
from penstock.cli.output import print_line, print_row, print_rows

LEVELS: Final = ("debug", "info", "warning", "error")

COLUMNS: Final = ("name", "value", "origin")


def add_to(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, "options", "List the options of a running node: their values, and where they come from.")
    command.add_argument("prefix", nargs="?", default="", metavar="PREFIX", help="With which the name begins, such as store.")
    command.add_argument("--changed", action="store_true", help="List only what a file, a variable or an argument sets.")
    finish(command, _options)
    command.set_defaults(after="", limit=sys.maxsize)

    command = add_command(commands, "log-level", "Show or set what a node logs, until its process ends.")
    command.add_argument("level", nargs="?", choices=LEVELS, metavar="LEVEL", help=f"New level: {', '.join(LEVELS)}.")
    finish(command, _log_level)


def _options(options: argparse.Namespace) -> int:
    rows = [
        row
        for row in rows_of(pages_of(ApiClient(options), "/options", options))
        if row["name"].startswith(options.prefix) and not (options.changed and row["origin"] == "default")
    ]
    cells = ([row["name"], _text_of(row["value"]), row["origin"]] for row in rows)
    print_rows(rows, cells, COLUMNS, as_json=options.json, out=sys.stdout)
    return 0


def _text_of(value: object) -> str:
    """Return a value as operators write it: what is no text as JSON."""
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _log_level(options: argparse.Namespace) -> int:
    api = ApiClient(options)
    shown = api.call("PUT", "/log-level", body={"level": options.level}) if options.level else api.get("/log-level")
    if options.json:
        print_row(shown, as_json=True)
    else:
        print_line(f"the node logs from {shown['level']} on; log.level is {shown['configured']}, which a restart brings back")
    return 0
