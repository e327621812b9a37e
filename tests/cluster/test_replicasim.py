"""The simulation of replicas as part of the tests."""

from __future__ import annotations

import pytest

from tests.cluster.replicamutations import MUTATIONS, SEEDS_MAX, catch
from tests.cluster.replicaseeds import run_portion
from tests.depth import DEPTH

SEEDS = 1_000 * DEPTH
"""Seeds of one test."""


@pytest.mark.slow
@pytest.mark.parametrize("portion", range(10))
def test_nothing_acknowledged_is_lost_and_replicas_agree_whatever_fails(portion: int) -> None:
    counts, failures = run_portion(range(portion * SEEDS, (portion + 1) * SEEDS))
    assert failures == []
    assert counts["acknowledged"] > 10 * SEEDS
    assert counts["acknowledged_while_deposed"] > SEEDS
    assert counts["truncations"] > 0.9 * SEEDS, "the simulation must reach what it is for"


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTATIONS)
def test_the_simulation_finds_a_deliberate_defect(name: str) -> None:
    assert catch(name, SEEDS_MAX).violation
