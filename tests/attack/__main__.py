"""`make test-attack`: attacks on a node, with honest clients beside.

The node and the honest clients run on one processor, the attacker on another. Windows of attack alternate with windows of
peace, so that another load of the machine disturbs both. A row that fails by latency alone is run again, up to twice.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import uvloop

from tests.attack.attacks.attack import Attack
from tests.attack.catalogue import AttackUnknown, chosen
from tests.attack.mutations import MUTATIONS
from tests.attack.report import line, table
from tests.attack.row import Course, Verdict, start_and_play

# gRPC has threads, and the processes that we start exec at once.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")

TRIES = 3

LATENCY_S_MIN = 3.0
"""Seconds of a window from which on a row that is slow has failed. In a shorter one, p99 is the slowest of a few messages."""

MUTATION_WINDOW_S = 3.0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument(
        "--only", default="all", metavar="NAMES", help="Names, separated by commas; huge-* means all that begin so."
    )
    parser.add_argument("--windows", type=int, default=3, help="Windows of attack in each row (3).")
    parser.add_argument(
        "--seconds", type=float, default=4.0, help="Seconds of each window (4). Below 3, no row fails because it is slow."
    )
    parser.add_argument("--tries", type=int, default=TRIES, help=f"Tries of a row that is only slow ({TRIES}).")
    parser.add_argument("--report", type=Path, metavar="FILE", help="File that gets the report.")
    parser.add_argument("--list", action="store_true", help="List the attacks.")
    parser.add_argument(
        "--mutations", nargs="?", const="all", metavar="NAMES", help="Prove that rows fail with deliberate defects."
    )
    options = parser.parse_args()
    try:
        attacks = chosen(options.only)
    except AttackUnknown as error:
        parser.error(str(error))
    if options.list:
        for one in attacks:
            print(f"{one.name:26} {one.summary}: {one.must_get}")
        return 0
    if options.mutations:
        return prove(list(MUTATIONS) if options.mutations == "all" else options.mutations.split(","))
    cpus = sorted(os.sched_getaffinity(0))
    judges_latency = options.seconds >= LATENCY_S_MIN
    course = Course(options.windows, options.seconds, (cpus[0],), (cpus[-1],), judges_latency=judges_latency)
    os.sched_setaffinity(0, course.node_cpus)
    verdicts: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="penstock-attack-") as directory:
        for one in attacks:
            verdict = uvloop.run(_play(one, Path(directory), course, options.tries))
            verdicts.append(verdict)
            print(line(verdict), flush=True)
    text = table(verdicts, f"make test-attack ONLY={options.only}" if options.only != "all" else "make test-attack")
    if options.report is not None:
        options.report.write_text(text)
    print(f"\n{text}")
    return 0 if all(one.is_passed for one in verdicts) else 1


def prove(names: list[str]) -> int:
    """Run an attack on a node with each of some deliberate defects. Return 1 if a row passes all the same."""
    missed = 0
    cpus = sorted(os.sched_getaffinity(0))
    course = Course(1, MUTATION_WINDOW_S, (cpus[0],), (cpus[-1],))
    for name in names:
        (attack,) = chosen(MUTATIONS[name].attack)
        with tempfile.TemporaryDirectory(prefix="penstock-attack-") as directory:
            verdict = uvloop.run(start_and_play(attack, Path(directory), course, name))
        found = [each for each in (*verdict.problems, *verdict.slow) if not each.startswith("the row ")]
        missed += not found
        print(f"{name}: {f'found by {attack.name}: {found[0][:160]}' if found else 'NOT FOUND'}", flush=True)
    return bool(missed)


async def _play(attack: type[Attack], directory: Path, course: Course, tries: int) -> Verdict:
    for number in range(1, tries + 1):
        here = Path(tempfile.mkdtemp(dir=directory))
        verdict = await start_and_play(attack, here, course)
        verdict.tries = number
        if verdict.problems or not verdict.slow:
            break
        print(f"{attack.name}: slow, {verdict.slow[0]}", flush=True)
    return verdict


if __name__ == "__main__":
    sys.exit(main())
