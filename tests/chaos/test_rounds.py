"""A few rounds of chaos, so that the faults and their load keep working. `make test-chaos` plays as many as you like."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.catalogue import FAULTS, FaultUnknown, chosen, plan
from tests.chaos.launching import Forks
from tests.chaos.mutations import MUTATIONS
from tests.chaos.report import Report
from tests.chaos.round import Verdict, play
from tests.chaos.scene import Outcome

pytestmark = pytest.mark.nightly


@pytest.fixture
async def forks() -> AsyncIterator[Forks]:
    launcher = Forks()
    yield launcher
    await launcher.close()


async def test_a_round_ends_without_a_problem(tmp_path: Path, forks: Forks) -> None:
    names = ["kill-node", "kill-sync"]
    verdict = await play("quick", [FAULTS[name] for name in names], tmp_path, forks, small=True)
    assert verdict.problems == []
    assert [(outcome.fault, outcome.injected) for outcome in verdict.outcomes] == [(name, 1) for name in names]
    assert verdict.acked > 20
    assert verdict.acked >= sum(outcome.acked for outcome in verdict.outcomes) > 0


async def test_a_round_fails_when_the_node_acknowledges_messages_that_it_does_not_store(tmp_path: Path) -> None:
    """`python -m tests.chaos --mutations` proves the same of all deliberate defects."""
    launcher = Forks(mutation="acknowledge-without-append")
    try:
        verdict = await play("mutation", [FAULTS["kill-node"]] * 9, tmp_path, launcher)
    finally:
        await launcher.close()
    assert any(problem.startswith("lost: ") for problem in verdict.problems), verdict.problems


async def test_a_campaign_plays_a_power_cut_in_a_process_with_mounts_of_its_own(tmp_path: Path) -> None:
    faults = chosen("power-cut")
    for why in filter(None, (fault.missing() for fault in faults)):
        pytest.skip(why)
    report = Report("make test-chaos", "quick")
    await Campaign(faults, "quick", range(1), 1, tmp_path, report, faults_max=1).run()
    assert report.failed == []
    assert report.rows["power-cut"].injected >= 1
    assert str(tmp_path) not in await asyncio.to_thread(Path("/proc/self/mounts").read_text)


def test_faults_are_chosen_by_name_and_by_the_beginning_of_a_name() -> None:
    assert [fault.name for fault in chosen("kill-node")] == ["kill-node"]
    assert {fault.name for fault in chosen("stop-*,kill-sync")} == {"stop-node", "stop-sync", "kill-sync"}
    assert {fault.name for fault in chosen("all")} == set(FAULTS)
    with pytest.raises(FaultUnknown, match=r"no fault 'kill-me'; the faults are kill-node, "):
        chosen("kill-me")


async def test_a_campaign_that_was_interrupted_goes_on(tmp_path: Path) -> None:
    results = tmp_path / "results"
    verdict = Verdict("quick-0", [Outcome("kill-node", injected=3)], acked=7)
    results.write_text(json.dumps(verdict.as_dict()) + "\n")
    report = Report("make test-chaos", "quick")
    await Campaign(chosen("kill-node"), "quick", range(1), 1, tmp_path, report, results=results).run()
    assert (report.rounds, report.injected, report.acked) == (1, 3, 7)
    assert results.read_text().count("\n") == 1


def test_a_seed_gives_the_same_rounds_each_time_and_each_fault_its_turn() -> None:
    faults = chosen("all")
    rounds = [plan(faults, number, f"7-{number}") for number in range(len(faults))]
    assert rounds == [plan(faults, number, f"7-{number}") for number in range(len(faults))]
    assert [names[0] for names in rounds] == faults
    assert all(len({(fault.on, fault.log) for fault in names}) == 1 for names in rounds)
    assert all(len(names) == 1 or not any(fault.is_last for fault in names) for names in rounds)


def test_a_report_has_a_row_for_each_fault_the_skipped_ones_and_the_problems() -> None:
    report = Report("make test-chaos SEED=7", "7")
    report.skipped = {"kill-sync": "not here"}
    outcome = Outcome("kill-node", injected=4, acked=1_000, refused=1, excused=2, repeats=3, problems=1)
    report.add(Verdict("7-0", [outcome] * 2, ["lost: 1"], sent=5, acked=4, is_reconciled=True).as_dict())
    text = report.text()
    assert "8 faults in 1 rounds, 5 messages sent, 4 acknowledged. Spark's report was compared in 1 rounds." in text
    assert "Seed 7: `make test-chaos SEED=7`." in text
    assert "| `kill-node`: kill -9 of the node under load | 8 | 2,000 | 2 | 0 | 4 | 6 | 2 |" in text
    assert "- kill-sync: not here" in text
    assert "- lost: 1" in text


def test_each_deliberate_defect_names_faults() -> None:
    assert all(chosen(mutation.faults) for mutation in MUTATIONS.values())
