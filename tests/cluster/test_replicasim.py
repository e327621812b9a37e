"""The simulation of replicas as part of the tests. `make nightly` runs more seeds, and the mutations that it must find."""

from __future__ import annotations

from tests.cluster.replicaseeds import run_portion

SEEDS = 300


def test_nothing_acknowledged_is_lost_and_replicas_agree_whatever_fails() -> None:
    counts, failures = run_portion(range(SEEDS))
    assert failures == []
    assert counts["acknowledged"] > 10 * SEEDS
    assert counts["acknowledged_while_deposed"] > SEEDS
    assert counts["truncations"] > 0.9 * SEEDS, "the simulation must reach what it is for"
