"""What one client sends is handled bit by bit, so that others are served between: order, completeness and bounds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from websockets.frames import OP_BINARY, OP_PING, Frame

from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.connection.outbox import ANSWERS_BYTES_MAX
from penstock.gateway.protocol.encode import PINGRESP_BYTES, encode_acks, encode_publish
from penstock.gateway.protocol.packets import CONNACK, PINGRESP, PUBREC, PUBREL
from penstock.gateway.transport.overtime import SLICE_S_MIN, TURN_S, Overtime
from penstock.gateway.transport.socket_transport import PIECE_OVERHEAD_BYTES, READ_BYTES
from penstock.store.options import KIB, MIB
from tests.gateway.brokers import StartBroker
from tests.gateway.packet_cases import connect, subscribe, unsubscribe
from tests.gateway.websocket_client import WS, connected, dial
from tests.gateway.wire import ANSWER_S_MAX, CLEAN, PING, Broker, message_of
from tests.waiting import until

FLOODS = {
    "PUBREC": encode_acks(PUBREC, [7]),
    "PUBREL": encode_acks(PUBREL, [7]),
    "SUBSCRIBE": subscribe(1, (b"a", 0)),
    "UNSUBSCRIBE": unsubscribe(1, b"a"),
    "PUBLISH": encode_publish(b"a", b""),
    "PUBLISH to two topics": encode_publish(b"a", b"") + encode_publish(b"b", b""),
}


PACKETS_A_TURN_MAX = 10_000
"""Small packets that a turn without time handles, at most: a run of PUBLISHes to one topic is one piece of work."""

OF_SINGLE_PACKETS = {"SUBSCRIBE": 1, "UNSUBSCRIBE": 1, "PUBLISH to two topics": 50}
"""How many units a turn without time handles, at most, of the floods that are no runs of equal packets."""


class Seconds:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


# --- overtime -----------------------------------------------------------------------------------------------------------


async def test_what_is_added_takes_turns_and_none_takes_more_than_its_share() -> None:
    clock = Seconds()
    overtime = Overtime(clock)
    overtime.start(asyncio.get_running_loop())
    trace: list[str] = []

    def work(name: str, left: int) -> None:
        trace.append(name)
        clock.now_s += 1
        if left:
            overtime.add(lambda: work(name, left - 1))

    for name in "abc":
        overtime.add(lambda name=name: work(name, 2))  # type: ignore[misc]
    asyncio.get_running_loop().call_soon(trace.append, "others")
    await until(lambda: not len(overtime))
    assert [each for each in trace if each != "others"] == ["a", "b", "c"] * 3
    assert trace.index("others") == 1, "each turn has done one piece of work, which took all of its time"


async def test_long_work_shares_a_turn_in_equal_slices() -> None:
    clock = Seconds()
    overtime = Overtime(clock)
    overtime.start(asyncio.get_running_loop())
    took_s: dict[str, float] = {}

    def work(name: str) -> None:
        began_s = clock.now_s
        while not overtime.is_over():
            clock.now_s += SLICE_S_MIN / 4
        took_s[name] = clock.now_s - began_s

    for name in "abcd":
        overtime.add(lambda name=name: work(name))  # type: ignore[misc]
    await asyncio.sleep(0)
    assert set(took_s) == set("abcd"), "those who came first have taken the turn for themselves"
    assert max(took_s.values()) <= TURN_S / 4 + SLICE_S_MIN / 2


async def test_the_share_of_a_turn_ends_with_it_wherever_it_began() -> None:
    clock = Seconds()
    overtime = Overtime(clock)
    overtime.start(asyncio.get_running_loop())
    assert not overtime.is_over()
    clock.now_s += TURN_S
    assert overtime.is_over()
    await asyncio.sleep(0)
    assert not overtime.is_over()


async def test_what_gets_no_slice_comes_first_in_the_next_turn() -> None:
    clock = Seconds()
    overtime = Overtime(clock)
    overtime.start(asyncio.get_running_loop())
    trace: list[int] = []

    def work(number: int) -> None:
        trace.append(number)
        while not overtime.is_over():
            clock.now_s += SLICE_S_MIN
        overtime.add(lambda: work(number))

    count = 5 * int(TURN_S / SLICE_S_MIN)
    for number in range(count):
        overtime.add(lambda number=number: work(number))  # type: ignore[misc]
    await asyncio.sleep(0)
    assert count / 6 < len(trace) < count / 4
    for _ in range(5):
        await asyncio.sleep(0)
    assert trace[:count] == list(range(count))


async def test_short_work_shares_a_turn_and_a_failure_holds_up_nobody() -> None:
    overtime = Overtime(Seconds())
    overtime.start(asyncio.get_running_loop())
    trace: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: trace.append(str(context["exception"])))

    def fail() -> None:
        raise RuntimeError("a defect")

    for work in (lambda: trace.append(1), fail, lambda: trace.append(2), lambda: trace.append(3)):
        overtime.add(work)
    asyncio.get_running_loop().call_soon(trace.append, "others")
    await until(lambda: not len(overtime))
    assert trace == [1, "a defect", "others", 2, 3]


# --- one read -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLOODS)
async def test_a_read_full_of_small_packets_does_not_hold_up_others(
    broker: Broker, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await broker.connect("flood")
    await client.subscribe(("a", 0))
    unit = FLOODS[name]
    monkeypatch.setattr("penstock.gateway.transport.overtime.TURN_S", 0.0)
    overtime = broker.node.gateway.overtime
    before = overtime.put_off
    a_turn_max = OF_SINGLE_PACKETS.get(name, PACKETS_A_TURN_MAX)
    count = min(READ_BYTES // len(unit), 2000 * a_turn_max)
    broker.feed("flood", unit * count)
    assert len(overtime) == 1
    assert broker.connection("flood").is_unread
    await until(lambda: not len(overtime) or not broker.node.gateway.connections)
    turns = overtime.put_off - before
    assert count <= turns * a_turn_max, "what can't be put off is short"


@pytest.mark.parametrize("is_v5", [False, True])
async def test_a_read_full_of_pings_is_answered_at_once(broker: Broker, is_v5: bool) -> None:
    client = await (broker.connect_5("flood") if is_v5 else broker.connect("flood"))
    before = broker.node.gateway.traffic.packets_out[PINGRESP]
    broker.feed("flood", PING * (READ_BYTES // 2))
    assert len(broker.node.gateway.overtime) == 0
    assert [await client.receive() for _ in range(1_000)] == [(PINGRESP, 0, b"")] * 1_000
    assert broker.node.gateway.traffic.packets_out[PINGRESP] - before == READ_BYTES // 2


async def test_what_is_put_off_is_handled_in_order_and_completely(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    subscriber, client = await broker.connect("subscriber"), await broker.connect("flood")
    await subscriber.subscribe(("#", 0))
    monkeypatch.setattr("penstock.gateway.transport.overtime.TURN_S", 0.0)
    count = 3000
    before = broker.node.gateway.overtime.put_off
    packets = [encode_publish(b"t/%d" % (number % 7), b"%d" % number) for number in range(count)]
    await client.send(*packets, subscribe(1, (b"mine", 0)), encode_publish(b"mine", b"last"), PING)
    await client.expect(13)
    assert broker.node.gateway.overtime.put_off > before
    found = [message_of(each) for each in [await subscriber.receive() for _ in range(count + 1)]]
    assert [message.body for message in found] == [*(b"%d" % number for number in range(count)), b"last"]
    assert not broker.connection("flood").is_unread


async def test_a_subscribe_and_an_unsubscribe_with_many_filters_take_several_turns(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await broker.connect("many")
    monkeypatch.setattr("penstock.gateway.transport.overtime.TURN_S", 0.0)
    names = [f"a/{number}/+" for number in range(100)]
    for change in (client.subscribe(*((name, 1) for name in names)), client.unsubscribe(*names)):
        before = broker.node.gateway.overtime.put_off
        await change
        assert broker.node.gateway.overtime.put_off > before
    assert len(broker.connection("many").subscriptions) == 0
    assert await client.subscribe((names[7], 1)) == [1]


async def test_what_follows_a_connect_in_one_long_read_is_handled_once(broker: Broker) -> None:
    client = await broker.dial()
    await until(lambda: len(broker.node.gateway.connections) == 1)
    (connection,) = broker.node.gateway.connections
    count = 2000
    connection.data_received(connect(CLEAN, b"c") + b"".join(encode_publish(b"a", b"%d" % n) for n in range(count)) + PING)
    assert [(await client.receive())[0] for _ in range(2)] == [CONNACK, PINGRESP]
    assert [int(message.body) for message in broker.stored()] == list(range(count))


async def test_the_connects_of_a_fleet_take_several_turns(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.transport.overtime.TURN_S", 0.0)
    found = await asyncio.gather(*(broker.connect(f"device-{number}") for number in range(20)))
    assert broker.node.gateway.overtime.put_off >= 20
    await found[0].subscribe(("a", 1))
    await found[1].publish("a", b"x", 1)
    assert (await found[0].message()).body == b"x"


async def test_a_client_that_ends_while_its_packets_wait_leaves_nothing_behind(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = await broker.connect("flood")
    monkeypatch.setattr("penstock.gateway.transport.overtime.TURN_S", 0.0)
    unit = FLOODS["PUBREL"]
    broker.feed("flood", unit * (READ_BYTES // len(unit)))
    assert len(broker.node.gateway.overtime) == 1
    client.reset()
    await until(lambda: not broker.node.gateway.connections and not len(broker.node.gateway.overtime))


async def test_small_answers_that_wait_for_the_kernel_count_with_their_overhead(start_broker: StartBroker) -> None:
    broker = await start_broker(send_buffer_bytes=64 * KIB)
    client = await broker.connect("slow")
    client.stop_reading()
    outbox, transport = broker.connection("slow").outbox, broker.connection("slow")._transport
    assert transport is not None
    while not transport.get_write_buffer_size():
        transport.write(bytes(64 * KIB))
    while outbox.writable:
        outbox.send(PINGRESP_BYTES)
    assert len(transport._unsent) <= 64 * KIB // PIECE_OVERHEAD_BYTES + 1  # type: ignore[attr-defined]


FRAMES_A_TURN_MAX = 1000
"""Frames that a turn without time handles, at most."""

# --- WebSocket ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_connected", [False, True])
async def test_pongs_that_are_not_read_stop_the_reading_of_pings(start_broker: StartBroker, is_connected: bool) -> None:
    broker = await start_broker(listeners=(WS,), send_buffer_bytes=4 * KIB, connect_timeout_ms=600_000)
    opened: list[Any] = []
    client = await connected(broker, b"flood", opened) if is_connected else (await dial(broker))[0]
    (connection,) = broker.node.gateway.connections
    assert connection._transport is not None
    client.writer.transport.pause_reading()  # type: ignore[attr-defined]
    pings = Frame(OP_PING, bytes(125)).serialize(mask=True) * 1000
    written = 0
    while not connection._paused_for & PauseReason.ANSWERS_UNREAD:
        if client.writer.transport.get_write_buffer_size() < 64 * KIB:
            client.writer.write(pings)
            written += len(pings)
        assert written < 64 * MIB, "the server answers without end"
        await asyncio.sleep(0)
    assert connection._transport.get_write_buffer_size() < 4 * KIB + ANSWERS_BYTES_MAX + READ_BYTES
    client.writer.transport.resume_reading()  # type: ignore[attr-defined]
    while connection._paused_for or len(broker.node.gateway.overtime):
        async with asyncio.timeout(ANSWER_S_MAX):
            assert await client.reader.read(MIB)
    client.writer.transport.abort()


@pytest.mark.parametrize("frame", [Frame(OP_PING, b""), Frame(OP_BINARY, b""), Frame(OP_BINARY, PING)], ids=str)
async def test_a_read_full_of_small_frames_does_not_hold_up_others(
    start_broker: StartBroker, frame: Frame, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = await start_broker(listeners=(WS,))
    opened: list[Any] = []
    client = await connected(broker, b"flood", opened)
    connection, overtime = broker.connection("flood"), broker.node.gateway.overtime
    unit = frame.serialize(mask=True)
    count = READ_BYTES // len(unit)
    monkeypatch.setattr("penstock.gateway.transport.overtime.TURN_S", 0.0)
    before = overtime.put_off
    connection._transport.data_received(unit * count)  # type: ignore[union-attr]
    assert len(overtime) == 1
    await until(lambda: not len(overtime))
    if frame.data:
        await client.packets(expected=PINGRESP_BYTES * count)
    assert count <= (overtime.put_off - before) * FRAMES_A_TURN_MAX
    client.writer.transport.abort()
