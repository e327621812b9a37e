"""Bad input gets a specific error, and has no effect."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import GroupServiceStub, PopServiceStub
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX

HUGE = 2**63 - 1
WAITERS_MAX = 100
OWN_CONNECTION = [("grpc.use_local_subchannel_pool", 1)]
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNKNOWN = grpc.StatusCode.NOT_FOUND


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data", pop=PopOptions(waiters_max=WAITERS_MAX)) as started:
        yield started


def pop(**fields: Any) -> tuple[str, pb.PopRequest]:
    return "Pop", pb.PopRequest(**{"group": GROUP, "filter": FILTER, **fields})


REFUSED: list[tuple[tuple[str, Any], grpc.StatusCode, str]] = [
    (pop(messages_max=-1), INVALID, "messages_max"),
    (pop(invisible_ms=-1), INVALID, "invisible_ms"),
    (pop(invisible_ms=HUGE), INVALID, "invisible_ms"),
    (pop(wait_ms=-HUGE), INVALID, "wait_ms"),
    (pop(group=""), INVALID, "empty"),
    (pop(group="a/b"), INVALID, "characters"),
    (pop(group="g" * 256), INVALID, "255"),
    (pop(filter=""), INVALID, "empty"),
    (pop(filter="a/#/b"), INVALID, "#"),
    (pop(filter="x" * 5_000), INVALID, "bytes"),
    (pop(filter="$dlq/" + GROUP), INVALID, "own dead letters"),
    (pop(filter="$retry/1"), INVALID, "can't be popped"),
    (pop(start=99), INVALID, "start"),
    (pop(attempt_id="x" * 300), INVALID, "attempt_id"),
    (pop(acks=["x"] * 16_385), INVALID, "16384"),
    (("Ack", pb.AckRequest(group=GROUP, handles=["x"] * 16_385)), INVALID, "16384"),
    (("DeadLetter", pb.AckRequest(group=GROUP, handles=["x"] * 16_385)), INVALID, "16384"),
    (("PollTransactions", pb.PollTransactionsRequest()), INVALID, "producer"),
    (("PollTransactions", pb.PollTransactionsRequest(producer="p", wait_ms=-1)), INVALID, "wait_ms"),
    (("ListTransactions", pb.ListTransactionsRequest(after_message_id="zz")), INVALID, "id"),
    (("CreateGroup", pb.CreateGroupRequest(group="", filter=FILTER)), INVALID, "empty"),
    (("CreateGroup", pb.CreateGroupRequest(group=GROUP, filter="#/#")), INVALID, "#"),
    (("UpdateGroup", pb.UpdateGroupRequest(group="nobody")), UNKNOWN, "nobody"),
    (("DescribeGroups", pb.GroupRequest(group="nobody")), UNKNOWN, "nobody"),
    (("DeleteGroup", pb.GroupRequest(group="nobody")), UNKNOWN, "nobody"),
    (("ResetGroup", pb.ResetGroupRequest(group="nobody", end=pb.LATEST)), UNKNOWN, "nobody"),
    (("ResetGroup", pb.ResetGroupRequest(group=GROUP)), INVALID, "one of"),
    (("ResetGroup", pb.ResetGroupRequest(group=GROUP, time_ms=-1)), INVALID, "negative"),
    (("ResetGroup", pb.ResetGroupRequest(group=GROUP, message_id="xyz")), INVALID, "id"),
    (("ResetGroup", pb.ResetGroupRequest(group=GROUP, end=7)), INVALID, "start"),  # type: ignore[arg-type]
    (("ListDeadLetters", pb.ListDeadLettersRequest(group=GROUP, dead_letters_max=-1)), INVALID, "dead_letters_max"),
    (("ListDeadLetters", pb.ListDeadLettersRequest(group=GROUP, after_message_id="0")), INVALID, "id"),
    (("GetDeadLetter", pb.GetDeadLetterRequest(group=GROUP, message_id="0")), INVALID, "id"),
    (("PurgeDeadLetters", pb.RedriveRequest(group=GROUP, message_ids=["-000000000000001"])), INVALID, "id"),
    (("Redrive", pb.RedriveRequest(group=GROUP, message_ids=["-000000000000001"])), INVALID, "id"),
]


async def test_a_bad_call_is_refused_with_its_reason_and_no_effect(node: Node) -> None:
    end = node.store.log.end
    async with grpc.aio.insecure_channel(node.target) as channel:
        for (method, request), code, reason in REFUSED:
            stub = PopServiceStub(channel) if hasattr(PopServiceStub(channel), method) else GroupServiceStub(channel)
            case = f"{method} {str(request)[:200]}"
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(stub, method)(request)
            assert refused.value.code() is code, case
            assert reason in (refused.value.details() or ""), case
            assert list(node.core.groups) == [], case
            assert node.store.log.end == end, case
            assert node.core.waiting == 0, case


async def test_huge_sizes_are_cut_to_what_the_node_allows(node: Node) -> None:
    node.publish(*([b"x"] * 2_000))
    async with grpc.aio.insecure_channel(node.target) as channel:
        answer = await PopServiceStub(channel).Pop(pb.PopRequest(group=GROUP, filter=FILTER, messages_max=2**31 - 1))
    assert len(answer.messages) == node.options[0].messages_max


async def test_a_wrong_handle_acknowledges_nothing_and_stops_no_other(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        stub = PopServiceStub(channel)
        for change in ("truncated", "longer", "flipped", "upper", "spaces", "not hex", "empty", "of another group"):
            node.publish(b"a", b"b")
            answer = await stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER))
            right, other = (message.handle for message in answer.messages)
            foreign = (await stub.Pop(pb.PopRequest(group="audit", filter=FILTER))).messages[0].handle
            wrong = {
                "truncated": right[:-2],
                "longer": right + "00",
                "flipped": right[:-1] + ("0" if right[-1] != "0" else "1"),
                "upper": right[:-16] + "F" * 16,
                "spaces": " " + right[:-1],
                "not hex": "z" * 60,
                "empty": "",
                "of another group": foreign,
            }[change]
            for handles in ([wrong], [wrong, other], [other, wrong]):
                acked = await stub.Ack(pb.AckRequest(group=GROUP, handles=handles))
                codes = dict(zip(handles, (status.code for status in acked.statuses), strict=True))
                assert codes[wrong] == pb.INVALID_HANDLE, change
                popped = await stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER, acks=handles))
                assert popped.ack_statuses[handles.index(wrong)] == acked.statuses[handles.index(wrong)], change
            assert node.group().in_flight == 1, change
            acked = await stub.Ack(pb.AckRequest(group=GROUP, handles=[right]))
            assert [status.code for status in acked.statuses] == [pb.OK], change


async def test_two_handles_that_only_together_have_the_length_of_two_are_both_judged(node: Node) -> None:
    node.publish(b"a", b"b")
    async with grpc.aio.insecure_channel(node.target) as channel:
        stub = PopServiceStub(channel)
        answer = await stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER))
        first, second = (message.handle for message in answer.messages)
        acked = await stub.Ack(pb.AckRequest(group=GROUP, handles=[first + second[:2], second[2:]]))
        assert [status.code for status in acked.statuses] == [pb.INVALID_HANDLE] * 2
    assert node.group().in_flight == 2


async def test_a_client_that_polls_and_vanishes_leaves_nothing_behind(node: Node) -> None:
    for _ in range(5):
        async with grpc.aio.insecure_channel(node.target) as channel:
            calls = [PopServiceStub(channel).Pop(pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=60_000)) for _ in range(5)]
            await node.until(lambda: node.core.waiting == 5)
            del calls
        await node.until(lambda: node.core.waiting == 0)
    node.publish(b"a")
    async with grpc.aio.insecure_channel(node.target) as channel:
        answer = await PopServiceStub(channel).Pop(pb.PopRequest(group=GROUP, filter=FILTER))
    assert [(message.body, message.attempt) for message in answer.messages] == [(b"a", 1)]


async def test_as_many_polls_as_allowed_wait_one_more_is_refused_and_a_message_goes_to_one(node: Node) -> None:
    async with (
        grpc.aio.insecure_channel(node.target) as channel,
        grpc.aio.insecure_channel(node.target, OWN_CONNECTION) as other,
    ):
        stub, late = PopServiceStub(channel), PopServiceStub(other)
        request = pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=60_000)
        polls = [asyncio.ensure_future(_answer(stub, request)) for _ in range(WAITERS_MAX)]
        await node.until(lambda: node.core.waiting == WAITERS_MAX)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await late.Pop(request)  # on the first connection it would wait in the client: see `PopOptions.calls_max`
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await late.Send(pb.SendRequest(messages=[pb.Message(topic=TOPIC, body=b"a")]))
        done, waiting = await asyncio.wait(polls, return_when=asyncio.FIRST_COMPLETED)
        assert [len(poll.result().messages) for poll in done] == [1]
        assert len(waiting) == WAITERS_MAX - 1
        for poll in waiting:
            poll.cancel()
        await asyncio.wait(waiting)
    await node.until(lambda: node.core.waiting == 0)


async def _answer(stub: Any, request: pb.PopRequest) -> pb.PopResponse:
    answer: pb.PopResponse = await stub.Pop(request)
    return answer


@pytest.mark.parametrize("method", ["Pop", "Consume"])
async def test_bytes_that_are_no_message_are_refused_and_not_logged_as_a_defect(
    node: Node, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        make: Any = channel.stream_stream if method == "Consume" else channel.stream_unary
        call: Any = make(f"/penstock.pop.v1.PopService/{method}")(iter([b"\xff\xff"]), timeout=WAIT_S_MAX)
        with pytest.raises(grpc.aio.AioRpcError, match="no message of /penstock") as refused:
            await (call.read() if method == "Consume" else call)
    assert refused.value.code() is INVALID
    assert "Traceback" not in caplog.text
