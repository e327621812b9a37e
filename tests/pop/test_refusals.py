"""A source that is refused again and again hears it at a bounded rate, and nobody else waits."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from penstock.pop.access import refusals
from penstock.pop.access.refusals import AT_ONCE, PER_S, WAIT_S_MAX, CallRefused, Refusals
from penstock.pop.client.client import Client
from penstock.pop.grpc.calls import Call, Context, Method
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.options import MIB
from tests.pop.wiring import TOPIC, Node, stub_of
from tests.waiting import PROCESS_S, until

NOW_S = 1_000.0


class Request:
    """What a call has sent."""


class CallContext:
    """A call, as gRPC shows it to the code that serves it."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def write(self, response: object) -> None:
        raise AssertionError("the method has one response")

    async def abort(self, status: grpc.StatusCode, detail: str) -> None:
        raise RuntimeError(detail)


def called() -> Call:
    """Return a call of a method with one response."""
    method = Method("Ack", lambda _: None, bytes, None, has_request_stream=False, has_response_stream=False, is_send=False)
    return Call(method, cast(Context, CallContext()), None)


def test_the_first_refusals_of_a_source_are_told_at_once() -> None:
    refusing = Refusals()
    assert [refusing.wait_s("a", NOW_S) for _ in range(AT_ONCE)] == [0.0] * AT_ONCE


def test_further_refusals_come_at_a_bounded_rate_and_those_of_others_at_once() -> None:
    refusing = Refusals()
    waits = [refusing.wait_s("a", NOW_S) for _ in range(AT_ONCE + 10)]
    assert waits[AT_ONCE:] == pytest.approx([number / PER_S for number in range(1, 11)])
    assert refusing.wait_s("b", NOW_S) == 0.0


def test_nobody_waits_for_longer_than_the_bound_and_a_flood_is_forgotten_soon() -> None:
    refusing = Refusals()
    flood = [refusing.wait_s("a", NOW_S) for _ in range(10_000)]
    assert max(flood) == pytest.approx(WAIT_S_MAX)
    assert refusing.wait_s("a", NOW_S + 1) == pytest.approx(WAIT_S_MAX - 1 + 1 / PER_S)
    assert refusing.wait_s("a", NOW_S + WAIT_S_MAX + 1) == 0.0


def test_the_number_of_sources_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "SOURCES_MAX", 3)
    refusing = Refusals()
    for _ in range(AT_ONCE):
        refusing.wait_s("a", NOW_S)
    for other in "bcd":
        assert refusing.wait_s(other, NOW_S) == 0.0
    assert refusing.wait_s("a", NOW_S) == 0.0, "it was forgotten"
    assert len(refusing._paid_s) == 3


# --- a node -------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Node]:
    """A node with room for three requests of 1 MiB, which refuses a second call of a source only after 30 s."""
    monkeypatch.setattr(refusals, "AT_ONCE", 1)
    monkeypatch.setattr(refusals, "PER_S", 1 / 30)
    monkeypatch.setattr(refusals, "WAIT_S_MAX", 30.0)
    pop = PopOptions(request_bytes_max=MIB, message_bytes_max=MIB, requests_bytes_max=3 * MIB)
    async with Node(tmp_path / "data", pop=pop) as node:
        yield node


async def refused_pop(channel: grpc.aio.Channel) -> grpc.StatusCode:
    try:
        await stub_of(channel).Pop(pb.PopRequest(group="g", filter="a/#/b"), timeout=PROCESS_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("the call was not refused")


async def refused_stream(channel: grpc.aio.Channel) -> grpc.StatusCode:
    consume: Any = stub_of(channel).Consume
    stream = consume(timeout=PROCESS_S)
    await stream.write(pb.ConsumeRequest(credits=1))
    try:
        await stream.read()
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("the call was not refused")


async def refused_bytes(channel: grpc.aio.Channel) -> grpc.StatusCode:
    call: Any = channel.unary_unary("/penstock.pop.v1.PopService/Send")  # type: ignore[call-arg]  # raw bytes
    try:
        await call(b"\xff" * 1000, timeout=PROCESS_S)
    except grpc.aio.AioRpcError as error:
        return error.code()
    raise AssertionError("the call was not refused")


@pytest.mark.parametrize("refused", [refused_pop, refused_stream, refused_bytes])
async def test_who_is_refused_often_waits_and_holds_up_nobody(node: Node, refused: Any) -> None:
    server = node._server
    assert server is not None
    async with grpc.aio.insecure_channel(node.target) as channel, Client(node.target) as client:
        assert await refused(channel) == grpc.StatusCode.INVALID_ARGUMENT
        waiting = [asyncio.create_task(refused(channel)) for _ in range(10)]
        await until(lambda: server.refusals.delayed == 10)
        assert server.requests.used == 0, "what waits to hear of its refusal takes no room"
        await client.send(TOPIC, b"x")
        assert not any(call.done() for call in waiting)
        for call in waiting:
            call.cancel()


async def test_a_refusal_by_a_response_waits_too(node: Node) -> None:
    pytest.importorskip("rocketmq")
    from penstock.pop.rocketmq.stubs import SERVICE, service_pb

    server = node._server
    assert server is not None
    async with grpc.aio.insecure_channel(node.target) as channel:

        async def receive() -> int:
            make: Any = channel.unary_stream(
                f"/{SERVICE.full_name}/ReceiveMessage",
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=service_pb.ReceiveMessageResponse.FromString,
            )
            request = service_pb.ReceiveMessageRequest(batch_size=-1)
            return (await make(request, metadata=(("x-mq-client-id", "c"),), timeout=PROCESS_S).read()).status.code

        assert await receive() >= 40_000
        waiting = asyncio.create_task(receive())
        await until(lambda: server.refusals.delayed == 1)
        assert not waiting.done()
        waiting.cancel()


async def test_what_waits_keeps_nothing_of_its_request_and_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "AT_ONCE", 0)
    monkeypatch.setattr(refusals, "WAITING_MAX", 2)
    monkeypatch.setattr(refusals, "PER_S", 1 / 30)
    refusing, requests = Refusals(), weakref.WeakSet[Request]()

    async def serve(_: Call) -> None:
        request = Request()
        requests.add(request)
        try:
            raise ValueError(request)
        except ValueError as error:
            raise CallRefused(response=b"no") from error

    calls = [asyncio.create_task(refusing.tell(serve, called())) for _ in range(3)]
    assert await asyncio.wait_for(calls[2], PROCESS_S) == b"no", "two others wait"
    assert (refusing.delayed, [call.done() for call in calls], len(requests)) == (2, [False, False, True], 0)
    for call in calls[:2]:
        call.cancel()
    await asyncio.wait(calls)
    assert refusing._waiting == 0


async def test_a_refusal_leaves_nothing_for_the_garbage_collector() -> None:
    raised: list[weakref.ref[CallRefused]] = []

    async def serve(_: Call) -> None:
        refused = CallRefused(grpc.StatusCode.NOT_FOUND, "nothing")
        raised.append(weakref.ref(refused))
        try:
            raise refused
        finally:
            del refused

    refusing = Refusals()
    gc.disable()
    try:
        for _ in range(20):
            with pytest.raises(RuntimeError, match="nothing"):
                await refusing.tell(serve, called())
        left = [each for each in raised if each() is not None]
    finally:
        gc.enable()
    assert (len(raised), left) == (20, [])
