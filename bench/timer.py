"""`python -m bench timer`: delayed messages, from ten thousand to ten million pending, beside Redis and nats-server.

Rows about the store run it and its delayed messages in a process of its own, without a network, so that its memory is its own.
Messages are due at random within 30 days, of a thousand topics. Memory is what the process has beyond one with an empty store,
and disk is the index: the log has the messages themselves.

Rows about firing run a whole node, on messages that were stored before it started. A subscriber compares the due time in each
body with the time at which it comes. Meanwhile other clients publish at QoS 1 and wait for each PUBACK.

The other brokers are talked to over a socket (`bench.timerpeers`). They get fewer messages: `--rivals-pending` at most, and
those of ten seconds.
"""

from __future__ import annotations

import asyncio
import csv
import gc
import os
import random
import shutil
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from bench import plots
from bench.peers import OURS, BrokerProcess
from bench.rows import Figures, Goal, Row, RowFailed, Setting, add_beside, beside, find_rivals, parser_of, run
from bench.timerload import (
    BODY,
    Deliveries,
    dues_at,
    mqtt_publisher,
    mqtt_reader,
    publish_steadily,
    read_due,
)
from bench.timerpeers import PEERS
from bench.timerpeers import pending as pending_of_peer
from penstock.store.clock import SystemClock
from penstock.store.options import MINUTE_MS, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from penstock.store.store import Store
from penstock.timer.buckets import TimerBuckets
from penstock.timer.delayed import DelayedMessages, Recalled
from penstock.timer.options import TimerOptions

BATCH = 256
KEPT = 10_240
"""Messages about which the benchmark keeps something at once."""
TOPICS = 1_000
SPAN_MS = 30 * 86_400_000
"""Within this time messages are due."""

SLOT_MS, FIRED = 10, 1_024
"""Ms after which the node looks again for what is due, about, and messages that it then fires in one turn."""

SIZES = (10_000, 100_000, 1_000_000, 10_000_000)
RIVALS_PENDING = 1_000_000
PROBED = 10_000
"""Messages whose cost is measured when others are pending."""

AT_ONCE = 1_000_000
RECALLS = 100_000
RATES = (100_000, 10_000)
DUE_S, RIVALS_DUE_S = 60, 10
"""Seconds for which messages are due at a rate."""

STORED_PER_S = 50_000
"""Messages a second that every broker is expected to store before they are due."""
START_S, QUICK_START_S = 15, 3
"""Seconds that a broker gets besides, until it runs and its clients are connected."""
TRIES = (1, 3, 9)
"""Times this, until the machine is fast enough."""

FLAGS = 1 | Flag.DELAYED
PLOTS = Path("docs/images")


# --- the store and its delayed messages -------------------------------------------------------------------------------


class _Timers:
    """A store with its delayed messages."""

    def __init__(self, data_dir: Path) -> None:
        data_dir.mkdir(parents=True, exist_ok=True)
        self.store = Store(data_dir, StoreOptions(retention_ms=0), SystemClock())
        self.delayed = DelayedMessages(self.store, TimerOptions(pending_max=10**9, pending_bytes_max=1 << 40))
        self.store.add_part(self.delayed)
        self.store.recover()
        self.routes = [self.store.router.route(b"bench/%d" % number) for number in range(TOPICS)]

    def delay(self, dues_ms: Iterable[int]) -> list[tuple[int, int]]:
        """Delay messages with one commit for each `BATCH`; return position and due time of each."""
        sent: list[tuple[int, int]] = []
        for due_ms in dues_ms:
            encoded = encode_properties(Properties(deliver_at_ms=due_ms))
            route = self.routes[len(sent) % TOPICS]
            sent.append((self.store.append_message(route, BODY % due_ms, encoded, FLAGS), due_ms))
            if not len(sent) % BATCH:
                self.store.commit()
        self.store.commit()
        return sent

    def fill(self, dues_ms: Iterable[int]) -> None:
        """Delay messages, and keep nothing about them."""
        rest = iter(dues_ms)
        while self.delay(islice(rest, KEPT)):
            pass


def _random_dues(count: int, seed: int = 1) -> Generator[int]:
    now_ms, rnd = int(time.time() * 1000), random.Random(seed)
    for _ in range(count):
        yield now_ms + 60_000 + rnd.randrange(SPAN_MS)


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
    dues_ms = _random_dues(count)
    began = time.perf_counter()
    timers.fill(dues_ms)
    rate = count / (time.perf_counter() - began)
    memory = _anonymous_mib() - before
    timers.store.index.flush()
    disk = sum(path.stat().st_size for path in timers.store.index.path.iterdir())
    log = timers.store.log.end
    began = time.perf_counter()
    timers.delay(_random_dues(PROBED, 2))  # which a start must apply again
    probe_us = (time.perf_counter() - began) / PROBED * 1e6
    return {
        "rate": rate,
        "memory": memory,
        "memory_each": memory * 1024**2 / count,
        "disk": disk / count,
        "disk_each": (disk + log) / count,
        "delay_us": probe_us,
    }


def start(data_dir: Path) -> Figures:
    """Start until messages fire, then measure what it costs to fire some beside all that is pending."""
    began = time.perf_counter()
    timers = _Timers(data_dir)
    timers.delayed.fire_due()
    started = time.perf_counter() - began
    due_ms = timers.store.now_ms() + 1_500
    timers.delay(due_ms for _ in range(PROBED))
    time.sleep(max(due_ms - timers.store.now_ms(), 0) / 1000 + 0.002)
    began = time.perf_counter()
    while timers.delayed.fired < PROBED:
        timers.delayed.fire_due()
        timers.store.commit()
    return {"start": started, "fire_us": (time.perf_counter() - began) / PROBED * 1e6}


def buckets(data_dir: Path, count: int) -> Figures:
    """Put messages into buckets without a log, with the rows in the index; then some that are due in the minute under way."""
    timers = _Timers(data_dir)
    minute_ms = timers.store.now_ms() // MINUTE_MS * MINUTE_MS
    alone = TimerBuckets()
    alone.load(timers.store.index)
    while alone.is_opening_due(minute_ms):
        alone.open_next(minute_ms)
    rnd = random.Random(1)
    topics = [route.topic for route in timers.routes]

    def put(dues_ms: list[int], first: int) -> float:
        began = time.perf_counter()
        for start in range(0, count, BATCH):
            for at in range(start, min(start + BATCH, count)):
                alone.add(dues_ms[at], first + at, 0, 100, 0, topics[at % TOPICS])
            changes = timers.store.index.batch()
            alone.save(changes)
            timers.store.index.write(changes)
        return count / (time.perf_counter() - began)

    in_buckets = put([minute_ms + MINUTE_MS + rnd.randrange(SPAN_MS) for _ in range(count)], 0)
    in_wheel = put([minute_ms + rnd.randrange(MINUTE_MS) for _ in range(count)], count)
    began = time.perf_counter()
    for now_ms in range(minute_ms, minute_ms + MINUTE_MS, SLOT_MS):
        while len(alone.take_due(now_ms, FIRED)) == FIRED:
            pass
    return {"buckets": in_buckets, "wheel": in_wheel, "wheel_out": count / (time.perf_counter() - began)}


def recall(data_dir: Path, count: int) -> Figures:
    """Recall half of the messages that are due within a month."""
    timers = _Timers(data_dir)
    named = random.Random(1).sample(timers.delay(_random_dues(2 * count)), count)
    began = time.perf_counter()
    for first in range(0, count, BATCH):
        outcomes = timers.delayed.recall_all(named[first : first + BATCH])
        timers.store.commit()
        assert {*outcomes} == {Recalled.CANCELLED}
    return {"recall": count / (time.perf_counter() - began)}


def fill(data_dir: Path, dues_ms: Iterable[int]) -> None:
    """Store messages for a node that starts afterwards."""
    timers = _Timers(data_dir)
    timers.fill(dues_ms)

    async def close() -> None:
        timers.store.start(asyncio.get_running_loop(), _give_up)
        await timers.store.close()

    asyncio.run(close())


def _fill_at_rate(data_dir: Path, first_ms: int, per_s: int, count: int) -> None:
    fill(data_dir, dues_at(first_ms, per_s, count))


def _give_up(error: OSError) -> None:
    os._exit(1)


def _alone(job: Callable[..., Any], *arguments: object) -> Any:
    """Run a measurement in a process of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        return process.submit(job, *arguments).result()


# --- what is due while others publish ---------------------------------------------------------------------------------


class _Due:
    """Messages that are due at a rate, or all at one instant, on one broker.

    Parameters:
        setting: of the row.
        name: of the broker.
        per_s: how many are due in a second; 0 for all at one instant.
        count: of them all.
    """

    def __init__(self, setting: Setting, name: str, per_s: int, count: int) -> None:
        self._setting = setting
        self._peer = PEERS.get(name)
        self._per_s = per_s or count * 1000
        self._count = count
        self.before_ms: list[float] = []
        """How long answers to other publishers took before anything was due."""
        self.during_ms: list[float] = []
        """How long they took until the last message had come."""

    def measure(self) -> Deliveries:
        """Return how the messages came. Raises RowFailed."""
        for times in TRIES:
            found = self._try(self._spare_s * times)
            if found is not None:
                return found
        raise RowFailed("The messages were due before all were stored. Measure on a quiet machine.")

    @property
    def _spare_s(self) -> float:
        return self._setting.count(START_S, QUICK_START_S) + self._count / STORED_PER_S

    def _try(self, spare_s: float) -> Deliveries | None:
        """Let the first message be due after some seconds; return None if not all is ready then."""
        data_dir, signals = self._setting.fresh(), self._setting.fresh()
        is_read, until = signals / "read", signals / "done"
        first_ms = int((time.time() + spare_s) * 1000)
        if self._peer is None:
            _alone(_fill_at_rate, data_dir, first_ms, self._per_s, self._count)
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as clients, self._run(data_dir) as process:
            if self._peer is None:
                host, port, chat = process.host, process.port, mqtt_publisher(b"other/1")
                reading = clients.submit(read_due, host, port, mqtt_reader(b"bench/#"), first_ms, self._count, is_read)
            else:
                address, chat = self._peer.address_of(process), self._peer.publisher()
                host, _, digits = address.rpartition(":")
                port = int(digits)
                _alone(self._peer.delay, address, list(dues_at(first_ms, self._per_s, self._count)))
                reading = clients.submit(self._peer.read, address, first_ms, self._count, is_read)
            publishing = clients.submit(publish_steadily, host, port, chat, until)
            try:
                while not is_read.exists() and not reading.done():
                    time.sleep(0.02)
                if is_read.exists() and time.time() * 1000 > first_ms:
                    until.touch()
                    return None
                found: Deliveries = reading.result()
            finally:
                until.touch()
            self._note(publishing.result(), first_ms / 1000, found.seconds)
        shutil.rmtree(data_dir)
        return found

    def _run(self, data_dir: Path) -> AbstractContextManager[BrokerProcess]:
        return self._setting.node(data_dir) if self._peer is None else self._peer.run(data_dir)

    def _note(self, answers: list[tuple[float, float]], first_s: float, seconds: float) -> None:
        self.before_ms = [took_ms for sent_s, took_ms in answers if sent_s < first_s - 0.5]
        self.during_ms = [took_ms for sent_s, took_ms in answers if first_s <= sent_s < first_s + seconds]


def _p99(values_ms: list[float]) -> float:
    return quantiles(values_ms, n=100)[-1] if len(values_ms) > 1 else max(values_ms, default=0.0)


# --- the rows of the table --------------------------------------------------------------------------------------------


def _curve(setting: Setting) -> Generator[Figures]:
    most = setting.count(setting.options.pending, SIZES[0])
    rivals_most = setting.count(setting.options.rivals_pending, SIZES[0])
    runs: list[dict[tuple[str, int], Figures]] = []
    while True:
        runs.append({})
        for size in (size for size in SIZES if size <= most):
            data_dir = setting.fresh()
            runs[-1][OURS, size] = _alone(pending, data_dir, size) | _alone(start, data_dir)
            shutil.rmtree(data_dir)
            for name in setting.options.rivals if size <= rivals_most else ():
                data_dir = setting.fresh()
                runs[-1][name, size] = pending_of_peer(PEERS[name], data_dir, list(_random_dues(size)), _alone)
                shutil.rmtree(data_dir)
            for name in (OURS, *setting.options.rivals):
                if (name, size) in runs[-1]:
                    told = ", ".join(f"{figure} {value:,.2f}" for figure, value in runs[-1][name, size].items())
                    setting.tell(f"  {size:,} {name}: {told}")
        _plot_curve(setting, runs)
        yield _figures_of(runs[-1])


def _figures_of(found: dict[tuple[str, int], Figures]) -> Figures:
    sizes = [size for name, size in found if name == OURS]
    ours, least = found[OURS, max(sizes)], found[OURS, min(sizes)]
    figures = {f"{figure}_most": value for figure, value in ours.items()}
    figures["flat"] = (ours["delay_us"] + ours["fire_us"]) / (least["delay_us"] + least["fire_us"])
    for (name, size), of_size in found.items():
        figures |= {f"{figure}_{size}{'' if name == OURS else '@' + name}": value for figure, value in of_size.items()}
    beside_at = max((size for name, size in found if name != OURS), default=min(max(sizes), RIVALS_PENDING))
    for figure in ("rate", "memory_each", "disk_each", "start"):
        figures |= beside(f"{figure}_beside", {name: of[figure] for (name, size), of in found.items() if size == beside_at})
    return figures


def _plot_curve(setting: Setting, runs: list[dict[tuple[str, int], Figures]]) -> None:
    """Write the medians of the runs so far."""
    directory = _plots(setting)
    if directory is None:
        return
    points = {
        place: {figure: median(run[place][figure] for run in runs if place in run) for figure in of_place}
        for place, of_place in runs[-1].items()
    }

    def curves(figure: str, scale: Callable[[float], float] = float, suffix: str = "") -> dict[str, plots.Points]:
        found: dict[str, list[tuple[float, float]]] = {}
        for (name, size), of_place in sorted(points.items(), key=lambda point: point[0][1]):
            if figure in of_place:
                found.setdefault(f"{name}{suffix}", []).append((size, scale(of_place[figure])))
        return dict(found)

    cost = curves("delay_us", suffix=", to delay one more") | curves("fire_us", suffix=", to fire one")
    panels = (
        plots.Panel("Memory for each pending message", " B", curves("memory_each"), is_log=True),
        plots.Panel("Disk for each, with the messages themselves", " B", curves("disk_each")),
        plots.Panel("To delay one", " us", curves("rate", lambda rate: 1e6 / rate)),
        plots.Panel("One more when so many are pending", " us", cost),
        plots.Panel("Start after kill -9", " s", curves("start"), is_log=True),
    )
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "timers-pending.svg").write_text(plots.svg_of(panels, "", is_log=True))
    with (directory / "timers-pending.csv").open("w", newline="") as file:
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("broker", "pending", "figure", "median"))
        lines.writerows((*place, figure, f"{value:.4g}") for place, found in points.items() for figure, value in found.items())


def _plots(setting: Setting) -> Path | None:
    """Return where plots go; None if none are asked for. Those of a quick run mean nothing."""
    directory: Path | None = setting.options.plots
    return directory if directory is not None or setting.options.quick else PLOTS


def _row(job: Callable[..., Figures], full: int, quick: int) -> Callable[[Setting], Generator[Figures]]:
    def measure(setting: Setting) -> Generator[Figures]:
        while True:
            data_dir = setting.fresh()
            yield _alone(job, data_dir, setting.count(full, quick))
            shutil.rmtree(data_dir)

    return measure


def _recalls(setting: Setting) -> Generator[Figures]:
    count = setting.count(RECALLS, 1_000)
    while True:
        data_dir = setting.fresh()
        found = {OURS: _alone(recall, data_dir, count)["recall"]}
        shutil.rmtree(data_dir)
        for name in setting.options.rivals:
            peer, data_dir = PEERS[name], setting.fresh()
            with peer.run(data_dir) as process:
                address = peer.address_of(process)
                _alone(peer.delay, address, list(_random_dues(2 * count)))
                found[name] = count / _alone(peer.cancel, address, random.Random(1).sample(range(2 * count), count))
            shutil.rmtree(data_dir)
        yield beside("recall", found)


def _due_at_rate(setting: Setting, per_s: int) -> Generator[Figures]:
    while True:
        late, half = {}, {}
        for name in (OURS, *setting.options.rivals):
            seconds = setting.count(DUE_S if name == OURS else RIVALS_DUE_S, 1)
            found = _Due(setting, name, per_s, setting.count(per_s, 1_000) * seconds).measure()
            late[name], half[name] = float(found.late_ms_of(0.99)), float(found.late_ms_of(0.5))
        yield beside(f"late_{per_s}", late) | beside(f"late_half_{per_s}", half)


def _instant(setting: Setting) -> Generator[Figures]:
    runs: list[dict[str, Deliveries]] = []
    while True:
        seconds, before, during = {}, {}, {}
        runs.append({})
        for name in (OURS, *setting.options.rivals):
            due = _Due(setting, name, 0, setting.count(AT_ONCE, 5_000))
            found = runs[-1][name] = due.measure()
            seconds[name], before[name], during[name] = found.seconds, _p99(due.before_ms), _p99(due.during_ms)
        _plot_instant(setting, runs)
        yield beside("instant", seconds) | beside("puback_before", before) | beside("puback", during)


def _plot_instant(setting: Setting, runs: list[dict[str, Deliveries]]) -> None:
    """Write the run of each broker that took the median time."""
    directory = _plots(setting)
    if directory is None:
        return
    curves: dict[str, plots.Points] = {}
    for name in runs[-1]:
        of_broker = sorted((each[name] for each in runs), key=lambda found: found.seconds)
        curves[name] = [(0.0, 0.0), *((at_s, float(count)) for at_s, count in of_broker[(len(of_broker) - 1) // 2].arrivals)]
    most = max(count for points in curves.values() for _, count in points)
    directory.mkdir(parents=True, exist_ok=True)
    panels = (plots.Panel(f"Delivered of {most:,.0f} messages that are due at one instant", "", curves),)
    (directory / "timers-instant.svg").write_text(plots.svg_of(panels, " s"))


ROWS: dict[str, Row] = {
    "pending": Row(
        _curve,
        (
            Goal("rate_most", "delay messages that are due within 30 days, most pending", "messages/s", 150_000),
            Goal("memory_most", "... memory beyond an empty store", "MiB", 286, is_most=True),
            Goal("disk_most", "... index on disk, each", "bytes", 40, is_most=True),
            Goal("start_most", "... start after kill -9", "s", 3, is_most=True),
            Goal("flat", "... cost of one more, times that with the fewest pending", "x", 1.25, is_most=True),
            Goal("rate_beside", f"delay messages, {RIVALS_PENDING:,} pending", "messages/s"),
            Goal("memory_each_beside", "... memory, each", "bytes"),
            Goal("disk_each_beside", "... disk with the messages, each", "bytes"),
            Goal("start_beside", "... start after kill -9", "s"),
        ),
    ),
    "buckets": Row(
        _row(buckets, 1_000_000, 20_000),
        (
            Goal("buckets", "buckets alone", "messages/s", 1_000_000),
            Goal("wheel", "wheel alone: due in the minute under way, in", "messages/s", 1_000_000),
            Goal("wheel_out", "... out", "messages/s", 1_000_000),
        ),
    ),
    **{
        f"due-{per_s}": Row(
            partial(_due_at_rate, per_s=per_s),
            (
                Goal(f"late_{per_s}", f"lateness of {per_s:,}/s for {DUE_S} s, 99th percentile", "ms", late_ms, is_most=True),
                Goal(f"late_half_{per_s}", "... median", "ms"),
            ),
        )
        for per_s, late_ms in zip(RATES, (50, 15), strict=True)
    },
    "instant": Row(
        _instant,
        (
            Goal("instant", f"deliver {AT_ONCE:,} that are due at one instant", "s", 10, is_most=True),
            Goal("puback", "... until PUBACK of other publishers meanwhile, 99th percentile", "ms", 20, is_most=True),
            Goal("puback_before", "... before", "ms"),
        ),
    ),
    "recall": Row(_recalls, (Goal("recall", "recall", "messages/s", 100_000),)),
}


def _prepare(setting: Setting) -> None:
    find_rivals(setting, {name: peer.find for name, peer in PEERS.items()})


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark and return the exit status."""
    parser = parser_of("timer", "Measure delayed messages.", ROWS, runs=3)
    parser.add_argument("--pending", type=int, default=SIZES[-1], help="Most pending messages (%(default)s).")
    parser.add_argument(
        "--rivals-pending", type=int, default=RIVALS_PENDING, help="Most pending messages of other brokers (%(default)s)."
    )
    parser.add_argument("--plots", type=Path, help=f"Directory for timers-*.svg ({PLOTS}; with --quick none).")
    add_beside(parser, tuple(PEERS))
    return run(parser, ROWS, arguments, prepare=_prepare)
