"""The simulation as part of the tests. Each test runs it as a process, because it silences logs and changes classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.simulation import runs
from tests.simulation.runs import Outcome, catch

ROOT = Path(__file__).parents[2]

SEEDS = 30
SEEDS_TWICE = 2
"""Seeds that are run twice. `make nightly` runs more, and the mutations that they must catch."""


def simulate(*arguments: str) -> None:
    """Run the simulation. It fails if something does not hold."""
    command = [sys.executable, "-m", "tests.simulation", "--jobs=1", *arguments]
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"


def test_what_was_acknowledged_holds_whatever_happens_to_the_machine() -> None:
    simulate(f"--seeds=0-{SEEDS - 1}")


def test_a_seed_always_gives_the_same_run() -> None:
    """Each seed runs twice. Other objects have the same addresses then, and other strings the same hashes."""
    simulate(f"--seeds=0-{SEEDS_TWICE - 1}", "--twice")


@pytest.mark.nightly
def test_a_seed_that_fails_without_the_mutation_leaves_out_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def run_seed(seed: int) -> Outcome:
        ran.append(seed)
        return Outcome(seed, "", 1, 0, 0, "always" if seed == 3 else "")

    monkeypatch.setattr(runs, "run_seed", run_seed)
    assert catch("forget-the-order", 60).seeds == 60
    assert set(ran) == set(range(60))
