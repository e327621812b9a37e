"""A flood of large compressed requests, as a process of its own: `python -m tests.pop.flooding TARGET SIZE COUNT`.

It connects, prints a line, waits for a line, sends all requests, prints a line, and at last prints the names of the statuses
with which the calls end, as a JSON list.
"""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from typing import Any

import grpc
import grpc.aio

from penstock.pop.proto import pop_pb2 as pb

SEND = "/penstock.pop.v1.PopService/Send"
SEND_ROCKETMQ = "/apache.rocketmq.v2.MessagingService/SendMessage"
OPTIONS = [("grpc.max_send_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]


async def flood(target: str, size: int, count: int) -> list[str]:
    """Send messages of zeros, each on a connection of its own."""
    request = pb.SendRequest(messages=[pb.Message(topic="flood", body=bytes(size))]).SerializeToString()
    async with AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(grpc.aio.insecure_channel(target, options=OPTIONS)) for _ in range(count)]
        await asyncio.gather(*(channel.channel_ready() for channel in channels))
        print("connected", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        calls: list[Any] = []
        for channel in channels:
            open_call: Any = channel.stream_unary(SEND)  # type: ignore[call-arg]  # raw bytes
            calls.append(open_call(compression=grpc.Compression.Gzip, timeout=100))
        await asyncio.gather(*(call.write(request) for call in calls), return_exceptions=True)
        print("sent", flush=True)
        await asyncio.gather(*(call.done_writing() for call in calls), return_exceptions=True)
        return [(await call.code()).name for call in calls]


if __name__ == "__main__":
    print(json.dumps(asyncio.run(flood(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))))
