"""Rows of a benchmark: figures that are measured together, their goals, and the table of goals and results.

A benchmark is a dict of rows, and `run` is its command: it measures each row several times and prints medians. A row is a
generator that yields the figures of one run at a time. Between runs it keeps what they share, such as brokers. A row that takes
minutes yields only once.
"""

from __future__ import annotations

import argparse
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from bench.peers import OURS, BrokerProcess, NotInstalled, penstock
from bench.profile import profiled, told
from bench.trees import ROOT

RUNS = 5
TABLE_WIDTH_MIN = 150

Figures = dict[str, float]
"""Results of one run, by name. `FIGURE@BROKER` is the value of a figure in the column of a broker."""


class RowFailed(Exception):
    """Raised when a row can't be measured. The other rows are measured all the same. The message says what is wrong."""


@dataclass(frozen=True, slots=True)
class Goal:
    """A line of the table: a figure and its goal. `goal` is None for a figure without a goal."""

    figure: str
    title: str
    unit: str
    goal: float | None = None
    is_most: bool = False
    """Whether the goal is the maximum of the figure. Otherwise it is the minimum."""

    def is_met(self, reached: float) -> bool:
        return self.goal is None or (reached <= self.goal if self.is_most else reached >= self.goal)


@dataclass(frozen=True, slots=True)
class Setting:
    """The setting in which rows are measured.

    Parameters:
        directory: directory for the data of nodes.
        options: the parsed command line.
        tell: prints a line at once, such as a broker that is skipped.
    """

    directory: Path
    options: argparse.Namespace
    tell: Callable[[str], None]
    _shared: dict[str, BrokerProcess] = field(default_factory=dict)
    _until_the_end: ExitStack = field(default_factory=ExitStack)

    def count(self, full: int, quick: int) -> int:
        """Return `full`, or `quick` if the run only has to show that the row works."""
        return quick if self.options.quick else full

    def fresh(self) -> Path:
        """Return an empty directory."""
        return Path(tempfile.mkdtemp(dir=self.directory))

    @contextmanager
    def broker(self, name: str, start: Callable[[], AbstractContextManager[BrokerProcess]]) -> Iterator[BrokerProcess]:
        """Run a broker for a row. In a quick run, rows share what has the same name, because most of their time is starts.

        Args:
            name: of brokers that are alike.
            start: starts the broker. The end of its context stops it.

        Raises:
            BrokerFailed
        """
        if not self.options.quick:
            with start() as broker:
                yield broker
            return
        if name not in self._shared:
            self._shared[name] = self._until_the_end.enter_context(start())
        yield self._shared[name]

    def close(self) -> None:
        """Stop the brokers that rows have shared.

        Raises:
            BrokerFailed
        """
        self._until_the_end.close()

    def node(self, data_dir: Path | None = None) -> AbstractContextManager[BrokerProcess]:
        """Run a node on `data_dir`, or on a new directory. With `--profile`, print where its time went.

        Raises:
            BrokerFailed
        """
        return self._node(data_dir) if data_dir is not None else self.broker(OURS, lambda: self._node(self.fresh()))

    @contextmanager
    def _node(self, data_dir: Path) -> Iterator[BrokerProcess]:
        with penstock(data_dir) as node:
            if not self.options.profile:
                yield node
                return
            profile = self.directory / f"{node.pid}.profile"
            try:
                with profiled(node.pid, profile):
                    yield node
            finally:  # rows are closed after their last run
                for line in told(profile):
                    self.tell(line)


Measure = Callable[[Setting], Generator[Figures]]


@dataclass(frozen=True, slots=True)
class Row:
    """Figures that are measured together, in as many runs as `--runs` says, or fewer if `measure` ends before."""

    measure: Measure
    goals: tuple[Goal, ...]


Found = dict[str, list[float]]
"""Results of all runs, by figure."""


def measure_all(
    rows: Mapping[str, Row], setting: Setting, found: Found, failures: tuple[type[Exception], ...] = ()
) -> list[str]:
    """Measure rows one after the other and add the results to `found`. Return the failures, which don't stop other rows."""
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
    """Return each broker's value for its column, and the figure: our value, or its ratio to a `rival` that was measured."""
    figures = {f"{figure}@{name}": value for name, value in reached.items()}
    if not rival:
        figures[figure] = reached[OURS]
    elif reached.get(rival):
        figures[figure] = reached[OURS] / reached[rival]
    return figures


def table_of(title: str, found: Found, rows: Mapping[str, Row]) -> Table:
    """Return the table, with the columns title, brokers if there are several, goal, median, extremes, and met."""
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
    """Return the last cells of a line: goal, median, extremes, and whether the goal is met."""
    bound = "" if goal.goal is None else f"{'<=' if goal.is_most else '>='} {text_of(goal.goal)} {goal.unit}".rstrip()
    runs = found.get(goal.figure)
    if not runs:
        return bound, "", "", ""  # the row failed, or no rival is installed
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
    """Return a parser of the options that all benchmarks with rows have. Callers may add more before `run`."""
    parser = argparse.ArgumentParser(prog=f"python -m bench {name}", description=description)
    parser.add_argument("--only", metavar="ROW,...", help=f"Rows to measure, of {', '.join(rows)} (all rows).")
    parser.add_argument("--runs", type=int, default=runs, help="Runs of each row that doesn't take minutes (%(default)s).")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="Make one run with small counts, which only shows that the rows work.",
    )
    parser.add_argument("--profile", action="store_true", help="Print where the node's time goes, by function; needs py-spy.")
    parser.add_argument("--dir", type=Path, help="Directory for data, on a disk and not in tmpfs (a temporary one).")
    parser.add_argument("--json", metavar="FILE", help="Write all figures of all runs to this file; - is standard output.")
    return parser


def add_beside(parser: argparse.ArgumentParser, brokers: Iterable[str]) -> None:
    """Add `--beside`, which names the other brokers to measure."""
    all_of_them = ",".join(brokers)
    parser.add_argument(
        "--beside",
        default=all_of_them,
        metavar="BROKER,...",
        help="Other brokers to measure if they are installed, or none (%(default)s).",
    )


def find_rivals(setting: Setting, programs: Mapping[str, Callable[[], object]]) -> None:
    """Set `options.rivals` to the brokers of `--beside` that are installed, and print which are not.

    Args:
        programs: for each broker, a function that raises NotInstalled if the broker is missing.
    """
    asked_for = [name for name in setting.options.beside.split(",") if name not in ("", "none")]
    setting.options.rivals = []
    for name in asked_for:
        if name not in programs:
            raise RowFailed(f"There is no broker {name}. The brokers are {', '.join(programs)}.")
        try:
            programs[name]()
        except NotInstalled as error:
            setting.tell(f"{name} is skipped: {error}")
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
    """Measure the rows that the command line names, print the table, and return the exit status, which is 1 if a row failed.

    A missed goal is no failure, because results depend on the machine.

    Args:
        parser: parser of the command line, from `parser_of`.
        rows: all rows of the benchmark, by name.
        arguments: the command line; None for that of the process.
        failures: errors that end a row but not the benchmark.
        prepare: called once before the first row.
        table_of: returns the table to print, given its title, the figures and the rows that were chosen.
    """
    options = parser.parse_args(arguments)
    chosen = list(rows) if options.only is None else options.only.split(",")
    unknown = sorted(set(chosen) - rows.keys())
    if unknown or options.runs < 1:
        parser.error(f"There is no row {', '.join(unknown)}." if unknown else "--runs must be at least 1.")
    if options.quick:
        options.runs = 1
    chosen_rows = {name: row for name, row in rows.items() if name in chosen}
    console = Console(stderr=True, highlight=False, soft_wrap=True, markup=False)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-", dir=options.dir) as directory:
        about = machine(Path(directory))
        console.print("  ".join(f"{name} {value}" for name, value in about.items()))
        if about["filesystem"] == "tmpfs":
            console.print("The data directory is in memory, so nothing is synced. Name a directory on a disk with --dir.")
        setting = Setting(Path(directory), options, console.print)
        prepare(setting)
        found: Found = {}
        failed = ["interrupted"]
        # On SIGTERM, stop the brokers and print the results so far, which took minutes.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        with closing(setting), suppress(KeyboardInterrupt):
            failed = measure_all(chosen_rows, setting, found, failures)
    if options.json:
        lines = [
            {"figure": goal.figure, "title": goal.title, "unit": goal.unit}
            for row in chosen_rows.values()
            for goal in row.goals
        ]
        measured = {"machine": about, "lines": lines, "figures": found, "failed": failed}
        text = orjson.dumps(measured, option=orjson.OPT_INDENT_2) + b"\n"
        if options.json == "-":
            sys.stdout.write(text.decode())
        else:
            Path(options.json).write_bytes(text)
    if options.json != "-":
        shown = Console()
        shown.width = max(shown.width, TABLE_WIDTH_MIN)
        title = parser.prog.rpartition(" ")[2]
        shown.print(table_of(f"{title}, quick: figures mean nothing" if options.quick else title, found, chosen_rows))
    return 1 if failed else 0


def machine(directory: Path) -> dict[str, Any]:
    """Return what a benchmark runs on: date and commit, processors, system, and the file system of the log."""
    return {
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "commit": _commit(),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "data_dir": str(directory),
        "filesystem": _filesystem_of(directory),
    }


def _commit() -> str:
    """Return the commit of this checkout, with a `+` where files are changed; empty outside of a checkout."""
    command = ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
    with suppress(OSError):
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def _filesystem_of(directory: Path) -> str:
    """Return the type of the file system of `directory`, such as "ext4", or "tmpfs", which never syncs."""
    mounts = [line.split(" ") for line in Path("/proc/self/mounts").read_text().splitlines()]
    holding = [(len(at), kind) for _, at, kind, *_ in mounts if directory.resolve().is_relative_to(at)]
    return max(holding)[1] if holding else "unknown"
