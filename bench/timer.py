"""`python -m bench timer`: delayed messages, from ten thousand to ten million pending, beside a sorted set of Redis.

Each measurement of Penstock runs the store and its delayed messages in a process of its own, without a network, so that its
memory is its own. Messages are due at random within 30 days, of a thousand topics. Memory is what the process has beyond one
with an empty store, and disk is the index: the log has the messages themselves.

Redis holds the ids of messages in a sorted set, and a poller moves those that are due to a list, a thousand at a time, as
schedulers on Redis do. Its clients talk to it over a socket, and it syncs once a second.
"""

from __future__ import annotations

import asyncio
import gc
import os
import random
import shutil
import time
from collections.abc import Callable, Generator
from concurrent.futures import ProcessPoolExecutor
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import uvloop

from bench.peers import NotInstalled, path_of, redis_server
from bench.rows import Figures, Goal, Row, Setting, add_beside, beside, find_rivals, parser_of, run
from penstock.store.clock import SystemClock
from penstock.store.options import StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from penstock.store.store import Store
from penstock.timer.buckets import TimerBuckets
from penstock.timer.delayed import DelayedMessages, Recalled
from penstock.timer.options import TimerOptions

RIVAL = "Redis"

BATCH = 256
TOPICS = 1_000
BODY = b"x" * 64
SPAN_MS = 30 * 86_400_000
"""Within this time messages are due."""

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
AT_ONCE = 1_000_000
RECALLS = 100_000
POLLED = 1_000
"""Messages that the poller of Redis moves at once."""

FLAGS = 1 | Flag.DELAYED


class _Timers:
    """A store with its delayed messages."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.store = Store(data_dir, StoreOptions(retention_ms=0), SystemClock())
        self.delayed = DelayedMessages(self.store, TimerOptions(pending_max=10**9, pending_bytes_max=1 << 40))
        self.store.add_part(self.delayed)
        self.store.recover()
        self.routes = [self.store.router.route(b"bench/%d" % number) for number in range(TOPICS)]

    def delay(self, count: int, due_ms: Callable[[], int]) -> list[tuple[int, int]]:
        """Delay messages with one commit for each `BATCH`; return position and due time of each."""
        sent = []
        for batch in _batches(count):
            for number in batch:
                due = due_ms()
                encoded = encode_properties(Properties(deliver_at_ms=due))
                sent.append((self.store.append_message(self.routes[number % TOPICS], BODY, encoded, FLAGS), due))
            self.store.commit()
        return sent


def _batches(count: int) -> Generator[range]:
    for start in range(0, count, BATCH):
        yield range(start, min(start + BATCH, count))


def _anonymous_mib() -> float:
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) / 1024
    raise AssertionError("The kernel does not tell the anonymous memory of a process.")


def pending(data_dir: Path, count: int) -> Figures:
    """Delay messages, and end as if by kill -9."""
    timers = _Timers(data_dir)
    before = _anonymous_mib()
    now_ms, rnd = timers.store.now_ms(), random.Random(1)
    began = time.perf_counter()
    for _ in range(count // 10_000 or 1):
        timers.delay(min(count, 10_000), lambda: now_ms + 60_000 + rnd.randrange(SPAN_MS))
    rate = count / (time.perf_counter() - began)
    memory = _anonymous_mib() - before
    timers.store.index.flush()
    disk = sum(path.stat().st_size for path in timers.store.index.path.iterdir())
    timers.delay(10_000, lambda: now_ms + 60_000 + rnd.randrange(SPAN_MS))  # which a start must apply again
    return {"rate": rate, "memory": memory, "disk": disk / len(timers.delayed)}


def start(data_dir: Path) -> Figures:
    """Start until messages fire."""
    began = time.perf_counter()
    timers = _Timers(data_dir)
    timers.delayed.fire_due()
    return {"start": time.perf_counter() - began}


def buckets(data_dir: Path, count: int) -> Figures:
    """Put messages into buckets without a log, with the rows in the index."""
    timers = _Timers(data_dir)
    alone = TimerBuckets()
    alone.load(timers.store.index)
    now_ms, rnd = timers.store.now_ms(), random.Random(1)
    dues = [now_ms + rnd.randrange(SPAN_MS) for _ in range(count)]
    topics = [route.topic for route in timers.routes]
    began = time.perf_counter()
    for batch in _batches(count):
        for number in batch:
            alone.add(dues[number], number, 0, 100, 0, topics[number % TOPICS])
        changes = timers.store.index.batch()
        alone.save(changes)
        timers.store.index.write(changes)
    return {"buckets": count / (time.perf_counter() - began)}


def fire(data_dir: Path, count: int) -> Figures:
    """Fire messages that are due at one instant, on a loop that does other work every ms."""

    async def fired() -> Figures:
        timers = _Timers(data_dir)
        due_ms = timers.store.now_ms() + 1_000 + count // 20  # when all are stored
        timers.delay(count, lambda: due_ms)
        loop = asyncio.get_running_loop()
        timers.store.start(loop, _give_up)
        timers.delayed.start(loop)
        pauses: list[float] = []
        await asyncio.sleep(max(due_ms - timers.store.now_ms(), 0) / 1000)
        began = time.perf_counter()
        is_done = False
        while not is_done:
            asked = time.perf_counter()
            await asyncio.sleep(0.001)
            pauses.append((time.perf_counter() - asked) * 1000)
            is_done = timers.delayed.fired >= count
        seconds = time.perf_counter() - began
        timers.delayed.stop()
        await timers.store.close()
        pauses.sort()
        return {"fire_seconds": seconds, "fire": count / seconds, "pause": pauses[len(pauses) * 99 // 100]}

    return uvloop.run(fired())


def recall(data_dir: Path, count: int) -> Figures:
    """Recall messages that are due within a month."""
    timers = _Timers(data_dir)
    now_ms, rnd = timers.store.now_ms(), random.Random(1)
    sent = timers.delay(2 * count, lambda: now_ms + 60_000 + rnd.randrange(SPAN_MS))
    named = rnd.sample(sent, count)
    began = time.perf_counter()
    for batch in _batches(count):
        for number in batch:
            assert timers.delayed.recall(*named[number]) is Recalled.CANCELLED
        timers.store.commit()
    return {"recall": count / (time.perf_counter() - began)}


def _give_up(error: OSError) -> None:
    os._exit(1)


def _alone(job: Callable[..., Figures], *arguments: object) -> Figures:
    """Run a measurement in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(job, *arguments).result()


# --- Redis ------------------------------------------------------------------------------------------------------------


def _find_redis() -> None:
    path_of("redis-server")
    if find_spec("redis") is None or find_spec("hiredis") is None:
        raise NotInstalled("Its client is not installed (pip install 'redis[hiredis]').")


def redis(address: str, count: int) -> Figures:
    """Put the ids of messages into a sorted set, then let a poller move them to a list when they are due."""
    import redis as client_library  # it need not be installed

    host, _, port = address.rpartition(":")
    client: Any = client_library.Redis(host, int(port))
    rnd = random.Random(1)
    memory = client.info("memory")["used_memory"]
    began = time.perf_counter()
    for batch in _batches(count):
        client.zadd("delayed", {b"%016d" % number: rnd.randrange(SPAN_MS) for number in batch})
    rate = count / (time.perf_counter() - began)
    taken = (client.info("memory")["used_memory"] - memory) / count
    began = time.perf_counter()
    fired = 0
    while fired < count:
        due = client.zrangebyscore("delayed", 0, SPAN_MS, 0, POLLED)
        with client.pipeline() as pipeline:
            pipeline.zrem("delayed", *due)
            pipeline.rpush("fired", *due)
            pipeline.execute()
        fired += len(due)
    client.flushall()
    return {"rate": rate, "memory": taken, "fire": count / (time.perf_counter() - began)}


# --- the rows of the table --------------------------------------------------------------------------------------------


def _curve(setting: Setting) -> Generator[Figures]:
    figures: Figures = {}
    for size in SIZES:
        if size <= setting.count(setting.options.pending, 10_000):
            data_dir = setting.fresh()
            found = _alone(pending, data_dir, size) | _alone(start, data_dir)
            shutil.rmtree(data_dir)
            figures |= {f"{name}_{size}": value for name, value in found.items()}
            setting.tell(f"  {size:,}: " + ", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
            largest = found
    yield figures | {f"{name}_most": value for name, value in largest.items()}


def _row(job: Callable[..., Figures], full: int, quick: int) -> Callable[[Setting], Generator[Figures]]:
    def measure(setting: Setting) -> Generator[Figures]:
        while True:
            data_dir = setting.fresh()
            yield _alone(job, data_dir, setting.count(full, quick))
            shutil.rmtree(data_dir)

    return measure


def _beside_redis(setting: Setting) -> Generator[Figures]:
    count = setting.count(200_000, 1_000)
    while True:
        ours = _alone(pending, setting.fresh(), count) | _alone(fire, setting.fresh(), count)
        figures = {"rate": {"Penstock": ours["rate"]}, "fired": {"Penstock": ours["fire"]}}
        if RIVAL in setting.options.rivals:
            with redis_server(setting.fresh()) as peer:
                theirs = _alone(redis, f"{peer.host}:{peer.port}", count)
            figures["rate"][RIVAL], figures["fired"][RIVAL] = theirs["rate"], theirs["fire"]
        yield beside("rate", figures["rate"], RIVAL) | beside("fired", figures["fired"], RIVAL)


ROWS: dict[str, Row] = {
    "pending": Row(
        _curve,
        (
            Goal("rate_most", "delay messages that are due within 30 days, most pending", "messages/s", 150_000),
            Goal("memory_most", "... memory beyond an empty store", "MiB", 286, is_most=True),
            Goal("disk_most", "... index on disk, each", "bytes", 40, is_most=True),
            Goal("start_most", "... start after kill -9", "s", 3, is_most=True),
        ),
    ),
    "buckets": Row(_row(buckets, 1_000_000, 20_000), (Goal("buckets", "buckets alone", "messages/s", 1_000_000),)),
    "fire": Row(
        _row(fire, AT_ONCE, 10_000),
        (
            Goal("fire_seconds", f"fire {AT_ONCE:,} that are due at one instant", "s", 10, is_most=True),
            Goal("pause", "... delay of other work meanwhile, 99th percentile", "ms", 20, is_most=True),
        ),
    ),
    "recall": Row(_row(recall, RECALLS, 1_000), (Goal("recall", "recall", "messages/s", 100_000),)),
    "beside": Row(
        _beside_redis,
        (
            Goal("rate", f"delay 200,000 messages, times the rate of {RIVAL}", "x"),
            Goal("fired", f"fire them, times the rate of {RIVAL}", "x"),
        ),
    ),
}


def _prepare(setting: Setting) -> None:
    find_rivals(setting, {RIVAL: _find_redis})


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of("timer", "Measure delayed messages.", ROWS, runs=3)
    parser.add_argument("--pending", type=int, default=SIZES[-1], help="Most pending messages (%(default)s).")
    add_beside(parser, (RIVAL,))
    return run(parser, ROWS, arguments, prepare=_prepare)
