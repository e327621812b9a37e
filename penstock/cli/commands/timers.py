"""`penstock timer`."""

from __future__ import annotations

import argparse
from typing import Any

from penstock.cli.commands.arguments import (
    Commands,
    add_command,
    add_json,
    add_pop_address,
    count,
    duration,
    instant,
    pop_endpoint,
)


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
    add_pop_address(listing)
    listing.set_defaults(run=_list)

    counting = add_command(actions, "count", "Count the pending messages, and those that are due soon.")
    add_json(counting)
    add_pop_address(counting)
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
                "--delay-ms",
                type=duration,
                default=0,
                metavar="TIME",
                dest="delay_ms",
                help="Deliver it after this time, such as 10min. A number alone is ms.",
            )
            when.add_argument(
                "--deliver-at",
                "--deliver-at-ms",
                type=instant,
                default=0,
                metavar="TIME",
                dest="deliver_at_ms",
                help="Deliver it then, as ISO 8601 or in ms since 1970.",
            )
        add_pop_address(action)
        action.set_defaults(run=_act)

    cancelling = add_command(actions, "cancel-all", "Cancel all pending messages of a listing, such as all of a user.")
    cancelling.add_argument("filter", help="MQTT topic filter that their topics match; # for any.")
    _add_query(cancelling)
    add_pop_address(cancelling)
    cancelling.set_defaults(run=_cancel_all)


def _add_query(command: argparse.ArgumentParser) -> None:
    """Add the options that say which pending messages are meant, besides their topics."""
    command.add_argument("--key", default="", help="Only messages with this key.")
    command.add_argument(
        "--from", type=instant, default=0, metavar="TIME", dest="from_ms", help="Only those due then or later, as ISO 8601."
    )
    command.add_argument(
        "--before", type=instant, default=0, metavar="TIME", dest="before_ms", help="Only those due before, as ISO 8601."
    )
    command.add_argument("--user", default="", help="Only those that this user has sent.")
    command.add_argument("--client-id", default="", metavar="ID", help="Only those that this client has sent over MQTT.")


def _query_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return what `_add_query` has added, as arguments."""
    return {name: getattr(options, name) for name in ("key", "from_ms", "before_ms", "user", "client_id")}


def _list(options: argparse.Namespace) -> int:
    from penstock.cli.actions.timers import list_timers

    list_timers(
        pop_endpoint(options),
        options.filter,
        **_query_of(options),
        limit=options.limit,
        page_token=options.page_token,
        as_json=options.json,
    )
    return 0


def _count(options: argparse.Namespace) -> int:
    from penstock.cli.actions.timers import count_timers

    count_timers(pop_endpoint(options), as_json=options.json)
    return 0


def _cancel_all(options: argparse.Namespace) -> int:
    from penstock.cli.actions.timers import cancel_all

    cancel_all(pop_endpoint(options), options.filter, **_query_of(options))
    return 0


def _act(options: argparse.Namespace) -> int:
    from penstock.cli.actions import timers

    names = (pop_endpoint(options), options.handle, options.topic, options.key)
    if options.action == "find":
        timers.find(*names)
    elif options.action == "cancel":
        timers.cancel(*names)
    else:
        timers.reschedule(*names, delay_ms=options.delay_ms, deliver_at_ms=options.deliver_at_ms)
    return 0
