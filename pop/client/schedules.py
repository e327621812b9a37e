"""Schedules: `Client.schedules` and `SyncClient.schedules`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from penstock.pop.client.calls import AsyncCalls, SyncCalls
from penstock.pop.client.durations import Duration, milliseconds
from penstock.pop.client.results import MISSED, MissedPolicy, ScheduleDescription
from penstock.pop.errors import GroupExists, GroupUnknown, ScheduleExists, ScheduleUnknown
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import ScheduleServiceAsyncStub, ScheduleServiceStub


def _creation(
    name: str,
    topic: str,
    body: bytes,
    *,
    every: Duration,
    cron: str,
    rrule: str,
    zone: str,
    template: bool,
    properties: Mapping[str, str] | None,
    tag: str,
    message_group: str,
    content_type: str,
    expire_after: Duration,
    start_ms: int,
    end_ms: int,
    count: int,
    missed: MissedPolicy,
    grace: Duration,
    replace: bool,
) -> pb.CreateScheduleRequest:
    if sum(map(bool, (every, cron, rrule))) != 1:
        raise ValueError("give exactly one of every, cron and rrule")
    if missed not in MISSED:
        raise ValueError(f"missed is {missed!r}; use one of {', '.join(MISSED)}")
    schedule = pb.Schedule(
        name=name,
        topic=topic,
        body=body,
        body_is_template=template,
        properties=properties or {},
        tag=tag,
        message_group=message_group,
        content_type=content_type,
        expire_after_ms=milliseconds(expire_after, "expire_after"),
        zone=zone,
        start_ms=start_ms,
        end_ms=end_ms,
        count=count,
        missed=MISSED[missed],
        grace_ms=milliseconds(grace, "grace"),
    )
    if every:
        schedule.every_ms = milliseconds(every, "every")
    elif cron:
        schedule.cron = cron
    else:
        schedule.rrule = rrule
    return pb.CreateScheduleRequest(schedule=schedule, replace=replace)


@contextmanager
def _own_errors() -> Iterator[None]:
    """Raise the errors of schedules for the gRPC statuses that the clients take for errors of groups."""
    try:
        yield
    except GroupUnknown as error:
        raise ScheduleUnknown(str(error)) from error
    except GroupExists as error:
        raise ScheduleExists(str(error)) from error


class ScheduleCalls:
    """Creates, describes, pauses, resumes, runs and deletes schedules.

    A schedule sends a message to its topic again and again. The caller needs the right to send to that topic. All methods raise
    NodeUnavailable, NotAuthenticated and NotPermitted, and those that name a schedule raise ScheduleUnknown.
    """

    def __init__(self, call: AsyncCalls, stub: ScheduleServiceAsyncStub) -> None:
        self._call = call
        self._stub = stub

    async def create(
        self,
        name: str,
        topic: str,
        body: bytes = b"",
        *,
        every: Duration = 0.0,
        cron: str = "",
        rrule: str = "",
        zone: str = "UTC",
        template: bool = False,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
        content_type: str = "",
        expire_after: Duration = 0.0,
        start_ms: int = 0,
        end_ms: int = 0,
        count: int = 0,
        missed: MissedPolicy = "skip",
        grace: Duration = 0.0,
        replace: bool = False,
    ) -> ScheduleDescription:
        """Create a schedule; return its description, with its next occurrences.

            await client.schedules.create("report/acme", "reports/acme", b"{{occurrence:%Y-%m-%d}}", template=True,
                                          cron="0 2 * * *", zone="Europe/Berlin", missed="once")

        Args:
            name: Names the schedule on the node: 1 to 255 bytes of printable characters.
            topic: As in `OutgoingMessage`, like `properties`, `tag`, `message_group`, `content_type` and `expire_after`.
                Each message has the properties `schedule` and `occurrence-ms` besides.
            body: Of the messages. The whole schedule may have 64 KiB.
            every: Occur again after so long, from `start_ms` on, in seconds or as a timedelta. Give one of `every`, `cron` and
                `rrule`.
            cron: Five fields: minute, hour, day of month, month and day of week.
            rrule: Recurrence rule of RFC 5545, with `start_ms` as its DTSTART.
            zone: Time zone of `cron` and `rrule`, by its name in the IANA database.
            template: Fill in `{{occurrence}}`, `{{occurrence:FORMAT}}` (as in `strftime`), `{{occurrence_ms}}`, `{{number}}`
                and `{{schedule}}` in the body.
            properties: See `topic`.
            tag: See `topic`.
            message_group: See `topic`.
            content_type: See `topic`.
            expire_after: See `topic`.
            start_ms: Nothing occurs before, in ms since 1970; 0 for now.
            end_ms: Nothing occurs after; 0 for no end.
            count: The schedule ends after so many messages; 0 for no end.
            missed: What becomes of occurrences that the node could not send in time.
            grace: How late an occurrence is at least that counts as missed, in seconds or as a timedelta; 0 for one minute.
            replace: Replace the schedule of this name, which begins anew, in one step.

        Raises:
            ScheduleExists: There is a schedule of this name, and `replace` is False.
            RequestInvalid: The rule, the zone, a time, the topic or the template is not valid, or nothing would ever occur.
            Overloaded: `timer.schedules_max` or another bound of the node is reached, or the disk is full.
            TypeError, ValueError: Not exactly one rule is given, or a duration is none.
        """
        request = _creation(
            name,
            topic,
            body,
            every=every,
            cron=cron,
            rrule=rrule,
            zone=zone,
            template=template,
            properties=properties,
            tag=tag,
            message_group=message_group,
            content_type=content_type,
            expire_after=expire_after,
            start_ms=start_ms,
            end_ms=end_ms,
            count=count,
            missed=missed,
            grace=grace,
            replace=replace,
        )
        with _own_errors():
            return ScheduleDescription(await self._call(self._stub.CreateSchedule, request))

    async def describe(self, name: str) -> ScheduleDescription:
        """Return a schedule, how far it has got, and its next occurrences."""
        with _own_errors():
            return ScheduleDescription(await self._call(self._stub.DescribeSchedule, pb.ScheduleRequest(name=name)))

    async def list(self, *, prefix: str = "", after: str = "", limit: int = 1_000) -> list[ScheduleDescription]:
        """Return the schedules to whose topics the caller may send, by name.

        Args:
            prefix: What the names begin with.
            after: Name of the last schedule of the page before.
            limit: Maximum number of schedules, 1 to 10,000.
        """
        found: list[ScheduleDescription] = []
        request: pb.ListSchedulesRequest | None = pb.ListSchedulesRequest(prefix=prefix, after=after, schedules_max=limit)
        while request is not None:
            page = (await self._call(self._stub.ListSchedules, request)).schedules
            found += map(ScheduleDescription, page)
            request = _next_page(request, page)
        return found

    async def pause(self, name: str) -> ScheduleDescription:
        """Send nothing until `resume`. What occurs meanwhile is not sent."""
        with _own_errors():
            return ScheduleDescription(await self._call(self._stub.PauseSchedule, pb.ScheduleRequest(name=name)))

    async def resume(self, name: str) -> ScheduleDescription:
        """Go on with the first occurrence from now on."""
        with _own_errors():
            return ScheduleDescription(await self._call(self._stub.ResumeSchedule, pb.ScheduleRequest(name=name)))

    async def run(self, name: str) -> str:
        """Send a message now, besides the occurrences; return its message id. It does not count against `count`."""
        with _own_errors():
            return (await self._call(self._stub.RunSchedule, pb.ScheduleRequest(name=name))).message_id

    async def delete(self, name: str) -> None:
        """Delete a schedule. Messages that it has sent stay."""
        with _own_errors():
            await self._call(self._stub.DeleteSchedule, pb.ScheduleRequest(name=name))


class SyncScheduleCalls:
    """The methods of `ScheduleCalls`, for threads. Parameters, results and errors are the same."""

    def __init__(self, call: SyncCalls, stub: ScheduleServiceStub) -> None:
        self._call = call
        self._stub = stub

    def create(
        self,
        name: str,
        topic: str,
        body: bytes = b"",
        *,
        every: Duration = 0.0,
        cron: str = "",
        rrule: str = "",
        zone: str = "UTC",
        template: bool = False,
        properties: Mapping[str, str] | None = None,
        tag: str = "",
        message_group: str = "",
        content_type: str = "",
        expire_after: Duration = 0.0,
        start_ms: int = 0,
        end_ms: int = 0,
        count: int = 0,
        missed: MissedPolicy = "skip",
        grace: Duration = 0.0,
        replace: bool = False,
    ) -> ScheduleDescription:
        """Create a schedule, as `ScheduleCalls.create`."""
        request = _creation(
            name,
            topic,
            body,
            every=every,
            cron=cron,
            rrule=rrule,
            zone=zone,
            template=template,
            properties=properties,
            tag=tag,
            message_group=message_group,
            content_type=content_type,
            expire_after=expire_after,
            start_ms=start_ms,
            end_ms=end_ms,
            count=count,
            missed=missed,
            grace=grace,
            replace=replace,
        )
        with _own_errors():
            return ScheduleDescription(self._call(self._stub.CreateSchedule, request))

    def describe(self, name: str) -> ScheduleDescription:
        """Return a schedule, as `ScheduleCalls.describe`."""
        with _own_errors():
            return ScheduleDescription(self._call(self._stub.DescribeSchedule, pb.ScheduleRequest(name=name)))

    def list(self, *, prefix: str = "", after: str = "", limit: int = 1_000) -> list[ScheduleDescription]:
        """Return schedules, as `ScheduleCalls.list`."""
        found: list[ScheduleDescription] = []
        request: pb.ListSchedulesRequest | None = pb.ListSchedulesRequest(prefix=prefix, after=after, schedules_max=limit)
        while request is not None:
            page = self._call(self._stub.ListSchedules, request).schedules
            found += map(ScheduleDescription, page)
            request = _next_page(request, page)
        return found

    def pause(self, name: str) -> ScheduleDescription:
        """Send nothing until `resume`, as `ScheduleCalls.pause`."""
        with _own_errors():
            return ScheduleDescription(self._call(self._stub.PauseSchedule, pb.ScheduleRequest(name=name)))

    def resume(self, name: str) -> ScheduleDescription:
        """Go on, as `ScheduleCalls.resume`."""
        with _own_errors():
            return ScheduleDescription(self._call(self._stub.ResumeSchedule, pb.ScheduleRequest(name=name)))

    def run(self, name: str) -> str:
        """Send a message now, as `ScheduleCalls.run`."""
        with _own_errors():
            return self._call(self._stub.RunSchedule, pb.ScheduleRequest(name=name)).message_id

    def delete(self, name: str) -> None:
        """Delete a schedule, as `ScheduleCalls.delete`."""
        with _own_errors():
            self._call(self._stub.DeleteSchedule, pb.ScheduleRequest(name=name))


def _next_page(request: pb.ListSchedulesRequest, page: Sequence[pb.ScheduleDescription]) -> pb.ListSchedulesRequest | None:
    """Return the request for the page after one, which may have fewer schedules than it could; None if there is none."""
    missing = request.schedules_max - len(page)
    if not page or missing <= 0:
        return None
    return pb.ListSchedulesRequest(prefix=request.prefix, after=page[-1].schedule.name, schedules_max=missing)
