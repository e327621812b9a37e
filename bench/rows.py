"""Rows of a benchmark: what is measured together, the goals of its figures, and the table of goals beside what is reached.

Every benchmark with goals is a dict of rows, and `run` is its command: it measures each row several times and prints medians. A
row is a generator that yields the figures of one run at a time and keeps meanwhile what its runs share, such as brokers. One
that takes long yields once.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from bench.peers import OURS, NotInstalled, Peer, penstock
from bench.profile import profiled, told

RUNS = 5
TABLE_WIDTH_MIN = 150

Figures = dict[str, float]
"""What one run came to, by name. `FIGURE@BROKER` is what stands in the column of that broker beside the figure."""


class RowFailed(Exception):
    """Raised when a row can't be measured; the others are. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A line of the table: a figure, and what it should be. `goal` is None where only the figure is told."""

    figure: str
    title: str
    unit: str
    goal: float | None = None
    is_most: bool = False
    """The goal is the most that the figure may be; else the least."""

    def is_met(self, reached: float) -> bool:
        return self.goal is None or (reached <= self.goal if self.is_most else reached >= self.goal)


@dataclass(frozen=True, slots=True)
class Setting:
    """What a row may depend on.

    Parameters:
        directory: where nodes store what they store.
        options: the command line.
        tell: shows a line at once, such as that something is left out.
    """

    directory: Path
    options: argparse.Namespace
    tell: Callable[[str], None]

    def count(self, full: int, quick: int) -> int:
        """Return how many there shall be: `quick` where the figures don't matter, only that the row works."""
        return quick if self.options.quick else full

    def fresh(self) -> Path:
        """Return an empty directory."""
        return Path(tempfile.mkdtemp(dir=self.directory))

    @contextmanager
    def node(self, data_dir: Path | None = None) -> Iterator[Peer]:
        """Run a node, on a directory of its own where none is given. Where a profile is asked for, say where its time went.

        Raises:
            PeerFailed
        """
        with penstock(data_dir or self.fresh()) as node:
            if not self.options.profile:
                yield node
                return
            profile = self.directory / f"{node.pid}.profile"
            try:
                with profiled(node.pid, profile):
                    yield node
            finally:  # a row is closed when it has run often enough
                for line in told(profile):
                    self.tell(line)


Measure = Callable[[Setting], Generator[Figures]]


@dataclass(frozen=True, slots=True)
class Row:
    """What is measured together. Measured as often as runs are asked for, or as `measure` yields, whichever is less."""

    measure: Measure
    goals: tuple[Goal, ...]


Found = dict[str, list[float]]
"""What each run gave, by figure."""


def measure_all(
    rows: Mapping[str, Row], setting: Setting, found: Found, failures: tuple[type[Exception], ...] = ()
) -> list[str]:
    """Measure rows one after the other, into `found`; return what failed. A row that fails doesn't end the others."""
    failed: list[str] = []
    caught: tuple[type[Exception], ...] = (RowFailed, *failures)
    for name, row in rows.items():
        setting.tell(f"{name} ...")
        try:
            with closing(row.measure(setting)) as runs:
                for figures in islice(runs, setting.options.runs):
                    for figure, reached in figures.items():
                        found.setdefault(figure, []).append(reached)
                    setting.tell("  " + ", ".join(f"{figure} {text_of(reached)}" for figure, reached in figures.items()))
        except caught as error:
            failed.append(f"{name}: {error}")
            setting.tell(failed[-1])
    return failed


def beside(figure: str, reached: Mapping[str, float], rival: str = "") -> Figures:
    """Return each broker's value for its column; with a `rival` that was measured too, the figure is the ratio to that one."""
    figures = {f"{figure}@{name}": value for name, value in reached.items()}
    if not rival:
        figures[figure] = reached[OURS]
    elif reached.get(rival):
        figures[figure] = reached[OURS] / reached[rival]
    return figures


def table_of(title: str, found: Found, rows: Mapping[str, Row]) -> Table:
    """Return the table: what, each broker where there are several, goal, reached, met."""
    brokers = list(dict.fromkeys(figure.partition("@")[2] for figure in found if "@" in figure))
    table = Table(title)
    for name in (*brokers, "goal", "reached", "lowest to highest"):
        table.add_column(name, justify="right")
    table.add_column("met")
    for goal in (goal for row in rows.values() for goal in row.goals):
        values = (found.get(f"{goal.figure}@{name}") for name in brokers)
        table.add_row(goal.title, *(text_of(median(runs)) if runs else "" for runs in values), *_reached(goal, found))
    return table


def _reached(goal: Goal, found: Found) -> tuple[str, str, str, str]:
    """Return the last cells of a line: goal, median, extremes, whether the goal is met."""
    bound = "" if goal.goal is None else f"{'<=' if goal.is_most else '>='} {text_of(goal.goal)} {goal.unit}".rstrip()
    runs = found.get(goal.figure)
    if not runs:
        return bound, "", "", ""  # not measured, or nothing was there to compare it with
    spread = f"{text_of(min(runs))} to {text_of(max(runs))}" if len(runs) > 1 else ""
    met = "" if goal.goal is None else "yes" if goal.is_met(median(runs)) else "NO"
    return bound, f"{text_of(median(runs))} {goal.unit}".rstrip(), spread, met


def text_of(figure: float) -> str:
    """Return a figure as the tables show it: the larger, the fewer decimals."""
    if abs(figure) >= 100 or figure == int(figure):
        return f"{figure:,.0f}"
    return f"{figure:,.1f}" if abs(figure) >= 10 else f"{figure:,.2f}"


# --- the command ------------------------------------------------------------------------------------------------------


def parser_of(name: str, description: str, rows: Mapping[str, Row], *, runs: int = RUNS) -> argparse.ArgumentParser:
    """Return a parser of the options that all benchmarks with rows have. More may be added before `run`."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    parser.add_argument("--only", metavar="ROW,...", help=f"of {', '.join(rows)}; all without it")
    parser.add_argument("--runs", type=int, default=runs, help="runs of each row that don't take minutes (%(default)s)")
    parser.add_argument(
        "--quick", action="store_true", help="one run with small counts: it shows that all works, and nothing else"
    )
    parser.add_argument("--profile", action="store_true", help="say where the node's time goes, by function (needs py-spy)")
    parser.add_argument("--dir", type=Path, help="where nodes store; a disk, not tmpfs (a temporary directory)")
    parser.add_argument("--json", metavar="FILE", help="write all figures of all runs there; - is standard output")
    return parser


def add_beside(parser: argparse.ArgumentParser, brokers: Iterable[str]) -> None:
    """Let the command line name what is measured besides Penstock."""
    all_of_them = ",".join(brokers)
    parser.add_argument(
        "--beside",
        default=all_of_them,
        metavar="BROKER,...",
        help="other brokers to measure, where they are installed; or none (%(default)s)",
    )


def find_rivals(setting: Setting, programs: Mapping[str, Callable[[], object]]) -> None:
    """Set `options.rivals` to those asked for that are there; say of the others what is missing.

    Args:
        programs: by broker, what raises NotInstalled where it is not there.
    """
    asked_for = [name for name in setting.options.beside.split(",") if name not in ("", "none")]
    setting.options.rivals = []
    for name in asked_for:
        if name not in programs:
            raise RowFailed(f"no broker is called {name}: there are {', '.join(programs)}")
        try:
            programs[name]()
        except NotInstalled as error:
            setting.tell(f"{name} is left out: {error}")
        else:
            setting.options.rivals.append(name)


def run(
    parser: argparse.ArgumentParser,
    rows: Mapping[str, Row],
    arguments: list[str] | None,
    *,
    failures: tuple[type[Exception], ...] = (),
    prepare: Callable[[Setting], None] = lambda setting: None,
    table_of: Callable[[str, Found, Mapping[str, Row]], Table] = table_of,
) -> int:
    """Measure the rows that the command line names, print the table, and return the exit status: 1 when a row failed.

    A goal that is missed is no failure: it depends on the machine.

    Args:
        failures: errors that end a row, and not the benchmark.
        prepare: called once before the first row.
        table_of: returns the table to print, given its title, the figures and the rows that were chosen.
    """
    options = parser.parse_args(arguments)
    chosen = list(rows) if options.only is None else options.only.split(",")
    unknown = sorted(set(chosen) - rows.keys())
    if unknown or options.runs < 1:
        parser.error(f"no row is called {', '.join(unknown)}" if unknown else "--runs must be at least 1")
    if options.quick:
        options.runs = 1
    chosen_rows = {name: row for name, row in rows.items() if name in chosen}
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.dir) as directory:
        about = machine(Path(directory))
        console.print("  ".join(f"{name} {value}" for name, value in about.items()))
        if about["filesystem"] == "tmpfs":
            console.print("The data directory is in memory: nothing is really synced. Name another with --dir.")
        setting = Setting(Path(directory), options, console.print)
        prepare(setting)
        found: Found = {}
        failed = ["interrupted"]
        # Asked to end, it ends the brokers, and shows what it has: that took minutes.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with suppress(KeyboardInterrupt):
            failed = measure_all(chosen_rows, setting, found, failures)
    if options.json:
        text = orjson.dumps({"machine": about, "figures": found, "failed": failed}, option=orjson.OPT_INDENT_2) + b"\n"
        if options.json == "-":
            sys.stdout.write(text.decode())
        else:
            Path(options.json).write_bytes(text)
    if options.json != "-":
        shown = Console()
        shown.width = max(shown.width, TABLE_WIDTH_MIN)
        title = parser.prog.rpartition(" ")[2]
        shown.print(table_of(f"{title}, quick: no figures" if options.quick else title, found, chosen_rows))
    return 1 if failed else 0


def machine(directory: Path) -> dict[str, Any]:
    """Return what a figure depends on besides the brokers: processors, system, and where the log is written."""
    return {
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
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
