"""MQTT in and out: the same load on Millrace and on mosquitto, in turn, on one machine.

For each row of the table both brokers are started anew and get a tenth of the load to warm up. Then they take turns (A B A
B ...), so that whatever else the machine does falls on both; the one that is not measured is idle. A figure is the median of
the runs; the pairwise ratios, of each run with its neighbour, show how far to trust it.

The two don't promise the same. Millrace writes to its log, and acknowledges after fdatasync. mosquitto keeps messages in
memory: `persistence false`, its default, and without bounds on what it queues (see `peers.MOSQUITTO_CONFIG`).
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from bench.load import Load, LoadFailed, LoadUnavailable, Result, compile_load, run_load
from bench.peers import NotInstalled, Peer, PeerFailed, millrace, mosquitto, mosquitto_path

RUNS = 5
WARM_UP_SHARE = 10


@dataclass(frozen=True, slots=True)
class Row:
    """A row of the table: a load, and which of its rates is the figure."""

    key: str
    title: str
    load: Load
    is_delivered: bool = False
    """The figure is messages delivered per second; else published (QoS > 0: acknowledged) per second."""

    def figure(self, result: Result) -> float:
        return result.deliver_per_s if self.is_delivered else result.publish_per_s


# With QoS 0 what a client has written may still lie in a socket's buffer: there only delivery shows what a broker did.
ROWS = (
    Row("one-to-one", "1 publisher → 1 subscriber, QoS 0", Load(subs=1, msgs=300_000), is_delivered=True),
    Row("window", "1 publisher, QoS 1, window 1,000", Load(qos=1, msgs=200_000)),
    Row("hundred", "100 publishers, QoS 1, window 20", Load(pubs=100, qos=1, window=20, msgs=200_000)),
    Row("hundred-single", "100 publishers, QoS 1, window 1", Load(pubs=100, qos=1, window=1, msgs=100_000)),
    Row("many-single", "500 publishers, QoS 1, window 1", Load(pubs=500, qos=1, window=1, msgs=100_000)),
    Row(
        "devices",
        "1,000 publishers, one message per write → 1 subscriber, QoS 0",
        Load(pubs=1_000, subs=1, chunk=1, msgs=200_000),
        is_delivered=True,
    ),
    Row("fan-out", "1 publisher, QoS 1 → 100 subscribers, QoS 0", Load(subs=100, qos=1, msgs=10_000), is_delivered=True),
)
DEFAULT_ROW = "window"

Start = Callable[[], AbstractContextManager[Peer]]


@dataclass(frozen=True, slots=True)
class Measured:
    """What one row came to: the results of each broker by name, in order of the runs."""

    row: Row
    results: dict[str, list[Result]]

    def figures(self, name: str) -> list[float]:
        return [self.row.figure(result) for result in self.results[name]]

    def median(self, name: str) -> float:
        return median(self.figures(name))

    def ratios(self) -> list[float]:
        """Return Millrace's figure over mosquitto's, run by run; nothing unless both were measured."""
        if len(self.results) < 2:
            return []
        return [ours / theirs for ours, theirs in zip(self.figures("Millrace"), self.figures("mosquitto"), strict=True)]

    def ratio_of_medians(self) -> float | None:
        return self.median("Millrace") / self.median("mosquitto") if len(self.results) == 2 else None

    def missing(self, name: str) -> int:
        return sum(result.missing(self.row.load) for result in self.results[name])

    def as_json(self) -> dict[str, Any]:
        """Return all of it, for a machine."""
        return {
            "row": self.row.key,
            "title": self.row.title,
            "unit": "delivered/s" if self.row.is_delivered else "published/s",
            "load": asdict(self.row.load),
            "medians": {name: self.median(name) for name in self.results},
            "figures": {name: self.figures(name) for name in self.results},
            "missing": {name: self.missing(name) for name in self.results},
            "ratio_of_medians": self.ratio_of_medians(),
            "ratios": self.ratios(),
            "results": {name: [asdict(result) for result in results] for name, results in self.results.items()},
        }


def measure(row: Row, starts: Sequence[Start], runs: int) -> Measured:
    """Start the brokers, put the load of `row` on each in turn, `runs` times, and stop them.

    Raises:
        NotInstalled, PeerFailed, LoadUnavailable, LoadFailed
    """
    with ExitStack() as stack:
        peers = [stack.enter_context(start()) for start in starts]
        warm_up = replace(row.load, msgs=max(row.load.msgs // WARM_UP_SHARE, row.load.pubs))
        for peer in peers:
            run_load(peer.host, peer.port, warm_up)
        results: dict[str, list[Result]] = {peer.name: [] for peer in peers}
        for _ in range(runs):
            for peer in peers:
                results[peer.name].append(run_load(peer.host, peer.port, row.load))
    return Measured(row, results)


# --- what is shown ----------------------------------------------------------------------------------------------------


def table_of(measurements: Sequence[Measured]) -> Table:
    """Return the table of at least one measurement: for each broker the median and its extremes, then the ratios."""
    table = Table(title="MQTT, messages per second: median (lowest to highest)", title_justify="left")
    table.add_column("load")
    names = list(measurements[0].results)
    for name in names:
        table.add_column(name, justify="right")
    if len(names) == 2:
        table.add_column("ratio of medians", justify="right")
        table.add_column("run by run", justify="right")
    for measured in measurements:
        cells = [measured.row.title, *(_cell(measured, name) for name in names)]
        ratio = measured.ratio_of_medians()
        if ratio is not None:
            cells += [f"{ratio:.2f}", " ".join(f"{each:.2f}" for each in measured.ratios())]
        table.add_row(*cells)
    return table


def _cell(measured: Measured, name: str) -> str:
    figures = measured.figures(name)
    missing = measured.missing(name)
    spread = f"{measured.median(name):,.0f} ({min(figures):,.0f} to {max(figures):,.0f})"
    return f"{spread}; {missing:,} missing" if missing else spread


def machine(directory: Path) -> dict[str, Any]:
    """Return what a figure depends on besides the brokers: processors, system, and where the log is written."""
    return {
        "cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "data_dir": str(directory),
        "filesystem": _filesystem_of(directory),
    }


def _filesystem_of(directory: Path) -> str:
    """Return the type of the file system that holds `directory`: "ext4", or "tmpfs", which syncs nothing."""
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [(len(at), kind) for _, at, kind, *_ in mounts if directory.resolve().is_relative_to(at)]
    return max(holding)[1] if holding else "unknown"


# --- the command ------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line and return the exit status."""
    options = _parse(arguments)
    console = Console(stderr=options.json == "-")
    measurements: list[Measured] = []
    status = 0
    with tempfile.TemporaryDirectory(prefix="millrace-bench-", dir=options.dir) as directory:
        about = machine(Path(directory))
        console.print("  ".join(f"{name} {value}" for name, value in about.items()), highlight=False, soft_wrap=True)
        if about["filesystem"] == "tmpfs":
            console.print("The data directory is in memory: nothing is really synced. Name another with --dir.")
        try:
            compile_load()
            starts = _starts(options, Path(directory), console)
            for row in options.rows:
                console.print(f"{row.title}: {options.runs} runs ...", highlight=False)
                measurements.append(measure(row, starts, options.runs))
        except (NotInstalled, PeerFailed, LoadUnavailable, LoadFailed) as error:
            # The rows that were measured are shown all the same: they took minutes.
            console.print(f"bench: {error}", markup=False, highlight=False, soft_wrap=True)
            status = 1
    if measurements:
        console.print(table_of(measurements))
    if options.json:
        _write_json(options.json, {"machine": about, "rows": [each.as_json() for each in measurements]})
    return status


def _write_json(to: str, fields: dict[str, Any]) -> None:
    text = orjson.dumps(fields, option=orjson.OPT_INDENT_2) + b"\n"
    if to == "-":
        sys.stdout.write(text.decode())
    else:
        Path(to).write_bytes(text)


def _starts(options: argparse.Namespace, directory: Path, console: Console) -> list[Start]:
    """Return how to start each broker that is to be measured. A missing mosquitto is said and left out, unless it was named."""
    starts: list[Start] = []
    if options.only != "mosquitto":
        starts.append(lambda: millrace(Path(tempfile.mkdtemp(dir=directory))))
    if options.only != "millrace":
        try:
            mosquitto_path()
            starts.append(mosquitto)
        except NotInstalled as error:
            if options.only:
                raise
            console.print(f"{error}: skipped.")
    return starts


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench ingest", description="MQTT rates of Millrace beside mosquitto.")
    keys = ", ".join(row.key for row in ROWS)
    parser.add_argument("--rows", default=DEFAULT_ROW, help=f"all, or some of {keys}, with commas (%(default)s)")
    parser.add_argument("--runs", type=int, default=RUNS, help="measured runs of each broker per row (%(default)s)")
    parser.add_argument("--only", choices=("millrace", "mosquitto"), help="measure this broker alone")
    parser.add_argument("--dir", type=Path, default=Path.cwd(), help="where the node's data goes while it runs (here)")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - is standard output")
    options = parser.parse_args(arguments)
    chosen = [row.key for row in ROWS] if options.rows == "all" else options.rows.split(",")
    unknown = sorted(set(chosen) - {row.key for row in ROWS})
    if unknown or options.runs < 1:
        parser.error(f"no row is called {', '.join(unknown)}; there are {keys}" if unknown else "--runs must be at least 1")
    options.rows = [row for row in ROWS if row.key in chosen]
    return options


if __name__ == "__main__":
    sys.exit(main())
