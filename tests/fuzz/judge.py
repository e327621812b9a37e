"""What must be true of the answers to calls over gRPC, whoever calls.

a message that is popped    was sent to that topic, fits the filter, and its caller may read it
a handle                    ends one delivery: it is done once, for the group that got it, and for nobody else
an acknowledged message     does not come again; one in flight comes to nobody else of its group
a recalled message          never comes, nor one of a transaction that was not committed
an answer OK                was for a caller who may do that
a list of answers           has one for each question
"""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import unquote

from google.protobuf.message import Message

from penstock.pop.proto import pop_pb2 as pb
from tests.fuzz.callers import Caller, matches

WATCHED = "call/"
"""What the topics begin with to which only calls send. Others have messages of MQTT, too."""

ROCKETMQ_OK = 20_000

Delivery = tuple[str, str, str]
"""Group, filter and message id."""


def topic_of(message: Any) -> str:
    """Return the topic of a message of either API; empty if it is no valid name."""
    if isinstance(message.topic, str):
        return message.topic
    return "" if message.topic.resource_namespace else unquote(message.topic.name)


class Judge:
    """Judges the answers to calls, one sequence after the other, and raises AssertionError for one that must not be."""

    def __init__(self) -> None:
        self._sent: set[tuple[str, bytes]] = set()
        """Topic and body of all messages that any call asked the node to send."""
        self._templates: set[str] = set()
        """Topics of schedules that make their bodies."""
        self._schedules: dict[str, str] = {}
        """Topics of schedules by name, as far as they are known."""
        self.begin()

    def begin(self) -> None:
        """Begin a sequence. Handles of others are not known to it."""
        self._handles: dict[str, Delivery] = {}
        self._ended: set[str] = set()
        """Handles that the node has accepted."""
        self._acked: set[Delivery] = set()
        self._in_flight: dict[Delivery, tuple[str, float]] = {}
        """The handle, and the time before which the delivery is not over."""
        self._recallable: dict[str, tuple[str, bytes]] = {}
        """Topic and body of messages by their recall handle."""
        self._recalled: set[tuple[str, bytes]] = set()
        self._halves: dict[str, tuple[str, bytes]] = {}
        """Topic and body of half messages by their transaction handle."""
        self._open_halves: set[tuple[str, bytes]] = set()
        """Those of them that nobody asked to commit."""
        self._group = ""

    # --- before and after a call ---------------------------------------------------------------------------------------------

    def asked(self, requests: list[Message]) -> None:
        """Note what a call asks for, before it: the node may do it without an answer."""
        self._began_s = time.monotonic()
        for request in requests:
            for message in getattr(request, "messages", ()):
                self._sent.add((topic_of(message), message.body))
            if isinstance(request, pb.CreateScheduleRequest):
                self._sent.add((request.schedule.topic, request.schedule.body))
                self._schedules.pop(request.schedule.name, None)
                if request.schedule.body_is_template:
                    self._templates.add(request.schedule.topic)
            if isinstance(request, pb.EndTransactionsRequest):
                for end in request.ends:
                    if end.commit:
                        self._open_halves.discard(self._halves.get(end.transaction_handle, ("", b"")))
            if isinstance(request, pb.ConsumeRequest) and request.HasField("open"):
                self._group = request.open.group
            self._may_return(request)

    def _may_return(self, request: Message) -> None:
        """Note that messages of a group may come again, or be acknowledged without our knowledge."""
        if isinstance(
            request,
            (
                pb.ChangeInvisibleRequest,
                pb.ResetGroupRequest,
                pb.RedriveRequest,
                pb.UpdateGroupRequest,
                pb.CreateGroupRequest,
                pb.GroupRequest,
            ),
        ):
            group = request.group
        elif isinstance(request, pb.ConsumeRequest):
            group = request.open.group if request.HasField("open") else self._group
        else:
            return
        self._in_flight = {of: one for of, one in self._in_flight.items() if of[0] != group}
        if not isinstance(request, (pb.ChangeInvisibleRequest, pb.ConsumeRequest)):
            self._acked = {of for of in self._acked if of[0] != group}

    def answered(self, method: str, caller: Caller, requests: list[Message], answer: Any) -> None:
        """Judge an answer to a call with the gRPC status OK."""
        if getattr(answer, "status", None) is not None and not isinstance(answer.status, pb.Status):
            self._answered_rocketmq(method, caller, requests[0], answer)
            return
        assert caller.is_known, f"{method} was answered to a caller that the node must not know: {answer}"
        judge = getattr(self, f"_{method}", None)
        if judge is not None:
            judge(caller, requests[0] if method != "Consume" else requests, answer)

    # --- sending -------------------------------------------------------------------------------------------------------------

    def _Send(self, caller: Caller, request: pb.SendRequest, answer: pb.SendResponse) -> None:
        ids = [result.message_id for result in answer.results if result.message_id and not result.repeated]
        assert len(ids) == len(set(ids)), f"one id for two messages: {ids}"
        for message, result in _pairs(request.messages, answer.results):
            if result.status.code != pb.OK:
                continue
            assert caller.may_write(message.topic), f"{caller.name!r} sent to {message.topic!r}"
            assert result.message_id, "a message without an id"
            if result.repeated:
                self._recallable.setdefault(result.recall_handle, _earlier(message.topic, result.message_id))
                self._halves.setdefault(result.transaction_handle, _earlier(message.topic, result.message_id))
                continue
            content = (message.topic, message.body)
            if result.recall_handle:
                self._recallable[result.recall_handle] = content
            if result.transaction_handle:
                self._halves[result.transaction_handle] = content
                self._open_halves.add(content)

    def _Recall(self, caller: Caller, request: pb.RecallRequest, answer: pb.RecallResponse) -> None:
        for handle, status in _pairs(request.recall_handles, answer.statuses):
            if status.code == pb.OK:
                self._recall(caller, handle)

    def _recall(self, caller: Caller, handle: str) -> None:
        content = self._recallable.get(handle)
        assert content is not None, f"a message was recalled with {handle!r}, which the node did not give"
        assert caller.may_write(content[0]), f"{caller.name!r} recalled a message of {content[0]!r}"
        assert content not in self._recalled, f"{content} was recalled twice"
        self._recalled.add(content)

    def _CancelTimer(self, caller: Caller, request: pb.TimerName, answer: pb.Status) -> None:
        if answer.code == pb.OK and request.recall_handle:
            self._recall(caller, request.recall_handle)
        elif answer.code == pb.OK:
            assert caller.may_write(request.topic), f"{caller.name!r} cancelled a message of {request.topic!r}"

    def _EndTransactions(self, caller: Caller, request: pb.EndTransactionsRequest, answer: pb.EndTransactionsResponse) -> None:
        for end, status in _pairs(request.ends, answer.statuses):
            if status.code == pb.OK:
                topic, _ = self._halves.get(end.transaction_handle, (None, b""))
                assert topic is not None, f"a transaction ended by {end.transaction_handle!r}, which the node did not give"
                assert caller.may_write(topic), f"{caller.name!r} ended a transaction of {topic!r}"

    def _PollTransactions(self, caller: Caller, _request: Any, answer: pb.TransactionsResponse) -> None:
        for one in answer.transactions:
            assert caller.may_write(one.message.topic), f"{caller.name!r} saw {one}"
            self._halves[one.transaction_handle] = (one.message.topic, one.message.body)

    def _ListTransactions(self, caller: Caller, _request: Any, answer: pb.TransactionsResponse) -> None:
        assert caller.may_admin(""), f"{caller.name!r} saw {answer}"
        for one in answer.transactions:
            self._halves[one.transaction_handle] = (one.message.topic, one.message.body)

    # --- timers and schedules ------------------------------------------------------------------------------------------------

    def _RescheduleTimer(self, caller: Caller, request: pb.RescheduleTimerRequest, answer: pb.Timer) -> None:
        self._FindTimer(caller, request, answer)
        content = self._recallable.get(request.name.recall_handle)
        if answer.status.code == pb.OK and content is not None:
            assert content not in self._recalled, f"{content} was recalled, and has another time now"
            self._recallable[answer.recall_handle] = content

    def _FindTimer(self, caller: Caller, _request: Any, answer: pb.Timer) -> None:
        assert answer.status.code != pb.OK or caller.may_write(answer.topic), f"{caller.name!r} saw {answer}"
        content = self._recallable.get(answer.recall_handle)
        assert answer.status.code != pb.OK or content not in self._recalled, f"{content} was recalled, and is pending"
        if answer.status.code == pb.OK and content is None:
            self._recallable[answer.recall_handle] = _earlier(answer.topic, answer.message_id)

    def _ListTimers(self, caller: Caller, request: pb.ListTimersRequest, answer: pb.ListTimersResponse) -> None:
        for timer in answer.timers:
            assert not request.filter or matches(request.filter, timer.topic), f"{timer} for {request.filter!r}"
            self._FindTimer(caller, request, timer)

    def _CountTimers(self, caller: Caller, _request: Any, answer: pb.TimerCounts) -> None:
        assert caller.may_admin(""), f"{caller.name!r} saw {answer}"

    def _CreateSchedule(self, caller: Caller, _request: Any, answer: pb.ScheduleDescription) -> None:
        assert caller.may_write(answer.schedule.topic), f"{caller.name!r} has to do with {answer.schedule}"
        self._schedules[answer.schedule.name] = answer.schedule.topic

    _DescribeSchedule = _PauseSchedule = _ResumeSchedule = _CreateSchedule

    def _RunSchedule(self, caller: Caller, request: pb.ScheduleRequest, _answer: Any) -> None:
        topic = self._schedules.get(request.name)
        assert topic is None or caller.may_write(topic), f"{caller.name!r} has to do with the schedule of {topic!r}"

    _DeleteSchedule = _RunSchedule

    def _ListSchedules(self, caller: Caller, _request: Any, answer: pb.ListSchedulesResponse) -> None:
        for one in answer.schedules:
            self._CreateSchedule(caller, _request, one)

    # --- consuming -----------------------------------------------------------------------------------------------------------

    def _Pop(self, caller: Caller, request: pb.PopRequest, answer: pb.PopResponse) -> None:
        assert caller.may_consume(request.group), f"{caller.name!r} consumed {request.group!r}"
        if request.acks:
            statuses = answer.ack_statuses or [pb.Status()] * len(request.acks)  # Without any, all of them are OK.
            self._settle(caller, request.group, request.acks, statuses, is_acked=True)
        if request.messages_max > 0 and not request.attempt_id:  # Another try gets what the first one got.
            assert len(answer.messages) <= request.messages_max, f"{len(answer.messages)} messages for {request.messages_max}"
        for message in answer.messages:
            of = self._got(caller, request.group, request.filter, message)
            handle, until_s = self._in_flight.get(of, (message.handle, 0.0))
            assert handle == message.handle or time.monotonic() >= until_s, f"{of} is in flight, and came again"
            self._in_flight[of] = (message.handle, self._began_s + answer.invisible_ms / 1000)

    def _Consume(self, caller: Caller, requests: list[pb.ConsumeRequest], answer: pb.ConsumeResponse) -> None:
        opens = [request.open for request in requests if request.HasField("open")]
        given = [handle for request in requests for handle in request.acks]
        assert answer.acked <= len(given), f"{answer.acked} of {len(given)} handles were acknowledged"
        for refused in answer.refused:
            assert refused.status.code != pb.OK, refused
        if answer.messages:
            assert opens, "messages on a stream that was not opened"
            assert caller.may_consume(opens[0].group), f"{caller.name!r} consumed {opens[0].group!r}"
        for message in answer.messages:
            self._got(caller, opens[0].group, opens[0].filter, message)

    def _got(self, caller: Caller, group: str, topic_filter: str, message: Any) -> Delivery:
        """Judge a message that a consumer got."""
        if not topic_filter.startswith("$"):  # The message of a dead letter has its own topic.
            assert matches(topic_filter, message.topic), f"a message of {message.topic!r} for {topic_filter!r}"
            assert caller.may_read(message.topic), f"{caller.name!r} got a message of {message.topic!r}"
        assert message.attempt >= 1 or topic_filter.startswith("$"), message
        content = (message.topic, message.body)
        if message.topic.startswith(WATCHED):
            assert content in self._sent or message.topic in self._templates, f"nobody sent {content}"
            assert content not in self._recalled, f"{content} was recalled, and came"
            assert content not in self._open_halves, f"{content} was not committed, and came"
        delivery = (group, topic_filter, message.message_id)
        assert delivery not in self._acked, f"{delivery} was acknowledged, and came again"
        known = self._handles.setdefault(message.handle, delivery)
        assert known == delivery, f"one handle for {known} and {delivery}"
        return delivery

    def _Ack(self, caller: Caller, request: pb.AckRequest, answer: pb.AckResponse) -> None:
        self._settle(caller, request.group, request.handles, answer.statuses, is_acked=True)

    def _DeadLetter(self, caller: Caller, request: pb.AckRequest, answer: pb.AckResponse) -> None:
        self._settle(caller, request.group, request.handles, answer.statuses, is_acked=False)

    def _settle(self, caller: Caller, group: str, handles: Any, statuses: Any, *, is_acked: bool) -> None:
        for handle, status in _pairs(handles, statuses):
            if status.code == pb.OK:
                delivery = self._end(caller, group, handle)
                if is_acked:
                    self._acked.add(delivery)

    def _end(self, caller: Caller, group: str, handle: str) -> Delivery:
        """Judge that the node accepted a handle, and note that its delivery is over."""
        delivery = self._handles.get(handle)
        assert delivery is not None, f"the handle {handle!r} was accepted, and the node did not give it"
        assert delivery[0] == group, f"a handle of {delivery[0]!r} was accepted for {group!r}"
        assert caller.may_consume(group), f"{caller.name!r} consumed {group!r}"
        assert handle not in self._ended, f"a handle was accepted twice: {handle!r} of {delivery}"
        self._ended.add(handle)
        self._in_flight.pop(delivery, None)
        return delivery

    def _ChangeInvisible(self, caller: Caller, request: pb.ChangeInvisibleRequest, answer: pb.ChangeInvisibleResponse) -> None:
        for change, result in _pairs(request.changes, answer.results):
            if result.status.code == pb.OK:
                delivery = self._end(caller, request.group, change.handle)
                if result.handle:
                    self._handles[result.handle] = delivery
                    self._ended.discard(result.handle)

    # --- groups --------------------------------------------------------------------------------------------------------------

    def _administered(self, caller: Caller, request: Any, answer: Any) -> None:
        assert caller.may_admin(request.group), f"{caller.name!r} administered {request.group!r}: {answer}"

    def _CreateGroup(self, caller: Caller, request: pb.CreateGroupRequest, answer: Any) -> None:
        self._administered(caller, request, answer)
        assert caller.may_read(request.filter), f"{caller.name!r} created a group that reads {request.filter!r}"

    _UpdateGroup = _DescribeGroups = _DeleteGroup = _ResetGroup = _ListDeadLetters = _Redrive = _administered
    _GetDeadLetter = _PurgeDeadLetters = _administered

    # --- RocketMQ ------------------------------------------------------------------------------------------------------------

    def _answered_rocketmq(self, method: str, caller: Caller, request: Any, answer: Any) -> None:
        is_ok = answer.status.code == ROCKETMQ_OK
        assert caller.is_known or not is_ok, f"{method} was answered to a caller that the node must not know: {answer}"
        entries = getattr(answer, "entries", ())
        if method == "SendMessage" and entries:
            for message, entry in _pairs(request.messages, entries):
                topic = topic_of(message)
                if entry.status.code == ROCKETMQ_OK and topic:
                    assert caller.may_write(topic), f"{caller.name!r} sent to {topic!r}"
        elif method == "ReceiveMessage" and answer.HasField("message"):
            message, topic = answer.message, topic_of(answer.message)
            assert not topic or topic.startswith("$") or caller.may_read(topic), f"{caller.name!r} got a message of {topic!r}"
            if topic.startswith(WATCHED):
                assert (topic, message.body) in self._sent or topic in self._templates, f"nobody sent {(topic, message.body)}"
            handle = message.system_properties.receipt_handle
            self._handles.setdefault(handle, (request.group.name, topic, message.system_properties.message_id))
        elif method == "AckMessage":
            for entry in entries:
                if entry.status.code == ROCKETMQ_OK:
                    assert entry.receipt_handle in self._handles, f"{entry}, and the node did not give the handle"
                    assert entry.receipt_handle not in self._ended, f"a handle was accepted twice: {entry}"
                    self._ended.add(entry.receipt_handle)


def _earlier(topic: str, message_id: str) -> tuple[str, bytes]:
    """Return what stands for the content of a message that an earlier sequence sent."""
    return topic, message_id.encode()


def _pairs(questions: Any, answers: Any) -> list[tuple[Any, Any]]:
    """Return each question with its answer."""
    assert len(questions) == len(answers), f"{len(answers)} answers to {len(questions)} questions"
    return list(zip(questions, answers, strict=True))
