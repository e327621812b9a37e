"""The servicer of `penstock.pop.v1.ScheduleService`: messages that the node sends again and again."""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from penstock.access.actions import SEND
from penstock.pop.access.auditedcall import change_noted
from penstock.pop.access.caller import CALLER, causer_of_call, check_permitted
from penstock.pop.core.sender import check_properties, message_id
from penstock.pop.errors import ScheduleExists, ScheduleUnknown
from penstock.pop.grpc.requests import bounded
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.properties import Properties
from penstock.store.store import Store
from penstock.timer.schedule import GRACE_MS, Missed, ScheduleDefinition
from penstock.timer.schedules import Schedule, Schedules

SCHEDULES_DEFAULT = 1_000
SCHEDULES_MAX = 10_000
"""Schedules of one page."""

PAGE_BYTES = 1024 * 1024
"""Bytes after which a page ends, so that a small request does not make the node hold a large response."""

LOOKS = 256
"""Schedules that one call looks at before others have their turn."""

UPCOMING = 5
"""Occurrences that a description shows."""

_MISSED: dict[pb.Missed.ValueType, Missed] = {pb.SKIP: "skip", pb.ONCE: "once", pb.ALL: "all", pb.LAST: "latest"}
_MISSED_CODES = {missed: code for code, missed in _MISSED.items()}


class ScheduleServicer:
    """Has the methods of the service. A call that changes something is answered when the change is durable.

    Parameters:
        schedules: the schedules of the node.
        store: tells when a change is durable.
    """

    def __init__(self, schedules: Schedules, store: Store) -> None:
        self._schedules = schedules
        self._store = store
        self._turn = asyncio.Lock()

    @asynccontextmanager
    async def _own_turn(self) -> AsyncGenerator[None]:
        """Serve one such call in a turn of the loop: to search for occurrences takes up to some milliseconds."""
        async with self._turn:
            try:
                yield
            finally:
                await asyncio.sleep(0)

    async def CreateSchedule(self, request: pb.CreateScheduleRequest) -> pb.ScheduleDescription:
        definition = definition_of(request.schedule)
        async with self._own_turn():
            old = self._schedules.get(definition.name)
            if old is not None:
                check_permitted(SEND, old.definition.topic)
                if not request.replace:
                    raise ScheduleExists(
                        f"there is a schedule {definition.name!r} already: set replace, delete it, or choose another name"
                    )
            with change_noted(self._store):
                schedule = self._schedules.put(definition, causer_of_call())
            answer = described(schedule, with_upcoming=True)
        await self._store.durable()
        return answer

    async def DescribeSchedule(self, request: pb.ScheduleRequest) -> pb.ScheduleDescription:
        async with self._own_turn():
            return described(self._named(request.name), with_upcoming=True)

    async def ListSchedules(self, request: pb.ListSchedulesRequest) -> pb.ListSchedulesResponse:
        count = min(bounded("schedules_max", request.schedules_max, SCHEDULES_DEFAULT), SCHEDULES_MAX)
        rights, names = CALLER.get(), self._schedules.names
        page, size = pb.ListSchedulesResponse(), 0
        first = max(bisect_right(names, request.after) if request.after else 0, bisect_left(names, request.prefix))
        for begin in range(first, len(names), LOOKS):
            async with self._own_turn():
                for name in names[begin : begin + LOOKS]:
                    if not name.startswith(request.prefix) or len(page.schedules) == count or size >= PAGE_BYTES:
                        return page
                    schedule = self._schedules.get(name)
                    if schedule is not None and (rights is None or rights.may(SEND, schedule.definition.topic)):
                        page.schedules.append(described(schedule))
                        size += schedule.size
        return page

    async def PauseSchedule(self, request: pb.ScheduleRequest) -> pb.ScheduleDescription:
        schedule = self._named(request.name)
        with change_noted(self._store):
            self._schedules.pause(schedule)
        await self._store.durable()
        return described(schedule)

    async def ResumeSchedule(self, request: pb.ScheduleRequest) -> pb.ScheduleDescription:
        async with self._own_turn():
            schedule = self._named(request.name)
            with change_noted(self._store):
                self._schedules.resume(schedule)
            answer = described(schedule, with_upcoming=True)
        await self._store.durable()
        return answer

    async def RunSchedule(self, request: pb.ScheduleRequest) -> pb.RunScheduleResponse:
        with change_noted(self._store) as fields:
            position = self._schedules.run(self._named(request.name))
            fields["message"] = message_id(position)
        await self._store.durable()
        return pb.RunScheduleResponse(message_id=message_id(position))

    async def DeleteSchedule(self, request: pb.ScheduleRequest) -> pb.DeleteScheduleResponse:
        with change_noted(self._store):
            self._schedules.delete(self._named(request.name))
        await self._store.durable()
        return pb.DeleteScheduleResponse()

    def _named(self, name: str) -> Schedule:
        """Return a schedule to whose topic the caller may send."""
        schedule = self._schedules.get(name)
        if schedule is None:
            raise ScheduleUnknown(f"there is no schedule {name[:80]!r}")
        check_permitted(SEND, schedule.definition.topic)
        return schedule


def definition_of(request: pb.Schedule) -> ScheduleDefinition:
    """Return the definition in a request. Raises SendRefused if a property breaks a bound."""
    properties = sorted(request.properties.items())
    check_properties(Properties(properties, request.tag, request.message_group, content_type=request.content_type or None))
    return ScheduleDefinition(
        name=request.name,
        topic=request.topic,
        body=request.body,
        is_template=request.body_is_template,
        properties=properties,
        tag=request.tag,
        message_group=request.message_group,
        content_type=request.content_type,
        expire_after_ms=request.expire_after_ms,
        every_ms=request.every_ms,
        cron=request.cron,
        rrule=request.rrule,
        zone=request.zone or "UTC",
        start_ms=request.start_ms,
        end_ms=request.end_ms,
        count=request.count,
        missed=_MISSED.get(request.missed, "skip"),
        grace_ms=request.grace_ms or GRACE_MS,
    )


def described(schedule: Schedule, *, with_upcoming: bool = False) -> pb.ScheduleDescription:
    """Return the description of a schedule."""
    definition, state = schedule.definition, schedule.state
    rule: dict[str, int | str] = {name: value for name in ("every_ms", "cron", "rrule") if (value := getattr(definition, name))}
    upcoming: list[int] = []
    if with_upcoming and state.next_ms:
        upcoming = [state.next_ms, *definition.upcoming(state.next_ms + 1, state.counted + 1, UPCOMING - 1)]
    return pb.ScheduleDescription(
        schedule=pb.Schedule(
            name=definition.name,
            topic=definition.topic,
            body=definition.body,
            body_is_template=definition.is_template,
            properties=dict(definition.properties),
            tag=definition.tag,
            message_group=definition.message_group,
            content_type=definition.content_type,
            expire_after_ms=definition.expire_after_ms,
            zone=definition.zone,
            start_ms=definition.start_ms,
            end_ms=definition.end_ms,
            count=definition.count,
            missed=_MISSED_CODES[definition.missed],
            grace_ms=definition.grace_ms,
            **rule,  # type: ignore[arg-type]  # one of the three, of its own type
        ),
        paused=state.is_paused,
        next_ms=state.next_ms,
        sent=state.sent,
        last_ms=state.last_ms,
        error=state.error,
        upcoming_ms=upcoming,
    )
