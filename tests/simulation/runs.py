"""Runs seeds, one after the other or several processes at a time, and mutations until they are caught."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import structlog

from penstock.pop.core import selection
from penstock.store.log import commitlog
from tests.simulation.disk import ProcessDead
from tests.simulation.mutations import MUTATIONS
from tests.simulation.sent import Violation
from tests.simulation.world import World

PORTION = 25
"""Seeds that a worker gets at a time."""

SCAN_READS = 32
"""Messages that one pop of a FIFO group reads at most. What is found is noted in one record, which must fit into a segment, and
the segments are small here."""

TRACE_LINES = 40
"""Lines of the trace that a failure shows."""


class Outcome(NamedTuple):
    """What came of one seed."""

    seed: int
    hash: str
    """Hash of everything that happened. A seed always gives the same."""
    starts: int
    faults: int
    messages: int
    failure: str = ""
    """What does not hold; empty if everything does."""
    trace: tuple[str, ...] = ()
    """What happened last, if there is a failure."""


def run_seed(seed: int) -> Outcome:
    """Run one seed to its end."""
    world = World(seed)
    failure = ""
    try:
        with patch.object(
            os, "urandom", Random(f"secrets {seed}").randbytes
        ):  # a backup's manifest has a checksum of the secret
            world.run()
    except Violation as violation:
        failure = str(violation)
    except (Exception, ProcessDead) as error:  # a defect of the node or of the simulation
        failure = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    trace = tuple(world.trace[-TRACE_LINES:]) if failure else ()
    return Outcome(seed, world.hash, world.starts, world.faults, len(world.oracle.sent), failure, trace)


def prepare() -> None:
    """Make this process run simulations: no log lines, and no garbage collection at other times than between seeds."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL), logger_factory=structlog.ReturnLoggerFactory()
    )
    warnings.simplefilter("ignore", RuntimeWarning)  # coroutines of dead processes are never awaited
    sys.unraisablehook = _swallow
    setattr(commitlog, "Thread", InlineThread)  # noqa: B010 - the one thread that no constructor takes
    setattr(selection, "SCAN_READS_MAX", SCAN_READS)  # noqa: B010 - it is no option
    all_tasks = getattr(asyncio.tasks, "_all_tasks", None)
    if all_tasks is not None:  # Python 3.11 adds each task to it; nobody asks for them
        all_tasks.add = _swallow
    gc.collect()
    gc.freeze()
    gc.disable()


class InlineThread:
    """A thread that does its work when it is started.

    Parameters:
        target: the work.
    """

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self.start = target

    def join(self, timeout: float) -> None:
        """Do nothing: the work is done."""


def _swallow(_: Any) -> None:
    """Do nothing: with what finalizers raise, which belong to processes that are dead, and with the set of all tasks."""


def run_portion(seeds: list[int], mutation: str = "") -> list[Outcome]:
    """Run seeds in this process, up to the first failure if there is a mutation."""
    outcomes: list[Outcome] = []
    with pytest.MonkeyPatch.context() as patch:
        if mutation:
            MUTATIONS[mutation](patch)
        for seed in seeds:
            outcomes.append(run_seed(seed))
            gc.collect(1)
            if mutation and outcomes[-1].failure:
                break
    gc.collect()
    return outcomes


def run_seeds(seeds: Iterable[int], jobs: int, *, is_apart: bool = False) -> Iterator[Outcome]:
    """Run seeds on `jobs` processes; yield their outcomes in the order given. A single job runs here, unless `is_apart`."""
    numbers = list(seeds)
    portions = [numbers[at : at + PORTION] for at in range(0, len(numbers), PORTION)]
    if jobs == 1 and not is_apart:
        prepare()
        for portion in portions:
            yield from run_portion(portion)
        return
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare) as pool:
        for outcomes in pool.map(run_portion, portions):
            yield from outcomes


class Caught(NamedTuple):
    """What came of a mutation."""

    mutation: str
    seeds: int
    """Number of seeds that were run."""
    failure: str
    """What showed it; empty if nothing did."""
    seconds: float


def catch(mutation: str, seeds_max: int) -> Caught:
    """Run seeds with a mutation until one fails."""
    began_s = time.perf_counter()
    count = 0
    while count < seeds_max:
        outcomes = run_portion(list(range(count, min(count + PORTION, seeds_max))), mutation)
        count += len(outcomes)  # the portion has ended with the first failure
        last = outcomes[-1]
        if last.failure and not run_seed(last.seed).failure:  # a seed that fails anyway shows nothing
            return Caught(mutation, count, last.failure, time.perf_counter() - began_s)
    return Caught(mutation, count, "", time.perf_counter() - began_s)


def catch_all(mutations: Iterable[str], seeds_max: int, jobs: int) -> Iterator[Caught]:
    """Run mutations on `jobs` processes; yield what came of them, in their order."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), prepare, max_tasks_per_child=1) as pool:
        yield from pool.map(partial(catch, seeds_max=seeds_max), mutations)
