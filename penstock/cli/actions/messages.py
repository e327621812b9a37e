"""`penstock send`, `penstock pop` and `penstock recall`."""

from __future__ import annotations

import asyncio
import sys
from typing import Literal

from penstock import Message
from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.output import print_row, text_of
from penstock.cli.actions.popclient import client_of
from penstock.pop.proto import pop_pb2 as pb

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
    async with client_of(node) as client:
        remaining = count
        while remaining:
            messages = await client.pop(
                topic_filter,
                group=group,
                messages_max=1 if outcome == "ask" else min(remaining, 256),
                invisible_ms=invisible_ms,
                wait_ms=wait_ms,
            )
            if not messages:
                return
            for message in messages:
                row: dict[str, object] = {
                    "topic": message.topic,
                    "body": text_of(message.body),
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
    async with client_of(node) as client:
        sent = await client.send(topic, body, tag=tag, delay_ms=delay_ms, timer_key=key)
    row = {"message_id": sent.message_id}
    if sent.recall_handle:
        row["recall_handle"] = sent.recall_handle
    print_row(row, as_json)


async def recall(node: Endpoint, handle: str) -> None:
    """Cancel a delayed message by its recall handle."""
    async with client_of(node) as client:
        await client.recall(handle)
    print("The message is recalled.")
