"""What judges the answers of a node in the fuzzers detects each kind of answer that must not be, and knows who may do what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from penstock.access.actions import CONSUME, POP, PUBLISH, RECEIVE, SEND, SUBSCRIBE
from penstock.access.file import load_access_policy
from penstock.access.subject import Subject
from penstock.pop.proto import pop_pb2 as pb
from tests.fuzz.callers import EVERYBODY, KEEPER, KNOWN, RULES, STRANGERS, Caller, contains, overlap
from tests.fuzz.calls import HINTS
from tests.fuzz.judge import Judge
from tests.fuzz.sequences import FILTERS, TOPICS

pytestmark = pytest.mark.nightly

DONE, REFUSED = pb.Status(code=pb.OK), pb.Status(code=pb.INVALID_HANDLE)
SEND_A = pb.SendRequest(messages=[pb.Message(topic="call/a", body=b"1")])
POP_ALL = pb.PopRequest(group="g", filter="call/#")
ACK = pb.AckRequest(group="g", handles=["h"])


def sent(**handles: Any) -> pb.SendResponse:
    return pb.SendResponse(results=[pb.SendResult(status=DONE, message_id="1", **handles)])


def popped(topic: str = "call/a", body: bytes = b"1", handle: str = "h", message_id: str = "1") -> pb.PopResponse:
    message = pb.PoppedMessage(topic=topic, body=body, handle=handle, message_id=message_id, attempt=1)
    return pb.PopResponse(messages=[message], invisible_ms=60_000)


SENT = ("Send", SEND_A, sent())
POPPED = ("Pop", POP_ALL, popped())
ACKED = ("Ack", ACK, pb.AckResponse(statuses=[DONE]))
RECALLED = ("Recall", pb.RecallRequest(recall_handles=["r"]), pb.RecallResponse(statuses=[DONE]))
END = pb.EndTransactionsRequest(ends=[pb.TransactionEnd(transaction_handle="t", commit=True)])
GROUP = pb.CreateGroupRequest(group="g", filter="call/#")
Call = tuple[str, Message, Any]


def judge(*calls: Call, caller: Caller = EVERYBODY) -> None:
    found = Judge()
    for method, request, answer in calls:
        found.asked([request])
        found.answered(method, caller, [request], answer)


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        ([SENT, ("Pop", POP_ALL, popped(body=b"2"))], "nobody sent"),
        ([SENT, ("Pop", POP_ALL, popped(topic="call/b"))], "nobody sent"),
        ([SENT, ("Pop", pb.PopRequest(group="g", filter="call/b"), popped())], "for 'call/b'"),
        ([SENT, POPPED, ("Pop", POP_ALL, popped(handle="other"))], "is in flight, and came again"),
        ([SENT, POPPED, ACKED, ACKED], "accepted twice"),
        ([SENT, POPPED, ACKED, ("Pop", POP_ALL, popped(handle="other"))], "acknowledged, and came again"),
        ([SENT, POPPED, ("DeadLetter", ACK, ACKED[2]), ACKED], "accepted twice"),
        ([SENT, ACKED], "the node did not give it"),
        ([SENT, POPPED, ("Ack", pb.AckRequest(group="other", handles=["h"]), ACKED[2])], "of 'g' was accepted for 'other'"),
        ([SENT, POPPED, ("Ack", ACK, pb.AckResponse())], "0 answers to 1 questions"),
        ([("Send", SEND_A, pb.SendResponse())], "0 answers to 1 questions"),
        ([SENT, POPPED, ("Pop", POP_ALL, popped(message_id="2"))], "one handle for"),
        ([("Send", SEND_A, sent(recall_handle="r")), RECALLED, POPPED], "was recalled, and came"),
        ([("Send", SEND_A, sent(recall_handle="r")), RECALLED, RECALLED], "recalled twice"),
        ([SENT, RECALLED], "which the node did not give"),
        ([("Send", SEND_A, sent(transaction_handle="t")), POPPED], "not committed, and came"),
    ],
)
def test_the_judge_detects_an_answer_that_must_not_be(calls: list[Call], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        judge(*calls)


@pytest.mark.parametrize(
    "calls",
    [
        [SENT, POPPED, POPPED, ACKED, ("Ack", ACK, pb.AckResponse(statuses=[REFUSED]))],
        [SENT, POPPED, ACKED, ("ResetGroup", pb.ResetGroupRequest(group="g"), None), ("Pop", POP_ALL, popped(handle="again"))],
        [
            ("Send", SEND_A, sent(transaction_handle="t")),
            ("EndTransactions", END, pb.EndTransactionsResponse(statuses=[DONE])),
            POPPED,
        ],
    ],
)
def test_the_judge_accepts_what_may_be(calls: list[Call]) -> None:
    judge(*calls)


HALVES = pb.TransactionsResponse(transactions=[pb.Transaction(transaction_handle="h", message=pb.Message(topic="call/a"))])


@pytest.mark.parametrize(
    ("caller", "calls", "why"),
    [
        (STRANGERS[0], [SENT], "must not know"),
        (STRANGERS[0], [("CountTimers", pb.CountTimersRequest(), pb.TimerCounts())], "must not know"),
        (Caller("x", consumes=("g",)), [("Pop", POP_ALL, popped())], "'x' got a message"),
        (Caller("x", reads=("call/#",)), [("Pop", POP_ALL, popped())], "'x' consumed"),
        (Caller("x", reads=("call/#",), hides=("call/a",), consumes=("g",)), [("Pop", POP_ALL, popped())], "'x' got a message"),
        (Caller("x", reads=("call/#",)), [SENT], "'x' sent to"),
        (Caller("x"), [("CreateGroup", GROUP, pb.GroupsResponse())], "'x' administered"),
        (
            Caller("x", admins=("g",)),
            [("ListTransactions", pb.ListTransactionsRequest(), pb.TransactionsResponse())],
            "'x' saw",
        ),
        (
            Caller("x", admins=("*",)),
            [("PollTransactions", pb.PollTransactionsRequest(), HALVES)],
            "'x' saw",
        ),
        (Caller("x", admins=("g",)), [("CreateGroup", GROUP, pb.GroupsResponse())], "'x' created"),
        (Caller("x"), [("FindTimer", pb.TimerName(), pb.Timer(status=DONE, topic="call/a"))], "'x' saw"),
        (
            Caller("x"),
            [("PauseSchedule", pb.ScheduleRequest(), pb.ScheduleDescription(schedule=pb.Schedule(topic="call/a")))],
            "'x' has to do with",
        ),
    ],
)
def test_the_judge_detects_an_answer_to_a_caller_who_may_not_have_it(caller: Caller, calls: list[Call], why: str) -> None:
    with pytest.raises(AssertionError, match=why):
        judge(*calls, caller=caller)


@pytest.mark.parametrize("caller", [KEEPER, *KNOWN], ids=lambda caller: caller.name)
def test_callers_may_do_in_the_fuzzers_what_the_rules_of_the_node_say(tmp_path: Path, caller: Caller) -> None:
    path = tmp_path / "access.toml"
    path.write_text(RULES)
    roles = frozenset({"owners"} if caller.name == "owner" else ())
    rights = load_access_policy(path).rights_of(Subject(caller.name, roles))
    topics = {topic.removeprefix("$delayed/0/") for topic in (*TOPICS, *HINTS["topic"])}
    for topic in topics:
        assert rights.may(PUBLISH, topic) == rights.may(SEND, topic) == caller.may_write(topic), topic
        assert rights.may(RECEIVE, topic) == caller.may_receive(topic) or not topic.startswith("seq/"), topic
    for topic_filter in FILTERS:
        assert rights.may(SUBSCRIBE, topic_filter) == caller.may_subscribe(topic_filter), topic_filter
    for topic_filter in HINTS["filter"]:
        assert rights.may(POP, topic_filter) == caller.may_read(topic_filter), topic_filter
    for group in HINTS["group"]:
        assert rights.may(CONSUME, group) == caller.may_consume(group), group


@pytest.mark.parametrize(
    ("outer", "inner", "is_contained", "do_overlap"),
    [
        ("a/#", "a", True, True),
        ("a/#", "a/b/+", True, True),
        ("a/+", "a/#", False, True),
        ("a/+", "a/b", True, True),
        ("a/b", "a/+", False, True),
        ("a", "a/b", False, False),
        ("a/+/c", "a/b/d", False, False),
        ("#", "$SYS/x", False, True),
        ("$SYS/#", "$SYS/x", True, True),
    ],
)
def test_filters_that_contain_others_and_overlap(outer: str, inner: str, is_contained: bool, do_overlap: bool) -> None:
    assert contains(outer, inner) is is_contained
    assert overlap(outer, inner) is do_overlap
