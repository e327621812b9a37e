"""`penstock send`, `penstock pop` and `penstock recall`, to try a node by hand over gRPC."""

from __future__ import annotations

import argparse

from penstock.cli.commands.arguments import (
    Commands,
    add_command,
    add_json,
    add_pop_address,
    count,
    duration,
    pop_endpoint,
    read_body,
    run_async,
)


def add_to(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, "send", "Send a message over gRPC, to be delivered now or later.")
    command.add_argument("topic", help="Topic of the message.")
    command.add_argument("body", help="Body of the message, or - to read it from standard input.")
    add_pop_address(command)
    command.add_argument(
        "--delay",
        "--delay-ms",
        type=duration,
        default=0,
        metavar="TIME",
        dest="delay_ms",
        help="Time until the message is delivered, such as 10min. A number alone is ms (%(default)s).",
    )
    command.add_argument(
        "--key", default="", help="Key of a delayed message, which replaces the pending one of that key (none)."
    )
    command.add_argument("--tag", default="", help="Tag of the message, by which groups can select (none).")
    add_json(command)
    command.set_defaults(run=_send)

    command = add_command(commands, "pop", "Pop messages for a group, print them and acknowledge them.")
    command.add_argument("filter", help="Topic filter of the group, such as 'plant/#'.")
    command.add_argument("--group", required=True, help="Name of the group. A new group is created.")
    add_pop_address(command)
    command.add_argument("--count", type=count, default=1, help="Maximum number of messages (%(default)s).")
    command.add_argument(
        "--invisible",
        "--invisible-ms",
        type=duration,
        default=0,
        metavar="TIME",
        dest="invisible_ms",
        help="Time for which other consumers don't see the messages, such as 5min. A number alone is ms, and 0 is the group's "
        "default (%(default)s).",
    )
    command.add_argument(
        "--wait",
        "--wait-ms",
        type=duration,
        default=0,
        metavar="TIME",
        dest="wait_ms",
        help="Time to wait for the first message, such as 20s. A number alone is ms (%(default)s).",
    )
    outcome = command.add_mutually_exclusive_group()
    outcome.add_argument(
        "--no-ack", action="store_true", help="Leave the messages unacknowledged: they return after the invisible time."
    )
    outcome.add_argument(
        "--ask",
        action="store_true",
        help="Ask for each message what to do: a(ck), n(ack), s(uspend), d(ead letter), or leave it.",
    )
    add_json(command)
    command.set_defaults(run=_pop)

    command = add_command(commands, "recall", "Cancel a delayed message before it is delivered.")
    command.add_argument("handle", help="Recall handle that `penstock send --delay-ms` printed.")
    add_pop_address(command)
    command.set_defaults(run=_recall)


def _send(options: argparse.Namespace) -> int:
    from penstock.cli.actions.messages import send

    body = read_body(options.body)
    return run_async(
        send(
            pop_endpoint(options),
            options.topic,
            body,
            delay_ms=options.delay_ms,
            key=options.key,
            tag=options.tag,
            as_json=options.json,
        )
    )


def _pop(options: argparse.Namespace) -> int:
    from penstock.cli.actions.messages import pop

    return run_async(
        pop(
            pop_endpoint(options),
            options.filter,
            group=options.group,
            count=options.count,
            invisible_ms=options.invisible_ms,
            wait_ms=options.wait_ms,
            outcome="ask" if options.ask else "leave" if options.no_ack else "ack",
            as_json=options.json,
        )
    )


def _recall(options: argparse.Namespace) -> int:
    from penstock.cli.actions.messages import recall

    return run_async(recall(pop_endpoint(options), options.handle))
