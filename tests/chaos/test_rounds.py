"""A few rounds of chaos, so that the faults and their load keep working. `make test-chaos` plays as many as you like."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.chaos.campaign import Campaign
from tests.chaos.catalogue import FAULTS, FaultUnknown, chosen, plan
from tests.chaos.report import Report
from tests.chaos.round import play

QUICK = (["kill-node", "kill-sync"],)


@pytest.mark.parametrize("names", QUICK, ids=" ".join)
async def test_a_round_ends_without_a_problem(tmp_path: Path, names: list[str]) -> None:
    faults = [FAULTS[name] for name in names]
    for why in filter(None, (fault.missing() for fault in faults)):
        pytest.skip(why)
    verdict = await play("quick", faults, tmp_path, small=True)
    assert verdict.problems == []
    assert [outcome.fault for outcome in verdict.outcomes] == names
    assert verdict.acked > 20


async def test_a_campaign_plays_a_power_cut_in_a_process_with_mounts_of_its_own(tmp_path: Path) -> None:
    faults = chosen("power-cut")
    for why in filter(None, (fault.missing() for fault in faults)):
        pytest.skip(why)
    report = Report("make test-chaos", "quick")
    await Campaign(faults, "quick", range(1), 1, tmp_path, report).run()
    assert report.failed == []
    assert report.rows["power-cut"].injected >= 1
    assert str(tmp_path) not in await asyncio.to_thread(Path("/proc/self/mounts").read_text)


def test_faults_are_chosen_by_name_and_by_the_beginning_of_a_name() -> None:
    assert [fault.name for fault in chosen("kill-node")] == ["kill-node"]
    assert {fault.name for fault in chosen("stop-*,kill-sync")} == {"stop-node", "stop-sync", "kill-sync"}
    assert {fault.name for fault in chosen("all")} == set(FAULTS)
    with pytest.raises(FaultUnknown, match=r"no fault 'kill-me'; the faults are kill-node, "):
        chosen("kill-me")


def test_a_seed_gives_the_same_rounds_each_time_and_each_fault_its_turn() -> None:
    faults = chosen("all")
    rounds = [plan(faults, number, f"7-{number}") for number in range(len(faults))]
    assert rounds == [plan(faults, number, f"7-{number}") for number in range(len(faults))]
    assert [names[0] for names in rounds] == faults
    assert all(len({fault.on for fault in names}) == 1 for names in rounds)


def test_a_report_has_a_row_for_each_fault_the_skipped_ones_and_the_problems() -> None:
    report = Report("make test-chaos SEED=7", "7")
    report.skipped = {"kill-sync": "not here"}
    outcome = {"fault": "kill-node", "refused": 1, "repaired": 0, "excused": 2, "problems": 1, "repeats": 3, "unmarked": 0}
    report.add({"seed": "7-0", "outcomes": [outcome] * 2, "problems": ["lost: 1"], "sent": 5, "acked": 4, "seconds": 1.0})
    text = report.text()
    assert "2 faults in 1 rounds, 5 messages sent, 4 acknowledged. Seed 7: `make test-chaos SEED=7`." in text
    assert "| `kill-node`: kill -9 of the node under load | 2 | 2 | 0 | 4 | 2 | 6 |" in text
    assert "- kill-sync: not here" in text
    assert "- lost: 1" in text
