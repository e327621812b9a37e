"""`make test-chaos`: real faults under load. `docs/internals/faults.md` explains it."""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.chaos.campaign import Campaign, serve
from tests.chaos.catalogue import FAULTS, FaultUnknown, chosen
from tests.chaos.report import Report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--faults", default="all", help="Names, separated by commas; kill-* means all that begin so (all).")
    parser.add_argument("--seed", default="1", help="Seed of the campaign (1).")
    parser.add_argument("--rounds", type=int, default=20, help="Number of rounds (20).")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="Play one round of the campaign again.")
    parser.add_argument("--workers", type=int, default=2, help="Rounds at a time (2).")
    parser.add_argument("--report", type=Path, metavar="FILE", help="File that gets the report.")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="Where the nodes store everything (a temporary directory).")
    parser.add_argument("--keep-going", action="store_true", help="Play on after a round that failed.")
    parser.add_argument("--list", action="store_true", help="List the faults, and what this machine lacks for them.")
    parser.add_argument("--worker", type=Path, metavar="DIR", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        asyncio.run(serve(options.worker))
        return 0
    if options.list:
        for fault in FAULTS.values():
            why = fault.missing()
            print(f"{fault.name:20} {fault.summary}{f' (skipped here: {why})' if why else ''}")
        return 0
    try:
        wanted = chosen(options.faults)
    except FaultUnknown as error:
        parser.error(str(error))
    return _run(options, [fault for fault in wanted if not fault.missing()], {one.name: one.missing() for one in wanted})


def _run(options: argparse.Namespace, faults: list, missing: dict[str, str]) -> int:
    command = f"make test-chaos FAULTS={options.faults} SEED={options.seed} ROUNDS={options.rounds}"
    report = Report(command, options.seed)
    report.skipped = {name: why for name, why in missing.items() if why}
    for name, why in report.skipped.items():
        print(f"skipped: {name}: {why}")
    if not faults:
        return 1
    directory = options.dir or Path(tempfile.mkdtemp(prefix="penstock-chaos-"))
    rounds = range(options.rounds) if options.only is None else range(options.only, options.only + 1)
    asyncio.run(
        Campaign(faults, options.seed, rounds, options.workers, directory, report, stop_early=not options.keep_going).run()
    )
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


if __name__ == "__main__":
    sys.exit(main())
