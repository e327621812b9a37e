"""Simulates nodes on faulty machines: `make simulate SEEDS=0-999`, `make simulate SEEDS=1234`, `make simulate
ARGS=--mutations`."""

from __future__ import annotations

import argparse
import os
import sys
import time

from tests.simulation.mutations import MUTATIONS
from tests.simulation.runs import Outcome, catch_all, run_seeds


def main() -> int:
    """Run what the command line says. Return 1 if something does not hold, or a mutation is not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seeds", default="0-999", help="a seed, or the first and the last one with a hyphen")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes at a time")
    parser.add_argument("--hashes", action="store_true", help="print the hash of each seed")
    parser.add_argument(
        "--twice",
        action="store_true",
        help="run each seed twice, in two processes and after other seeds, and fail if not the same happens both times",
    )
    parser.add_argument("--mutations", action="store_true", help="run each mutation until a seed catches it")
    parser.add_argument("--mutation", action="append", choices=sorted(MUTATIONS), help="run this mutation only")
    parser.add_argument("--seeds-max", type=int, default=3_000, help="seeds within which a mutation must be caught")
    arguments = parser.parse_args()
    if arguments.mutations or arguments.mutation:
        return _mutate(arguments.mutation or list(MUTATIONS), arguments.seeds_max, arguments.jobs)
    first, _, last = arguments.seeds.partition("-")
    seeds = range(int(first), int(last or first) + 1)
    jobs = arguments.jobs if len(seeds) > 1 else 1
    again = {each.seed: each.hash for each in run_seeds(reversed(seeds), jobs, is_apart=True)} if arguments.twice else {}
    return _run(seeds, jobs, again, hashes=arguments.hashes)


def _run(seeds: range, jobs: int, again: dict[int, str], *, hashes: bool) -> int:
    """Run seeds, and compare their hashes with those of an earlier run, if there was one."""
    began_s = time.perf_counter()
    starts = faults = messages = failures = 0
    for number, outcome in enumerate(run_seeds(seeds, jobs), 1):
        if again.get(outcome.seed, outcome.hash) != outcome.hash:
            outcome = outcome._replace(failure=f"{outcome.failure}\nnot the same happened when it was run twice".strip())
        starts += outcome.starts
        faults += outcome.faults
        messages += outcome.messages
        if hashes:
            print(f"seed {outcome.seed}: {outcome.hash}")
        if outcome.failure:
            failures += 1
            _show(outcome)
        if sys.stderr.isatty() and number % 50 == 0:
            print(f"\r{number} of {len(seeds)} seeds, {failures} failed", end="", file=sys.stderr)
    seconds = time.perf_counter() - began_s
    rate = len(seeds) / seconds
    print(
        f"{len(seeds)} seeds, {failures} failed: {faults} faults, {starts} starts and {messages} messages in {seconds:.0f} s, "
        f"{rate:.0f} seeds/s"
    )
    return 1 if failures else 0


def _show(outcome: Outcome) -> None:
    print(f"seed {outcome.seed} FAILED: {outcome.failure}")
    for line in outcome.trace:
        print(f"    {line}")
    print(f"    Run it again: make simulate SEEDS={outcome.seed}")


def _mutate(mutations: list[str], seeds_max: int, jobs: int) -> int:
    missed = 0
    print("| mutation | seeds | caught by |\n|---|---|---|")
    for caught in catch_all(mutations, seeds_max, jobs):
        missed += not caught.failure
        said = caught.failure.splitlines()[0][:110] if caught.failure else "NOT CAUGHT"
        print(f"| {caught.mutation} | {caught.seeds} | {said} |", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
