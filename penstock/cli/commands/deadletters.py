"""`penstock dlq`."""

from __future__ import annotations

import argparse

from penstock.cli.commands.arguments import Commands, add_command, add_json, add_pop_address, count, message_id, pop_endpoint


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "dlq", "List the dead letters of a group, and send them back to it.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = add_command(actions, "list", "List the dead letters of a group that were not sent back.")
    listing.add_argument("group", help="Name of the group.")
    listing.add_argument(
        "--after", type=message_id, default="", metavar="MESSAGE_ID", help="Begin after this dead letter (the oldest)."
    )
    listing.add_argument("--limit", type=count, default=100, help="Maximum number of dead letters (%(default)s).")
    add_json(listing)
    add_pop_address(listing)
    listing.set_defaults(run=_list)

    redrive = add_command(actions, "redrive", "Send dead letters back to their group as new messages.")
    redrive.add_argument("group", help="Name of the group.")
    which = redrive.add_mutually_exclusive_group(required=True)
    which.add_argument("message_id", type=message_id, nargs="*", default=[], help="Ids of the dead letters.")
    which.add_argument("--all", action="store_true", help="Send back all of them, up to 10,000.")
    add_pop_address(redrive)
    redrive.set_defaults(run=_redrive)


def _list(options: argparse.Namespace) -> int:
    from penstock.cli.actions.deadletters import list_dead_letters

    list_dead_letters(pop_endpoint(options), options.group, after=options.after, limit=options.limit, as_json=options.json)
    return 0


def _redrive(options: argparse.Namespace) -> int:
    from penstock.cli.actions.deadletters import redrive

    redrive(pop_endpoint(options), options.group, None if options.all else options.message_id)
    return 0
