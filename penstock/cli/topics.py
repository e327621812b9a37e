"""`penstock topics`: the topics of live traffic, the filters that have queues, and who has subscribed to a filter."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from typing import Any, Final

from penstock.cli.apiclient import ApiClient
from penstock.cli.arguments import Commands, add_command
from penstock.cli.listing import add_bounds, awaited, finish, pages_of, print_listing, rows_of
from penstock.cli.output import cells_of, print_line, print_rows, time_of

TOPIC_COLUMNS: Final = ("topic", "messages_per_s", "bytes_per_s", "last")
QUEUE_COLUMNS: Final = ("filter", "queue_id", "start", "next_offset", "messages", "is_backfilling", "owners")
SUBSCRIBER_COLUMNS: Final = ("client_id", "is_connected", "qos", "queued")


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "topics", "List topics of live traffic, the filters that have queues, and subscribers.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = add_command(
        actions,
        "list",
        "List topics of live traffic with their rates. The node looks at its traffic only while somebody asks, so the first "
        "figures take a second or more.",
    )
    action.add_argument("filter", nargs="?", default="#", metavar="FILTER", help="Topic filter (%(default)s).")
    action.add_argument("--contains", default="", metavar="TEXT", help="A text in the topic.")
    action.add_argument(
        "--order",
        choices=("messages", "bytes", "topic"),
        default="messages",
        help="The highest rates first, of which there are up to 1,000, or all topics in their order (%(default)s).",
    )
    add_bounds(action, "topic")
    finish(action, _topics)

    action = add_command(actions, "queues", "List the topic filters that have durable queues, and what needs the queues.")
    action.add_argument("--prefix", default="", metavar="TEXT", help="With which the filter begins.")
    action.add_argument("--exact", action="store_true", help="List the filters without wildcards in place of those with some.")
    add_bounds(action, "filter")
    finish(action, _queues)

    action = add_command(actions, "subscribers", "List the clients that have subscribed to a filter, connected or away.")
    action.add_argument("filter", metavar="FILTER", help="The filter, exactly as clients have it, also with $share/.")
    add_bounds(action, "client id")
    finish(action, _subscribers)


def _topics(options: argparse.Namespace) -> int:
    if options.after and options.order != "topic":
        raise ValueError("--after needs --order topic: the highest rates are one listing that nothing follows.")
    api = ApiClient(options)

    query = {"filter": options.filter, "contains": options.contains, "order": options.order}
    pages = awaited(lambda: list(pages_of(api, "/topics", options, **query)), lambda found: not found or found[0]["topics"])
    print_listing(rows_of(pages), TOPIC_COLUMNS, {"last": "last_ms"}, as_json=options.json)
    if pages:
        _print_sample(pages[-1])
    return 0


def _print_sample(page: Mapping[str, Any]) -> None:
    """Say on standard error how far the figures can be trusted."""
    dropped = f", and {page['topics_dropped']:,} that went out, because there are too many" if page["topics_dropped"] else ""
    print_line(
        f"sample since {time_of(page['since_ms'])}: {page['topics']:,} topics{dropped}; it has looked at "
        f"{page['sampled_percent']:g} % of the newest traffic",
        out=sys.stderr,
    )


def _queues(options: argparse.Namespace) -> int:
    wildcards = "false" if options.exact else "true"
    pages = list(pages_of(ApiClient(options), "/filters", options, prefix=options.prefix, wildcards=wildcards))
    filters = rows_of(pages)
    queues = [queue | {"filter": each["filter"], "owners": _owners(queue)} for each in filters for queue in each["queues"]]
    cells = (cells_of(queue, QUEUE_COLUMNS) for queue in queues)
    print_rows(filters, cells, QUEUE_COLUMNS, as_json=options.json, out=sys.stdout)
    if pages:
        count, transient = pages[-1]["queues"], pages[-1]["transient"]
        print_line(f"{count:,} queues, {transient:,} of which serve connections only and are not listed", out=sys.stderr)
    return 0


def _owners(queue: Mapping[str, Any]) -> str:
    more = queue["owner_count"] - len(queue["owners"])
    return ", ".join(queue["owners"]) + (f" and {more:,} more" if more else "")


def _subscribers(options: argparse.Namespace) -> int:
    rows = rows_of(pages_of(ApiClient(options), "/subscriptions", options, filter=options.filter))
    cells = (cells_of(row | row["subscription"], SUBSCRIBER_COLUMNS) for row in rows)
    print_rows(rows, cells, SUBSCRIBER_COLUMNS, as_json=options.json, out=sys.stdout)
    return 0
