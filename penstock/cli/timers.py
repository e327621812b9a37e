"""`penstock timer`: lists, counts, finds, cancels and reschedules pending messages."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from penstock.cli.arguments import Commands, add_command, add_json, add_node, count, delay, endpoint, instant
from penstock.cli.output import cells_of, print_line, print_row, print_rows, time_of

if TYPE_CHECKING:
    from penstock import Timer
    from penstock.cli.endpoint import Endpoint


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "timer", "List, count, find, cancel or reschedule delayed messages that are pending.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    listing = add_command(actions, "list", "List pending messages in order of delivery time.")
    listing.add_argument("filter", nargs="?", default="#", help="MQTT topic filter that their topics match (%(default)s).")
    _add_query(listing)
    listing.add_argument("--limit", type=count, default=100, help="Maximum number of messages (%(default)s).")
    listing.add_argument("--page-token", default="", metavar="TOKEN", help="Go on where a listing has ended.")
    add_json(listing)
    add_node(listing, "target")
    listing.set_defaults(run=_list)

    counting = add_command(actions, "count", "Count the pending messages, and those that are due soon.")
    add_json(counting)
    add_node(counting, "target")
    counting.set_defaults(run=_count)

    for name, summary in (
        ("find", "Print a pending message, as JSON."),
        ("cancel", "Cancel a pending message."),
        ("reschedule", "Let a pending message be delivered at another time, and print it with its new handle, as JSON."),
    ):
        action = add_command(actions, name, summary)
        action.add_argument("handle", nargs="?", default="", help="Recall handle of the message.")
        action.add_argument("--topic", default="", help="Topic of the message, in place of a handle.")
        action.add_argument("--key", default="", help="Key of the message, with --topic.")
        if name == "reschedule":
            when = action.add_mutually_exclusive_group(required=True)
            when.add_argument(
                "--delay",
                type=delay,
                default=0,
                metavar="TIME",
                dest="delay_ms",
                help="Deliver it after this time, such as 10m.",
            )
            when.add_argument(
                "--deliver-at",
                type=instant,
                default=0,
                metavar="INSTANT",
                dest="deliver_at_ms",
                help="Deliver it then.",
            )
        add_node(action, "target")
        action.set_defaults(run=_act)

    cancelling = add_command(actions, "cancel-all", "Cancel all pending messages of a listing, such as all of a user.")
    cancelling.add_argument("filter", help="MQTT topic filter that their topics match; # for any.")
    _add_query(cancelling)
    add_node(cancelling, "target")
    cancelling.set_defaults(run=_cancel_all)


def _add_query(command: argparse.ArgumentParser) -> None:
    """Add the options that say which pending messages are meant, besides their topics."""
    command.add_argument("--key", default="", help="Only messages with this key.")
    command.add_argument(
        "--from", type=instant, default=0, metavar="INSTANT", dest="from_ms", help="Only those due then or later."
    )
    command.add_argument(
        "--before", type=instant, default=0, metavar="INSTANT", dest="before_ms", help="Only those due before."
    )
    command.add_argument("--user", default="", help="Only those that this user has sent.")
    command.add_argument("--client-id", default="", metavar="ID", help="Only those that this client has sent over MQTT.")


def _query_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `_add_query` has added, as arguments."""
    return {name: getattr(options, name) for name in ("key", "from_ms", "before_ms", "user", "client_id")}


def _list(options: argparse.Namespace) -> int:
    list_timers(
        endpoint(options, "target"),
        options.filter,
        **_query_of(options),
        limit=options.limit,
        page_token=options.page_token,
        as_json=options.json,
    )
    return 0


def _count(options: argparse.Namespace) -> int:
    count_timers(endpoint(options, "target"), as_json=options.json)
    return 0


def _cancel_all(options: argparse.Namespace) -> int:
    cancel_all(endpoint(options, "target"), options.filter, **_query_of(options))
    return 0


def _act(options: argparse.Namespace) -> int:
    names = (endpoint(options, "target"), options.handle, options.topic, options.key)
    if options.action == "find":
        find(*names)
    elif options.action == "cancel":
        cancel(*names)
    else:
        reschedule(*names, delay_ms=options.delay_ms, deliver_at_ms=options.deliver_at_ms)
    return 0


_COLUMNS = ("deliver_at", "topic", "key", "size", "from", "recall_handle")


def list_timers(
    node: Endpoint,
    filter: str,
    *,
    key: str,
    from_ms: int,
    before_ms: int,
    user: str,
    client_id: str,
    limit: int,
    page_token: str,
    as_json: bool,
) -> None:
    """Print pending messages in order of delivery time, and on stderr the token of the next page. See `TimerCalls.list`."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        page = client.timers.list(
            filter,
            key=key,
            from_ms=from_ms,
            before_ms=before_ms,
            user=user,
            client_id=client_id,
            limit=limit,
            page_token=page_token,
        )
    rows = [_row(timer) for timer in page.timers]
    print_rows(
        rows,
        [cells_of({**row, "from": _sender(timer)}, _COLUMNS) for row, timer in zip(rows, page.timers, strict=True)],
        _COLUMNS,
        as_json=as_json,
        out=sys.stdout,
    )
    if page.next_page_token:
        print_line(f"more follow: --page-token {page.next_page_token}", out=sys.stderr)


def count_timers(node: Endpoint, *, as_json: bool) -> None:
    """Print how many messages are pending, how many of them are due soon, and when the next one is delivered."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        found = client.timers.count()
    row = {
        "pending": found.pending,
        "due_minute": found.due_minute,
        "due_hour": found.due_hour,
        "due_day": found.due_day,
        "next_ms": found.next_ms,
        "next": time_of(found.next_ms),
    }
    columns = [name for name in row if name != "next_ms"]
    print_rows([row], [cells_of(row, columns)], columns, as_json=as_json, out=sys.stdout)


def find(node: Endpoint, handle: str, topic: str, key: str) -> None:
    """Print a pending message, which is named by its handle, or by its topic and key."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        print_row(_row(client.timers.find(handle, topic=topic, key=key)), as_json=True)


def cancel(node: Endpoint, handle: str, topic: str, key: str) -> None:
    """Cancel a pending message."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        client.timers.cancel(handle, topic=topic, key=key)
    print_line("cancelled")


def cancel_all(node: Endpoint, filter: str, *, key: str, from_ms: int, before_ms: int, user: str, client_id: str) -> None:
    """Cancel all pending messages that a listing has, and print how many. See `TimerCalls.cancel_all`."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        cancelled = client.timers.cancel_all(
            filter, key=key, from_ms=from_ms, before_ms=before_ms, user=user, client_id=client_id
        )
    print_line(f"{cancelled} cancelled")


def reschedule(node: Endpoint, handle: str, topic: str, key: str, *, delay_ms: int, deliver_at_ms: int) -> None:
    """Let a pending message be delivered at another time, and print it with its new handle."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        moved = client.timers.reschedule(handle, topic=topic, key=key, delay=delay_ms / 1000, deliver_at_ms=deliver_at_ms)
    print_row(_row(moved), as_json=True)


def _sender(timer: Timer) -> str:
    return " ".join(name for name in (timer.user, timer.source, timer.client_id) if name)


def _row(timer: Timer) -> dict[str, Any]:
    return {
        "recall_handle": timer.recall_handle,
        "message_id": timer.message_id,
        "topic": timer.topic,
        "key": timer.key,
        "deliver_at_ms": timer.deliver_at_ms,
        "deliver_at": time_of(timer.deliver_at_ms),
        "size": timer.size,
        "user": timer.user,
        "source": timer.source,
        "client_id": timer.client_id,
    }
