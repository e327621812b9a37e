"""`python -m bench store`: what the store costs by itself, without a network.

Each measurement is a process of its own, so that its memory is its own and one doesn't warm the other. Rates are medians of
several runs; memory, starts and rebuilds of large directories are measured once.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import random
import resource
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import orjson
import uvloop
from rich.console import Console
from rich.table import Table

from store.clock import SystemClock
from store.index import Index
from store.lightqueue import ENTRY
from store.options import StoreOptions
from store.store import Store

BATCH = 256
TOPICS = 64
WAITERS = 1_000
OWNER = "bench"

Figures = dict[str, float]


def _open(data_dir: Path) -> Store:
    data_dir.mkdir(exist_ok=True)
    store = Store(data_dir, StoreOptions(queues_max=10_000_000), SystemClock())
    store.recover()
    return store


def _append(store: Store, records: int, body: bytes) -> float:
    """Append records in batches of `BATCH`, each a commit; return the seconds that took."""
    topics = [b"bench/t%d" % number for number in range(TOPICS)]
    route_of, append = store.queues.route, store.append_message
    began = time.perf_counter()
    for start in range(0, records, BATCH):
        for number in range(start, start + BATCH):
            append(route_of(topics[number % TOPICS]), body)
        store.commit()
    return time.perf_counter() - began


def append(data_dir: Path, records: int, body_bytes: int) -> Figures:
    """Append, route and index, without sync."""
    store = _open(data_dir)
    _append(store, records // 10, b"x" * body_bytes)
    seconds = _append(store, records, b"x" * body_bytes)
    return {"records_per_s": records / seconds, "mb_per_s": records * body_bytes / seconds / 1e6}


def append_synced(data_dir: Path, records: int) -> Figures:
    """The same with group commit and `WAITERS` who wait for their record, each with the next one when it is durable."""

    async def run() -> float:
        store = _open(data_dir)
        store.start(asyncio.get_running_loop(), _give_up)
        done = asyncio.get_running_loop().create_future()
        body, left = b"x" * 64, records
        topics = [b"bench/t%d" % number for number in range(TOPICS)]

        def publish() -> None:
            nonlocal left
            left -= 1
            if left >= 0:
                store.append_message(store.queues.route(topics[left % TOPICS]), body)
                store.when_durable(publish)
            elif left == -WAITERS:
                done.set_result(None)

        began = time.perf_counter()
        for _ in range(WAITERS):
            publish()
        await done
        seconds = time.perf_counter() - began
        await store.close()
        return seconds

    return {"records_per_s": records / uvloop.run(run())}


def _give_up(error: OSError) -> None:
    raise SystemExit(f"the log can't be synced: {error}")


def read_hot(data_dir: Path, records: int) -> Figures:
    """Read one hot queue from its first entry to its last, with the records."""
    store = _open(data_dir)
    _append(store, records, b"x" * 64)
    queue = store.queues.find("bench/#")
    assert queue is not None
    began = time.perf_counter()
    read = 0
    for offset in range(0, queue.committed_offset, 1024):
        for position, size, _ in ENTRY.iter_unpack(queue.read(offset, 1024)):
            read += len(store.read(position, size)) > 0
    assert read == queue.committed_offset, read
    return {"records_per_s": read / (time.perf_counter() - began)}


def many_queues(data_dir: Path, queues: int, entries: int) -> Figures:
    """Declare a queue for each of many devices, and put `entries` messages into each."""
    store = _open(data_dir)
    began = time.perf_counter()
    for number in range(queues):
        store.queues.declare(f"device/{number}/command", OWNER)
        if number % BATCH == 0:
            store.commit()
    store.commit()
    declared_s = time.perf_counter() - began
    for start in range(0, queues, BATCH):
        for turn in range(entries):
            for number in range(start, min(start + BATCH, queues)):
                store.append_message(store.queues.route(b"device/%d/command" % number), b"%d" % turn)
            store.commit()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    asyncio.run(_close(store))
    return {"declared_per_s": queues / declared_s, "memory_mib": memory}


async def _close(store: Store) -> None:
    await store.close()


def start(data_dir: Path) -> Figures:
    """Open a directory as it is: seconds, what was replayed, memory."""
    began = time.perf_counter()
    store = Store(data_dir, StoreOptions(queues_max=10_000_000), SystemClock())
    recovery = store.recover()
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "replayed": recovery.replayed, "memory_mib": memory}


def read_sparse(data_dir: Path, queues: int, reads: int) -> Figures:
    """Read an entry, and its record, of queues chosen at random among many."""
    store = _open(data_dir)
    chosen = random.Random(1)
    names = [f"device/{chosen.randrange(queues)}/command" for _ in range(reads)]
    began = time.perf_counter()
    for name in names:
        queue = store.queues.find(name)
        assert queue is not None
        entry = queue.read(chosen.randrange(queue.committed_offset), 1)
        store.read(int.from_bytes(entry[:8], "little"), int.from_bytes(entry[8:12], "little"))
    return {"reads_per_s": reads / (time.perf_counter() - began)}


def write_and_die(data_dir: Path, records: int) -> Figures:
    """Append, flush the index as often as a node would, and end as by kill -9."""
    store = _open(data_dir)
    flushed = 0
    for _ in range(0, records, 100_000):
        _append(store, 100_000, b"x" * 64)
        if store.log.written - flushed >= store.options.index_flush_bytes:
            store.log.sync()
            store.index.flush()
            flushed = store.log.written
    store.log.sync()
    os._exit(0)


def _alone(job: Callable[..., Figures], *arguments: object) -> Figures:
    """Run a measurement in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(job, *arguments).result()


def _median(runs: int, directory: Path, job: Callable[..., Figures], *arguments: object) -> Figures:
    found = []
    for run in range(runs):
        found.append(_alone(job, directory / f"{job.__name__}{run}", *arguments))
        shutil.rmtree(directory / f"{job.__name__}{run}")
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def measure(directory: Path, options: argparse.Namespace, tell: Callable[[str], None]) -> dict[str, Figures]:
    """Run all measurements; return their figures by name."""
    figures: dict[str, Figures] = {}
    runs = options.runs
    tell("append")
    figures["append, 64 B"] = _median(runs, directory, append, 1_000_000, 64)
    figures["append, 1 KiB"] = _median(runs, directory, append, 300_000, 1024)
    figures["append, 64 B, fdatasync, 1,000 waiters"] = _median(runs, directory, append_synced, 1_000_000)
    tell("read")
    figures["read a hot queue"] = _median(runs, directory, read_hot, 1_000_000)
    tell(f"{options.queues} queues")
    queues = directory / "queues"
    figures[f"{options.queues:,} queues of {options.entries}"] = _alone(many_queues, queues, options.queues, options.entries)
    figures["start with them"] = _alone(start, queues)
    figures["read them at random"] = _alone(read_sparse, queues, options.queues, min(options.queues, 200_000))
    shutil.rmtree(queues)
    tell(f"{options.records} records")
    killed = directory / "killed"
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(killed, options.records))
    process.start()
    process.join()
    figures[f"start after kill -9, {options.records:,} records"] = _alone(start, killed)
    Index.destroy(killed)
    rebuilt = _alone(start, killed)
    figures["start without an index"] = {**rebuilt, "records_per_s": rebuilt["replayed"] / rebuilt["seconds"]}
    return figures


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench store", description="The store by itself.")
    parser.add_argument("--runs", type=int, default=5, help="runs of each rate (%(default)s)")
    parser.add_argument("--queues", type=int, default=1_000_000, help="light queues (%(default)s)")
    parser.add_argument("--entries", type=int, default=10, help="entries of each of them (%(default)s)")
    parser.add_argument("--records", type=int, default=10_000_000, help="records of the log for the starts (%(default)s)")
    parser.add_argument("--dir", type=Path, help="where it stores; a disk, not tmpfs (a temporary directory)")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args(arguments)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-", dir=options.dir) as directory:
        figures = measure(Path(directory), options, lambda text: console.print(f"{text} ..."))
    if options.json:
        print(orjson.dumps(figures).decode())
        return 0
    table = Table("store", "figures")
    for name, values in figures.items():
        table.add_row(name, ", ".join(f"{key} {value:,.1f}" for key, value in values.items()))
    Console().print(table)
    return 0
