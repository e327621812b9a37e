"""A campaign: rounds on several worker processes, up to the first problem."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.chaos.catalogue import FAULTS, FAULTS_PER_ROUND_MAX, plan
from tests.chaos.faults.fault import Fault
from tests.chaos.launching import ROOT, Forks
from tests.chaos.reconciling import Reconciler
from tests.chaos.report import Report
from tests.chaos.round import Verdict, play
from tests.chaos.scene import Outcome

CLONE_NEWNS = 0x0002_0000
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000

ROUND_S_MAX = 1_500

WORKER_DIED = "the worker died"


class Campaign:
    """Plays rounds, `workers` at a time, and stops at the first that fails.

    Parameters:
        faults: those that this machine can inject.
        rounds: the numbers of the rounds.
        directory: gets a folder for each round; that of a round which failed stays.
        stop_early: end with the first round that fails.
        results: a file that gets the verdict of each round, a line of JSON each. Rounds whose verdicts it has are not played
            again, so a campaign that was interrupted goes on.
        spark_every: Spark's report is compared with what clients saw in one of so many rounds; 0 for none.
        mutation: a deliberate defect of the nodes, by its name in `tests.chaos.mutations`; an empty string for none.
        faults_max: how many faults a round may have, one after the other.
    """

    def __init__(
        self,
        faults: list[type[Fault]],
        seed: str,
        rounds: range,
        workers: int,
        directory: Path,
        report: Report,
        *,
        stop_early: bool = True,
        results: Path | None = None,
        spark_every: int = 0,
        mutation: str = "",
        faults_max: int = FAULTS_PER_ROUND_MAX,
    ) -> None:
        self.faults = faults
        self.seed = seed
        self.report = report
        self.stop_early = stop_early
        self.workers = workers
        self.directory = directory
        self.results = results
        self.spark_every = spark_every
        self.mutation = mutation
        self.faults_max = faults_max
        self._numbers: Iterator[int] = iter(rounds)

    async def run(self) -> None:
        for verdict in self._played():
            self.report.add(verdict)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.workers):
                tasks.create_task(self._work())

    def _played(self) -> list[dict[str, Any]]:
        """Return the verdicts of earlier runs, and leave out their rounds."""
        if self.results is None or not self.results.exists():
            return []
        verdicts = [json.loads(line) for line in self.results.read_text().splitlines()]
        seeds = {verdict["seed"] for verdict in verdicts}
        self._numbers = iter([number for number in self._numbers if f"{self.seed}-{number}" not in seeds])
        return verdicts

    async def _work(self) -> None:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.chaos", "--worker", str(self.directory), "--mutation", self.mutation),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=ROOT,
            limit=1 << 24,
        )
        assert worker.stdin is not None
        assert worker.stdout is not None
        try:
            for number in self._numbers:
                seed = f"{self.seed}-{number}"
                names = [fault.name for fault in plan(self.faults, number, seed, self.faults_max)]
                spark = bool(self.spark_every) and not Random(f"spark {seed}").randrange(self.spark_every)
                worker.stdin.write(json.dumps({"seed": seed, "faults": names, "spark": spark}).encode() + b"\n")
                async with asyncio.timeout(ROUND_S_MAX):
                    line = await worker.stdout.readline()
                verdict = json.loads(line) if line else _died(seed, names)
                self.report.add(verdict)
                _say(verdict)
                if self.results is not None:
                    with self.results.open("a") as results:
                        results.write(json.dumps(verdict) + "\n")
                if not line or (self.report.failed and self.stop_early):
                    return  # without its process, this worker would fail all rounds that are left
        finally:
            worker.stdin.close()
            try:
                async with asyncio.timeout(30):
                    await worker.wait()
            except TimeoutError:
                worker.kill()


def _died(seed: str, names: list[str]) -> dict[str, Any]:
    return Verdict(seed, [Outcome(names[0], problems=1)], [WORKER_DIED]).as_dict()


def _say(verdict: dict) -> None:
    names = " ".join(outcome["fault"] for outcome in verdict["outcomes"])
    state = "FAILED" if verdict["problems"] else "ok"
    injected = sum(outcome["injected"] for outcome in verdict["outcomes"])
    print(
        f"{verdict['seed']}: {state}, {injected} faults in {verdict['seconds']:.1f} s, {verdict['acked']} messages: {names}",
        *verdict["problems"],
        sep="\n    ",
        flush=True,
    )


async def serve(directory: Path, mutation: str) -> None:
    """Play the rounds that standard input names, one after the other, in a mount namespace of this process's own."""
    hide_mounts()
    launcher, reconciler = Forks(mutation=mutation), Reconciler()
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        here = directory / asked["seed"]
        here.mkdir(parents=True)
        faults = [FAULTS[name] for name in asked["faults"]]
        verdict = await play(asked["seed"], faults, here, launcher, reconciler=reconciler if asked["spark"] else None)
        sys.stdout.write(json.dumps(verdict.as_dict()) + "\n")
        sys.stdout.flush()
    await launcher.close()
    await reconciler.close()


def hide_mounts() -> None:
    """Give this process mounts of its own, which the system removes when the process ends. Does nothing without root."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError):
        if libc.unshare(CLONE_NEWNS) == 0:
            libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
