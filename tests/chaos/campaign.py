"""A campaign: rounds on several worker processes, up to the first problem."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import sys
from pathlib import Path

from tests.chaos.catalogue import FAULTS, plan
from tests.chaos.faults.fault import Fault
from tests.chaos.launching import ROOT, Forks
from tests.chaos.report import Report
from tests.chaos.round import play

CLONE_NEWNS = 0x0002_0000
MS_REC, MS_PRIVATE = 0x4000, 0x4_0000

ROUND_S_MAX = 600


class Campaign:
    """Plays rounds, `workers` at a time, and stops at the first that fails.

    Parameters:
        faults: those that this machine can inject.
        rounds: the numbers of the rounds.
        directory: gets a folder for each round; that of a round which failed stays.
        stop_early: end with the first round that fails.
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
    ) -> None:
        self.faults = faults
        self.seed = seed
        self.report = report
        self.stop_early = stop_early
        self.workers = workers
        self.directory = directory
        self._numbers = iter(rounds)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self.workers):
                tasks.create_task(self._work())

    async def _work(self) -> None:
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.chaos", "--worker", str(self.directory)),
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
                names = [fault.name for fault in plan(self.faults, number, seed)]
                worker.stdin.write(json.dumps({"seed": seed, "faults": names}).encode() + b"\n")
                async with asyncio.timeout(ROUND_S_MAX):
                    line = await worker.stdout.readline()
                verdict = json.loads(line) if line else _died(seed, names)
                self.report.add(verdict)
                _say(verdict)
                if self.report.failed and self.stop_early:
                    return
        finally:
            worker.stdin.close()
            try:
                async with asyncio.timeout(30):
                    await worker.wait()
            except TimeoutError:
                worker.kill()


def _died(seed: str, names: list[str]) -> dict[str, object]:
    outcomes = [
        {"fault": name, "refused": 0, "repaired": 0, "excused": 0, "problems": 1, "repeats": 0, "unmarked": 0}
        for name in names[:1]
    ]
    return {"seed": seed, "outcomes": outcomes, "problems": ["the worker died"], "sent": 0, "acked": 0, "seconds": 0.0}


def _say(verdict: dict) -> None:
    names = " ".join(outcome["fault"] for outcome in verdict["outcomes"])
    state = "FAILED" if verdict["problems"] else "ok"
    print(f"{verdict['seed']}: {state} in {verdict['seconds']:.1f} s, {verdict['acked']} acknowledged: {names}", flush=True)


async def serve(directory: Path) -> None:
    """Play the rounds that standard input names, one after the other, in a mount namespace of this process's own."""
    hide_mounts()
    launcher = Forks()
    while line := await asyncio.to_thread(sys.stdin.readline):
        asked = json.loads(line)
        here = directory / asked["seed"]
        here.mkdir(parents=True)
        verdict = await play(asked["seed"], [FAULTS[name] for name in asked["faults"]], here, launcher)
        sys.stdout.write(json.dumps(verdict.as_dict()) + "\n")
        sys.stdout.flush()
    await launcher.close()


def hide_mounts() -> None:
    """Give this process mounts of its own, which the system removes when the process ends. Does nothing without root."""
    if os.geteuid():
        return
    libc = ctypes.CDLL(None, use_errno=True)
    with contextlib.suppress(OSError):
        if libc.unshare(CLONE_NEWNS) == 0:
            libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
