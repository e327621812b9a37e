"""The audit log over gRPC: what it says of each method of each service, whoever calls it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.message_factory import GetMessageClass

from penstock import Client, Security
from penstock.access.options import AccessControlOptions
from penstock.access.subject import Subject
from penstock.pop.errors import NotPermitted
from penstock.pop.grpc.access import GROUP_RULES, POP_RULES, SCHEDULE_RULES, TIMER_RULES
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.rocketmq.access import RULES as ROCKETMQ_RULES
from penstock.pop.rocketmq.stubs import SERVICE, service_pb
from penstock.pop.rocketmq.stubs import pb as rocketmq_pb
from penstock.store.store import Store
from tests.pop.rocketmq.calling import named, outgoing, receive_request
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX

METHODS = {
    f"{service.name}/{method.name}": (service.full_name, method)
    for service in (*pb.DESCRIPTOR.services_by_name.values(), SERVICE)
    for method in service.methods
}
"""Each method of each service, by the names of both."""

QUIET = "plant/quiet"
"""A topic to which only a test sends that names it."""

RULES = (POP_RULES, GROUP_RULES, SCHEDULE_RULES, TIMER_RULES, ROCKETMQ_RULES)

FILE = """
[[principal]]
name = "owner"
token_sha256 = "{owner}"
write = ["plant/#"]
read = ["plant/#", "lite/#"]
consume = ["*"]
admin = ["*"]

[[principal]]
name = "consumer"
token_sha256 = "{consumer}"
consume = ["*"]

[[principal]]
name = "nobody"
token_sha256 = "{nobody}"
""".format(**{name: sha256(name.encode()).hexdigest() for name in ("owner", "consumer", "nobody")})


class Audited:
    """A node with an audit log, and what the requests of this test are about.

    Parameters:
        node: the node.
        path: of the audit log.
        channel: to the node.
    """

    def __init__(self, node: Node, path: Path, channel: grpc.aio.Channel) -> None:
        self.node = node
        self.channel = channel
        self._path = path
        self._read = 0
        self.recall = self.other_recall = self.half = self.dead_letter = ""

    async def prepare(self) -> None:
        """Make a group with a dead letter, a schedule, two delayed messages and a half message."""
        async with Client(self.node.target, security=Security(token="owner")) as client:
            await client.groups.create(GROUP, FILTER)
            await client.send(TOPIC, b"a")
            (message,) = await client.pop(FILTER, group=GROUP)
            await client.dead_letter([message.handle], group=GROUP)
            await client.schedules.create("s", TOPIC, every=60.0)
            self.recall = (await client.send(TOPIC, b"a", delay=60.0, timer_key="k")).recall_handle or ""
            self.other_recall = (await client.send(TOPIC, b"a", delay=60.0)).recall_handle or ""
            self.half = (await client.transactions.begin(TOPIC, b"a", producer="p")).handle
        self.lines()

    async def call(self, name: str, request: Any, token: str) -> None:
        """Call a method, and wait for the end of the call, whatever its outcome. A stream gets one request, or none."""
        full_name, method = METHODS[name]
        kind = "_".join("stream" if streams else "unary" for streams in (method.client_streaming, method.server_streaming))
        make = getattr(self.channel, kind)(
            f"/{full_name}/{method.name}",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        metadata = (("x-mq-client-id", "c1"), *((("authorization", f"Bearer {token}"),) if token else ()))
        requests = _one(request) if method.client_streaming else request
        call = make(requests, metadata=metadata, timeout=WAIT_S_MAX)
        try:
            if method.server_streaming:
                async for _ in call:
                    pass
            else:
                await call
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.DEADLINE_EXCEEDED:
                raise

    def lines(self) -> list[dict[str, Any]]:
        """Return the lines that are new since the last call."""
        found = [json.loads(line) for line in self._path.read_text().splitlines()]
        new, self._read = found[self._read :], len(found)
        return new


async def _one(request: Any) -> AsyncIterator[Any]:
    if request is not None:
        yield request


@pytest.fixture
async def audited(tmp_path: Path) -> AsyncIterator[Audited]:
    (tmp_path / "access.toml").write_text(FILE)
    async with (
        Node(tmp_path / "data", access=tmp_path / "access.toml", audit=tmp_path / "audit") as node,
        grpc.aio.insecure_channel(node.target) as channel,
    ):
        found = Audited(node, tmp_path / "audit", channel)
        await found.prepare()
        yield found


# --- denied and refused -------------------------------------------------------------------------------------------------

Make = Callable[[Audited], Any]


@dataclass(frozen=True)
class Denied:
    """A request that needs rights.

    Parameters:
        request: returns it.
        nobody: action and name that a caller without rights is denied.
        consumer: those that a caller is denied who may consume all groups and do nothing else; None if that suffices.
    """

    request: Make
    nobody: tuple[str, str]
    consumer: tuple[str, str] | None


def sends(request: Make) -> Denied:
    return Denied(request, ("send", TOPIC), ("send", TOPIC))


def consumes(request: Make) -> Denied:
    return Denied(request, ("consume", GROUP), None)


def reads(request: Make) -> Denied:
    return Denied(request, ("consume", GROUP), ("pop", FILTER))


def administrates(request: Make, name: str = GROUP) -> Denied:
    return Denied(request, ("admin", name), ("admin", name))


def schedule(_: Audited) -> Any:
    return pb.ScheduleRequest(name="s")


def offset(of: type[Any], **more: Any) -> Make:
    queue = rocketmq_pb.MessageQueue(topic=named(FILTER))
    return lambda _: of(group=named(GROUP), message_queue=queue, **more)


def pull(_: Audited) -> Any:
    request = offset(service_pb.PullMessageRequest, batch_size=1)(_)
    request.long_polling_timeout.FromMilliseconds(0)
    return request


DENIED = {
    "PopService/Send": sends(lambda _: pb.SendRequest(messages=[pb.Message(topic=TOPIC)])),
    "PopService/Pop": reads(lambda _: pb.PopRequest(group=GROUP, filter=FILTER)),
    "PopService/Ack": consumes(lambda _: pb.AckRequest(group=GROUP, handles=["x"])),
    "PopService/ChangeInvisible": consumes(
        lambda _: pb.ChangeInvisibleRequest(group=GROUP, changes=[pb.InvisibleChange(handle="x", invisible_ms=1)])
    ),
    "PopService/DeadLetter": consumes(lambda _: pb.AckRequest(group=GROUP, handles=["x"])),
    "PopService/Consume": reads(lambda _: pb.ConsumeRequest(open=pb.ConsumeOpen(group=GROUP, filter=FILTER))),
    "PopService/Recall": sends(lambda audited: pb.RecallRequest(recall_handles=[audited.recall])),
    "PopService/EndTransactions": sends(
        lambda audited: pb.EndTransactionsRequest(ends=[pb.TransactionEnd(transaction_handle=audited.half, commit=True)])
    ),
    "PopService/ListTransactions": administrates(lambda _: pb.ListTransactionsRequest(), ""),
    "GroupService/CreateGroup": administrates(lambda _: pb.CreateGroupRequest(group=GROUP, filter=FILTER)),
    "GroupService/UpdateGroup": administrates(
        lambda _: pb.UpdateGroupRequest(group=GROUP, settings=pb.GroupSettings(attempts_max=3))
    ),
    "GroupService/DescribeGroups": administrates(lambda _: pb.GroupRequest(group=GROUP)),
    "GroupService/DeleteGroup": administrates(lambda _: pb.GroupRequest(group=GROUP)),
    "GroupService/ResetGroup": administrates(lambda _: pb.ResetGroupRequest(group=GROUP, end=pb.EARLIEST)),
    "GroupService/ListDeadLetters": administrates(lambda _: pb.ListDeadLettersRequest(group=GROUP)),
    "GroupService/GetDeadLetter": administrates(lambda _: pb.GetDeadLetterRequest(group=GROUP, message_id="0" * 16)),
    "GroupService/PurgeDeadLetters": administrates(lambda _: pb.RedriveRequest(group=GROUP)),
    "GroupService/Redrive": administrates(lambda _: pb.RedriveRequest(group=GROUP)),
    "ScheduleService/CreateSchedule": sends(
        lambda _: pb.CreateScheduleRequest(schedule=pb.Schedule(name="t", topic=TOPIC, every_ms=60_000))
    ),
    "ScheduleService/DescribeSchedule": sends(schedule),
    "ScheduleService/PauseSchedule": sends(schedule),
    "ScheduleService/ResumeSchedule": sends(schedule),
    "ScheduleService/RunSchedule": sends(schedule),
    "ScheduleService/DeleteSchedule": sends(schedule),
    "TimerService/FindTimer": sends(lambda audited: pb.TimerName(recall_handle=audited.recall)),
    "TimerService/CancelTimer": sends(lambda _: pb.TimerName(topic=TOPIC, key="k")),
    "TimerService/RescheduleTimer": sends(
        lambda audited: pb.RescheduleTimerRequest(name=pb.TimerName(recall_handle=audited.recall), delay_ms=90_000)
    ),
    "TimerService/CountTimers": administrates(lambda _: pb.CountTimersRequest(), ""),
    "MessagingService/SendMessage": sends(lambda _: service_pb.SendMessageRequest(messages=[outgoing()])),
    "MessagingService/QueryAssignment": consumes(
        lambda _: service_pb.QueryAssignmentRequest(group=named(GROUP), topic=named(FILTER))
    ),
    "MessagingService/ReceiveMessage": reads(lambda _: receive_request(topic=FILTER, wait_ms=0)),
    "MessagingService/AckMessage": consumes(lambda _: service_pb.AckMessageRequest(group=named(GROUP))),
    "MessagingService/ForwardMessageToDeadLetterQueue": consumes(
        lambda _: service_pb.ForwardMessageToDeadLetterQueueRequest(group=named(GROUP), receipt_handle="x")
    ),
    "MessagingService/ChangeInvisibleDuration": consumes(
        lambda _: service_pb.ChangeInvisibleDurationRequest(group=named(GROUP), receipt_handle="x")
    ),
    "MessagingService/PullMessage": reads(pull),
    "MessagingService/GetOffset": reads(offset(service_pb.GetOffsetRequest)),
    "MessagingService/UpdateOffset": reads(offset(service_pb.UpdateOffsetRequest, offset=0)),
    "MessagingService/QueryOffset": Denied(
        lambda _: service_pb.QueryOffsetRequest(message_queue=rocketmq_pb.MessageQueue(topic=named(FILTER))),
        ("pop", FILTER),
        ("pop", FILTER),
    ),
    "MessagingService/EndTransaction": sends(
        lambda audited: service_pb.EndTransactionRequest(
            transaction_id=audited.half, resolution=rocketmq_pb.TransactionResolution.COMMIT
        )
    ),
    "MessagingService/RecallMessage": sends(
        lambda audited: service_pb.RecallMessageRequest(topic=named(TOPIC), recall_handle=audited.recall)
    ),
    "MessagingService/SyncLiteSubscription": Denied(
        lambda _: service_pb.SyncLiteSubscriptionRequest(group=named(GROUP), topic=named("lite"), lite_topic_set=["x"]),
        ("consume", GROUP),
        ("pop", "lite/x"),
    ),
}
"""The methods that need rights, each with a request that a caller without them is denied."""

OPEN: dict[str, Make] = {
    "PopService/PollTransactions": lambda _: pb.PollTransactionsRequest(
        producer="p"
    ),  # has those of topics that it may send to
    "ScheduleService/ListSchedules": lambda _: pb.ListSchedulesRequest(),  # too
    "TimerService/ListTimers": lambda _: pb.ListTimersRequest(),  # too
    "TimerService/CancelTimers": lambda _: pb.ListTimersRequest(),  # too
    "MessagingService/QueryRoute": lambda _: service_pb.QueryRouteRequest(topic=named(TOPIC)),
    "MessagingService/Heartbeat": lambda _: service_pb.HeartbeatRequest(client_type=rocketmq_pb.ClientType.PRODUCER),
    "MessagingService/Telemetry": lambda _: None,  # topics to which the caller may not send are left out
    "MessagingService/NotifyClientTermination": lambda _: service_pb.NotifyClientTerminationRequest(),
}
"""The methods that every principal may call."""


def test_each_method_is_in_one_of_the_tables() -> None:
    assert DENIED.keys() | OPEN.keys() == METHODS.keys()
    assert not DENIED.keys() & OPEN.keys()


@pytest.mark.parametrize("caller", ["nobody", "consumer"])
async def test_a_caller_without_the_right_has_one_line_that_says_denied(audited: Audited, caller: str) -> None:
    for name, case in DENIED.items():
        denied = case.nobody if caller == "nobody" else case.consumer
        if denied is None:
            continue
        await audited.call(name, case.request(audited), caller)
        (line,) = audited.lines()
        assert line.pop("at"), name
        about = {"action": denied[0]} | ({"name": denied[1]} if denied[1] else {})
        who = {"user": caller, "client": "c1", "address": "127.0.0.1"}
        assert line == {"event": "denied", "over": "grpc", "method": name.partition("/")[2]} | who | about, name
    assert len(audited.node.delayed) == 2
    assert len(audited.node.transactions) == 1


@pytest.mark.parametrize("caller", ["stranger", "banned"])
async def test_a_caller_that_nobody_knows_or_that_is_banned_has_one_line_that_says_refused(
    audited: Audited, caller: str
) -> None:
    if caller == "banned":
        await audited.node.access.ban("user", "owner", for_ms=0, why="", by=Subject("test"))
        audited.lines()
    for name in METHODS:
        request = DENIED[name].request(audited) if name in DENIED else OPEN[name](audited)
        await audited.call(name, request, "owner" if caller == "banned" else "")
        (line,) = audited.lines()
        assert (line["event"], line["method"], line["client"]) == ("refused", name.partition("/")[2], "c1"), name
        if caller == "banned":
            assert (line["user"], line["reason"], line["why"]) == ("owner", "BANNED", "the user owner is banned"), name
        else:
            assert (line.get("user"), line["reason"]) == (None, "UNAUTHENTICATED"), name


async def test_a_stream_whose_caller_loses_the_right_has_a_line(audited: Audited, tmp_path: Path) -> None:
    async with (
        Client(audited.node.target, security=Security(token="owner")) as client,
        client.stream(QUIET, group=GROUP) as messages,
    ):
        await client.send(QUIET, b"a")
        await anext(aiter(messages))
        (tmp_path / "access.toml").write_text(FILE.replace('read = ["plant/#"', 'read = ["other/#"'))
        audited.node.access.reload(Subject("test"))
        with pytest.raises(NotPermitted):
            await anext(aiter(messages))
    line = audited.lines()[-1]
    assert (line["event"], line["user"], line["method"], line["action"]) == ("denied", "owner", "Consume", "pop")


async def test_a_call_that_an_operator_ends_has_a_line(audited: Audited) -> None:
    waiting = asyncio.create_task(audited.call("PopService/Pop", _waits(), "owner"))
    await audited.node.until(lambda: any(group.polls for group in audited.node.core.groups))
    assert audited.node.kick("user", "owner") == 1
    await waiting
    (line,) = audited.lines()
    assert (line["event"], line["user"], line["method"]) == ("disconnected", "owner", "Pop")


def _waits() -> Any:
    return pb.PopRequest(group=GROUP, filter=QUIET, wait_ms=60_000)


async def test_a_flood_of_denials_writes_few_lines_and_hides_no_other_action(audited: Audited) -> None:
    limit = AccessControlOptions().audit_lines_per_s
    case = DENIED["PopService/Send"]
    for _ in range(limit + 20):
        await audited.call("PopService/Send", case.request(audited), "nobody")
    await audited.call("TimerService/CountTimers", pb.CountTimersRequest(), "nobody")
    assert [line["action"] for line in audited.lines()] == ["send"] * limit + ["admin"]
    audited.node.access.audit.turn_page()
    (line,) = audited.lines()
    assert (line["event"], line["of"], line["action"], line["lines"]) == ("left_out", "denied", "send", 20)


# --- changed and failed -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Change:
    """A call that changes something.

    Parameters:
        about: fields of the line.
        request: returns the request; None for that in `DENIED`.
        failing: returns a request that can't be served.
    """

    about: dict[str, Any]
    failing: Make
    request: Make | None = None


def unknown_schedule(_: Audited) -> Any:
    return pb.ScheduleRequest(name="none")


ON_GROUP = {"group": GROUP}
ON_SCHEDULE = {"name": "s"}

CHANGES = {
    "GroupService/CreateGroup": Change(
        {"group": "new", "filter": FILTER},
        lambda _: pb.CreateGroupRequest(group="new", filter=FILTER, settings=pb.GroupSettings(attempts_max=7)),
        lambda _: pb.CreateGroupRequest(group="new", filter=FILTER),
    ),
    "GroupService/UpdateGroup": Change(ON_GROUP, lambda _: pb.UpdateGroupRequest(group="none")),
    "GroupService/ResetGroup": Change(
        ON_GROUP | {"to": "earliest"}, lambda _: pb.ResetGroupRequest(group="none", end=pb.EARLIEST)
    ),
    "GroupService/Redrive": Change(ON_GROUP | {"redriven": 1}, lambda _: pb.RedriveRequest(group=GROUP, message_ids=["no id"])),
    "GroupService/PurgeDeadLetters": Change(
        ON_GROUP | {"purged": 2}, lambda _: pb.RedriveRequest(group=GROUP, message_ids=["no id"])
    ),
    "MessagingService/UpdateOffset": Change(
        ON_GROUP | {"filter": FILTER, "offset": 0}, offset(service_pb.UpdateOffsetRequest, offset=4_711)
    ),
    "GroupService/DeleteGroup": Change(ON_GROUP, lambda _: pb.GroupRequest(group="none")),
    "ScheduleService/CreateSchedule": Change(
        {"name": "t", "topic": TOPIC},
        lambda _: pb.CreateScheduleRequest(schedule=pb.Schedule(name="t", topic=TOPIC, every_ms=60_000)),
    ),
    "ScheduleService/PauseSchedule": Change(ON_SCHEDULE, unknown_schedule),
    "ScheduleService/ResumeSchedule": Change(ON_SCHEDULE, unknown_schedule),
    "ScheduleService/RunSchedule": Change(ON_SCHEDULE, unknown_schedule),
    "ScheduleService/DeleteSchedule": Change(ON_SCHEDULE, unknown_schedule),
    "TimerService/RescheduleTimer": Change(
        {"topic": TOPIC, "key": "k"},
        lambda _: pb.RescheduleTimerRequest(name=pb.TimerName(topic=TOPIC, key="none"), delay_ms=1),
        lambda _: pb.RescheduleTimerRequest(name=pb.TimerName(topic=TOPIC, key="k"), delay_ms=90_000),
    ),
    "TimerService/CancelTimer": Change({"topic": TOPIC, "key": "k"}, lambda _: pb.TimerName(topic=TOPIC, key="none")),
    "PopService/Recall": Change(
        {"handles": 2, "recalled": 1},
        lambda audited: pb.RecallRequest(recall_handles=[audited.recall]),
        lambda audited: pb.RecallRequest(recall_handles=[audited.recall, audited.other_recall]),
    ),
    "MessagingService/RecallMessage": Change(
        {"topic": TOPIC}, lambda _: service_pb.RecallMessageRequest(topic=named(TOPIC), recall_handle="x")
    ),
    "TimerService/CancelTimers": Change(
        {"of_user": "owner", "messages": 1},
        lambda _: pb.ListTimersRequest(filter="a/#/b"),
        lambda _: pb.ListTimersRequest(user="owner"),
    ),
}
"""The methods that change what others rely on, in an order in which they can be called one after the other."""

NO_CHANGES = {
    # What these change is a message or a delivery of the caller.
    "PopService/Send",
    "PopService/Pop",
    "PopService/Ack",
    "PopService/ChangeInvisible",
    "PopService/DeadLetter",
    "PopService/Consume",
    "PopService/EndTransactions",
    "MessagingService/SendMessage",
    "MessagingService/ReceiveMessage",
    "MessagingService/AckMessage",
    "MessagingService/ForwardMessageToDeadLetterQueue",
    "MessagingService/ChangeInvisibleDuration",
    "MessagingService/PullMessage",
    "MessagingService/EndTransaction",
    # These tell the node about the caller.
    "MessagingService/Heartbeat",
    "MessagingService/Telemetry",
    "MessagingService/NotifyClientTermination",
    "MessagingService/SyncLiteSubscription",
    # These read.
    "PopService/PollTransactions",
    "PopService/ListTransactions",
    "GroupService/DescribeGroups",
    "GroupService/ListDeadLetters",
    "GroupService/GetDeadLetter",
    "ScheduleService/DescribeSchedule",
    "ScheduleService/ListSchedules",
    "TimerService/FindTimer",
    "TimerService/ListTimers",
    "TimerService/CountTimers",
    "MessagingService/QueryRoute",
    "MessagingService/QueryAssignment",
    "MessagingService/GetOffset",
    "MessagingService/QueryOffset",
}


def test_each_method_changes_something_or_does_not() -> None:
    assert CHANGES.keys() | NO_CHANGES == METHODS.keys()
    assert not CHANGES.keys() & NO_CHANGES
    assert CHANGES.keys() == {f"{rules.prefix.split('.')[-1]}{method}" for rules in RULES for method in rules.changes}


async def test_a_change_has_one_line_when_it_was_made_and_one_when_it_failed(audited: Audited) -> None:
    for name, case in CHANGES.items():
        what = name.partition("/")[2]
        async with Client(audited.node.target, security=Security(token="owner")) as client:
            if what == "UpdateOffset":
                for message in await client.pop(FILTER, group=GROUP):
                    await message.ack()
            elif what == "PurgeDeadLetters":
                for message in await client.pop(FILTER, group=GROUP):
                    await message.dead_letter()
            elif what in ("RecallMessage", "CancelTimers"):
                audited.recall = (await client.send(TOPIC, b"a", delay=60.0)).recall_handle or ""
        assert audited.lines() == []
        await audited.call(name, (case.request or DENIED[name].request)(audited), "owner")
        (line,) = audited.lines()
        expected = {"event": "changed", "user": "owner", "client": "c1", "address": "127.0.0.1", "what": what} | case.about
        assert {field: line.get(field) for field in expected} == expected, name
        assert "why" not in line, name
        await audited.call(name, case.failing(audited), "owner")
        (line,) = audited.lines()
        assert (line["event"], line["user"], line["what"]) == ("failed", "owner", what), name
        assert line["why"], name


async def test_a_call_that_changes_nothing_has_no_line(audited: Audited) -> None:
    unchanged = {
        "GroupService/CreateGroup": pb.CreateGroupRequest(group=GROUP, filter=FILTER),
        "GroupService/UpdateGroup": pb.UpdateGroupRequest(group=GROUP, settings=pb.GroupSettings(paused=False)),
        "ScheduleService/ResumeSchedule": pb.ScheduleRequest(name="s"),
        "PopService/Recall": pb.RecallRequest(),
        "MessagingService/UpdateOffset": offset(service_pb.UpdateOffsetRequest, offset=1)(audited),
    }
    for name in sorted(NO_CHANGES - {"PopService/Consume", "MessagingService/Telemetry"}):
        unchanged[name] = DENIED[name].request(audited) if name in DENIED else OPEN[name](audited)
    for name, request in unchanged.items():
        await audited.call(name, request, "owner")
        assert audited.lines() == [], name


async def test_a_consumer_that_changes_the_expression_of_its_group_has_a_line(audited: Audited) -> None:
    await audited.call("MessagingService/ReceiveMessage", receive_request(group="g", wait_ms=0), "owner")
    assert audited.lines() == []
    await audited.call("MessagingService/ReceiveMessage", receive_request(group="g", wait_ms=0, expression="red"), "owner")
    (line,) = audited.lines()
    assert (line["event"], line["what"], line["group"], line["expression"]) == ("changed", "ReceiveMessage", "g", "red")


async def test_a_change_whose_caller_does_not_wait_for_the_answer_has_a_line(
    audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(_: Store) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Store, "durable", never)
    calling = asyncio.create_task(audited.call("GroupService/DeleteGroup", pb.GroupRequest(group=GROUP), "owner"))
    await audited.node.until(lambda: not list(audited.node.core.groups))
    calling.cancel()
    (line,) = audited.lines()
    assert (line["event"], line["what"], line["group"]) == ("changed", "DeleteGroup", GROUP)


async def test_a_client_that_resets_a_lite_topic_of_its_group_has_a_line(audited: Audited) -> None:
    about = {"group": named(GROUP), "topic": named("lite"), "lite_topic_set": ["x"]}
    again = rocketmq_pb.OffsetOption(policy=rocketmq_pb.OffsetOption.Policy.MIN)
    await audited.call("MessagingService/SyncLiteSubscription", service_pb.SyncLiteSubscriptionRequest(**about), "owner")
    assert audited.lines() == []
    request = service_pb.SyncLiteSubscriptionRequest(offset_option=again, **about)
    await audited.call("MessagingService/SyncLiteSubscription", request, "owner")
    (line,) = audited.lines()
    assert (line["event"], line["user"], line["what"]) == ("changed", "owner", "SyncLiteSubscription")
    assert (line["group"], line["filter"], line["to"]) == (GROUP, "lite/x", "earliest")
