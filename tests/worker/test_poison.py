"""A message that ends each process that handles it: real processes, one after the other."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
from pathlib import Path

import pytest
from taskiq import TaskiqMessage

from penstock.contrib.taskiq import PenstockTasks
from penstock.pop.core.group import ConsumerGroup
from penstock.store.properties import Properties
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.system.processes import ROOT
from tests.waiting import until

pytestmark = pytest.mark.nightly

ATTEMPTS_MAX = 3
INVISIBLE_MS = 60_000

HANDLE = """
import asyncio, os, sys
from contextlib import nullcontext
from penstock import Client, Worker

def handle(body):
    if body == b"poison":
        os._exit(3)
    with open(sys.argv[1], "ab", buffering=0) as handled:
        handled.write(body + b"\\n")
"""

WORKER = """
app = Worker(sys.argv[2])

@app.consumer("plant/#", group="billing", concurrency={concurrency}, batch={batch})
async def one(body: {annotation}) -> None:
    for each in body if isinstance(body, list) else [body]:
        handle(each)
        await asyncio.sleep(0.002)

asyncio.run(app.run())
"""

CLIENT = """
async def main():
    async with Client(sys.argv[2]) as client:
        async with {opened} as messages:
            async for message in messages:
                handle(message.body)
                if (acked := message.ack()) is not None:  # a stream has nothing to wait for
                    await acked

asyncio.run(main())
"""

APPLICATIONS = {
    "worker, one at a time": WORKER.format(concurrency=1, batch=0, annotation="bytes"),
    "worker, sixteen at a time": WORKER.format(concurrency=16, batch=0, annotation="bytes"),
    "worker, batches": WORKER.format(concurrency=4, batch=8, annotation="list[bytes]"),
    "consume": CLIENT.format(opened='nullcontext(client.consume("plant/#", group="billing"))'),
    "stream": CLIENT.format(opened='client.stream("plant/#", group="billing")'),
}


FASTSTREAM = """
from faststream import FastStream
from penstock.contrib.faststream import PenstockBroker

broker = PenstockBroker(sys.argv[2])

@broker.subscriber("plant/#", group="billing", max_workers={concurrency})
async def one(message: str | int) -> None:  # JSON is decoded
    handle(str(message).encode())
    await asyncio.sleep(0.002)

asyncio.run(FastStream(broker).run())
"""

TASKIQ = """
from taskiq.api import run_receiver_task
from penstock.contrib.taskiq import PenstockTasks

broker = PenstockTasks(sys.argv[2], topic="plant/1/temperature", group="billing")

@broker.task(task_name="handle")
async def one(body: str) -> None:
    handle(body.encode())
    await asyncio.sleep(0.002)

async def main():
    await broker.startup()
    await run_receiver_task(broker, max_async_tasks={concurrency})

asyncio.run(main())
"""

JAVASCRIPT = """
import {{ appendFileSync }} from "node:fs";
import {{ Worker }} from "{client}";

const [handled, target] = process.argv.slice(2);
const worker = new Worker(target);
worker.consumer("plant/#", {{ group: "billing", decode: "text", concurrency: {concurrency} }}, async (body) => {{
  if (body === "poison") process.exit(3);
  appendFileSync(handled, body + "\\n");
  await new Promise((resolve) => setTimeout(resolve, 2));
}});
await worker.run();
"""

GOOD = [b"%d" % number for number in range(31)]


def task_of(body: bytes) -> bytes:
    """Return the body of the message that asks for a task of `TASKIQ`."""
    task = TaskiqMessage(task_id=body.decode(), task_name="handle", labels={}, args=[body.decode()], kwargs={})
    return PenstockTasks().formatter.dumps(task).message


async def run_until_one_is_dead(node: Node, group: ConsumerGroup, command: tuple[str, ...], handled: Path) -> None:
    """Start a process again and again until it has handled all good messages, and the group has a dead letter: the poison."""
    starts = 0

    def done() -> set[bytes]:
        return set(handled.read_bytes().split()) if handled.exists() else set()

    def is_done() -> bool:
        return len(done()) == len(GOOD) and group.dead_letter_count == 1

    while not is_done():
        starts += 1
        assert starts <= ATTEMPTS_MAX + 8, (done(), node.dead_letters.list(GROUP))
        process = await asyncio.create_subprocess_exec(
            *command, str(handled), node.target, env={**os.environ, "PYTHONPATH": str(ROOT)}
        )
        ended = asyncio.create_task(process.wait())
        try:
            await until(lambda ended=ended: ended.done() or is_done())  # type: ignore[misc]
        finally:
            if not ended.done():
                process.kill()
            await ended
        await asyncio.sleep(0.05)  # the node sees that its connections have ended
        node.advance(INVISIBLE_MS)
    (letter,) = node.dead_letters.list(GROUP)
    assert b"poison" in node.store.read(letter.position, letter.size)
    assert letter.attempts == ATTEMPTS_MAX


@pytest.mark.parametrize("place", [0, 20, 31])
@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("application", APPLICATIONS)
async def test_the_message_that_ends_processes_is_the_only_dead_letter(
    node: Node, tmp_path: Path, application: str, fifo: bool, place: int
) -> None:
    group = node.create(fifo=fifo, attempts_max=ATTEMPTS_MAX, invisible_ms=INVISIBLE_MS)
    for body in (*GOOD[:place], b"poison", *GOOD[place:]):
        node.publish(body, properties=Properties(message_group="one") if fifo else None)
    script = tmp_path / "application.py"
    script.write_text(HANDLE + APPLICATIONS[application])
    await run_until_one_is_dead(node, group, (sys.executable, str(script)), tmp_path / "handled")


@pytest.mark.parametrize("concurrency", [1, 16])
@pytest.mark.parametrize("framework", ["faststream", "taskiq"])
async def test_frameworks_are_rid_of_it_as_well(node: Node, tmp_path: Path, framework: str, concurrency: int) -> None:
    topic_filter = TOPIC if framework == "taskiq" else FILTER
    group = node.create(topic_filter=topic_filter, attempts_max=ATTEMPTS_MAX, invisible_ms=INVISIBLE_MS)
    for body in (*GOOD[:20], b"poison", *GOOD[20:]):
        node.publish(task_of(body) if framework == "taskiq" else body)
    script = tmp_path / "application.py"
    application = {"faststream": FASTSTREAM, "taskiq": TASKIQ}[framework]
    script.write_text(HANDLE + application.format(concurrency=concurrency))
    await run_until_one_is_dead(node, group, (sys.executable, str(script)), tmp_path / "handled")


@pytest.mark.skipif(
    shutil.which("node") is None or not (ROOT / "clients" / "javascript" / "node_modules").is_dir(),
    reason="needs Node, and the modules of clients/javascript: tests/clients/install node",
)
@pytest.mark.parametrize("concurrency", [1, 16])
async def test_a_worker_in_javascript_is_rid_of_it_as_well(node: Node, tmp_path: Path, concurrency: int) -> None:
    group = node.create(attempts_max=ATTEMPTS_MAX, invisible_ms=INVISIBLE_MS)
    for body in (*GOOD[:20], b"poison", *GOOD[20:]):
        node.publish(body)
    script = tmp_path / "application.mjs"
    client = ROOT / "clients" / "javascript" / "src" / "index.js"
    script.write_text(JAVASCRIPT.format(client=client, concurrency=concurrency))
    await run_until_one_is_dead(node, group, ("node", str(script)), tmp_path / "handled")
