"""A few rows of `make test-attack`, short and on one node, and what a verdict sees. No test judges how fast it is."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from tests.attack.attacker import Attacker
from tests.attack.attacks.attack import Attack
from tests.attack.attacks.packets import HugeConnect
from tests.attack.bystander import Bystander
from tests.attack.catalogue import ATTACKS, QUICK, AttackUnknown, chosen
from tests.attack.ground import Ground
from tests.attack.honest import Window, percentile
from tests.attack.report import line, table
from tests.attack.row import Course, Verdict, judge, judge_latency, play
from tests.attack.servednode import ServedNode
from tests.waiting import until

pytestmark = pytest.mark.nightly


async def test_a_node_under_attack_serves_honest_clients_and_loses_nothing(tmp_path: Path) -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    course = Course(1, 0.6, cpus, cpus, judges_latency=False)
    node = ServedNode(tmp_path, cpus, {})
    attackers = {name: Attacker(name, cpus) for name in QUICK}
    try:
        await asyncio.gather(node.start(), *(attacker.spawn() for attacker in attackers.values()))
        for name, attacker in attackers.items():
            verdict = await play(ATTACKS[name], node, course, attacker)
            assert verdict.problems == [], line(verdict)
            assert verdict.lost == 0
            assert verdict.acked > 0
        assert await node.stop() == 0
    finally:
        node.kill()
        await asyncio.gather(*(attacker.close() for attacker in attackers.values()))


def test_all_attacks_are_in_the_catalogue_with_what_they_must_get() -> None:
    assert len(chosen("all")) == len(ATTACKS) > 40
    assert chosen("huge-*,take-over") == [ATTACKS[name] for name in ATTACKS if name.startswith("huge-")] + [
        ATTACKS["take-over"]
    ]
    assert all(one.summary and one.must_get and one.__doc__ for one in ATTACKS.values())
    with pytest.raises(AttackUnknown, match="there is no attack 'nonsense'"):
        chosen("nonsense")


# --- what a verdict sees ----------------------------------------------------------------------------------------------


def window(*ms: float) -> Window:
    seconds = [each / 1000 for each in ms]
    return Window(list(seconds), list(seconds), list(seconds), list(seconds))


@pytest.mark.parametrize(
    ("peace_ms", "war_ms", "is_slow"), [(10, 49, False), (10, 51, True), (100, 299, False), (100, 301, True), (1, 5, False)]
)
def test_a_row_is_slow_above_50_ms_and_3_times_the_undisturbed_p99(peace_ms: float, war_ms: float, is_slow: bool) -> None:
    verdict = Verdict("login-flood", window(peace_ms), window(war_ms))
    judge_latency(verdict)
    assert bool(verdict.slow) == is_slow
    verdict = Verdict("login-flood", window(peace_ms), window(war_ms))
    verdict.war.lags_s = [0.4]
    judge_latency(verdict)
    assert not verdict.slow, "the clients themselves were late"


def test_what_a_bystander_waits_for_the_disk_is_taken_off_unless_the_node_writes_more() -> None:
    verdict = Verdict("login-flood", window(10), window(400))
    verdict.war.disk_s = [0.38]
    verdict.peace.written_bytes, verdict.war.written_bytes = 1000, 2000
    judge_latency(verdict)
    assert not verdict.slow, "the disk was late for everybody"
    verdict.war.written_bytes = 2001
    judge_latency(verdict)
    assert len(verdict.slow) == 4, "the node kept the disk busy"


async def test_a_bystander_waits_for_each_tick(tmp_path: Path) -> None:
    bystander, waits_s = Bystander(tmp_path / "file"), list[float]()
    bystander.start()
    for _ in range(10):
        bystander.tick(waits_s)
    await until(lambda: len(waits_s) == 10)
    assert all(0 < each < 60 for each in waits_s)
    assert (tmp_path / "file").stat().st_size == 10 * 4096
    bystander.close()
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    ("peak_mib", "after_mib", "log", "problem"),
    [
        (100, 60, "", ""),
        (50 + HugeConnect.peak_mib + 1, 60, "", "memory grew by 161 MiB"),
        (100, 50 + HugeConnect.kept_mib + 1, "", "memory is 65 MiB larger"),
        (100, 60, "Traceback (most recent call last)\nKeyError", "the node raised"),
    ],
)
async def test_a_verdict_sees_memory_and_exceptions(
    tmp_path: Path, peak_mib: float, after_mib: float, log: str, problem: str
) -> None:
    class Running(ServedNode):
        is_running = True

    node = Running(tmp_path, (0,), {})
    node.log.write_text(log)
    verdict = Verdict("huge-connect", window(1), window(1), before_mib=50, peak_mib=peak_mib, after_mib=after_mib)
    judge(verdict, HugeConnect, node)
    assert [each[: len(problem)] for each in verdict.problems] == ([problem] if problem else [])


def test_a_verdict_sees_a_node_that_has_ended_and_an_attack_that_stopped_everything(tmp_path: Path) -> None:
    node = ServedNode(tmp_path, (0,), {})
    node.log.write_text("")
    verdict = Verdict("huge-connect")
    judge(verdict, HugeConnect, node)
    assert verdict.problems == ["the node has ended", "no honest message was acknowledged during the attack"]


def test_what_the_attacker_got_must_be_what_the_row_says() -> None:
    class Tried(Attack):
        name = "tried"

        async def run(self) -> None: ...

        def problems(self) -> list[str]:
            return self.only("0x95")

    tried = Tried(Ground({}, ""))
    assert tried.problems() == ["the attacker never got 0x95"]
    tried.saw["0x95"] += 1
    assert tried.problems() == []
    tried.saw["0x00"] += 2
    assert tried.problems() == ["the attacker got '0x00' 2 times"]


def test_the_report_has_a_row_for_each_attack() -> None:
    verdict = Verdict("huge-connect", window(1, 2, 3), window(4), acked=7, saw={"0x95": 3}, problems=["something"])
    text = table([verdict], "make test-attack")
    assert "| `huge-connect` | 3.0 → 4.0 | 3.0 → 4.0 | 3.0 → 4.0 | 3.0 → 4.0 | - → - | - → - | 0 of 7 |" in text
    assert "| 3 times 0x95 | **no** |" in text
    verdict.problems.clear()
    verdict.tries = 2
    assert "| yes, at try 2 |" in table([verdict], "make test-attack")
    assert "- `huge-connect`: something" in text
    assert "0 of 1 attacks passed" in text


def test_a_percentile_of_few_values_is_the_worst() -> None:
    assert percentile([], 99) == 0
    assert percentile([3, 1, 2], 99) == 3
    assert percentile(list(range(1000)), 99) == 990
