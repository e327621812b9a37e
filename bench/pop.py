"""`python -m bench pop`: messages sent, then popped and acknowledged, by calls and by streams, over gRPC with the native API.

The client is a process of its own beside the node, so two cores are what the figures need. Everything is durable: Send, Pop
and Ack are answered after fdatasync. The stubs are used bare, as the fastest client in Python would; the rates with
`pop.client.Client` are lower by what its conveniences cost.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from bench.peers import PeerFailed, millrace
from pop import pop_pb2 as pb
from pop import pop_pb2_grpc

BODY = b"x" * 64
SEND_BATCH = 1_000
TOPICS = 16


Measured = dict[str, float]
"""Messages per second of one run: "send", "pop_ack" and "consume"."""


async def _send(stub: pop_pb2_grpc.PopServiceAsyncStub, run: int, messages: int) -> float:
    requests = [
        pb.SendRequest(messages=[pb.Message(topic=f"bench{run}/t{i % TOPICS}", body=BODY) for i in range(SEND_BATCH)])
        for _ in range(messages // SEND_BATCH)
    ]
    began = time.perf_counter()
    for request in requests:
        response = await stub.Send(request)
        if any(result.status.code for result in response.results):
            raise RuntimeError(f"a send failed: {response.results[0].status}")
    return messages / (time.perf_counter() - began)


async def _pop_and_ack(stub: pop_pb2_grpc.PopServiceAsyncStub, run: int, messages: int, batch: int, consumers: int) -> float:
    left = messages
    done = asyncio.Event()

    async def consume() -> None:
        nonlocal left
        request = pb.PopRequest(group=f"group{run}", filter=f"bench{run}/#", messages_max=batch, wait_ms=10_000)
        while True:
            popped = await stub.Pop(request)
            handles = [message.handle for message in popped.messages]
            acked = await stub.Ack(pb.AckRequest(group=f"group{run}", handles=handles))
            if any(status.code for status in acked.statuses):
                raise RuntimeError(f"an ack failed: {acked.statuses[0]}")
            left -= len(handles)
            if left <= 0:
                done.set()

    began = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(consume()) for _ in range(consumers)]
        await done.wait()
        elapsed_s = time.perf_counter() - began  # not with the polls that wait for messages that don't come
        for task in tasks:
            task.cancel()
    if left:
        raise RuntimeError(f"{-left} messages more than were sent came out")
    return messages / elapsed_s


async def _consume(stub: pop_pb2_grpc.PopServiceAsyncStub, run: int, messages: int, batch: int, streams: int) -> float:
    """Take all messages from streams, each of which has credits for eight batches."""
    left = messages
    done = asyncio.Event()
    opening = pb.ConsumeOpen(group=f"stream{run}", filter=f"bench{run}/#", credits=8 * batch, batch_max=batch)

    async def consume() -> None:
        nonlocal left
        call: Any = stub.Consume()  # type: ignore[call-arg]  # without an iterator, requests are written
        await call.write(pb.ConsumeRequest(open=opening))
        acked = taken = 0
        while left > 0 or acked < taken:
            answer = await call.read()
            acked = max(acked, answer.acked)
            if answer.refused:
                raise RuntimeError(f"an ack failed: {answer.refused[0]}")
            if answer.messages:
                taken += len(answer.messages)
                left -= len(answer.messages)
                await call.write(pb.ConsumeRequest(acks=[message.handle for message in answer.messages]))
            if left <= 0 and acked >= taken:
                done.set()
        call.cancel()

    began = time.perf_counter()
    tasks = [asyncio.create_task(consume()) for _ in range(streams)]
    await done.wait()
    elapsed_s = time.perf_counter() - began
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return messages / elapsed_s


async def _run(address: str, options: argparse.Namespace) -> list[Measured]:
    measured = []
    async with grpc.aio.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        stub: pop_pb2_grpc.PopServiceAsyncStub = pop_pb2_grpc.PopServiceStub(channel)
        for run in range(options.runs + 1):
            count = options.messages if run else options.messages // 10  # the first warms up, and doesn't count
            sent = await _send(stub, run, count // SEND_BATCH * SEND_BATCH)
            popped = await _pop_and_ack(stub, run, count // SEND_BATCH * SEND_BATCH, options.batch, options.consumers)
            consumed = await _consume(stub, run, count // SEND_BATCH * SEND_BATCH, options.batch, options.streams)
            if run:
                measured.append(Measured(send=sent, pop_ack=popped, consume=consumed))
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench pop", description="Send, pop and acknowledge over gRPC.")
    parser.add_argument("--messages", type=int, default=100_000, help="messages of a run (%(default)s)")
    parser.add_argument("--batch", type=int, default=256, help="messages of a pop (%(default)s)")
    parser.add_argument("--consumers", type=int, default=8, help="pops under way at a time (%(default)s)")
    parser.add_argument("--streams", type=int, default=2, help="streams of Consume at a time (%(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="runs that count (%(default)s)")
    parser.add_argument("--dir", type=Path, help="where the node stores; a disk, not tmpfs (a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    try:
        with (
            tempfile.TemporaryDirectory(prefix="millrace-bench-", dir=options.dir) as directory,
            millrace(Path(directory, "data")) as node,
        ):
            measured = uvloop.run(_run(node.addresses["pop"], options))
    except PeerFailed as error:
        print(f"bench pop: {error}", file=sys.stderr)
        return 1
    medians = {name: statistics.median(run[name] for run in measured) for name in ("send", "pop_ack", "consume")}
    if options.json:
        print(orjson.dumps({"runs": measured, "median": medians}).decode())
        return 0
    table = Table("messages/s, 64-byte bodies", "median", "least", "most", title=f"{options.runs} runs of {options.messages}")
    for name, text in (
        ("send", f"send, {SEND_BATCH} a call, durable"),
        ("pop_ack", f"pop + ack, {options.batch} a batch, {options.consumers} consumers"),
        ("consume", f"consume, {options.batch} a response, {options.streams} streams"),
    ):
        rates = [run[name] for run in measured]
        table.add_row(text, f"{medians[name]:,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}")
    Console().print(table)
    return 0
