"""`python -m bench compare --base DIR`: this tree beside another tree of the project, in processor time and rate.

    python -m bench compare --base ../before
    python -m bench compare --base ../before --base-command 'python -m oldname' mqtt --only window,fanout
    python -m bench compare --base ../before store

For each row both trees get the same load in turn (A B, B A, A B, ...), so that whatever else the machine does falls on both.
The table shows, for each tree, the median of the processor time that a message costs (user and system time together) and the
median of the rate. The ratios are those of the medians, and for processor time that of the lowest runs, too. Judge by processor
time: a busy machine changes it much less than the rate. A row is worse where both its ratios are.

For MQTT and POP, the processor time is that of the node and of the process that syncs its log. POP has a second line for each
row, with the processor time of its client processes. `mqload.c` of this tree makes the load over MQTT. Clients of POP, and the
measurements of the store, are jobs of each tree's own `bench.clients` and `bench.store`, so that trees may differ in the names
of packages and services. The names and arguments of these jobs must be the same in both.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from statistics import median

from rich.table import Table

from bench import clients, mqtt, pop
from bench.load import LoadFailed, LoadUnavailable, run_load
from bench.peers import BrokerFailed, BrokerProcess, penstock, processor_s
from bench.rows import Figures, Found, Measure, Row, RowFailed, Setting, parser_of, run, text_of
from bench.trees import THIS, JobFailed, Tree, job_processes

BASE = "base"
RUNS = 7
WORSE_MAX = 3.0
"""Percent by which a message's processor time may be higher than in the base tree before the table says so."""

FAILURES = (BrokerFailed, LoadFailed, LoadUnavailable, JobFailed)
"""Errors that end a row but not the benchmark."""

SENDERS = 64
"""Tasks of the row `send-single`, in all client processes together."""

CLIENT_PROCESSES = 2
"""As many as `bench.clients.PROCESSES`, by which its jobs share out their messages."""
BEGIN_AFTER_S = 0.5


@dataclass(frozen=True, slots=True)
class Cost:
    """Result of one run of a load: messages per second, and the processor time of a message in microseconds."""

    per_s: float
    us: float
    client_us: float | None = None
    """The same of the clients, where these are part of the tree."""


Load = Callable[[], Cost]
"""Puts a row's load on one tree once."""

OpenLoad = Callable[[Setting, Tree], AbstractContextManager[Load]]
"""Prepares a row's load for one tree. The end of the context stops its processes."""


def _in_turn(name: str, open_load: OpenLoad) -> Measure:
    """Return the measurement of a row: a run of both trees to warm up, then runs that alternate which tree begins."""

    def measure(setting: Setting) -> Generator[Figures]:
        trees = (Tree.of(BASE, setting.options.base, setting.options.base_command), THIS)
        with ExitStack() as stack:
            loads = {tree.name: stack.enter_context(open_load(setting, tree)) for tree in trees}
            for load in loads.values():
                load()
            for order in itertools.cycle((tuple(loads), tuple(reversed(loads)))):
                costs = {tree: loads[tree]() for tree in order}
                yield {
                    f"{name}_{what}@{tree}": cost
                    for what in ("us", "per_s", "client_us")
                    for tree in loads
                    if (cost := getattr(costs[tree], what)) is not None
                }

    return measure


def _count(setting: Setting, full: int, quick: int) -> int:
    """Return how many messages a run has: one of so many as `share` says, which is a default of the command."""
    return setting.count(full // setting.options.share, quick)


def _node(setting: Setting, tree: Tree) -> AbstractContextManager[BrokerProcess]:
    return setting.broker(tree.name, partial(_own_node, setting, tree))


@contextmanager
def _own_node(setting: Setting, tree: Tree) -> Iterator[BrokerProcess]:
    data_dir = setting.fresh()
    try:
        with penstock(data_dir, tree=tree) as node:
            yield node
    finally:
        shutil.rmtree(data_dir)


# --- MQTT -------------------------------------------------------------------------------------------------------------


@contextmanager
def _mqtt(name: str, setting: Setting, tree: Tree) -> Iterator[Load]:
    load = mqtt.LOADS[name]
    load = replace(load, msgs=max(_count(setting, load.msgs, load.msgs // mqtt.QUICK_SHARE), load.pubs))
    with _node(setting, tree) as node:

        def put() -> Cost:
            before_s = processor_s(node.pid)
            result = run_load(node.host, node.port, load)
            spent_s = processor_s(node.pid) - before_s
            if missing := result.missing(load):
                raise RowFailed(f"{missing:,} of {result.msgs:,} messages, or their deliveries, are missing in {tree.name}")
            if load.subs:
                return Cost(result.deliver_per_s, spent_s / result.delivered * 1e6)
            return Cost(result.publish_per_s, spent_s / result.msgs * 1e6)

        yield put


# --- POP --------------------------------------------------------------------------------------------------------------


Jobs = Callable[..., Cost]
"""Runs a job of `bench.clients` in all client processes, with the arguments that follow the node's address."""


def _sent(batch: int, jobs: Jobs, address: str, name: str, count: int) -> Cost:
    return jobs("send", name, batch, count, 8)


def _sent_singly(jobs: Jobs, address: str, name: str, count: int) -> Cost:
    return jobs("send_singly", name, count, SENDERS)


def _drained(job: str, batch: int, consumers: int, jobs: Jobs, address: str, name: str, count: int) -> Cost:
    jobs("send", name, pop.BATCH, count, 8)
    return jobs(job, name, f"{name}/#", batch, consumers)


def _worked(batch: int, jobs: Jobs, address: str, name: str, count: int) -> Cost:
    jobs("send", name, pop.BATCH, count, 8)
    return jobs("work", name, f"{name}/#", batch, count)


def _in_order(jobs: Jobs, address: str, name: str, count: int) -> Cost:
    clients.create_in_order(address, name)
    clients.send_in_order(address, name, count, pop.BATCH)
    return jobs("drain_in_order", name, name, pop.BATCH)


@contextmanager
def _pop(count_max: int, work: Callable[[Jobs, str, str, int], Cost], setting: Setting, tree: Tree) -> Iterator[Load]:
    """Run jobs of clients with a new queue each time. `work` returns the cost of the jobs that the row measures."""
    count = _count(setting, count_max, pop.QUICK)
    numbers = itertools.count()
    with _node(setting, tree) as node, job_processes(tree, CLIENT_PROCESSES) as processes:
        address = node.addresses["pop"]

        def clients_s() -> float:
            return sum(processor_s(process.pid) for process in processes)

        def run_jobs(job: str, *arguments: object) -> Cost:
            begin_s = time.monotonic() + BEGIN_AFTER_S
            before_s, clients_before_s = processor_s(node.pid), clients_s()
            for number, process in enumerate(processes):
                process.begin(f"bench.clients.{job}", number, begin_s, address, *arguments)
            spans = [process.result().value for process in processes]
            spent_s, clients_spent_s = processor_s(node.pid) - before_s, clients_s() - clients_before_s
            messages, began_s, ended_s = zip(*spans, strict=True)
            if sum(messages) != count:
                raise RowFailed(f"{count:,} messages were sent, and {sum(messages):,} came out of {tree.name}")
            return Cost(count / (max(ended_s) - min(began_s)), spent_s / count * 1e6, clients_spent_s / count * 1e6)

        def put() -> Cost:
            return work(run_jobs, address, f"queue{next(numbers)}", count)

        yield put


# --- the store --------------------------------------------------------------------------------------------------------


@contextmanager
def _store(job: str, arguments: tuple[int, ...], setting: Setting, tree: Tree) -> Iterator[Load]:
    """Run a job of `bench.store`, each time in a process and a directory of its own. Its first argument is how many records."""
    records, *others = arguments
    records = _count(setting, records, 10_000)

    def put() -> Cost:
        data_dir = setting.fresh()
        try:
            with job_processes(tree, 1) as (process,):
                process.begin(f"bench.store.{job}", data_dir, records, *others)
                result = process.result()
        finally:
            shutil.rmtree(data_dir)
        return Cost(result.value["records_per_s"], result.processor_s / records * 1e6)

    yield put


# --- the rows ---------------------------------------------------------------------------------------------------------


TITLES = {
    "mqtt": {
        "one-to-one": "1 publisher, QoS 0 → 1 subscriber",
        "window": "1 publisher, QoS 1, window 1,000",
        "hundred": "100 publishers, QoS 1, window 20",
        "hundred-single": "100 publishers, QoS 1, window 1",
        "many-single": "500 publishers, QoS 1, window 1",
        "devices": "1,000 publishers, QoS 0, one message per write → 1 subscriber",
        "fanout": "1 publisher, QoS 1 → 100 subscribers, QoS 0",
        "fanout-acked": "1 publisher, QoS 1 → 100 subscribers, QoS 1",
        "fanout-lasting": "1 publisher, QoS 1 → 100 subscribers, QoS 1, whose sessions last",
        "delayed": "1 publisher, QoS 1, delayed by a second → 1 subscriber, QoS 0",
    },
    "pop": {
        "send": f"send, {pop.BATCH} a batch",
        "send-large": f"send, {pop.BATCH_LARGE:,} a batch",
        "send-single": f"send, {SENDERS} tasks with one message each",
        "pop": f"pop + ack, {pop.BATCH} a batch",
        "pop-small": f"pop + ack, {pop.BATCH_SMALL} a batch",
        "consume": f"stream, {pop.BATCH} a response",
        "worker": f"worker, 32 handlers with batches of up to {pop.BATCH}",
        "worker-single": "worker, 32 handlers with one message",
        "fifo": f"pop + ack in FIFO order, one message group, {pop.BATCH} a batch",
    },
    "store": {
        "append": "append, 64 B",
        "append-synced": "append with sync, 64 B, 1,000 waiters",
        "read": "read a hot queue with its records",
    },
}
"""What each row measures, by area and name."""

_LOADS: dict[str, OpenLoad] = {
    **{name: partial(_mqtt, name) for name in TITLES["mqtt"]},
    "send": partial(_pop, pop.MESSAGES, partial(_sent, pop.BATCH)),
    "send-large": partial(_pop, pop.MESSAGES, partial(_sent, pop.BATCH_LARGE)),
    "send-single": partial(_pop, pop.MESSAGES // 5, _sent_singly),
    "pop": partial(_pop, pop.MESSAGES, partial(_drained, "pop_and_ack", pop.BATCH, 8)),
    "pop-small": partial(_pop, pop.MESSAGES, partial(_drained, "pop_with_client", pop.BATCH_SMALL, 16)),
    "consume": partial(_pop, pop.MESSAGES, partial(_drained, "consume", pop.BATCH, CLIENT_PROCESSES)),
    "worker": partial(_pop, pop.MESSAGES, partial(_worked, pop.BATCH)),
    "worker-single": partial(_pop, pop.MESSAGES // 2, partial(_worked, 0)),
    "fifo": partial(_pop, pop.MESSAGES // 4, _in_order),
    "append": partial(_store, "append", (1_000_000, 64)),
    "append-synced": partial(_store, "append_synced", (1_000_000,)),
    "read": partial(_store, "read_hot", (1_000_000,)),
}

AREAS: dict[str, dict[str, Row]] = {
    area: {name: Row(_in_turn(name, _LOADS[name]), ()) for name in titles} for area, titles in TITLES.items()
}

EVERY_ROW = {name: row for rows in AREAS.values() for name, row in rows.items()}


@dataclass(frozen=True, slots=True)
class Compared:
    """Medians of one figure of a row in both trees: us of a processor a message."""

    row: str
    figure: str
    """`us` or `client_us`."""
    base_us: float
    this_us: float
    ratio: float
    """The ratio of the medians."""
    ratio_of_least: float
    """The ratio of the lowest runs."""
    each: tuple[float, ...]
    """The ratio of each pair of runs."""

    def is_within(self, worse_max: float) -> bool:
        """Return whether this tree needs at most so many percent more than the base.

        Other work on the machine only adds to what a run costs. So what makes the median worse and not the lowest run is no
        difference of the trees.
        """
        return min(self.ratio, self.ratio_of_least) <= 1 + worse_max / 100


def compared(found: Found, rows: Iterable[str]) -> Iterator[Compared]:
    """Yield what was measured of rows. A row may have no clients, or have failed before its first run."""
    for row, figure in itertools.product(rows, ("us", "client_us")):
        if f"{row}_{figure}@{BASE}" in found:
            base_us, this_us = (found[f"{row}_{figure}@{tree}"] for tree in (BASE, THIS.name))
            each = tuple(_ratio(this, base) for base, this in zip(base_us, this_us, strict=True))
            medians, least = (median(this_us), median(base_us)), (min(this_us), min(base_us))
            yield Compared(row, figure, medians[1], medians[0], _ratio(*medians), _ratio(*least), each)


def table_of(title: str, found: Found, rows: Iterable[str], worse_max: float) -> Table:
    """Return the table: processor time a message of both trees, their ratio, and the same for the rate."""
    table = Table(title)
    for column in ("base: µs", "this: µs", "ratio", "of the lowest", "of each run", "base: msg/s", "this: msg/s", "ratio"):
        table.add_column(column, justify="right")
    table.add_column(f"within {worse_max:g} %")
    titles = {name: text for titles in TITLES.values() for name, text in titles.items()}
    for line in compared(found, rows):
        base_per_s, this_per_s = (median(found[f"{line.row}_per_s@{tree}"]) for tree in (BASE, THIS.name))
        is_node = line.figure == "us"
        table.add_row(
            f"{line.row}: {titles[line.row]}" if is_node else "... its clients",
            f"{line.base_us:.2f}",
            f"{line.this_us:.2f}",
            f"{line.ratio:.3f}",
            f"{line.ratio_of_least:.3f}",
            f"{min(line.each):.3f} to {max(line.each):.3f}",
            *((text_of(base_per_s), text_of(this_per_s), f"{this_per_s / base_per_s:.3f}") if is_node else ("", "", "")),
            "yes" if line.is_within(worse_max) else "NO",
        )
    return table


def _ratio(this: float, base: float) -> float:
    """Return the ratio of two processor times. Those of a quick run may be less than the system's clock tells, and so 0."""
    return this / base if base else 1.0 if not this else inf


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison and return the exit status: 1 when a row failed."""
    parser = parser_of("compare", "Compare this tree with another tree, measured in turn.", EVERY_ROW, runs=RUNS)
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"Areas to measure, of {', '.join(AREAS)} (all areas).")
    parser.add_argument("--base", type=Path, required=True, metavar="DIR", help="Root of the checkout of the other tree.")
    add_base_command(parser)
    parser.set_defaults(share=1)
    parser.add_argument(
        "--worse-max",
        type=float,
        default=WORSE_MAX,
        metavar="PERCENT",
        help="Mark rows whose processor time is higher by more (%(default)g).",
    )
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.areas) - AREAS.keys()):
        parser.error(f"There is no area {', '.join(unknown)}. The areas are {', '.join(AREAS)}.")
    rows = {name: row for area in options.areas or AREAS for name, row in AREAS[area].items()}
    return run(
        parser,
        rows,
        arguments,
        failures=FAILURES,
        table_of=lambda title, found, chosen: table_of(title, found, chosen, options.worse_max),
    )


def add_base_command(parser: argparse.ArgumentParser) -> None:
    """Add `--base-command`, for a tree whose packages have other names."""
    parser.add_argument(
        "--base-command",
        default="python -m penstock",
        metavar="COMMAND",
        help="Command line of the other tree, which runs in its root; `python` means this Python (%(default)s).",
    )
