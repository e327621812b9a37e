"""`penstock topics`: live traffic and its topics, the filters that have queues, and who has subscribed to a filter."""

from __future__ import annotations

import argparse
import sys
from base64 import b64decode
from collections.abc import Mapping
from contextlib import closing
from typing import Any, Final

from penstock.cli.apiclient import ApiClient
from penstock.cli.arguments import Commands, add_command, count
from penstock.cli.commandparser import EXIT_FAILED
from penstock.cli.listing import add_bounds, awaited, finish, pages_of, print_listing, rows_of
from penstock.cli.output import cells_of, print_line, print_row, print_rows, shown_bytes, text_of, time_of

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

    action = add_command(
        actions,
        "tail",
        "Print messages as they are stored, whoever gets them.",
    )
    action.add_argument("filter", nargs="?", default="#", metavar="FILTER", help="Topic filter (%(default)s).")
    action.add_argument("--count", type=count, default=0, help="Messages after which to end; 0 never ends (%(default)s).")
    action.add_argument(
        "--per-s",
        type=count,
        default=100,
        metavar="N",
        help="Print at most N messages a second; count the others (%(default)s).",
    )
    action.add_argument(
        "--body-bytes", type=count, default=1_024, metavar="N", help="Print at most N bytes of a body (%(default)s)."
    )
    finish(action, _tail)


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
        total, transient = pages[-1]["queues"], pages[-1]["transient"]
        print_line(f"queues: {total:,}, of which {transient:,} serve connections only and are not listed", out=sys.stderr)
    return 0


def _owners(queue: Mapping[str, Any]) -> str:
    more = queue["owner_count"] - len(queue["owners"])
    return ", ".join(queue["owners"]) + (f" and {more:,} more" if more else "")


def _subscribers(options: argparse.Namespace) -> int:
    rows = rows_of(pages_of(ApiClient(options), "/subscriptions", options, filter=options.filter))
    cells = (cells_of(row | row["subscription"], SUBSCRIBER_COLUMNS) for row in rows)
    print_rows(rows, cells, SUBSCRIBER_COLUMNS, as_json=options.json, out=sys.stdout)
    return 0


def _tail(options: argparse.Namespace) -> int:
    lines = ApiClient(options).stream(
        "/streams/messages", filter=options.filter, per_s=options.per_s, body_bytes=options.body_bytes
    )
    printed = 0
    with closing(lines):
        for line in lines:
            if line["type"] == "state":
                _print_losses(line)
                continue
            print_row(line if options.json else _tailed(line), options.json)
            printed += 1
            if printed == options.count:
                return 0
    print_line("penstock topics: the node has ended the stream", out=sys.stderr)
    return EXIT_FAILED


def _tailed(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is printed of a message for people."""
    body = text_of(b64decode(message["body_base64"])) + ("..." if message["cut"] else "")
    return {"stored": time_of(message["stored_ms"]), "topic": message["topic"], "body": body}


def _print_losses(state: Mapping[str, Any]) -> None:
    """Say on standard error what the tail does not show."""
    if state["left_out"]:
        print_line(
            f"{state['left_out']:,} more messages are not shown: they are beyond --per-s, or can't be read", out=sys.stderr
        )
    if state["skipped_bytes"]:
        print_line(
            f"{shown_bytes(state['skipped_bytes'])} of the log were passed over: to keep up, or because they can't be read",
            out=sys.stderr,
        )
