"""Schedules over the admin API: messages that the node sends again and again."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from bisect import bisect_left, bisect_right
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Annotated, Any, Final, Literal

import msgspec

from penstock.node.api.changes import DurableChanges, causer_of, version_of
from penstock.node.api.operation import NUMBER_MAX, ApiCall, ApiError, ApiRole, Done, Operation, PageQuery, not_found
from penstock.pop.core.sender import check_properties, message_id
from penstock.store.properties import Properties
from penstock.timer.schedule import GRACE_MS, ScheduleDefinition
from penstock.timer.schedules import Schedule, Schedules

SCHEDULES_AT_ONCE: Final = 128
"""Schedules of a page that are described in one slice."""

UPCOMING: Final = 5
"""Occurrences that are shown of one schedule."""

_RULE: Final = ("every_ms", "cron", "rrule", "zone", "start_ms", "end_ms", "count", "missed", "grace_ms")
"""Fields of a definition that say when the schedule occurs."""

_MESSAGE: Final = ("topic", "is_template", "tag", "message_group", "content_type", "expire_after_ms")
"""Fields of a definition that say what it sends, besides the body and the properties."""


class SchedulePageQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a listing of schedules."""

    prefix: Annotated[str, msgspec.Meta(max_length=255, description="Their names begin with this.")] = ""


class ScheduleRule(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """When a schedule occurs. Exactly one of `every_ms`, `cron` and `rrule` must be given."""

    every_ms: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)] = 0
    cron: str = ""
    rrule: Annotated[str, msgspec.Meta(description="A recurrence rule of iCalendar (RFC 5545).")] = ""
    zone: Annotated[str, msgspec.Meta(description="Time zone of `cron` and `rrule`, by its name in the IANA database.")] = "UTC"
    start_ms: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="Nothing occurs before; 0 for now.")] = 0
    end_ms: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="Nothing occurs after; 0 for no end.")] = 0
    count: Annotated[
        int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="It ends when it has sent so many messages; 0 for no end.")
    ] = 0
    missed: Annotated[
        Literal["skip", "once", "all", "latest"],
        msgspec.Meta(description="Which messages are sent for occurrences that the node has missed."),
    ] = "skip"
    grace_ms: Annotated[
        int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="An occurrence that is so late counts as missed.")
    ] = GRACE_MS


class ScheduleSource(ScheduleRule, forbid_unknown_fields=True, kw_only=True):
    """What a schedule sends, and when."""

    topic: str
    body_base64: str = ""
    is_template: Annotated[bool, msgspec.Meta(description="Whether the body has placeholders such as {{occurrence}}.")] = False
    properties: Annotated[dict[str, str], msgspec.Meta(description="User properties.")] = {}
    tag: str = ""
    message_group: str = ""
    content_type: str = ""
    expire_after_ms: Annotated[
        int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="Its messages expire so long after they are sent; 0: never.")
    ] = 0


class ScheduleListed(msgspec.Struct, kw_only=True):
    """A schedule, without the body of its messages."""

    name: str
    topic: str
    rule: ScheduleRule
    paused: bool
    next_ms: Annotated[int, msgspec.Meta(description="When it occurs next; 0 if it has ended.")]
    last_ms: Annotated[int, msgspec.Meta(description="Time of the occurrence that was sent last; 0 if there was none.")]
    sent: Annotated[int, msgspec.Meta(description="Messages that it has sent.")]
    error: Annotated[str, msgspec.Meta(description="Why the last occurrence could not be sent; empty if it was.")]
    body_bytes: int
    version: str


class ScheduleShown(ScheduleListed, kw_only=True):
    """A schedule with its next occurrences."""

    upcoming_ms: list[int]


class SchedulePage(msgspec.Struct):
    """A page of schedules, in the order of their names."""

    items: list[ScheduleListed]
    next: str | None


class ScheduleDefined(msgspec.Struct, kw_only=True):
    """The definition of a schedule, as a PUT takes it."""

    definition: ScheduleSource
    version: str


class ScheduleRun(msgspec.Struct):
    """The message that was sent."""

    message_id: str


class ScheduleOperations:
    """Serves the schedules.

    Parameters:
        schedules: of the node.
        changes: waits until changes are durable.
    """

    def __init__(self, schedules: Schedules, changes: DurableChanges) -> None:
        self._schedules = schedules
        self._changes = changes
        self._turn = asyncio.Lock()

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        one, viewer, operator = "/schedules/{name}", ApiRole.VIEWER, ApiRole.OPERATOR
        yield Operation(
            "listSchedules", "GET", "/schedules", viewer, "List schedules.", self.page, SchedulePage, SchedulePageQuery
        )
        yield Operation(
            "getSchedule", "GET", one, viewer, "Show a schedule with its next occurrences.", self.show, ScheduleShown
        )
        yield Operation(
            "getScheduleDefinition",
            "GET",
            f"{one}/definition",
            operator,
            "Show the definition of a schedule, with the body of its messages.",
            self.definition,
            ScheduleDefined,
        )
        yield Operation(
            "putSchedule",
            "PUT",
            one,
            operator,
            "Create a schedule, or replace it; it begins anew.",
            self.put,
            ScheduleShown,
            body=ScheduleSource,
        )
        yield Operation(
            "pauseSchedule", "POST", f"{one}/pause", operator, "Let a schedule send nothing.", self.pause, ScheduleShown
        )
        yield Operation(
            "resumeSchedule", "POST", f"{one}/resume", operator, "End the pause of a schedule.", self.resume, ScheduleShown
        )
        yield Operation("runSchedule", "POST", f"{one}/run", operator, "Send a message now.", self.run, ScheduleRun)
        yield Operation("deleteSchedule", "DELETE", one, ApiRole.ADMIN, "Delete a schedule.", self.delete, Done)

    @asynccontextmanager
    async def _own_turn(self) -> AsyncGenerator[None]:
        """Serve one such call in a turn of the loop: to search for occurrences takes up to some milliseconds."""
        async with self._turn:
            try:
                yield
            finally:
                await asyncio.sleep(0)

    async def page(self, call: ApiCall) -> SchedulePage:
        """Return a page of schedules."""
        asked: SchedulePageQuery = call.query
        names = self._schedules.names  # a change makes another list
        begin = max(bisect_right(names, asked.after) if asked.after else 0, bisect_left(names, asked.prefix))
        items: list[ScheduleListed] = []
        for number in range(begin, len(names)):
            if not names[number].startswith(asked.prefix):
                break
            if len(items) == asked.limit:
                return SchedulePage(items, items[-1].name)
            schedule = self._schedules.get(names[number])
            if schedule is not None:
                items.append(ScheduleListed(**_figures(schedule)))
            if number % SCHEDULES_AT_ONCE == 0:
                await asyncio.sleep(0)
        return SchedulePage(items, None)

    async def show(self, call: ApiCall) -> ScheduleShown:
        """Return a schedule."""
        return await self._shown(self._named(call))

    async def definition(self, call: ApiCall) -> ScheduleDefined:
        """Return the definition of a schedule."""
        schedule = self._named(call)
        definition = schedule.definition
        source = ScheduleSource(
            body_base64=b64encode(definition.body).decode(),
            properties=dict(definition.properties),
            **{name: getattr(definition, name) for name in (*_RULE, *_MESSAGE)},
        )
        return ScheduleDefined(definition=source, version=_version(schedule))

    async def put(self, call: ApiCall) -> ScheduleShown:
        """Create or replace a schedule."""
        name, asked = call.path["name"], call.body
        definition = _definition(name, asked)
        async with self._own_turn():
            old = self._schedules.get(name)
            if old is not None:
                call.check_version(_version(old))
            elif call.if_match:
                raise ApiError(HTTPStatus.PRECONDITION_FAILED, f"there is no schedule {name[:200]!r} any more; read it again")
            async with self._changes.durable():
                _check_properties(asked)
                schedule = self._schedules.put(definition, causer_of(call.subject))
        call.noted["topic"] = definition.topic
        return await self._shown(schedule)

    async def pause(self, call: ApiCall) -> ScheduleShown:
        """Let a schedule send nothing."""
        schedule = self._named(call)
        async with self._changes.durable():
            self._schedules.pause(schedule)
        return await self._shown(schedule)

    async def resume(self, call: ApiCall) -> ScheduleShown:
        """End a pause."""
        async with self._own_turn(), self._changes.durable():
            schedule = self._named(call)
            self._schedules.resume(schedule)
        return await self._shown(schedule)

    async def run(self, call: ApiCall) -> ScheduleRun:
        """Send a message now."""
        schedule = self._named(call)
        async with self._changes.durable():
            position = self._schedules.run(schedule)
            call.noted["message"] = message_id(position)
        return ScheduleRun(message_id(position))

    async def delete(self, call: ApiCall) -> Done:
        """Delete a schedule."""
        schedule = self._named(call)
        async with self._changes.durable():
            self._schedules.delete(schedule)
        return Done()

    def _named(self, call: ApiCall) -> Schedule:
        """Return the schedule of a path, in the version that the caller has seen. Raises ApiError."""
        schedule = self._schedules.get(call.path["name"])
        if schedule is None:
            raise not_found("schedule", call.path["name"])
        call.check_version(_version(schedule))
        return schedule

    async def _shown(self, schedule: Schedule) -> ScheduleShown:
        async with self._own_turn():
            definition, state = schedule.definition, schedule.state
            upcoming: list[int] = []
            if state.next_ms:
                upcoming = [state.next_ms, *definition.upcoming(state.next_ms + 1, state.counted + 1, UPCOMING - 1)]
            return ScheduleShown(**_figures(schedule), upcoming_ms=upcoming)


def _version(schedule: Schedule) -> str:
    return version_of([schedule.id, schedule.state.is_paused])  # each definition is a record of its own


def _figures(schedule: Schedule) -> dict[str, Any]:
    definition, state = schedule.definition, schedule.state
    return {
        "name": definition.name,
        "topic": definition.topic,
        "rule": ScheduleRule(**{name: getattr(definition, name) for name in _RULE}),
        "paused": state.is_paused,
        "next_ms": state.next_ms,
        "last_ms": state.last_ms,
        "sent": state.sent,
        "error": state.error,
        "body_bytes": len(definition.body),
        "version": _version(schedule),
    }


def _definition(name: str, asked: ScheduleSource) -> ScheduleDefinition:
    """Return the definition in a request. Raises ApiError."""
    try:
        body = b64decode(asked.body_base64, validate=True)
    except ValueError as error:
        raise ApiError(HTTPStatus.BAD_REQUEST, f"body_base64 is not base64: {error}") from error
    values: dict[str, Any] = {each: getattr(asked, each) for each in (*_RULE, *_MESSAGE)}
    return ScheduleDefinition(name=name, body=body, properties=sorted(asked.properties.items()), **values)


def _check_properties(asked: ScheduleSource) -> None:
    """Raise SendRefused if the properties break a bound."""
    properties = list(asked.properties.items())
    check_properties(Properties(properties, asked.tag, asked.message_group, content_type=asked.content_type or None))
