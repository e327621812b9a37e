"""A message that ends each process that handles it: real processes, one after the other."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from penstock.store.properties import Properties
from tests.pop.wiring import GROUP, Node
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


@pytest.mark.parametrize("place", [0, 20, 31])
@pytest.mark.parametrize("fifo", [False, True])
@pytest.mark.parametrize("application", APPLICATIONS)
async def test_the_message_that_ends_processes_is_the_only_dead_letter(
    node: Node, tmp_path: Path, application: str, fifo: bool, place: int
) -> None:
    node.create(fifo=fifo, attempts_max=ATTEMPTS_MAX, invisible_ms=INVISIBLE_MS)
    good = [b"%d" % number for number in range(31)]
    for body in (*good[:place], b"poison", *good[place:]):
        node.publish(body, properties=Properties(message_group="one") if fifo else None)
    script, handled = tmp_path / "application.py", tmp_path / "handled"
    script.write_text(HANDLE + APPLICATIONS[application])
    handled.touch()
    group = node.group()
    starts = 0

    def is_done() -> bool:
        return len(set(handled.read_bytes().split())) == len(good) and group.dead_letter_count == 1

    while not is_done():
        starts += 1
        assert starts <= ATTEMPTS_MAX + 8, (handled.read_bytes().split(), node.dead_letters.list(GROUP))
        command = (sys.executable, str(script), str(handled), node.target)
        process = await asyncio.create_subprocess_exec(*command, env={**os.environ, "PYTHONPATH": str(ROOT)})
        ended = asyncio.create_task(process.wait())
        await until(lambda ended=ended: ended.done() or is_done())  # type: ignore[misc]
        if not ended.done():
            process.kill()
            await ended
        await asyncio.sleep(0.05)  # the node sees that its connections have ended
        node.advance(INVISIBLE_MS)
    (letter,) = node.dead_letters.list(GROUP)
    assert node.store.read(letter.position, letter.size).endswith(b"poison")
    assert letter.attempts == ATTEMPTS_MAX
