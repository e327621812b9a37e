"""`python -m bench soak`: run a node under everything with a small retention, and show that nothing grows.

The node gets the load of `bench.soakload`. Every few seconds the benchmark takes a sample: disk, index, memory, descriptors,
and less often the rows of the index by key space, which it counts in the files of the index beside the running node. It writes
all samples to `soak.csv` and a plot of them to `soak.svg`.

Caches and buffers fill first, so only the second half counts. There the trend of a figure is the median of the slopes between
its samples, which a saw-tooth or a single peak doesn't move. The exit status is 1 if a figure would grow by more than its bound
within as long as the run lasts, or an hour if that is less, or if the load could not do its work. So a short run sees only what
grows fast: what fills within half an hour looks like growth in a run of ten minutes, and is not.
"""

from __future__ import annotations

import argparse
import csv
import os
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import orjson
from rich.console import Console

from bench.peers import BrokerProcess, memory_of, penstock
from bench.soakplot import Panel, svg_of
from penstock.cli.inspect_index import IndexMissing, flushed_index
from penstock.store.errors import IndexDamaged
from penstock.store.index.index import KeySpace
from penstock.store.options import KIB, MIB

SAMPLE_S = 5.0
ROWS_EVERY = 6
"""Samples after which the rows of the index are counted again."""

CONFIG = """
[store]
segment_bytes = {segment_bytes}
retention = "{retention_ms}ms"
reserve_bytes = 0

[mqtt]
session_expiry_max = "1h"

[tables]
enabled = "off"
"""

END_S_MAX = 60
"""Seconds within which the load must end."""

FAILURES_MAX = 0.02
"""Share of the load's rounds that may fail. Clients that the load itself disconnects account for a few."""

Sample = dict[str, float]


@dataclass(frozen=True, slots=True)
class Bound:
    """How much a figure may grow.

    Parameters:
        share: growth, as a share of the median of the second half.
        least: growth that is never too much, in the unit of the figure.
    """

    share: float
    least: float


BOUNDS: dict[str, Bound] = {
    "log_bytes": Bound(0.1, 16 * MIB),
    "index_files_bytes": Bound(0.1, 16 * MIB),
    "snapshots_bytes": Bound(0.1, 16 * MIB),
    "rows": Bound(0.1, 20_000),
    "other_bytes": Bound(0.1, 16 * MIB),
    "block_cache_bytes": Bound(0.1, 16 * MIB),
    "descriptors": Bound(0.05, 10),
}
"""Bounds of the figures that must not grow. `other_bytes` is the anonymous memory without the parts that have limits of their
own: the block cache and the memtables of the index, and the objects of `HELD`."""

HELD = {"routes": 600, "checkpoints_open": 700, "checkpoints_closed": 335, "transactions_ended": 141, "timers": 141}
"""About the bytes of each object that the node counts in its state, in batches as small as those of the load."""


# --- samples ----------------------------------------------------------------------------------------------------------


def sample_of(node: BrokerProcess, data_dir: Path) -> Sample:
    """Return the figures of a node at the moment, except the rows of the index."""
    with urllib.request.urlopen(f"http://{node.addresses['admin']}/api/v1/state", timeout=30) as answer:
        state = orjson.loads(answer.read())
    memory, index = memory_of(node.pid), state["index"]
    held = sum(HELD[name] * count for name, count in state["in_memory"].items())
    other = memory.anonymous * KIB - index["block_cache"] - index["memtables"] - held
    return {
        "log_bytes": state["log"]["end"] - state["log"]["start"],
        "commitlog_bytes": size_of(data_dir / "commitlog"),
        "index_files_bytes": size_of(data_dir / "index"),
        "snapshots_bytes": size_of(data_dir / "snapshots"),
        "resident_bytes": memory.resident * KIB,
        "anonymous_bytes": memory.anonymous * KIB,
        "held_bytes": held,
        "other_bytes": other,
        "block_cache_bytes": index["block_cache"],
        "block_cache_max_bytes": index["block_cache_max"],
        "memtables_bytes": index["memtables"],
        "tables_bytes": index["tables"],
        "rows_estimate": index["rows"],
        **{f"held_{name}": count for name, count in state["in_memory"].items()},
        "descriptors": len(os.listdir(f"/proc/{node.pid}/fd")),
        "threads": len(os.listdir(f"/proc/{node.pid}/task")),
        "queues": state["queues"],
        "timers": state["timers_pending"],
        "connections": state["connections"],
        "stored_bytes": state["log"]["end"],
    }


def size_of(directory: Path) -> int:
    """Return the bytes that the files of a directory take on disk."""
    total = 0
    for path in directory.glob("*"):
        try:
            total += path.stat().st_blocks * 512
        except FileNotFoundError:  # deleted meanwhile
            continue
    return total


def rows_of(data_dir: Path) -> dict[str, int] | None:
    """Return the number of rows of each key space in the files of the index; None while RocksDB replaces one of them."""
    counts: Counter[str] = Counter()
    names = {bytes(space): space.name.lower() for space in KeySpace}
    try:
        with flushed_index(data_dir) as index:
            for key, _ in index.rows(b""):
                counts[names.get(key[:1], "unknown")] += 1
    except (IndexMissing, IndexDamaged, OSError):
        return None
    return {name: counts[name] for name in sorted({*names.values(), *counts})}


# --- what is judged ---------------------------------------------------------------------------------------------------


def growth_per_hour(points: Sequence[tuple[float, float]]) -> float:
    """Return how much a figure grows in an hour: the median of the slopes between points that are far apart (Theil and Sen)."""
    far = (points[-1][0] - points[0][0]) / 4
    slopes = [
        (later - earlier) / (later_s - earlier_s)
        for at, (earlier_s, earlier) in enumerate(points)
        for later_s, later in points[at + 1 :]
        if later_s - earlier_s >= far > 0
    ]
    return median(slopes) * 3600 if slopes else 0.0


def judged(samples: Sequence[Sample]) -> Iterator[tuple[str, float, float, float, bool]]:
    """Yield name, median, growth, bound, and whether that is kept, of each figure in the second half.

    The growth is that within as long as the samples took, or an hour if that is less.
    """
    hours = min(samples[-1]["seconds"] / 3600, 1.0)
    half = samples[len(samples) // 2 :]
    for name, bound in BOUNDS.items():
        points = [(sample["seconds"], sample[name]) for sample in half if name in sample]
        if len(points) < 2:
            continue
        middle = median(value for _, value in points)
        most = max(bound.share * middle, bound.least)
        growth = growth_per_hour(points) * hours
        yield name, middle, growth, most, growth <= most


PANELS = (
    Panel("Disk", "MiB", MIB, ("log_bytes", "index_files_bytes", "snapshots_bytes")),
    Panel("Memory", "MiB", MIB, ("resident_bytes", "anonymous_bytes", "other_bytes", "block_cache_bytes", "held_bytes")),
    Panel("Rows of the index", "thousand", 1000, ("rows", "rows_entries", "rows_pinned", "rows_copy", "rows_session")),
    Panel("In memory", "thousand", 1000, tuple(f"held_{name}" for name in HELD)),
    Panel("Descriptors and threads", "", 1, ("descriptors", "threads", "connections")),
)


# --- running ----------------------------------------------------------------------------------------------------------


@contextmanager
def load_on(node: BrokerProcess, log: Path) -> Iterator[Callable[[], dict[str, dict[str, int]]]]:
    """Put the load on a node. Yield what ends it and returns its rounds and failures."""
    words = [sys.executable, "-m", "bench.soakload", "--mqtt", node.addresses["mqtt"], "--pop", node.addresses["pop"]]
    with log.open("wb") as errors, subprocess.Popen(words, stdout=subprocess.PIPE, stderr=errors) as process:

        def ended() -> dict[str, dict[str, int]]:
            process.send_signal(signal.SIGTERM)
            try:
                out, _ = process.communicate(timeout=END_S_MAX)
            except subprocess.TimeoutExpired:
                return {}  # which counts as a failure
            found: dict[str, dict[str, int]] = orjson.loads(out or b"{}")
            return found

        try:
            yield ended
        finally:
            process.kill()


def run(
    data_dir: Path, config: Path, out: Path, seconds: float, tell: Callable[[str], None]
) -> tuple[list[Sample], dict[str, dict[str, int]]]:
    """Run the load on a node, and return all samples, and the rounds and failures of the load."""
    samples: list[Sample] = []
    with penstock(data_dir, "--config", str(config)) as node, load_on(node, out / "soak-load.log") as ended:
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            sample = {"seconds": round(passed, 1), **sample_of(node, data_dir)}
            if len(samples) % ROWS_EVERY == 0 and (rows := rows_of(data_dir)) is not None:
                sample |= {"rows": sum(rows.values()), **{f"rows_{name}": count for name, count in rows.items()}}
            samples.append(sample)
            if len(samples) % ROWS_EVERY == 1:
                tell(line_of(sample))
            time.sleep(max(began + len(samples) * SAMPLE_S - time.monotonic(), 0))
        return samples, ended()


def line_of(sample: Sample) -> str:
    """Return the main figures of a sample for the screen."""
    log, index = sample["log_bytes"] / MIB, sample["index_files_bytes"] / MIB
    resident, other = sample["resident_bytes"] / MIB, sample["other_bytes"] / MIB
    return (
        f"{sample['seconds'] / 60:.1f} min: log {log:.0f} MiB, index {index:.0f} MiB, {sample.get('rows', 0):,.0f} rows, "
        f"memory {resident:.0f} MiB, without limited parts {other:.0f} MiB, {sample['descriptors']:.0f} descriptors"
    )


def write(samples: Sequence[Sample], out: Path) -> None:
    """Write the samples as CSV, and their plot."""
    names = list(dict.fromkeys(name for sample in samples for name in sample))
    with (out / "soak.csv").open("w", newline="") as file:
        rows = csv.DictWriter(file, names, lineterminator="\n")
        rows.writeheader()
        rows.writerows(samples)
    (out / "soak.svg").write_text(svg_of(samples, PANELS))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark, write the samples and the plot, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m bench soak", description="Show that nothing grows.")
    parser.add_argument("--minutes", type=float, default=10, help="How long the load runs (%(default)s).")
    parser.add_argument("--retention-s", type=float, default=60, help="Seconds for which the node keeps records (%(default)s).")
    parser.add_argument("--segment-mib", type=int, default=8, help="MiB of a segment of the log (%(default)s).")
    parser.add_argument("--dir", type=Path, help="Directory for data (a temporary one).")
    parser.add_argument("--out", type=Path, default=Path(), help="Directory for soak.csv, soak.svg and the load's log (.).")
    options = parser.parse_args(arguments)
    if options.minutes <= 0 or options.retention_s < 1 or options.segment_mib < 1:
        parser.error("--minutes, --retention-s and --segment-mib must be positive.")
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="penstock-soak-", dir=options.dir) as directory:
        config, data_dir = Path(directory, "penstock.toml"), Path(directory, "data")
        config.write_text(CONFIG.format(segment_bytes=options.segment_mib * MIB, retention_ms=int(options.retention_s * 1000)))
        samples, load = run(
            data_dir, config, options.out, options.minutes * 60, lambda line: console.print(line, highlight=False)
        )
    write(samples, options.out)
    return 0 if told(samples, load, console) else 1


def told(samples: Sequence[Sample], load: dict[str, dict[str, int]], console: Console) -> bool:
    """Print the figures of the second half, and what the load did. Return whether all is well."""
    is_well = True
    for name, middle, growth, most, is_bounded in judged(samples):
        sign = "ok" if is_bounded else "GROWS"
        console.print(f"{sign:6} {name}: {middle:,.0f}, growth {growth:+,.0f} (bound {most:,.0f})", highlight=False)
        is_well = is_well and is_bounded
    rounds, failures = load.get("rounds", {}), load.get("failures", {})
    for name in sorted({*rounds, *failures}):
        done, failed = rounds.get(name, 0), failures.get(name, 0)
        is_done = name == "for_ever" or (done > 0 and failed <= max(FAILURES_MAX * done, 2))
        console.print(f"{'ok' if is_done else 'FAILS':6} load {name}: {done:,} rounds, {failed:,} failures", highlight=False)
        is_well = is_well and is_done
    return is_well and bool(rounds)
