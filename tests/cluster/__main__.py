"""Simulates replicas: `make simulate-cluster SEEDS=0-9999`, and `ARGS=--mutations` to prove that it finds defects."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from multiprocessing import get_context

from tests.cluster.replicamutations import MUTATIONS, catch
from tests.cluster.replicaseeds import run_portion

PORTION = 500
"""Seeds that a process gets at a time."""


def main() -> int:
    """Run what the command line says. Return 1 if something does not hold, or a mutation is not found."""
    parser = argparse.ArgumentParser(prog="python -m tests.cluster", description=__doc__)
    parser.add_argument("--seeds", default="0-9999", help="a seed, or the first and the last one with a hyphen")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--mutations", action="store_true", help="run each mutation until a seed finds it")
    arguments = parser.parse_args()
    with ProcessPoolExecutor(arguments.jobs, get_context("forkserver")) as pool:
        if arguments.mutations:
            missed = 0
            print("| mutation | seeds | found by |\n|---|---|---|")
            for name, caught in zip(MUTATIONS, pool.map(catch, MUTATIONS), strict=True):
                missed += not caught.violation
                print(f"| `{name}` | {caught.seeds} | {caught.violation[:100] or 'NOT FOUND'} |", flush=True)
            return 1 if missed else 0
        first, _, last = arguments.seeds.partition("-")
        seeds = range(int(first), int(last or first) + 1)
        began_s = time.perf_counter()
        counts: Counter[str] = Counter()
        failed = 0
        portions = [seeds[at : at + PORTION] for at in range(0, len(seeds), PORTION)]
        for found, failures in _in_windows(pool, portions):
            counts.update(found)
            failed += len(failures)
            for failure in failures:
                print(failure, flush=True)
        seconds = time.perf_counter() - began_s
        what = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in sorted(counts.items()))
        print(f"{len(seeds)} seeds, {failed} failed, in {seconds:.0f} s: {what}")
        return 1 if failed else 0


def _in_windows(pool: ProcessPoolExecutor, portions: list[range]) -> Iterator[tuple[Counter[str], list[str]]]:
    """Yield what came of each portion. A million seeds are not all submitted at once."""
    waiting = iter(portions)
    while window := list(islice(waiting, 64)):
        yield from pool.map(run_portion, window)


if __name__ == "__main__":
    sys.exit(main())
