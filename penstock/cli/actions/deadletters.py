"""`penstock dlq`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.output import print_rows, time_of
from penstock.cli.actions.popclient import sync_client_of
from penstock.cli.actions.protorow import row_of
from penstock.pop.proto import pop_pb2 as pb


def list_dead_letters(node: Endpoint, group: str, *, after: str, limit: int, as_json: bool) -> None:
    """Print the dead letters of a group that were not sent back.

    Args:
        node: its gRPC listener.
        group: name of the group.
        after: id of the message after which to begin, or empty to begin with the oldest.
        limit: maximum number of dead letters.
        as_json: print one JSON object a line in place of a table.
    """
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
                letter.detail or pb.Reason.Name(letter.reason).lower(),
                time_of(letter.failed_ms) or "",
            ]
            for letter in letters
        ],
        ("message", "topic", "filter", "attempts", "reason", "failed"),
        as_json=as_json,
        out=sys.stdout,
    )


def redrive(node: Endpoint, group: str, message_ids: Sequence[str] | None) -> None:
    """Send dead letters back to their group, and print how many. None for the ids means all of them.

    Raises:
        ValueError: some of the ids are no dead letters of the group. The others are sent back.
        GroupUnknown: there is no such group.
    """
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
