"""`make test-chaos`: real faults under load. `tests/chaos/README.md` explains it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from tests.chaos.campaign import WORKER_DIED, Campaign, serve
from tests.chaos.catalogue import FAULTS, FaultUnknown, chosen
from tests.chaos.mutations import MUTATIONS
from tests.chaos.reconciling import missing_for_spark
from tests.chaos.report import Report

ROUNDS_PER_MUTATION = 12
"""A deliberate defect must be found in so many rounds."""

SPARK = "the comparison with Spark's report"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", default="all", help="Names, separated by commas; kill-* means all that begin so (all).")
    parser.add_argument("--seed", default="1", help="Seed of the campaign (1).")
    parser.add_argument("--rounds", type=int, default=20, help="Number of rounds (20).")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="Play one round of the campaign again.")
    parser.add_argument("--workers", type=int, default=2, help="Rounds at a time (2).")
    parser.add_argument("--report", type=Path, metavar="FILE", help="File that gets the report.")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="Where the nodes store everything (a temporary directory).")
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="File of verdicts, so that an interrupted campaign goes on."
    )
    parser.add_argument(
        "--spark-every", type=int, default=20, metavar="N", help="Compare Spark's report in 1 of N rounds (20)."
    )
    parser.add_argument("--keep-going", action="store_true", help="Play on after a round that failed.")
    parser.add_argument("--list", action="store_true", help="List the faults, and what this machine lacks for them.")
    parser.add_argument(
        "--mutations", nargs="?", const="all", metavar="NAMES", help="Prove that rounds fail with deliberate defects."
    )
    parser.add_argument("--mutation", default="", help=argparse.SUPPRESS)
    parser.add_argument("--worker", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        asyncio.run(serve(options.worker, options.mutation))
        return 0
    if options.list:
        for fault in FAULTS.values():
            why = fault.missing()
            print(f"{fault.name:20} {fault.summary}{f' (skipped here: {why})' if why else ''}")
        return 0
    if options.mutations:
        names = MUTATIONS if options.mutations == "all" else options.mutations.split(",")
        return prove(list(names), options.seed, options.workers)
    try:
        wanted = chosen(options.faults)
    except FaultUnknown as error:
        parser.error(str(error))
    return _run(options, [fault for fault in wanted if not fault.missing()], {one.name: one.missing() for one in wanted})


def _run(options: argparse.Namespace, faults: list, missing: dict[str, str]) -> int:
    command = f"make test-chaos FAULTS={options.faults} SEED={options.seed} ROUNDS={options.rounds}"
    report = Report(command, options.seed)
    report.skipped = {name: why for name, why in {**missing, SPARK: missing_for_spark()}.items() if why}
    for name, why in report.skipped.items():
        print(f"skipped: {name}: {why}")
    if not faults:
        return 1
    directory = options.dir or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    rounds = range(options.rounds) if options.only is None else range(options.only, options.only + 1)
    campaign = Campaign(
        faults,
        options.seed,
        rounds,
        options.workers,
        directory,
        report,
        stop_early=not options.keep_going,
        results=options.results,
        spark_every=0 if SPARK in report.skipped else options.spark_every,
    )
    asyncio.run(campaign.run())
    if options.report is not None:
        options.report.write_text(report.text())
    print(f"\n{report.text()}")
    if report.failed:
        for verdict in report.failed:
            print(f"The data directory of the round that failed is kept: {directory / str(verdict['seed'])}")
        return 1
    if options.dir is None:
        directory.rmdir()
    return 0


def prove(names: list[str], seed: str, workers: int) -> int:
    """Play rounds with each of some deliberate defects until one fails. Return 1 if a defect is not found."""
    missed = 0
    for name in names:
        wanted = chosen(MUTATIONS[name].faults)
        missing = ", ".join(filter(None, (fault.missing() for fault in wanted)))
        if missing:
            print(f"{name}: skipped: {missing}")
            continue
        report = Report("", seed)
        with tempfile.TemporaryDirectory(prefix="penstock-chaos-") as directory, redirect_stdout(StringIO()):
            campaign = Campaign(wanted, seed, range(ROUNDS_PER_MUTATION), workers, Path(directory), report, mutation=name)
            asyncio.run(campaign.run())
        found = [problem for verdict in report.failed for problem in verdict["problems"] if problem != WORKER_DIED]
        missed += not found
        print(f"{name}: {f'found in {report.rounds} rounds: {found[0][:200]}' if found else 'NOT FOUND'}", flush=True)
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
