"""`Sockets`: what a protocol gets and sends, and that the end of one connection does not disturb others."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import pytest

from penstock.gateway.transport import socket_transport
from penstock.gateway.transport.sockets import HAS_TURNS, MID_TURN_SOCKETS
from tests.gateway.stage import Recorder, Stage
from tests.waiting import until

pytestmark = pytest.mark.skipif(not HAS_TURNS, reason="this system has no epoll: the loop's own transports serve")


async def read_all(far: socket.socket, size: int) -> bytes:
    """Return `size` bytes from the far end, or fewer if it closes before."""
    loop, found = asyncio.get_running_loop(), bytearray()
    while len(found) < size and (data := await loop.sock_recv(far, size - len(found))):
        found += data
    return bytes(found)


def reset(far: socket.socket) -> None:
    """End a connection as a crashed client does."""
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()


async def test_what_many_send_at_once_is_given_to_all_in_one_turn(stage: Stage) -> None:
    protocols = [Recorder() for _ in range(20)]
    far = [stage.add(protocol) for protocol in protocols]
    for number, end in enumerate(far):
        end.send(b"%d" % number)
    await until(lambda: all(protocol.received for protocol in protocols))
    assert [protocol.received for protocol in protocols] == [[b"%d" % number] for number in range(20)]
    assert stage.turns == 1


async def test_in_the_course_of_a_long_turn_others_are_looked_at(stage: Stage) -> None:
    protocols = [Recorder() for _ in range(2 * MID_TURN_SOCKETS + 1)]
    far = [stage.add(protocol) for protocol in protocols]
    seen: list[int] = []
    stage.look = lambda: seen.append(sum(bool(protocol.received) for protocol in protocols))
    for end in far:
        end.send(b"x")
    await until(lambda: stage.turns > 0)
    assert seen == [MID_TURN_SOCKETS - 1, 2 * MID_TURN_SOCKETS - 1]


async def test_a_turn_comes_to_its_end_though_a_look_fails(stage: Stage) -> None:
    def fail() -> None:
        stage.look = lambda: None
        raise RuntimeError("what was looked at is broken")

    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context["exception"]))
    protocols = [Recorder() for _ in range(MID_TURN_SOCKETS)]
    far = [stage.add(protocol) for protocol in protocols]
    stage.look = fail
    for end in far:
        end.send(b"x")
    await until(lambda: all(protocol.received for protocol in protocols))
    assert stage.turns == 2
    assert [str(error) for error in errors] == ["what was looked at is broken"]


async def test_more_than_a_turn_reads_comes_whole_in_order_and_holds_up_nobody(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_transport, "READ_BYTES", 1000)
    small_stage, order = Stage(), []
    large = Recorder(lambda *_: order.append("large"))
    small = Recorder(lambda *_: order.append("small"))
    ends = small_stage.add(large), small_stage.add(small)
    stage.far += ends
    sent = bytes(range(250)) * 12 + b"and more"
    ends[0].send(sent)
    ends[1].send(b"x")
    await until(lambda: sum(map(len, large.received)) == len(sent))
    small_stage.sockets.close()
    assert [len(each) for each in large.received] == [1000, 1000, 1000, 8]
    assert b"".join(large.received) == sent
    assert order.index("small") <= 1


@pytest.mark.parametrize(("size", "read"), [(40_000, 40_000), (1, 16_384), (1 << 30, 262_144)])
async def test_what_a_turn_reads_of_one_can_be_limited(stage: Stage, size: int, read: int) -> None:
    protocol = Recorder()
    far = stage.add(protocol)
    protocol.transport.limit_reads(size)
    writing = asyncio.get_running_loop().sock_sendall(far, bytes(600_000))
    await asyncio.gather(writing, until(lambda: sum(map(len, protocol.received)) == 600_000))
    assert max(map(len, protocol.received)) <= read
    assert len(protocol.received) >= 600_000 / read


async def test_what_the_kernel_has_no_room_for_waits_in_order_and_the_protocol_is_told(stage: Stage) -> None:
    protocol = Recorder()
    far = stage.add(protocol)
    protocol.transport.set_write_buffer_limits(high=100_000)
    pieces = [bytes([number]) * 10_000 for number in range(200)]
    for piece in pieces:
        protocol.transport.write(piece)
    assert protocol.said == ["pause"]
    assert protocol.transport.get_write_buffer_size() > 100_000
    assert await read_all(far, 2_000_000) == b"".join(pieces)
    await until(lambda: protocol.said == ["pause", "resume"])
    assert protocol.transport.get_write_buffer_size() == 0


async def test_a_paused_socket_is_not_read_until_it_resumes(stage: Stage) -> None:
    protocol, beside = Recorder(), Recorder()
    far, other = stage.add(protocol), stage.add(beside)
    protocol.transport.pause_reading()
    assert not protocol.transport.is_reading()
    far.send(b"later")
    other.send(b"now")
    await until(lambda: beside.received == [b"now"])
    assert protocol.received == []
    protocol.transport.resume_reading()
    await until(lambda: protocol.received == [b"later"])


async def test_one_that_another_pauses_in_the_same_turn_is_not_given_what_has_come(stage: Stage) -> None:
    protocols: list[Recorder] = []

    def pause_the_others(*_: object) -> None:
        for protocol in protocols[1:]:
            protocol.transport.pause_reading()

    protocols += [Recorder(pause_the_others), Recorder(), Recorder()]
    for end in [stage.add(protocol) for protocol in protocols]:
        end.send(b"x")
    await until(lambda: stage.turns > 0)
    assert [protocol.received for protocol in protocols] == [[b"x"], [], []]
    for protocol in protocols[1:]:
        protocol.transport.resume_reading()
    await until(lambda: all(protocol.received == [b"x"] for protocol in protocols))


@pytest.mark.parametrize("stays", [True, False])
async def test_the_end_of_what_a_client_sends_ends_the_connection_unless_the_protocol_stays(stage: Stage, stays: bool) -> None:
    protocol = Recorder(stays=stays)
    far = stage.add(protocol)
    far.send(b"bye")
    far.shutdown(socket.SHUT_WR)
    await until(lambda: "eof" in protocol.said)
    assert protocol.received == [b"bye"]
    if stays:
        protocol.transport.write(b"answer")
        protocol.transport.close()
        assert await read_all(far, 100) == b"answer"
    await until(lambda: protocol.said == ["eof", "lost"])
    assert protocol.error is None


async def test_a_reset_is_told_with_its_error(stage: Stage) -> None:
    protocol = Recorder()
    reset(stage.add(protocol))
    await until(lambda: protocol.said == ["lost"])
    assert isinstance(protocol.error, ConnectionResetError)


async def test_a_reset_of_one_that_is_not_read_is_told_when_something_is_sent_or_waits(stage: Stage) -> None:
    idle, full = Recorder(), Recorder()
    far, other = stage.add(idle), stage.add(full)
    for protocol in (idle, full):
        protocol.transport.pause_reading()
    while not full.transport.get_write_buffer_size():
        full.transport.write(bytes(100_000))
    reset(far)
    reset(other)
    await until(lambda: full.said[-1:] == ["lost"])
    assert idle.said == []
    while not idle.said:
        idle.transport.write(b"x")
        await asyncio.sleep(0)
    assert idle.said == ["lost"]


async def test_close_sends_what_waits_and_abort_does_not(stage: Stage) -> None:
    closed, aborted = Recorder(), Recorder()
    far, other = stage.add(closed), stage.add(aborted)
    for protocol in (closed, aborted):
        for _ in range(20):
            protocol.transport.write(bytes(100_000))
    closed.transport.close()
    aborted.transport.abort()
    assert closed.transport.is_closing()
    assert await read_all(far, 3_000_000) == bytes(2_000_000)
    assert len(await read_all(other, 3_000_000)) < 2_000_000
    await until(lambda: closed.said[-1] == aborted.said[-1] == "lost")


async def test_one_that_is_ended_by_another_in_the_same_turn_gets_nothing_more(stage: Stage) -> None:
    protocols: list[Recorder] = []

    def end_the_others(self: Recorder, _: bytes) -> None:
        for protocol in protocols:
            if protocol is not self:
                protocol.transport.abort()

    protocols += [Recorder(end_the_others) for _ in range(3)]
    for end in [stage.add(protocol) for protocol in protocols]:
        end.send(b"x")
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
    await until(lambda: sum(protocol.said == ["lost"] for protocol in protocols) == 2)
    assert failures == []
    assert sorted(len(protocol.received) for protocol in protocols) == [0, 0, 1]


async def test_a_protocol_that_fails_loses_its_connection_and_the_others_get_their_turn(stage: Stage) -> None:
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def fail(*_: object) -> None:
        raise RuntimeError("a defect")

    protocols = [Recorder(fail), Recorder(), Recorder(fail), Recorder()]
    for end in [stage.add(protocol) for protocol in protocols]:
        end.send(b"x")
    await until(lambda: protocols[2].said == ["lost"])
    assert [protocol.said for protocol in protocols] == [["lost"], [], ["lost"], []]
    assert [protocol.received for protocol in protocols] == [[b"x"]] * 4
    assert [str(each["exception"]) for each in failures] == ["a defect"] * 2


async def test_a_number_that_the_system_gives_again_is_of_the_new_socket_only(stage: Stage) -> None:
    first = Recorder()
    far = stage.add(first)
    number = first.transport.get_extra_info("socket").fileno()
    far.send(b"old")
    first.transport.abort()
    again = Recorder()
    near, end = socket.socketpair()
    assert number in (near.fileno(), end.fileno())
    if number != near.fileno():
        near, end = end, near
    near.setblocking(False)
    stage.far.append(end)
    stage.sockets.add(near, again)
    end.send(b"new")
    await until(lambda: bool(again.received))
    assert again.received == [b"new"]
    assert first.received == []
