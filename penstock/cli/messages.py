"""`penstock send` and `penstock pop`, to try a node by hand over gRPC."""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import TYPE_CHECKING, Literal

from penstock.cli.arguments import (
    Commands,
    add_body,
    add_command,
    add_json,
    add_node,
    count,
    delay,
    duration,
    endpoint,
    read_body,
    run_async,
)
from penstock.cli.output import body_fields, print_row, text_of
from penstock.cli.standardstreams import standard_input

if TYPE_CHECKING:
    from penstock import Message
    from penstock.cli.endpoint import Endpoint


def add_to(commands: Commands) -> None:
    """Add the commands."""
    command = add_command(commands, "send", "Send a message over gRPC, to be delivered now or later.")
    command.add_argument("topic", help="Topic of the message.")
    add_body(command)
    add_node(command, "target")
    command.add_argument(
        "--delay",
        type=delay,
        default=0,
        metavar="TIME",
        dest="delay_ms",
        help="Time until the message is delivered, such as 10m (%(default)s).",
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
    add_node(command, "target")
    command.add_argument("--count", type=count, default=1, help="Maximum number of messages (%(default)s).")
    command.add_argument(
        "--invisible",
        type=duration,
        default=0,
        metavar="TIME",
        dest="invisible_ms",
        help="Time for which other consumers don't see the messages, such as 5m. 0 is the group's default (%(default)s).",
    )
    command.add_argument(
        "--wait",
        type=duration,
        default="1s",
        metavar="TIME",
        dest="wait_ms",
        help="Time to wait for a message, such as 20s (%(default)s). A new group takes a moment to find its first ones.",
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


def _send(options: argparse.Namespace) -> int:
    body = read_body(options.body)
    return run_async(
        send(
            endpoint(options, "target"),
            options.topic,
            body,
            delay_ms=options.delay_ms,
            key=options.key,
            tag=options.tag,
            as_json=options.json,
        )
    )


def _pop(options: argparse.Namespace) -> int:
    if options.ask:
        standard_input()  # before a message is popped
    return run_async(
        pop(
            endpoint(options, "target"),
            options.filter,
            group=options.group,
            count=options.count,
            invisible_ms=options.invisible_ms,
            wait_ms=options.wait_ms,
            outcome="ask" if options.ask else "leave" if options.no_ack else "ack",
            as_json=options.json,
        )
    )


Outcome = Literal["ack", "leave", "ask"]
"""What to do with each message that was popped."""


async def pop(
    node: Endpoint,
    topic_filter: str,
    *,
    group: str,
    count: int,
    invisible_ms: int,
    wait_ms: int,
    outcome: Outcome,
    as_json: bool,
) -> None:
    """Print the messages that a group pops from `topic_filter`, and acknowledge them, leave them, or ask on standard input.

    The command ends after `count` messages, or when a pop returns none.
    """
    from penstock.cli.popclient import client_of
    from penstock.pop.proto import pop_pb2 as pb
    from penstock.store.durations import format_duration

    async with client_of(node) as client:
        remaining = count
        while remaining:
            messages = await client.pop(
                topic_filter,
                group=group,
                messages_max=1 if outcome == "ask" else min(remaining, 256),
                invisible=invisible_ms / 1000,
                wait=wait_ms / 1000,
            )
            if not messages:
                if remaining == count:
                    sys.stderr.write(f"no message came for the group {group} within {format_duration(wait_ms)}\n")
                return
            for message in messages:
                row: dict[str, object] = {
                    "topic": message.topic,
                    **(body_fields(message.body) if as_json else {"body": text_of(message.body)}),
                    "attempt": message.attempt,
                    "message_id": message.message_id,
                    "handle": message.handle,
                }
                if message.origin is not None:
                    row["dead_letter_of"] = message.origin.group
                    row["reason"] = pb.Reason.Name(message.origin.reason).lower()
                print_row(row, as_json)
                if outcome == "ask":
                    await _ask(message)
            if outcome == "ack":
                await asyncio.gather(*(message.ack() for message in messages))
            remaining -= len(messages)


async def _ask(message: Message) -> None:
    """Do with a message what standard input says. At the end of standard input, leave it."""
    sys.stderr.write("a(ck) n(ack) s(uspend) d(ead letter), or leave it: ")
    sys.stderr.flush()
    answer = (await asyncio.to_thread(sys.stdin.readline)).strip().lower()[:1]
    if answer == "a":
        await message.ack()
    elif answer == "n":
        await message.nack()
    elif answer == "s":
        await message.suspend()
    elif answer == "d":
        await message.dead_letter()


async def send(node: Endpoint, topic: str, body: bytes, *, delay_ms: int, key: str, tag: str, as_json: bool) -> None:
    """Send a message over gRPC and print its id.

    With a `delay_ms` above 0 the node delivers the message so much later, and the handle that recalls it is printed, too. With
    a `key` it replaces the pending message of its topic and key.
    """
    from penstock.cli.popclient import client_of

    async with client_of(node) as client:
        sent = await client.send(topic, body, tag=tag, delay=delay_ms / 1000, timer_key=key)
    row = {"message_id": sent.message_id}
    if sent.recall_handle:
        row["recall_handle"] = sent.recall_handle
    print_row(row, as_json)
