"""`penstock dlq`: lists dead letters, and sends them back to their groups."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from penstock.cli.arguments import Commands, add_command, add_json, add_node, count, endpoint, message_id
from penstock.cli.output import print_rows, row_of, shortened, time_of

if TYPE_CHECKING:
    from penstock.cli.endpoint import Endpoint


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
    add_node(listing, "target")
    listing.set_defaults(run=_list)

    redrive = add_command(actions, "redrive", "Send dead letters back to their group as new messages.")
    redrive.add_argument("group", help="Name of the group.")
    which = redrive.add_mutually_exclusive_group(required=True)
    which.add_argument("message_id", type=message_id, nargs="*", default=[], help="Ids of the dead letters.")
    which.add_argument("--all", action="store_true", help="Send back all of them, up to 10,000.")
    add_node(redrive, "target")
    redrive.set_defaults(run=_redrive)


def _list(options: argparse.Namespace) -> int:
    list_dead_letters(
        endpoint(options, "target"), options.group, after=options.after, limit=options.limit, as_json=options.json
    )
    return 0


def _redrive(options: argparse.Namespace) -> int:
    redrive(endpoint(options, "target"), options.group, None if options.all else options.message_id)
    return 0


def list_dead_letters(node: Endpoint, group: str, *, after: str, limit: int, as_json: bool) -> None:
    """Print the dead letters of a group that were not sent back.

    Args:
        node: its gRPC listener.
        group: name of the group.
        after: id of the message after which to begin, or empty to begin with the oldest.
        limit: maximum number of dead letters.
        as_json: print one JSON object a line in place of a table.
    """
    from penstock.cli.popclient import sync_client_of
    from penstock.pop.proto import pop_pb2 as pb

    with sync_client_of(node) as client:
        letters = client.dead_letters.of_group(group, after=after, limit=limit)
        if not letters:
            client.groups.describe(group)  # raises GroupUnknown: a name with a mistake in it has no dead letters either
    print_rows(
        [row_of(letter) for letter in letters],
        [
            [
                letter.message_id,
                letter.topic,
                letter.filter,
                str(letter.attempts),
                time_of(letter.failed_ms) or "",
                shortened(letter.detail) or pb.Reason.Name(letter.reason).lower(),
            ]
            for letter in letters
        ],
        ("message", "topic", "filter", "attempts", "failed", "reason"),
        as_json=as_json,
        out=sys.stdout,
    )


def redrive(node: Endpoint, group: str, message_ids: Sequence[str] | None) -> None:
    """Send dead letters back to their group, and print how many. None for the ids means all of them.

    Raises:
        ValueError: some of the ids are no dead letters of the group. The others are sent back.
        GroupUnknown: there is no such group.
    """
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        count = client.dead_letters.redrive(group, message_ids)
        if not count:
            client.groups.describe(group)
    sys.stdout.write(f"{count} sent back\n")
    missing = len(set(message_ids or ())) - count
    if missing > 0:
        sys.stdout.flush()
        raise ValueError(
            f"{missing} of the ids are no dead letters of the group {group!r}, or were sent back before. `penstock dlq list` "
            "has those that are left."
        )
