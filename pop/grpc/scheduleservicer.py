"""The servicer of `penstock.pop.v1.ScheduleService`: messages that the node sends again and again."""

from __future__ import annotations

from bisect import bisect_right

from penstock.access.actions import SEND
from penstock.pop.access.caller import CALLER, causer_of_call, check_permitted
from penstock.pop.core.names import message_id
from penstock.pop.core.sender import check_properties
from penstock.pop.errors import ScheduleExists, ScheduleUnknown
from penstock.pop.grpc.requests import bounded
from penstock.pop.grpc.status import with_status
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.properties import Properties
from penstock.store.store import Store
from penstock.timer.schedule import GRACE_MS, Missed, ScheduleDefinition
from penstock.timer.schedules import Schedule, Schedules

SCHEDULES_DEFAULT = 1_000
SCHEDULES_MAX = 10_000
"""Schedules of one page."""

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

    @with_status
    async def CreateSchedule(self, request: pb.CreateScheduleRequest) -> pb.ScheduleDescription:
        definition = definition_of(request.schedule)
        old = self._schedules.get(definition.name)
        if old is not None:
            check_permitted(SEND, old.definition.topic)
            if not request.replace:
                raise ScheduleExists(
                    f"there is a schedule {definition.name!r} already: set replace, delete it, or choose another name"
                )
        schedule = self._schedules.put(definition, causer_of_call())
        await self._store.durable()
        return described(schedule, with_upcoming=True)

    @with_status
    async def DescribeSchedule(self, request: pb.ScheduleRequest) -> pb.ScheduleDescription:
        return described(self._named(request.name), with_upcoming=True)

    @with_status
    async def ListSchedules(self, request: pb.ListSchedulesRequest) -> pb.ListSchedulesResponse:
        count = min(bounded("schedules_max", request.schedules_max, SCHEDULES_DEFAULT), SCHEDULES_MAX)
        rights = CALLER.get()
        names = self._schedules.names
        found: list[pb.ScheduleDescription] = []
        for at in range(bisect_right(names, request.after) if request.after else 0, len(names)):
            schedule = self._schedules.get(names[at])
            if schedule is None or not names[at].startswith(request.prefix):
                continue
            if rights is None or rights.may(SEND, schedule.definition.topic):
                found.append(described(schedule))
                if len(found) == count:
                    break
        return pb.ListSchedulesResponse(schedules=found)

    @with_status
    async def PauseSchedule(self, request: pb.ScheduleRequest) -> pb.ScheduleDescription:
        schedule = self._named(request.name)
        self._schedules.pause(schedule)
        await self._store.durable()
        return described(schedule)

    @with_status
    async def ResumeSchedule(self, request: pb.ScheduleRequest) -> pb.ScheduleDescription:
        schedule = self._named(request.name)
        self._schedules.resume(schedule)
        await self._store.durable()
        return described(schedule, with_upcoming=True)

    @with_status
    async def RunSchedule(self, request: pb.ScheduleRequest) -> pb.RunScheduleResponse:
        position = self._schedules.run(self._named(request.name))
        await self._store.durable()
        return pb.RunScheduleResponse(message_id=message_id(position))

    @with_status
    async def DeleteSchedule(self, request: pb.ScheduleRequest) -> pb.DeleteScheduleResponse:
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
    counted, next_ms = state.counted, state.next_ms
    while with_upcoming and next_ms and len(upcoming) < UPCOMING:
        upcoming.append(next_ms)
        counted += 1
        next_ms = definition.first_from(next_ms + 1, counted)
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
