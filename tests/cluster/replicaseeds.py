"""Runs many seeds of the simulation of replicas."""

from __future__ import annotations

from collections import Counter

from tests.cluster.replicasim import Simulation, Violation


def run_portion(seeds: range) -> tuple[Counter[str], list[str]]:
    """Run some seeds; return what has happened, and what was violated."""
    counts: Counter[str] = Counter()
    failures = []
    for seed in seeds:
        simulation = Simulation(seed)
        try:
            simulation.run()
        except Violation as violation:
            failures.append(f"seed {seed} FAILED: {violation}. Run it again: make simulate-cluster SEEDS={seed}")
        counts.update(simulation.counts)
    return counts, failures
