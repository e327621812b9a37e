"""What the methods of the native services need of their caller."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.access.actions import ADMIN, CONSUME, POP, SEND
from penstock.pop.access.auditedcall import LineFields
from penstock.pop.access.callguard import Need, ServiceRules, no_needs
from penstock.pop.grpc.status import refusal


def _send(request: Any) -> Iterator[Need]:
    for topic in {message.topic for message in request.messages}:
        yield SEND, topic


def _consume(request: Any) -> Iterator[Need]:
    yield CONSUME, request.group


def _pop(request: Any) -> Iterator[Need]:
    yield CONSUME, request.group
    yield POP, request.filter


def _consume_stream(request: Any) -> Iterator[Need]:
    # Only the first request of a stream names a group; the others are about the deliveries of the stream.
    if request.HasField("open"):
        yield from _pop(request.open)


def _create_schedule(request: Any) -> Iterator[Need]:
    yield SEND, request.schedule.topic


def _admin(request: Any) -> Iterator[Need]:
    yield ADMIN, request.group


def _create_group(request: Any) -> Iterator[Need]:
    # The description of a group tells how many messages its filter matches, and how old they are.
    yield ADMIN, request.group
    yield POP, request.filter


def _admin_all(_request: Any) -> Iterator[Need]:
    yield ADMIN, ""


def _group(request: Any) -> LineFields:
    return {"group": request.group, "filter": getattr(request, "filter", "")}


def _schedule(request: Any) -> LineFields:
    return {"name": request.name}


def _new_schedule(request: Any) -> LineFields:
    return {"name": request.schedule.name, "topic": request.schedule.topic}


def _timer(request: Any) -> LineFields:
    return {"topic": request.topic, "key": request.key}


def _rescheduled_timer(request: Any) -> LineFields:
    return _timer(request.name)


def _timers(request: Any) -> LineFields:
    named = {"filter": request.filter, "key": request.key, "of_user": request.user, "of_client": request.client_id}
    return {name: value for name, value in named.items() if value}


def _recall(request: Any) -> LineFields:
    return {"handles": len(request.recall_handles)}


POP_RULES = ServiceRules(
    "/penstock.pop.v1.PopService/",
    {
        "Send": _send,
        "Pop": _pop,
        "Ack": _consume,
        "ChangeInvisible": _consume,
        "DeadLetter": _consume,
        "Consume": _consume_stream,
        # These check by themselves that the caller may send to the topics of the messages.
        "Recall": no_needs,
        "EndTransactions": no_needs,
        "PollTransactions": no_needs,
        "ListTransactions": _admin_all,
    },
    refusal,
    {"Recall": _recall},
)
"""Each method of PopService is in here; a test holds the table to the service's descriptor."""

GROUP_RULES = ServiceRules(
    "/penstock.pop.v1.GroupService/",
    {
        "CreateGroup": _create_group,
        "UpdateGroup": _admin,
        "DescribeGroups": _admin,
        "DeleteGroup": _admin,
        "ResetGroup": _admin,
        "ListDeadLetters": _admin,
        "GetDeadLetter": _admin,
        "PurgeDeadLetters": _admin,
        "Redrive": _admin,
    },
    refusal,
    dict.fromkeys(("CreateGroup", "UpdateGroup", "DeleteGroup", "ResetGroup", "PurgeDeadLetters", "Redrive"), _group),
)
"""Each method of GroupService is in here; a test holds the table to the service's descriptor."""

SCHEDULE_RULES = ServiceRules(
    "/penstock.pop.v1.ScheduleService/",
    {
        "CreateSchedule": _create_schedule,
        # These check by themselves that the caller may send to the topics of the schedules.
        "DescribeSchedule": no_needs,
        "ListSchedules": no_needs,
        "PauseSchedule": no_needs,
        "ResumeSchedule": no_needs,
        "RunSchedule": no_needs,
        "DeleteSchedule": no_needs,
    },
    refusal,
    dict.fromkeys(("PauseSchedule", "ResumeSchedule", "RunSchedule", "DeleteSchedule"), _schedule)
    | {"CreateSchedule": _new_schedule},
)
"""Each method of ScheduleService is in here; a test holds the table to the service's descriptor."""

TIMER_RULES = ServiceRules(
    "/penstock.pop.v1.TimerService/",
    {
        # These check by themselves that the caller may send to the topics of the messages.
        "FindTimer": no_needs,
        "CancelTimer": no_needs,
        "RescheduleTimer": no_needs,
        "ListTimers": no_needs,
        "CancelTimers": no_needs,
        "CountTimers": _admin_all,
    },
    refusal,
    {"CancelTimer": _timer, "RescheduleTimer": _rescheduled_timer, "CancelTimers": _timers},
)
"""Each method of TimerService is in here; a test holds the table to the service's descriptor."""

REFLECTION_RULES = ServiceRules("", {}, refusal)
"""Whoever wants to know the services must be known."""
