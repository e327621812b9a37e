"""A client of the simulation that cancels, replaces and reschedules delayed messages, and has schedules."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, Final, NamedTuple

import grpc

from penstock.pop.access.refusals import CallRefused
from penstock.pop.proto import pop_pb2 as pb
from penstock.timer.schedule import Missed
from tests.simulation.oracle import Oracle
from tests.simulation.popclient import served
from tests.simulation.process import Process
from tests.simulation.sent import Sent, Violation
from tests.simulation.timermodel import NEVER_MS, Followed, Plan

KEYS = ("", "u", "u", "v")
NAMES = ("one", "two", "three")

SIZES = (10, 60, 300)
"""Sizes of the bodies."""

HELD_MAX = 12
"""Delayed messages that a client remembers."""

_MISSED: Final[dict[Missed, pb.Missed.ValueType]] = {"skip": pb.SKIP, "once": pb.ONCE, "all": pb.ALL, "latest": pb.LAST}


class Timed(NamedTuple):
    """A delayed message whose sender got its handle."""

    message: Sent
    position: int
    handle: str
    key: str

    def name(self, *, by_key: bool) -> pb.TimerName:
        """Return how a call names it."""
        return pb.TimerName(topic=self.message.topic, key=self.key) if by_key else pb.TimerName(recall_handle=self.handle)


class TimerClient:
    """Has delayed messages with and without keys, and schedules.

    Parameters:
        oracle: gets what happens.
        random: decides what the client does.
        topics: to which it sends. They are few, so that messages of one key replace each other.
        delay_ms_max: its longest delay.
        now_s: returns the virtual time.
    """

    def __init__(
        self, oracle: Oracle, random: Random, topics: tuple[str, ...], delay_ms_max: int, now_s: Callable[[], float]
    ) -> None:
        self.stays = random.random() < 0.3
        """Whether its schedules go on for some time when the faults have ended."""
        self.is_finished = False
        """Whether no schedule sends anything any more, as far as the client knows."""
        self._oracle = oracle
        self._model = oracle.timers
        self._random = random
        self._topics = topics
        self._delay_ms_max = delay_ms_max
        self._now_s = now_s
        self._held: list[Timed] = []
        self._busy: set[str] = set()
        """Names of the schedules about which a call is under way."""
        self._active: list[str] = []
        """Names of the schedules that send something, as the node has said."""

    def cut_off(self) -> None:
        """The node is gone, with all calls."""
        self._busy.clear()

    def act(self, process: Process) -> str:
        """Do one thing; return what it is."""
        what, random = self._random.random(), self._random
        if what < 0.3 or (what < 0.55 and not self._held):
            return self.send(process)
        if what < 0.4:
            return self._cancel(process, random.choice(self._held))
        if what < 0.5:
            return self._reschedule(process, random.choice(self._held))
        if what < 0.55:
            return self._find(process, random.choice(self._held))
        name = random.choice(NAMES)
        if name in self._busy:
            return "waits"
        self._busy.add(name)
        if what < 0.7:
            self._create(process, name)
        elif what < 0.75:
            self._list(process, name)
        elif what < 0.85:
            self._run(process, name)
        else:
            self._change(process, name, random.choice(("pause", "pause", "resume", "resume", "resume", "delete")))
        return f"schedule {name}"

    # --- delayed messages ---------------------------------------------------------------------------------------------

    def send(self, process: Process) -> str:
        """Send delayed messages, each of which replaces the pending one of its key."""
        random, topics = self._random, self._topics
        count = random.choice((1, 1, 2))
        return self._send(process, [(random.choice(topics), random.choice(KEYS), SIZES) for _ in range(count)])

    def replace(self, process: Process) -> str:
        """Send small delayed messages of one key in one call, each of which replaces the one before."""
        random = self._random
        return self._send(process, [(random.choice(self._topics), KEYS[-1], SIZES[:1])] * random.choice((2, 4, 8)))

    def _send(self, process: Process, wanted: list[tuple[str, str, tuple[int, ...]]]) -> str:
        """Send delayed messages. Each has a topic, a key, and one of some sizes."""
        random, oracle = self._random, self._oracle
        sent: list[tuple[Sent, str]] = []
        request = pb.SendRequest()
        for topic, key, sizes in wanted:
            message = oracle.new(topic, 1, random.choice(sizes))
            message.is_recallable = True
            message.due_ms, message.not_before_s = self._due(process)
            request.messages.add(
                topic=message.topic,
                body=message.body,
                deliver_at_ms=message.due_ms,
                extras=pb.MessageExtras(timer_key=key) if key else None,
            )
            sent.append((message, key))

        def done(response: Any, error: Exception | None) -> None:
            if error is not None:
                return  # the disk is full
            results = pb.SendResponse.FromString(response).results
            for (message, key), result in zip(sent, results, strict=True):
                if result.status.code == pb.OK:
                    oracle.acknowledged(message)
                    self._stored(process, message, result.message_id, result.recall_handle, key)

        process.call(served(process.servicer.Send(request)), done)
        return f"sends delayed messages up to {sent[-1][0].number}"

    def _due(self, process: Process) -> tuple[int, float]:
        """Return a time at which a message may be due, and the virtual time before which it must not come."""
        delay_ms = self._random.choice((1, 300, self._delay_ms_max, self._delay_ms_max))
        return process.store.now_ms() + delay_ms, self._now_s() + delay_ms * 0.9 / 1000 - 0.05

    def _stored(self, process: Process, message: Sent, message_id: str, handle: str, key: str) -> None:
        position = int(message_id, 16)
        message.positions.add(position)
        if not handle:
            return  # it was due already, and has gone out at once
        self._held = [*self._held[1 - HELD_MAX :], Timed(message, position, handle, key)]
        model = self._model
        model.expect(
            process.store.durable_position,
            lambda: f"{message} was acknowledged before it was stored" if model.state(position) == "unknown" else "",
        )

    def _expect_state(self, process: Process, timed: Timed, told: str, *states: str) -> None:
        """Expect of the records that are durable now that a message is in one of some states."""
        model = self._model

        def breach() -> str:
            state = model.state(timed.position)
            return "" if state in states else f"the message at {timed.position} is {state}, but a client was told: {told}"

        model.expect(process.store.durable_position, breach)

    def _cancel(self, process: Process, timed: Timed) -> str:
        by_key = bool(timed.key) and self._random.random() < 0.5

        async def work() -> tuple[Timed, int, int]:
            named = await self._named(process, timed) if by_key else timed
            if not by_key and self._random.random() < 0.3:
                response = await served(process.servicer.Recall(pb.RecallRequest(recall_handles=[timed.handle])))
                return named, response.statuses[0].code, 0
            status = await served(process.timers.CancelTimer(timed.name(by_key=by_key)))
            return named, status.code, process.store.log.end

        def done(result: tuple[Timed, int, int], error: Exception | None) -> None:
            if error is None:
                named, code, end = result
                if by_key and code == pb.UNKNOWN_MESSAGE:
                    self._expect_no_key(timed, end)
                else:
                    self._ended(process, named, code)

        process.call(work(), done)
        return f"cancels {timed.message.number}"

    async def _named(self, process: Process, timed: Timed) -> Timed:
        """Return the message that has the key now. It has no message if none has."""
        found = await served(process.timers.FindTimer(timed.name(by_key=True)))
        return timed._replace(position=int(found.message_id or "-1", 16), handle=found.recall_handle)

    def _expect_no_key(self, timed: Timed, end: int) -> None:
        key, model = (timed.message.topic.encode(), timed.key), self._model
        model.expect(end, lambda: f"no message has the key {key}, but one is pending" if key in model.keys else "")

    def _ended(self, process: Process, timed: Timed, code: int) -> None:
        if code == pb.OK:
            self._expect_state(process, timed, "cancelled", "cancelled")
        elif code == pb.ALREADY_RECALLED:
            # Before a message is due, the node takes any that is not pending for one that was recalled.
            more = ("fired",) if self._model.was_stepped else ()
            self._expect_state(process, timed, "cancelled or replaced already", "cancelled", "replaced", *more)
        elif code == pb.ALREADY_FIRED:
            self._expect_state(process, timed, "fired, or cancelled long ago", "fired", "cancelled", "replaced")
        elif self._model.is_judging:
            raise Violation(f"the cancellation of {timed.message} got the status {code}")

    def _reschedule(self, process: Process, timed: Timed) -> str:
        message, by_key = timed.message, bool(timed.key) and self._random.random() < 0.3
        due_ms, not_before_s = self._due(process)
        held = {each.position: each for each in self._held}

        async def work() -> tuple[Timed, pb.Timer, int] | None:
            named = await self._named(process, timed) if by_key else timed
            if by_key and named.position >= 0:
                if named.position not in held:
                    return None  # the client does not know which message it is
                named = held[named.position]
            message = named.message
            message.due_ms, message.not_before_s = min(message.due_ms, due_ms), min(message.not_before_s, not_before_s)
            request = pb.RescheduleTimerRequest(name=timed.name(by_key=by_key), deliver_at_ms=due_ms)
            timer = await served(process.timers.RescheduleTimer(request))
            return named, timer, process.store.log.end

        def done(result: tuple[Timed, pb.Timer, int] | None, error: Exception | None) -> None:
            if error is not None or result is None:
                return
            named, timer, end = result
            if timer.status.code == pb.OK:
                self._expect_state(process, named, "rescheduled", "replaced")
                self._stored(process, named.message, timer.message_id, timer.recall_handle, timer.key)
            elif by_key and timer.status.code == pb.UNKNOWN_MESSAGE:
                self._expect_no_key(timed, end)
            else:
                self._ended(process, named, timer.status.code)

        process.call(work(), done)
        return f"reschedules {message.number} to {due_ms}"

    def _find(self, process: Process, timed: Timed) -> str:
        by_key, model = bool(timed.key) and self._random.random() < 0.7, self._model
        key = (timed.message.topic.encode(), timed.key)

        async def work() -> tuple[pb.Timer, int]:
            return await served(process.timers.FindTimer(timed.name(by_key=by_key))), process.store.log.end

        def done(result: tuple[pb.Timer, int], error: Exception | None) -> None:
            if error is not None:
                return
            timer, end = result
            if timer.status.code != pb.OK:
                if by_key:
                    self._expect_no_key(timed, end)
                return
            position = int(timer.message_id, 16)

            def breach() -> str:
                pending = model.pending.get(position)
                if pending is None:
                    return f"the message at {position} was found, but it is {model.state(position)}"
                if by_key and pending.key != key:
                    return f"{pending.message} was found for the key {key}"
                if pending.due_ms != timer.deliver_at_ms and not model.was_stepped:
                    return f"{pending.message} is due at {pending.due_ms}, and was found to be due at {timer.deliver_at_ms}"
                return ""

            model.expect(end, breach)

        process.call(work(), done)
        return f"looks for {timed.message.number}"

    # --- schedules ----------------------------------------------------------------------------------------------------

    def _plan(self, process: Process, name: str) -> Plan:
        random, now_ms = self._random, process.store.now_ms()
        is_cron = random.random() < 0.2
        period_ms = random.choice((60_000, 120_000)) if is_cron else random.choice((300, 1_000, 1_000, 4_000))
        missed = random.choice(list(_MISSED))
        grace_ms = random.choice((200, 200, 3_000, 60_000))
        # A schedule that sends many messages costs much time, and finds no more than one that sends some.
        is_short = missed == "all" or (grace_ms == 60_000 and period_ms < 4_000)
        start_ms = now_ms + random.choice((-5_000, 0, 0, 400))
        return Plan(
            number=len(self._model.plans) + 1,
            name=name,
            topic=random.choice(self._topics),
            period_ms=period_ms,
            is_cron=is_cron,
            start_ms=start_ms,
            end_ms=start_ms + 8_000 if random.random() < 0.1 and not is_cron else 0,
            count=random.choice((3, 12)) if is_short else random.choice((0, 0, 5)),
            missed=missed,
            grace_ms=grace_ms,
            size=random.choice((0, 40, 200)),
            asked_ms=now_ms,
            asked_s=self._now_s(),
        )

    def _create(self, process: Process, name: str) -> None:
        plan, replace = self._plan(process, name), self._random.random() < 0.7
        self._model.plans[plan.number] = plan
        schedule = pb.Schedule(
            name=name,
            topic=plan.topic,
            body=plan.template,
            body_is_template=True,
            start_ms=plan.start_ms,
            end_ms=plan.end_ms,
            count=plan.count,
            missed=_MISSED[plan.missed],
            grace_ms=plan.grace_ms,
        )
        if plan.is_cron:
            schedule.cron = plan.cron
        else:
            schedule.every_ms = plan.period_ms
        request = pb.CreateScheduleRequest(schedule=schedule, replace=replace)

        def then(_: pb.ScheduleDescription) -> str:
            followed = self._model.schedules.get(name)
            return "" if followed is not None and followed.plan is plan else f"{plan} was created, and is not there"

        self._call(process, name, served(process.scheduler.CreateSchedule(request)), then)

    def _change(self, process: Process, name: str, how: str) -> None:
        request, scheduler = pb.ScheduleRequest(name=name), process.scheduler
        call: Callable[[pb.ScheduleRequest], Awaitable[Any]] = {
            "pause": scheduler.PauseSchedule,
            "resume": scheduler.ResumeSchedule,
            "delete": scheduler.DeleteSchedule,
        }[how]

        def then(_: Any) -> str:
            followed = self._model.schedules.get(name)
            if how == "delete":
                return f"{followed.plan} was deleted, and is still there" if followed is not None else ""
            if followed is None or followed.is_paused is not (how == "pause"):
                return f"the {how} of the schedule {name} was acknowledged, and did not happen"
            return ""

        self._call(process, name, served(call(request)), then)

    def _run(self, process: Process, name: str) -> None:
        request, model = pb.ScheduleRequest(name=name), self._model
        for plan in model.plans.values():
            plan.runs += plan.name == name  # the client does not know which of them the node has

        def then(response: pb.RunScheduleResponse) -> str:
            position = int(response.message_id, 16)
            return "" if position in model.runs else f"{name} was run as the message at {position}, which is none of it"

        self._call(process, name, served(process.scheduler.RunSchedule(request)), then)

    def _list(self, process: Process, name: str = "") -> None:
        """Ask for all schedules. It is `finish` that gives no name."""
        request, model = pb.ListSchedulesRequest(), self._model

        async def work() -> tuple[pb.ListSchedulesResponse, int]:
            begin = process.store.log.end
            response = await served(process.scheduler.ListSchedules(request))
            return response, begin if begin == process.store.log.end else -1  # a long list lets others change something

        def done(result: tuple[pb.ListSchedulesResponse, int], error: Exception | None) -> None:
            self._busy.discard(name)
            if error is not None:
                return
            response, end = result
            self._active = [each.schedule.name for each in response.schedules if each.next_ms and not each.paused]
            self.is_finished = not name and not self._active

            def breach() -> str:
                found = {each.schedule.name: each for each in response.schedules}
                if found.keys() != model.schedules.keys():
                    return f"the node has the schedules {sorted(found)}, and the log {sorted(model.schedules)}"
                return next(filter(None, (self._differs(each, model.schedules[name]) for name, each in found.items())), "")

            if end >= 0:
                model.expect(end, breach)

        process.call(work(), done)

    def _differs(self, found: pb.ScheduleDescription, followed: Followed) -> str:
        """Return how the node's description of a schedule differs from what the log says; empty if it does not."""
        if (found.paused, found.sent) != (followed.is_paused, followed.sent):
            return (
                f"{followed.plan} has sent {found.sent} messages and paused is {found.paused}, as the node says, but the log "
                f"says {followed.sent} and {followed.is_paused}"
            )
        next_ms = found.next_ms or NEVER_MS
        if not found.paused and not followed.plan.first_from(followed.from_ms) <= next_ms <= followed.next_ms:
            return f"{followed.plan} occurs at {found.next_ms}, as the node says, but by the log at {followed.next_ms}"
        return ""

    def _call(self, process: Process, name: str, call: Awaitable[Any], then: Callable[[Any], str]) -> None:
        """Make a call about a schedule. `then` gets the response, and returns what does not hold when the answer has come."""
        model = self._model

        async def work() -> tuple[Any, grpc.StatusCode, int]:
            try:
                return await call, grpc.StatusCode.OK, 0
            except CallRefused as refused:
                return None, refused.status, process.store.log.end

        def done(result: tuple[Any, grpc.StatusCode, int], error: Exception | None) -> None:
            self._busy.discard(name)
            if error is not None:
                return
            response, status, end = result
            if status is grpc.StatusCode.OK:
                model.expect(process.store.durable_position, lambda: then(response))
            elif status is grpc.StatusCode.NOT_FOUND:
                model.expect(end, lambda: f"there is no schedule {name}, as a call said" if name in model.schedules else "")
            elif status is grpc.StatusCode.ALREADY_EXISTS:
                model.expect(end, lambda: "" if name in model.schedules else f"there is a schedule {name}, as a call said")
            elif status is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                raise Violation(f"a call about the schedule {name} ended with {status.name}")

        process.call(work(), done)

    def finish(self, process: Process) -> None:
        """Let no schedule send anything more, by one call at a time."""
        if self._busy or self.is_finished:
            return
        name = self._active.pop() if self._active else ""
        self._busy.add(name)
        if name:
            self._change(process, name, self._random.choice(("pause", "delete")))
        else:
            self._list(process)
