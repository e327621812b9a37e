"""`penstock dlq`: lists and shows dead letters, sends them back to their groups, and purges them."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from penstock.cli.arguments import Commands, add_command, add_json, add_node, count, endpoint, message_id
from penstock.cli.output import body_fields, print_row, print_rows, row_of, shortened, text_of, time_of
from penstock.store.printable import printable

if TYPE_CHECKING:
    from penstock.cli.endpoint import Endpoint
    from penstock.pop.client.syncclient import SyncClient


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "dlq", "List dead letters, send them back, or purge them.")
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

    show = add_command(actions, "show", "Show a dead letter: why it failed, and its message.")
    show.add_argument("group", help="Name of the group.")
    show.add_argument("message_id", type=message_id, help="Id of the dead letter.")
    add_json(show)
    add_node(show, "target")
    show.set_defaults(run=_show)

    for name, summary in (
        ("redrive", "Send dead letters back to their group as new messages."),
        ("purge", "Remove dead letters that nobody needs any more. Their messages stay in the log for its retention."),
    ):
        action = add_command(actions, name, summary)
        action.add_argument("group", help="Name of the group.")
        which = action.add_mutually_exclusive_group(required=True)
        which.add_argument("message_id", type=message_id, nargs="*", default=[], help="Ids of the dead letters.")
        which.add_argument("--all", action="store_true", help="All dead letters of the group, up to 10,000.")
        add_node(action, "target")
        action.set_defaults(run=_change)


def _list(options: argparse.Namespace) -> int:
    list_dead_letters(
        endpoint(options, "target"), options.group, after=options.after, limit=options.limit, as_json=options.json
    )
    return 0


def _show(options: argparse.Namespace) -> int:
    show_dead_letter(endpoint(options, "target"), options.group, options.message_id, as_json=options.json)
    return 0


def _change(options: argparse.Namespace) -> int:
    act = redrive if options.action == "redrive" else purge
    act(endpoint(options, "target"), options.group, None if options.all else options.message_id)
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


def show_dead_letter(node: Endpoint, group: str, message_id: str, *, as_json: bool) -> None:
    """Print a dead letter with its message.

    Raises:
        ValueError: the message is no dead letter of the group.
        GroupUnknown: there is no such group.
    """
    from penstock.cli.popclient import sync_client_of
    from penstock.pop.proto import pop_pb2 as pb

    with sync_client_of(node) as client:
        message = client.dead_letters.get(group, message_id)
        if message is None:
            client.groups.describe(group)
            raise ValueError(_no_dead_letter(f"the message {message_id} is no dead letter", group))
    letter = message.origin
    assert letter is not None
    row = {
        "message_id": message.message_id,
        "group": letter.group,
        "filter": letter.filter,
        "attempts": letter.attempts,
        "failed": time_of(letter.failed_ms),
        "reason": pb.Reason.Name(letter.reason).lower(),
        "detail": letter.detail,
        "topic": message.topic,
        "stored": time_of(message.stored_ms) if message.stored_ms else None,
        "tag": message.tag,
        "message_group": message.message_group,
        "deduplication_id": message.deduplication_id,
        "content_type": message.content_type,
        "properties": message.properties,
        **(body_fields(message.body) if as_json else {"body": text_of(message.body)}),
    }
    if as_json:
        print_row(row, as_json=True)
        return
    for name, value in row.items():
        for line in [f"{key}={each}" for key, each in value.items()] if isinstance(value, dict) else [value]:
            if line not in ("", None):
                sys.stdout.write(printable(f"{name:>16}  {line}") + "\n")


def redrive(node: Endpoint, group: str, message_ids: Sequence[str] | None) -> None:
    """Send dead letters back to their group, and print how many. None for the ids means all of them.

    Raises:
        ValueError: some of the ids are no dead letters of the group. The others are sent back.
        GroupUnknown: there is no such group.
    """
    _act(node, group, message_ids, lambda client: client.dead_letters.redrive(group, message_ids), "sent back")


def purge(node: Endpoint, group: str, message_ids: Sequence[str] | None) -> None:
    """Remove dead letters, and print how many. The arguments and errors are those of `redrive`."""
    _act(node, group, message_ids, lambda client: client.dead_letters.purge(group, message_ids), "purged")


def _act(node: Endpoint, group: str, message_ids: Sequence[str] | None, act: Callable[[SyncClient], int], done: str) -> None:
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        count = act(client)
        if not count:
            client.groups.describe(group)
    sys.stdout.write(f"{count} {done}\n")
    missing = len(set(message_ids or ())) - count
    if missing > 0:
        sys.stdout.flush()
        raise ValueError(_no_dead_letter(f"{missing} of the ids are no dead letters", group))


def _no_dead_letter(what: str, group: str) -> str:
    return f"{what} of the group {group!r}, or not any more: `penstock dlq list` has those that are left"
