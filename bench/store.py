"""`python -m bench store`: the cost of the store alone, without a network.

Each measurement runs in a process of its own, so that its memory is its own and no measurement warms up another. Rates are
medians of several runs. Creating a million queues, and starts on large directories, are measured once. A figure that is a
share of another is measured in turn with it (A B A B ...), so that other work on the machine affects both.

`bench.compare` runs `append`, `append_synced` and `read_hot` of two trees by name, so names and arguments must stay the same.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import random
import resource
import shutil
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import uvloop

from bench.rows import Figures, Goal, Row, Setting, parser_of, run
from penstock.store.clock import SystemClock
from penstock.store.index.index import Index
from penstock.store.options import StoreOptions
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.store import Store

BATCH = 256
TOPICS = 64
WAITERS = 1_000
OWNER = "bench"

OTHER_FILTERS = 10_000
WARM_TOPICS = 1_000


def _open(data_dir: Path) -> Store:
    data_dir.mkdir(parents=True, exist_ok=True)
    store = Store(data_dir, StoreOptions(queues_max=10_000_000), SystemClock())
    store.recover()
    return store


def _append(store: Store, records: int, body: bytes) -> float:
    """Append records of a few topics, and return the seconds that it took."""
    return _append_to(store, itertools.cycle([b"bench/t%d" % number for number in range(TOPICS)]), records, body)


def _append_to(store: Store, topics: Iterator[bytes], records: int, body: bytes) -> float:
    """Append records with one commit per `BATCH`, and return the seconds that it took."""
    route_of, append = store.router.route, store.append_message
    began = time.perf_counter()
    for _ in range(0, records, BATCH):
        for topic in itertools.islice(topics, BATCH):
            append(route_of(topic), body)
        store.commit()
    return time.perf_counter() - began


def append(data_dir: Path, records: int, body_bytes: int) -> Figures:
    """Measure append, routing and indexing without sync."""
    store = _open(data_dir)
    _append(store, records // 10, b"x" * body_bytes)
    seconds = _append(store, records, b"x" * body_bytes)
    return {"records_per_s": records / seconds, "mb_per_s": records * body_bytes / seconds / 1e6}


def append_synced(data_dir: Path, records: int) -> Figures:
    """Measure appends with group commit. `WAITERS` callers wait for their record, and append another when it is durable."""

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
                store.append_message(store.router.route(topics[left % TOPICS]), body)
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


def fill(data_dir: Path, records: int) -> Figures:
    """Fill a queue from a log of `records`, a slice a turn, while each turn appends a batch."""
    store = _open(data_dir)
    _append(store, records, b"x" * 64)
    queue = store.queues.declare("bench/+", OWNER, "earliest")
    store.commit()
    began = time.perf_counter()
    while store.queues.backfill():
        _append(store, BATCH, b"x" * 64)
    store.commit()
    seconds = time.perf_counter() - began
    assert queue.committed_offset >= records, queue.committed_offset
    return {"records_per_s": queue.committed_offset / seconds}


def filters(data_dir: Path, records: int) -> Figures:
    """Measure by how many percent `OTHER_FILTERS` other filters slow down appends, with two stores in turn.

    Half of these filters belong to connections and half to durable sessions. Half have wildcards, some of them at the start.
    """
    alone, crowded = _open(data_dir / "alone"), _open(data_dir / "crowded")
    shapes = ("fleet/%d/state", "site%d/#", "bench/%d/other", "+/%d/+/alarm")
    for number in range(OTHER_FILTERS):
        declare = crowded.queues.declare if number // len(shapes) % 2 else crowded.queues.attach
        declare(shapes[number % len(shapes)] % number, OWNER)
    crowded.commit()
    warm = itertools.cycle([b"bench/w%d/temp" % number for number in range(WARM_TOPICS)])
    cold = (b"bench/c%d/temp" % number for number in itertools.count())
    figures = {}
    for name, topics in (("warm", warm), ("cold", cold)):
        ratios = []
        for _ in range(8):
            first = _append_to(alone, topics, records, b"x" * 64)
            ratios.append(_append_to(crowded, topics, records, b"x" * 64) / first)
        figures[name] = (median(ratios[1:]) - 1) * 100
    return figures


def _give_up(error: OSError) -> None:
    raise SystemExit(f"The log can't be synced: {error}")


def read_hot(data_dir: Path, records: int) -> Figures:
    """Measure reading one hot queue from its first entry to its last, with the records."""
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
    """Measure declaring a queue for each of many devices, and `entries` messages in each queue."""
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
                store.append_message(store.router.route(b"device/%d/command" % number), b"%d" % turn)
            store.commit()
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = time.perf_counter() - began
    asyncio.run(_close(store))
    return {"seconds": seconds, "declared_per_s": queues / declared_s, "memory_mib": memory}


async def _close(store: Store) -> None:
    """Close the store as a node does, so that the next start does not read durable records again."""
    store.start(asyncio.get_running_loop(), _give_up)
    await store.close()


def start(data_dir: Path) -> Figures:
    """Measure a start on a directory: seconds, records replayed, and memory."""
    began = time.perf_counter()
    store = Store(data_dir, StoreOptions(queues_max=10_000_000), SystemClock())
    recovery = store.recover()
    seconds = time.perf_counter() - began
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": seconds, "replayed": recovery.replayed, "memory_mib": memory}


def read_sparse(data_dir: Path, queues: int, entries: int, reads: int, seed: int) -> Figures:
    """Measure reading an entry and its record from random queues, each found by its filter."""
    store = _open(data_dir)
    chosen = random.Random(seed)
    wanted = [(f"device/{chosen.randrange(queues)}/command", chosen.randrange(entries)) for _ in range(reads)]
    began = time.perf_counter()
    for name, offset in wanted:
        queue = store.queues.find(name)
        assert queue is not None
        position, size, _ = ENTRY.unpack(queue.read(offset, 1))
        assert len(store.read(position, size)) == size
    return {"reads_per_s": reads / (time.perf_counter() - began)}


def write_and_die(data_dir: Path, records: int) -> Figures:
    """Append on an event loop with the syncs and index flushes of a node, and end as if by kill -9."""

    async def run() -> None:
        store = _open(data_dir)
        store.start(asyncio.get_running_loop(), _give_up)
        for _ in range(0, records, BATCH):
            _append(store, BATCH, b"x" * 64)
            await asyncio.sleep(0)
        os._exit(0)

    uvloop.run(run())
    raise AssertionError("The process has ended before.")


def _alone(job: Callable[..., Figures], *arguments: object) -> Figures:
    """Run a measurement in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(job, *arguments).result()


def _fresh(setting: Setting, job: Callable[..., Figures], *arguments: object) -> Figures:
    """Run a measurement in a process and a directory of its own."""
    data_dir = setting.fresh()
    try:
        return _alone(job, data_dir, *arguments)
    finally:
        shutil.rmtree(data_dir)


# --- the rows of the table --------------------------------------------------------------------------------------------


def _appends(setting: Setting) -> Generator[Figures]:
    while True:
        small = _fresh(setting, append, setting.count(1_000_000, 10_000), 64)
        large = _fresh(setting, append, setting.count(300_000, 3_000), 1024)
        yield {"append_64": small["records_per_s"], "append_1k": large["mb_per_s"]}


def _synced(setting: Setting) -> Generator[Figures]:
    records = setting.count(1_000_000, 10_000)
    while True:
        unsynced = _fresh(setting, append, records, 64)["records_per_s"]
        synced = _fresh(setting, append_synced, records)["records_per_s"]
        yield {"synced": synced, "synced_share": synced / unsynced * 100}


def _hot(setting: Setting) -> Generator[Figures]:
    while True:
        yield {"read_hot": _fresh(setting, read_hot, setting.count(1_000_000, 10_000))["records_per_s"]}


def _filled(setting: Setting) -> Generator[Figures]:
    while True:
        yield {"fill": _fresh(setting, fill, setting.count(1_000_000, 10_000))["records_per_s"]}


def _filters(setting: Setting) -> Generator[Figures]:
    while True:
        yield _fresh(setting, filters, setting.count(50_000, 1_000))


def _queues(setting: Setting) -> Generator[Figures]:
    data_dir = setting.directory / "queues"
    queues, entries = setting.count(setting.options.queues, 1_000), setting.options.entries
    made = _alone(many_queues, data_dir, queues, entries)
    started = _alone(start, data_dir)
    once = {
        "made": made["seconds"],
        "made_memory": made["memory_mib"],
        "start": started["seconds"],
        "start_memory": started["memory_mib"],
    }
    try:
        for seed in itertools.count():  # during the first run, RocksDB still compacts
            read = _alone(read_sparse, data_dir, queues, entries, min(queues, 200_000), seed)
            yield once | {"read_sparse": read["reads_per_s"]}
            once = {}
    finally:
        shutil.rmtree(data_dir)


def _starts(setting: Setting) -> Generator[Figures]:
    data_dir = setting.directory / "killed"
    records = setting.count(setting.options.records, 10_000)
    process = multiprocessing.get_context("spawn").Process(target=write_and_die, args=(data_dir, records))
    process.start()
    process.join()
    killed = _alone(start, data_dir)
    Index.destroy(data_dir)
    rebuilt = _alone(start, data_dir)
    shutil.rmtree(data_dir)
    yield {"killed": killed["seconds"], "rebuild": rebuilt["replayed"] / rebuilt["seconds"]}


ROWS: dict[str, Row] = {
    "append": Row(
        _appends,
        (
            Goal("append_64", "append, route, index: 64 B", "records/s", 400_000),
            Goal("append_1k", "append, route, index: 1 KiB", "MB/s", 300),
        ),
    ),
    "synced": Row(
        _synced,
        (
            Goal("synced", f"append with fdatasync, {WAITERS:,} waiters", "records/s"),
            Goal("synced_share", "... share of the rate without sync", "%", 80),
        ),
    ),
    "hot": Row(_hot, (Goal("read_hot", "read a hot queue with its records", "records/s", 500_000),)),
    "fill": Row(_filled, (Goal("fill", "fill a queue while appends go on", "records/s"),)),
    "filters": Row(
        _filters,
        (
            Goal("warm", f"slowdown of appends by {OTHER_FILTERS:,} other filters", "%", 20, is_most=True),
            Goal("cold", "... if each topic is new", "%", 20, is_most=True),
        ),
    ),
    "queues": Row(
        _queues,
        (
            Goal("made", "create the light queues with their entries", "s", 300, is_most=True),
            Goal("made_memory", "... resident memory", "MiB", 600, is_most=True),
            Goal("start", "start with these queues", "s", 3, is_most=True),
            Goal("start_memory", "... resident memory", "MiB", 600, is_most=True),
            Goal("read_sparse", "read these queues at random, with the records", "reads/s", 100_000),
        ),
    ),
    "starts": Row(
        _starts,
        (
            Goal("killed", "start after kill -9", "s", 5, is_most=True),
            Goal("rebuild", "start without an index, which is rebuilt", "records/s", 300_000),
        ),
    ),
}


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of("store", "Measure the store alone.", ROWS)
    parser.add_argument("--queues", type=int, default=1_000_000, help="Number of light queues (%(default)s).")
    parser.add_argument("--entries", type=int, default=10, help="Entries in each queue (%(default)s).")
    parser.add_argument("--records", type=int, default=10_000_000, help="Records in the log for the starts (%(default)s).")
    return run(parser, ROWS, arguments)
