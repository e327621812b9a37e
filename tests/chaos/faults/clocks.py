"""A time of day that somebody sets wrong, and right again."""

from __future__ import annotations

from typing import ClassVar

from tests.chaos.faults.fault import Fault
from tests.chaos.scene import Broken, Scene
from tests.system.timeofday import missing_for_time_of_day

HOUR_S = 3_600
MONTH_S = 30 * 24 * HOUR_S

SLEWED_MS_MAX = 1_000
"""The node's time may be off by this much, while it approaches a time of day that is wrong for some seconds."""


class ClockStep(Fault):
    """The time of day steps, and steps back some seconds later, in half of the cases with a kill and a start in between.

    Those are two faults: the node looks at the time of day once a second, and the way back is a step too.
    """

    on: ClassVar[str] = "clock"
    per_round: ClassVar[int] = 6
    step_s: ClassVar[int]

    @classmethod
    def missing(cls) -> str:
        return missing_for_time_of_day()

    async def inject(self, scene: Scene) -> None:
        assert scene.clock is not None
        scene.ledger.early_ms_max = SLEWED_MS_MAX
        scene.clock.set_ahead(self.step_s)
        scene.outcome.injected += 1
        await scene.under_load(0.3, 1.8)
        if scene.random.random() < 0.5:
            await scene.down()
            await scene.up()
            await scene.under_load(0.3, 1.2)
        scene.clock.set_ahead(0)
        scene.outcome.injected += 1
        await scene.under_load(0.3, 1.2)
        if not scene.node.is_running:
            raise Broken(f"the node has ended because its clock was set: {scene.node.log.read_text()[-800:]}")


class HourForward(ClockStep):
    name = "clock-hour-forward"
    summary = "the time of day is an hour ahead for some seconds"
    step_s = HOUR_S


class HourBack(ClockStep):
    name = "clock-hour-back"
    summary = "the time of day is an hour behind for some seconds"
    step_s = -HOUR_S


class MonthForward(ClockStep):
    name = "clock-month-forward"
    summary = "the time of day is thirty days ahead for some seconds"
    step_s = MONTH_S


class MonthBack(ClockStep):
    name = "clock-month-back"
    summary = "the time of day is thirty days behind for some seconds"
    step_s = -MONTH_S
