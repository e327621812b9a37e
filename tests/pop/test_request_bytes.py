"""The bytes of requests: how many the node reads at a time, who waits, and who is refused."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from penstock import Client
from penstock.pop.grpc import requestbytes
from penstock.pop.grpc.requestbytes import EOF, OTHER_REQUEST_BYTES_MAX, RefusedFor, RequestBytes, RequestRefused
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.options import MIB
from tests.pop.flooding import OPTIONS, SEND, SEND_ROCKETMQ
from tests.pop.looptime import LoopTime
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node, stub_of
from tests.system.processes import ROOT, NodeProcess
from tests.waiting import WAIT_S_MAX, until

# --- the room -----------------------------------------------------------------------------------------------------------


class Call:
    """A call of a connection. The test decides when its request comes."""

    def __init__(self, room: RequestBytes, peer: str = "a", *, is_send: bool = True) -> None:
        self._peer = peer
        self.comes: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.is_reading = False
        self.ended = asyncio.create_task(room.read(self, is_send=is_send))

    def peer(self) -> str:
        return self._peer

    async def read(self) -> Any:
        self.is_reading = True
        return await self.comes


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_request_keeps_what_it_has_and_gives_the_rest_back() -> None:
    room = RequestBytes(10, 30)
    call = Call(room)
    await turns()
    assert room.used == 10
    call.comes.set_result(b"123")
    assert await call.ended == b"123"
    assert room.used == 3
    room.done(3, is_send=True)
    assert room.used == 0


async def test_a_call_without_a_request_keeps_nothing() -> None:
    room = RequestBytes(10, 30)
    call = Call(room)
    call.comes.set_result(EOF)
    assert await call.ended is EOF
    assert room.used == 0


async def test_each_connection_gets_room_in_turn() -> None:
    room = RequestBytes(10, 10)
    first = Call(room)
    await turns()
    flood, honest = [Call(room, "flood") for _ in range(20)], Call(room, "honest")
    await turns()
    assert not any(call.is_reading for call in (honest, *flood))
    first.comes.set_result(b"")
    await turns()
    assert [call.is_reading for call in flood] == [True] + [False] * 19
    flood[0].comes.set_result(b"")
    await turns()
    assert honest.is_reading, "nineteen others wait, but not of this connection"
    for call in (honest, *flood[1:]):
        call.comes.set_result(b"")
    await asyncio.gather(*(call.ended for call in (honest, *flood)))
    assert room.used == 0


async def test_a_call_that_finds_no_room_in_time_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requestbytes, "WAIT_S", 0.01)
    monkeypatch.setattr(requestbytes, "READ_S", WAIT_S_MAX)
    room = RequestBytes(10, 10)
    first, second = Call(room), Call(room)
    with pytest.raises(RequestRefused, match=r"10 bytes already \(pop\.memory_bytes_max\)"):
        await second.ended
    first.comes.set_result(b"")
    await first.ended
    assert (room.used, room.refused) == (0, {RefusedFor.NO_ROOM: 1})
    third = Call(room)
    third.comes.set_result(b"1")
    assert await third.ended == b"1"


async def test_no_more_than_a_number_of_calls_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requestbytes, "WAITING_MAX", 1)
    room = RequestBytes(10, 10)
    _, waiting, refused = Call(room), Call(room), Call(room)
    with pytest.raises(RequestRefused):
        await refused.ended
    assert not waiting.ended.done()


async def test_a_request_that_comes_slowly_makes_way_if_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requestbytes, "READ_S", 0.01)
    monkeypatch.setattr(requestbytes, "WAIT_S", WAIT_S_MAX)
    room = RequestBytes(10, 20)
    slow = [Call(room), Call(room)]
    await asyncio.sleep(0.03)
    assert not any(call.ended.done() for call in slow), "nobody needs the room"
    honest = Call(room, "honest")
    honest.comes.set_result(b"1")
    assert await honest.ended == b"1"
    for call in slow:
        with pytest.raises(RequestRefused, match="did not come"):
            await call.ended
    assert room.used == 1


async def test_calls_that_their_clients_cancel_give_their_room_back() -> None:
    room = RequestBytes(10, 10)
    calls = [Call(room) for _ in range(3)]
    await turns()
    calls[1].ended.cancel()
    await turns()
    calls[0].ended.cancel()
    await turns()
    assert calls[2].is_reading
    calls[2].ended.cancel()
    await asyncio.gather(*(call.ended for call in calls), return_exceptions=True)
    assert room.used == 0


async def test_requests_that_send_nothing_leave_half_of_the_room_to_those_that_send() -> None:
    room = RequestBytes(10, 40)
    polls = [Call(room, is_send=False) for _ in range(3)]
    for poll in polls:
        poll.comes.set_result(bytes(9))
    assert [len(await poll.ended) for poll in polls[:2]] == [9, 9]
    with pytest.raises(RequestRefused, match=r"18 bytes already, and 20 at most, which is half of the bytes of all requests"):
        await polls[2].ended
    sends = [Call(room) for _ in range(2)]
    for send in sends:
        send.comes.set_result(bytes(10))
    assert [len(await send.ended) for send in sends] == [10, 10]
    assert (room.used, room.refused) == (38, {RefusedFor.NO_ROOM: 1})
    room.done(9, is_send=False)
    again = Call(room, is_send=False)
    again.comes.set_result(bytes(9))
    assert len(await again.ended) == 9


# --- on the wire --------------------------------------------------------------------------------------------------------


async def ask(target: str, path: str, request: bytes, compression: grpc.Compression | None = None) -> grpc.StatusCode:
    """Call a unary method, and return the status."""
    async with grpc.aio.insecure_channel(target, options=OPTIONS) as channel:
        call: Any = channel.unary_unary(path)  # type: ignore[call-arg]  # raw bytes
        try:
            await call(request, compression=compression, timeout=WAIT_S_MAX)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


async def test_a_request_that_is_too_large_is_refused(tmp_path: Path) -> None:
    pop = PopOptions(request_bytes_max=MIB, message_bytes_max=MIB, compression="on")
    async with Node(tmp_path / "data", pop=pop) as node:
        for path in (SEND, SEND_ROCKETMQ):
            for compression in (None, grpc.Compression.Gzip):
                found = await ask(node.target, path, bytes(3 * MIB), compression)
                assert found == grpc.StatusCode.RESOURCE_EXHAUSTED, (path, compression)
        async with Client(node.target) as client:
            await client.send(TOPIC, b"small")


async def test_a_compressed_request_is_refused_unless_an_option_allows_it(node: Node) -> None:
    request = pb.SendRequest(messages=[pb.Message(topic=TOPIC, body=bytes(1000))]).SerializeToString()
    assert await ask(node.target, SEND, request, grpc.Compression.Gzip) == grpc.StatusCode.UNIMPLEMENTED
    assert await ask(node.target, SEND, request) == grpc.StatusCode.OK


async def test_a_large_request_of_a_stream_is_refused(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target, options=OPTIONS) as channel:
        opened: Any = channel.stream_stream("/penstock.pop.v1.PopService/Consume")  # type: ignore[call-arg]  # raw bytes
        call = opened()
        await call.write(bytes(OTHER_REQUEST_BYTES_MAX + 1))
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_large_request_that_sends_no_messages_is_refused(node: Node) -> None:
    request = pb.PopRequest(group="x" * OTHER_REQUEST_BYTES_MAX, filter=FILTER, wait_ms=60_000)
    async with grpc.aio.insecure_channel(node.target, options=OPTIONS) as channel:
        with pytest.raises(grpc.aio.AioRpcError, match=f"one that sends no messages may have {OTHER_REQUEST_BYTES_MAX}"):
            await stub_of(channel).Pop(request, timeout=WAIT_S_MAX)
    assert node._server is not None
    assert node._server.requests.refused == {RefusedFor.TOO_LARGE: 1}


async def test_calls_that_send_nothing_keep_no_other_client_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requestbytes, "READ_S", 600.0)
    monkeypatch.setattr(requestbytes, "WAIT_S", WAIT_S_MAX)
    loop_time = LoopTime()
    pop = PopOptions(request_bytes_max=4 * MIB, requests_bytes_max=8 * MIB)
    async with Node(tmp_path / "data", pop=pop) as node, grpc.aio.insecure_channel(node.target) as channel:
        assert node._server is not None
        room = node._server.requests
        send: Any = channel.stream_unary(SEND)  # type: ignore[call-arg]  # raw bytes
        idle = [send() for _ in range(5)]
        await asyncio.gather(*(call.wait_for_connection() for call in idle))
        await until(lambda: room.used == 8 * MIB and room._waiting_count == 3)
        async with Client(node.target, timeout=WAIT_S_MAX) as client:
            sending = asyncio.create_task(client.send(TOPIC, b"honest"))
            await until(lambda: room._waiting_count == 4)
            loop_time.advance(601)
            room._give_up_slow()
            await sending
        codes = [asyncio.create_task(call.code()) for call in idle]
        await until(lambda: sum(code.done() for code in codes) >= 2)
        assert {code.result() for code in codes if code.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        for call in idle:
            call.cancel()
        await until(lambda: room.used == 0)


async def test_a_connection_has_a_bounded_number_of_calls(tmp_path: Path) -> None:
    pop = PopOptions(calls_max=2)
    async with Node(tmp_path / "data", pop=pop) as node, grpc.aio.insecure_channel(node.target) as channel:
        stub = stub_of(channel)
        # The first call brings the connection up, and with it the bound.
        await stub.Send(pb.SendRequest(messages=[pb.Message(topic="other", body=b"x")]))
        request = pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=60_000)
        waiting = [stub.Pop(request) for _ in range(2)]
        await node.until(lambda: node.core.polls.waiting == 2)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await stub.Send(pb.SendRequest(messages=[pb.Message(topic="other", body=b"x")]), timeout=0.2)
        assert late.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert node.store.messages_stored == 1
        async with Client(node.target) as client:
            await client.send("other", b"other connection")
        for call in waiting:
            call.cancel()


# --- memory -------------------------------------------------------------------------------------------------------------

FLOOD = 4
"""Requests at a time."""


def memory_mib(node: NodeProcess, name: str) -> float:
    lines = Path(f"/proc/{node.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


@pytest.fixture
def process(tmp_path: Path) -> Iterator[NodeProcess]:
    node = NodeProcess(tmp_path / "data")
    yield node
    node.close()


@pytest.mark.nightly
async def test_a_flood_of_compressed_zeros_takes_bounded_memory(process: NodeProcess, tmp_path: Path) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text('[pop]\ncompression = "on"\n')
    process.start("--config", str(config))
    target, before = process.addresses["pop"], memory_mib(process, "VmHWM")
    command = [sys.executable, "-m", "tests.pop.flooding", target, str(60 * MIB), str(FLOOD)]
    flooding = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdin=PIPE, stdout=PIPE)
    assert flooding.stdin is not None
    assert flooding.stdout is not None
    async with Client(target, timeout=60.0) as honest:
        await honest.send(TOPIC, b"before")
        assert await flooding.stdout.readline() == b"connected\n"
        process.signal(signal.SIGSTOP)  # so that all requests are there at once
        flooding.stdin.write(b"send\n")
        assert await flooding.stdout.readline() == b"sent\n"
        process.signal(signal.SIGCONT)
        codes = asyncio.create_task(flooding.communicate())
        sent = 1
        while not codes.done():
            await honest.send(TOPIC, b"honest")
            sent += 1
        popped = 0
        while popped < sent:
            popped += len(await honest.pop(FILTER, group=GROUP, messages_max=1000))
    assert set(json.loads((await codes)[0])) == {"RESOURCE_EXHAUSTED"}
    assert memory_mib(process, "VmHWM") - before < 80, "a request of 60 MiB is in memory three times where it is read"
