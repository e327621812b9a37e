"""One row of the report: an attack on a node, with windows of peace between those of attack, and the verdict."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.attack.attacker import Attacker
from tests.attack.attacks.attack import Attack
from tests.attack.bystander import Bystander
from tests.attack.honest import HonestClients, Window, percentile
from tests.attack.servednode import ServedNode

P99_MS_MAX = 50.0
P99_TIMES_MAX = 3.0
"""The honest p99 must stay below the first, or within so many times that of the undisturbed windows. By how much the honest
clients' own timers were late meanwhile (p99) is taken off: their process waits for the processor, too. So is what somebody
else waited for the disk (p99), unless the node wrote more than in those windows: then the attack may keep the disk busy."""

WRITTEN_TIMES_MAX = 2.0
"""A node that writes at most so many times as much as in the undisturbed windows is not what keeps the disk busy."""

AFTERMATH_S = 1.0
"""What follows an attack for so long still counts as attacked."""

SETTLE_S_MAX = 25.0
"""The node's memory must have returned after this time."""

SAMPLE_S = 0.1


@dataclass(frozen=True, slots=True)
class Course:
    """How a row is played.

    Parameters:
        windows: how many windows of attack there are. One of peace comes before each.
        window_s: how long each of them is.
        node_cpus: processors of the node and the honest clients.
        attacker_cpus: processors of the attacker.
        judges_latency: whether a slow answer fails the row. Tests in `make test` leave that out.
    """

    windows: int = 3
    window_s: float = 4.0
    node_cpus: tuple[int, ...] = (0,)
    attacker_cpus: tuple[int, ...] = (1,)
    judges_latency: bool = True


@dataclass(slots=True)
class Verdict:
    """What a row found. Times are in ms, memory is in MiB."""

    attack: str
    peace: Window = field(default_factory=Window)
    war: Window = field(default_factory=Window)
    acked: int = 0
    lost: int = 0
    before_mib: float = 0.0
    peak_mib: float = 0.0
    after_mib: float = 0.0
    saw: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    """Problems of latency, which another load of the machine can cause."""
    tries: int = 1
    """How often the row was played. One that is only slow is played again."""

    @property
    def is_passed(self) -> bool:
        return not self.problems and not self.slow


async def play(attack: type[Attack], node: ServedNode, course: Course, attacker: Attacker) -> Verdict:
    """Run an attack on a node that has started, and judge what came of it."""
    verdict = Verdict(attack.name)
    bystander = Bystander(node.directory / "bystander")
    honest = HonestClients(node.ground, bystander)
    sampling: asyncio.Task[None] | None = None
    try:
        await honest.start()
        await attacker.prepare(node.ground)
        await asyncio.sleep(course.window_s / 4)
        verdict.before_mib = verdict.peak_mib = node.memory_mib
        sampling = asyncio.create_task(_sample(node, verdict))
        for _ in range(course.windows):
            begun_bytes = node.written_bytes
            honest.window = verdict.peace
            await asyncio.sleep(course.window_s)
            attacked_bytes = node.written_bytes
            honest.window = verdict.war
            await attacker.tell("go")
            await asyncio.sleep(course.window_s)
            await attacker.tell("stop")
            await asyncio.sleep(AFTERMATH_S)
            verdict.peace.written_bytes += attacked_bytes - begun_bytes
            verdict.war.written_bytes += node.written_bytes - attacked_bytes
        honest.window = None
        answer = await attacker.tell("end")
        verdict.saw = answer["saw"]
        verdict.problems += answer["problems"]
        await _settle(node, verdict, attack.kept_mib)
        sampling.cancel()
        await honest.finish()
    except (AssertionError, TimeoutError, OSError) as error:
        verdict.problems.append(f"the row broke off: {type(error).__name__} {error}")
    finally:
        if sampling is not None:
            sampling.cancel()
        bystander.close()
    verdict.acked, verdict.lost = honest.acked, honest.lost
    verdict.problems += honest.problems
    judge(verdict, attack, node)
    if course.judges_latency:
        judge_latency(verdict)
    return verdict


async def _sample(node: ServedNode, verdict: Verdict) -> None:
    while True:
        verdict.peak_mib = max(verdict.peak_mib, node.memory_mib)
        await asyncio.sleep(SAMPLE_S)


async def _settle(node: ServedNode, verdict: Verdict, kept_mib: float) -> None:
    """Wait until memory has returned, at most for `SETTLE_S_MAX`."""
    until_s = time.monotonic() + SETTLE_S_MAX
    while True:
        verdict.after_mib = node.memory_mib
        if verdict.after_mib <= verdict.before_mib + kept_mib or time.monotonic() > until_s:
            return
        await asyncio.sleep(SAMPLE_S)


def judge(verdict: Verdict, attack: type[Attack], node: ServedNode) -> None:
    """Add what memory, the log and the clients show to the problems of a verdict."""
    if not node.is_running:
        verdict.problems.append("the node has ended")
    for trace in node.tracebacks[:2]:
        verdict.problems.append(f"the node raised: {trace[-400:]!r}")
    grown_mib = verdict.peak_mib - verdict.before_mib
    if grown_mib > attack.peak_mib:
        verdict.problems.append(f"memory grew by {grown_mib:.0f} MiB during the attack, and may by {attack.peak_mib}")
    kept_mib = verdict.after_mib - verdict.before_mib
    if kept_mib > attack.kept_mib:
        verdict.problems.append(f"memory is {kept_mib:.0f} MiB larger after the attack, and may be by {attack.kept_mib}")
    if not verdict.war.acked_s:
        verdict.problems.append("no honest message was acknowledged during the attack")


def judge_latency(verdict: Verdict) -> None:
    """Add what was slow to a verdict."""
    late_ms = 1000 * percentile(verdict.war.lags_s, 99)
    disk_ms = 1000 * percentile(verdict.war.disk_s, 99) if not writes_more(verdict) else 0
    for name in ("acked_s", "delivered_s", "popped_s", "logins_s"):
        war_ms = 1000 * percentile(getattr(verdict.war, name), 99)
        peace_ms = 1000 * percentile(getattr(verdict.peace, name), 99)
        own_ms = war_ms - late_ms - disk_ms
        if own_ms >= P99_MS_MAX and own_ms > P99_TIMES_MAX * peace_ms:
            verdict.slow.append(
                f"p99 of honest messages {name.removesuffix('_s')} is {war_ms:.0f} ms, and {peace_ms:.0f} ms undisturbed; "
                f"the clients' own timers are late by {late_ms:.0f} ms, and a bystander waits {disk_ms:.0f} ms for the disk"
            )


def writes_more(verdict: Verdict) -> bool:
    """Return whether the node wrote more because of the attack."""
    return verdict.war.written_bytes > WRITTEN_TIMES_MAX * verdict.peace.written_bytes


async def start_and_play(attack: type[Attack], directory: Path, course: Course, mutation: str = "") -> Verdict:
    """Run an attack on a node of its own."""
    node = ServedNode(directory, course.node_cpus, attack.options, mutation)
    attacker = Attacker(attack.name, course.attacker_cpus)
    verdict = Verdict(attack.name)
    try:
        await attacker.spawn()
        await node.start()
        verdict = await play(attack, node, course, attacker)
        if node.is_running and (status := await node.stop()):
            verdict.problems.append(f"the node ended with status {status}")
    except (AssertionError, TimeoutError) as error:
        verdict.problems.append(f"the row did not begin: {type(error).__name__} {error}")
    finally:
        await attacker.close()
        node.kill()
    return verdict
