"""`python -m bench curve`: the cost of a record while the log grows, as a plot.

The benchmark appends, routes and indexes records of 1 KiB on an event loop, one batch a turn, with the syncs and index flushes
of a node; nothing waits for a record. For each part of the log it keeps two figures in microseconds a record: elapsed time and
processor time. Elapsed time includes the disk and other work on the machine; processor time includes the threads of RocksDB.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

import uvloop
from rich.console import Console

from penstock.store.clock import SystemClock
from penstock.store.options import GIB, MIB, StoreOptions
from penstock.store.store import Store

BODY = b"x" * 1024
BATCH = 256
TOPICS = 10_000
FIRST_GIB = 1
"""Size of the log from which `growth` counts. Before, memtables and caches fill."""

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 44, 44
COLOURS = ("#1f6feb", "#bf5700")


class Point(NamedTuple):
    """The cost of a record in one part of the log."""

    log_gib: float
    """Size of the log at the end of the part."""
    clock_us: float
    processor_us: float


async def append(data_dir: Path, log_bytes: int, part_bytes: int, tell: Callable[[Point], None]) -> list[Point]:
    """Append until the log has `log_bytes`, and return a point for each `part_bytes`."""
    store = Store(data_dir, StoreOptions(), SystemClock())
    store.recover()
    store.start(asyncio.get_running_loop(), _give_up)
    topics = [b"curve/%d/state" % number for number in range(TOPICS)]
    route_of, append_message = store.router.route, store.append_message
    points: list[Point] = []
    at = records = 0
    began, began_cpu, next_end = time.perf_counter(), time.process_time(), part_bytes
    while store.log.end < log_bytes:
        for _ in range(BATCH):
            append_message(route_of(topics[at % TOPICS]), BODY)
            at += 1
        records += BATCH
        await asyncio.sleep(0)
        if store.log.end >= next_end:
            clock, processor = time.perf_counter() - began, time.process_time() - began_cpu
            points.append(Point(store.log.end / GIB, clock / records * 1e6, processor / records * 1e6))
            tell(points[-1])
            records, next_end = 0, next_end + part_bytes
            began, began_cpu = time.perf_counter(), time.process_time()
    await store.close()
    return points


def _give_up(error: OSError) -> None:
    raise SystemExit(f"The log can't be written: {error}")


def growth(points: Sequence[Point]) -> tuple[float, float]:
    """Return the cost in the last quarter of the log after `FIRST_GIB`, divided by that in its first, of both figures."""
    settled = [point for point in points if point.log_gib > FIRST_GIB] or list(points)
    quarter = max(len(settled) // 4, 1)
    first, last = settled[:quarter], settled[-quarter:]
    return (
        median(point.clock_us for point in last) / median(point.clock_us for point in first),
        median(point.processor_us for point in last) / median(point.processor_us for point in first),
    )


def svg_of(points: Sequence[Point]) -> str:
    """Return the plot: the size of the log on the x axis, the cost of a record on the y axis, and a line for each figure."""
    across = max(point.log_gib for point in points)
    up = max(max(point.clock_us, point.processor_us) for point in points) * 1.1

    def x(log_gib: float) -> float:
        return LEFT + log_gib / across * (WIDTH - LEFT - RIGHT)

    def y(cost_us: float) -> float:
        return HEIGHT - BOTTOM - cost_us / up * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">Cost of a record of 1 KiB: append, route, index</text>',
    ]
    for step in range(6):
        cost_us = up * step / 5
        parts.append(f'<path d="M{LEFT} {y(cost_us):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(cost_us) + 4:.1f}" text-anchor="end">{cost_us:.1f}</text>')
        parts.append(
            f'<text x="{x(across * step / 5):.1f}" y="{HEIGHT - 24}" text-anchor="middle">{across * step / 5:.1f}</text>'
        )
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">GiB of log</text>')
    for number, (name, field) in enumerate((("us elapsed", 1), ("us of processor time", 2))):
        line = " ".join(f"{x(point.log_gib):.1f},{y(point[field]):.1f}" for point in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[number]}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + number * 160}" y="36" fill="{COLOURS[number]}">{name}</text>')
    return "\n".join((*parts, "</svg>", ""))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, write the plot and the figures, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench curve", description="Plot the cost of a record while the log grows.")
    parser.add_argument("--gib", type=float, default=20, help="Final size of the log in GiB (%(default)s).")
    parser.add_argument("--part-mib", type=int, default=512, help="MiB of log for one point of the curve (%(default)s).")
    parser.add_argument("--dir", type=Path, help="Directory for data, on a disk and not in tmpfs (a temporary one).")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="Directory for append-curve.svg and .csv (%(default)s).")
    options = parser.parse_args(arguments)
    if options.part_mib < 1 or options.gib * GIB < options.part_mib * MIB:
        parser.error("--part-mib must be at least 1, and --gib at least one part.")
    console = Console(stderr=True)
    console.print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f} before the run")

    def tell(point: Point) -> None:
        console.print(
            f"{point.log_gib:.1f} GiB: {point.clock_us:.2f} us elapsed, {point.processor_us:.2f} us of processor",
            highlight=False,
        )

    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.dir) as directory:
        points = uvloop.run(append(Path(directory), int(options.gib * GIB), options.part_mib * MIB, tell))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "append-curve.svg").write_text(svg_of(points))
    with (options.out / "append-curve.csv").open("w", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("log_gib", "clock_us", "processor_us"))
        rows.writerows([f"{figure:.3f}" for figure in point] for point in points)
    by_clock, by_processor = growth(points)
    console.print(f"Last quarter divided by first: {by_clock:.2f} elapsed, {by_processor:.2f} of processor time")
    return 0
