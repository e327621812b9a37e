"""One round: a node under load, a few faults, and a verdict."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from penstock import PopError
from tests.chaos.faults.fault import Fault
from tests.chaos.launching import Launcher
from tests.chaos.ledger import Ledger
from tests.chaos.nodeprocess import ANEW
from tests.chaos.reconciling import Reconciler, compare
from tests.chaos.scene import Broken, Outcome, Scene

ROUND_S_MAX = 400
TRACE_CHARACTERS_MAX = 1_500


@dataclass
class Verdict:
    """What came of a round."""

    seed: str
    outcomes: list[Outcome]
    problems: list[str] = field(default_factory=list)
    sent: int = 0
    acked: int = 0
    seconds: float = 0.0
    is_reconciled: bool = False
    """Whether Spark's report was compared with what clients saw."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


async def play(
    seed: str,
    faults: Sequence[type[Fault]],
    directory: Path,
    launcher: Launcher = ANEW,
    *,
    reconciler: Reconciler | None = None,
    small: bool = False,
) -> Verdict:
    """Play a round with these faults, one after the other, in an empty directory that stays if there is a problem.

    Args:
        seed: decides everything that is left to chance, but not how the processes of the machine interleave.
        launcher: starts nodes and commands.
        reconciler: if given, Spark's report is compared with what clients saw.
        small: keep the load small, for the tests of this folder.
    """
    random = Random(seed)
    store_options = "\n".join(sorted({fault.store_options for fault in faults}))
    log = max((fault.log for fault in faults), key=("", "segments", "retention").index)
    scene = Scene(directory, random, launcher, store_options=store_options, on=faults[0].on, log=log, small=small)
    verdict = Verdict(seed, [])
    ledger = scene.ledger
    asyncio.get_running_loop().set_exception_handler(_forget_calls)
    begun_s = time.monotonic()
    try:
        async with asyncio.timeout(ROUND_S_MAX):
            await _play(scene, faults, verdict)
        if reconciler is not None and not ledger.problems:
            compare(ledger, await reconciler.report(scene.data_dir))
            verdict.is_reconciled = True
    except Broken as error:
        ledger.report("broken", str(error))
    except Exception:  # a defect of these tests, or a node that answers nonsense: the round failed, and shows where
        ledger.report("broken", traceback.format_exc()[-TRACE_CHARACTERS_MAX:])
    finally:
        await scene.close()
    verdict.problems = [f"{problem.kind}: {problem.what}" for problem in ledger.problems]
    verdict.sent = len(ledger.publications)
    verdict.acked = ledger.acked_count()
    verdict.seconds = time.monotonic() - begun_s
    if not verdict.problems:
        scene.remove()
    elif verdict.outcomes:
        verdict.outcomes[-1].problems = len(verdict.problems)
    return verdict


async def _play(scene: Scene, faults: Sequence[type[Fault]], verdict: Verdict) -> None:
    await scene.begin()
    for fault in faults:
        await scene.under_load()
        _count(scene.outcome, verdict.outcomes, scene.ledger)
        scene.outcome = Outcome(fault.name)
        verdict.outcomes.append(scene.outcome)
        await fault().inject(scene)
        if scene.ledger.problems:
            return
    await scene.under_load()
    await scene.end()
    _count(scene.outcome, verdict.outcomes, scene.ledger)


def _forget_calls(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Don't print the errors of calls whose tasks a kill has ended: the ledger has noted that nobody knows their outcome."""
    if not isinstance(context.get("exception"), PopError):
        loop.default_exception_handler(context)


def _count(outcome: Outcome, outcomes: list[Outcome], ledger: Ledger) -> None:
    """Count for a fault what was acknowledged and what came again since the count for the fault before it."""
    outcome.acked = ledger.acked_count() - sum(one.acked for one in outcomes if one is not outcome)
    outcome.repeats = ledger.repeats() - sum(one.repeats for one in outcomes if one is not outcome)
    outcome.unmarked = ledger.unmarked_repeats() - sum(one.unmarked for one in outcomes if one is not outcome)
