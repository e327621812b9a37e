"""`penstock retained`: lists, shows and deletes the retained messages of a running node."""

from __future__ import annotations

import argparse
from base64 import b64decode
from typing import Final

from penstock.cli.apiclient import ApiClient, escaped
from penstock.cli.arguments import Commands, add_command
from penstock.cli.listing import add_bounds, finish, pages_of, print_listing, print_thing, rows_of
from penstock.cli.output import print_line, print_row, text_of

COLUMNS: Final = ("topic", "message_id", "size_bytes", "expires")


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "retained", "List, show and delete the retained messages of a running node.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    action = add_command(actions, "list", "List the retained messages in the order of their topics.")
    action.add_argument("filter", nargs="?", default="#", metavar="FILTER", help="Topic filter (%(default)s).")
    add_bounds(action, "topic")
    finish(action, _list)
    action = add_command(actions, "show", "Show a retained message with its body, up to 64 KiB of it.")
    _add_topic(action)
    finish(action, _show)
    action = add_command(actions, "delete", "Delete a retained message. Its subscribers get an empty one.")
    _add_topic(action)
    finish(action, _delete)


def _add_topic(action: argparse.ArgumentParser) -> None:
    action.add_argument("topic", metavar="TOPIC", help="Topic of the message.")


def _list(options: argparse.Namespace) -> int:
    rows = rows_of(pages_of(ApiClient(options), "/retained", options, filter=options.filter))
    print_listing(rows, COLUMNS, {"expires": "expires_at_ms"}, as_json=options.json)
    return 0


def _show(options: argparse.Namespace) -> int:
    message = ApiClient(options).get(f"/retained/{escaped(options.topic)}")
    if options.json:
        print_row(message, as_json=True)
        return 0
    body, properties = text_of(b64decode(message.pop("body_base64"))), message.pop("properties")
    print_thing(properties | message, body)
    return 0


def _delete(options: argparse.Namespace) -> int:
    ApiClient(options).call("DELETE", f"/retained/{escaped(options.topic)}")
    print_line(f"deleted the retained message of {options.topic}")
    return 0
