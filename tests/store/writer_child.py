"""A process that appends numbered messages and prints each number once it is durable, until it is killed.

python -m tests.store.writer_child DATA_DIR FIRST_NUMBER SEED RETENTION_BYTES
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path

import structlog
import uvloop

from penstock.store import housekeeping
from penstock.store.clock import SystemClock
from penstock.store.options import KIB, StoreOptions
from penstock.store.store import Store


def options(retention_bytes: int) -> StoreOptions:
    """Return options that give many segments, and many flushes of the index, in a short time."""
    return StoreOptions(segment_bytes=64 * KIB, index_flush_ms=20, retention_bytes=retention_bytes)


WAITING_MAX = 500
"""The maximum number of appended messages that are not durable yet, like a publisher's window."""

EVERYTHING, SOME = "#", "+/1"


def topic(number: int) -> bytes:
    return b"%s/%d" % (random.Random(number).choice((b"plant", b"office", b"yard")), number % 3)


async def write(data_dir: Path, number: int, seed: int, retention_bytes: int) -> None:
    """Append messages numbered from `number` on. Never returns."""
    dice = random.Random(seed)
    store = Store(data_dir, options(retention_bytes), SystemClock())
    store.recover()
    store.start(asyncio.get_running_loop(), lambda error: os._exit(2))
    durable = number
    released = asyncio.Event()

    def print_up_to(last: int) -> None:
        nonlocal durable
        os.write(1, b"".join(b"%d\n" % each for each in range(durable, last + 1)))
        durable = last + 1
        released.set()

    for topic_filter in (EVERYTHING, SOME):
        store.queues.declare(topic_filter, f"seed:{seed}", "earliest")
    while True:
        for _ in range(dice.randint(1, 40)):
            body = b"%d:" % number + b"." * dice.randint(0, 2000)
            store.append_message(store.router.route(topic(number)), body)
            number += 1
        last = number - 1
        store.when_durable(lambda last=last: print_up_to(last))  # type: ignore[misc]
        await asyncio.sleep(0)
        while number - durable > WAITING_MAX:
            released.clear()
            await released.wait()


if __name__ == "__main__":
    housekeeping.INTERVAL_S = 0.01
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))  # stdout carries the numbers
    uvloop.run(write(Path(sys.argv[1]), *map(int, sys.argv[2:])))
