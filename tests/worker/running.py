"""A worker that runs beside a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from penstock import Client, OutgoingMessage, Worker, WorkerCounts
from tests.pop.wiring import TOPIC
from tests.waiting import WAIT_S_MAX


@asynccontextmanager
async def running(worker: Worker) -> AsyncIterator[asyncio.Task[None]]:
    """Run a worker within the block, and stop it at its end."""
    task = asyncio.create_task(worker.run(handle_signals=False))
    try:
        yield task
    finally:
        worker.stop()
        await asyncio.wait_for(task, WAIT_S_MAX)


def counts(worker: Worker) -> WorkerCounts:
    """Return the counts of a worker's only consumer, which may not have started yet."""
    return next(iter(worker.counts.values()), WorkerCounts())


async def send(client: Client, bodies: Iterable[bytes], *, message_group: str = "") -> None:
    """Send messages to the topic of the tests, in one call."""
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=body, message_group=message_group) for body in bodies])
