"""Small tools to try a node by hand over gRPC: `penstock pop`, `send` and `recall`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Literal

from penstock import Client, Message, Security
from penstock.cli.rows import show, text
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.options import HostPort

TOKEN, CA_FILE = "PENSTOCK_TOKEN", "PENSTOCK_CA_FILE"
"""Environment variables: the token that gRPC calls carry, and the PEM file of the roots that the node's certificate is checked
by."""


def security() -> Security:
    """Return how tools show who they are: as the environment says."""
    ca_file = os.environ.get(CA_FILE)
    return Security(token=os.environ.get(TOKEN, ""), root_certificates=Path(ca_file).read_bytes() if ca_file else None)


Settle = Literal["ack", "leave", "ask"]


async def pop(
    address: HostPort,
    topic_filter: str,
    *,
    group: str,
    count: int,
    invisible_ms: int,
    wait_ms: int,
    settle: Settle,
    as_json: bool,
) -> None:
    """Print what the group pops from `topic_filter`; acknowledge it, leave it, or ask on standard input what to do with each.

    Ends after `count` messages or when none comes.
    """
    async with Client(str(address), security=security()) as client:
        left = count
        while left:
            messages = await client.pop(
                topic_filter,
                group=group,
                messages_max=1 if settle == "ask" else min(left, 256),
                invisible_ms=invisible_ms,
                wait_ms=wait_ms,
            )
            if not messages:
                return
            for message in messages:
                row: dict[str, object] = {
                    "topic": message.topic,
                    "body": text(message.body),
                    "attempt": message.attempt,
                    "message_id": message.message_id,
                    "handle": message.handle,
                }
                if message.origin is not None:
                    row["dead_letter_of"] = message.origin.group
                    row["reason"] = pb.Reason.Name(message.origin.reason).lower()
                show(row, as_json)
                if settle == "ask":
                    await _ask(message)
            if settle == "ack":
                await asyncio.gather(*(message.ack() for message in messages))
            left -= len(messages)


async def _ask(message: Message) -> None:
    """Settle a message as standard input says; at its end, leave it."""
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


async def send(address: HostPort, topic: str, body: bytes, *, delay_ms: int, tag: str, as_json: bool) -> None:
    """Send a message over gRPC, to be delivered after `delay_ms`; print its id, and the handle that recalls it."""
    async with Client(str(address), security=security()) as client:
        deliver_at_ms = int(time.time() * 1000) + delay_ms if delay_ms else 0
        sent = await client.send(topic, body, tag=tag, deliver_at_ms=deliver_at_ms)
    row = {"message_id": sent.message_id}
    if sent.recall_handle:
        row["recall_handle"] = sent.recall_handle
    show(row, as_json)


async def recall(address: HostPort, handle: str) -> None:
    """Cancel a delayed message by its recall handle."""
    async with Client(str(address), security=security()) as client:
        await client.recall(handle)
    print("recalled")
