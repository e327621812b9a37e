"""Rate limits, back-pressure, and a log that clients cannot flood."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.connection.throttle import TICK_MS
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import LimitOptions, ListenerOptions
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.packets import PUBACK
from penstock.gateway.transport.token_bucket import TokenBucket
from penstock.store import housekeeping
from penstock.store.options import KIB
from tests.clock import AheadClock, ManualClock
from tests.gateway import scripted_plugins
from tests.gateway.brokers import StartBroker
from tests.gateway.logins import plugins
from tests.gateway.moving_time import pass_time
from tests.gateway.wire import FREE, PING, Broker, Client, HeldSync, Message
from tests.waiting import until

# --- the bucket ---------------------------------------------------------------------------------------------------------


@given(st.integers(1, 10_000), st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 500)), max_size=60))
def test_a_caller_that_waits_as_told_never_exceeds_the_rate_and_its_burst(per_s: int, reads: list[tuple[int, int]]) -> None:
    bucket = TokenBucket(per_s)
    now_ms, spent, last = 10**9, 0, 0
    began_ms = now_ms
    for pause_ms, tokens in reads:
        now_ms += max(pause_ms, bucket.wait_ms(0, now_ms))
        assert bucket.wait_ms(0, now_ms) == 0, "a caller that has waited as long as it was told may go on"
        assert spent * 1000 <= per_s * 1000 + (now_ms - began_ms) * per_s, "all before the last read is within the rate"
        bucket.spend(tokens)
        spent, last = spent + tokens, tokens
    assert (spent - last) * 1000 <= per_s * 1000 + (now_ms - began_ms) * per_s


@given(st.integers(1, 10_000), st.integers(0, 20_000))
def test_a_wait_is_as_long_as_it_must_be_and_no_longer(per_s: int, tokens: int) -> None:
    bucket = TokenBucket(per_s)
    bucket.spend(tokens)
    wait_ms = bucket.wait_ms(0, 0)
    assert bucket.wait_ms(0, wait_ms) == 0
    if wait_ms:
        other = TokenBucket(per_s)
        other.spend(tokens)
        assert other.wait_ms(0, wait_ms - 1) == 1


def test_a_bucket_without_a_rate_never_waits() -> None:
    bucket = TokenBucket(0)
    bucket.spend(10**12)
    assert bucket.wait_ms(10**12, 0) == 0


# --- clients ------------------------------------------------------------------------------------------------------------


async def publish_all(broker: Broker, clients: dict[str, Client], count: int, body: bytes) -> float:
    """Publish `count` messages of each client at once. Return how many seconds the clock had to move until all were read.

    The clock moves only while a client is not read, so the machine's speed has no part in the result.
    """
    for client in clients.values():
        await client.send(encode_publish(b"a", body) * count)
    drained = asyncio.gather(*(client.drained() for client in clients.values()))
    moved_s = 0.0
    while not drained.done():
        if any(broker.connection(name).is_unread for name in clients):
            pass_time(broker.node.gateway, 0.01)
            moved_s += 0.01
        await asyncio.sleep(0)
    return moved_s


@pytest.mark.parametrize(
    ("limits", "body"),
    [(LimitOptions(client_messages_per_s=100), b"x"), (LimitOptions(client_bytes_per_s=100 * KIB), b"x" * (KIB - 7))],
    ids=["messages", "bytes"],
)
async def test_a_client_publishes_at_its_rate_after_a_burst_and_others_are_not_paused(
    start_broker: StartBroker, limits: LimitOptions, body: bytes
) -> None:
    broker = await start_broker(clock=ManualClock(), limits=limits)
    fast, other = await broker.connect("fast"), await broker.connect("other")
    moved_s = await publish_all(broker, {"fast": fast}, 150, body)
    assert 0.45 < moved_s < 0.6, "the fifty messages beyond the burst take half a second"
    throttled = broker.node.gateway.throttle.throttled["client"]
    assert throttled > 0
    assert await publish_all(broker, {"other": other}, 20, body) == 0
    assert broker.node.gateway.throttle.throttled["client"] == throttled


async def test_a_packet_in_many_reads_is_charged_read_by_read(start_broker: StartBroker) -> None:
    broker = await start_broker(limits=LimitOptions(client_bytes_per_s=KIB))
    client = await broker.connect("c")
    connection, listener = broker.connection("c"), broker.listener("mqtt")
    packet = encode_publish(b"a", b"x" * 8 * KIB)
    received = listener.bytes_in
    await client.send(packet[:10])
    await until(lambda: listener.bytes_in == received + 10)
    assert not connection.is_unread
    await client.send(packet[10 : 4 * KIB])
    await until(lambda: connection.is_unread)
    assert broker.stored() == []


async def test_messages_that_waited_for_the_plugins_are_charged(start_broker: StartBroker) -> None:
    script = scripted_plugins.new_script()
    broker = await start_broker(access=plugins("Topics"), limits=LimitOptions(client_messages_per_s=1))
    client = await broker.connect("c")
    script.may_answer.clear()
    await client.send(*(encode_publish(b"a", b"x", 1, packet_id=number) for number in (1, 2, 3)))
    await until(lambda: bool(script.asked))
    assert broker.node.gateway.throttle.throttled["client"] == 0
    script.may_answer.set()
    assert [await client.receive() for _ in range(3)] == [(PUBACK, number) for number in (1, 2, 3)]
    assert broker.node.gateway.throttle.throttled["client"] == 1
    assert broker.connection("c").is_unread


async def test_all_clients_of_a_listener_share_its_rate(start_broker: StartBroker) -> None:
    listener = ListenerOptions(name="limited", listen=FREE, messages_per_s=100)
    broker = await start_broker(clock=ManualClock(), listeners=(listener,))
    clients = {name: await broker.connect(name, listener="limited") for name in "abc"}
    assert 0.3 < await publish_all(broker, clients, 50, b"x") < 0.6
    assert broker.node.gateway.throttle.throttled["listener"] > 0
    assert broker.connection("a").meter is not None
    assert await (await broker.connect("free")).drained() == []
    assert broker.connection("free").meter is None


async def test_a_read_is_handled_whole_and_charged_afterwards(start_broker: StartBroker) -> None:
    broker = await start_broker(limits=LimitOptions(client_messages_per_s=1000), clock=AheadClock())
    client = await broker.connect("c")
    await client.send(encode_publish(b"a", b"x") * 1200)
    assert await client.drained() == []
    assert len(broker.stored()) == 1200


async def test_a_throttled_client_is_not_closed_for_silence_and_one_that_goes_leaves_nothing(
    start_broker: StartBroker,
) -> None:
    broker = await start_broker(limits=LimitOptions(client_messages_per_s=10))
    client = await broker.connect("c", keep_alive_s=2)
    await client.send(encode_publish(b"a", b"x") * 200)
    await until(lambda: len(broker.node.gateway.throttle) == 1)
    for _ in range(4):
        pass_time(broker.node.gateway, 2)
    assert "c" in broker.node.gateway.clients
    broker.connection("c").outbox.abort()
    await until(lambda: not broker.node.gateway.connections)


def test_a_wait_shorter_than_a_tick_is_a_debt() -> None:
    assert TokenBucket(1000).wait_ms(1000 + TICK_MS - 1, 0) < TICK_MS


# --- back-pressure ------------------------------------------------------------------------------------------------------


async def test_publishers_are_not_read_while_the_disk_is_behind_so_memory_is_bounded(start_broker: StartBroker) -> None:
    bound = 64 * KIB
    broker = await start_broker(limits=LimitOptions(undurable_bytes_max=bound))
    publishers = [await broker.connect(name) for name in "abc"]
    reader = await broker.connect("reader")
    pressure = broker.node.gateway.backpressure
    body = b"x" * 1000
    with HeldSync(broker) as held:
        for client in publishers:
            for number in range(2000):  # 6 MB, more than the sockets hold
                client.writer.write(encode_publish(b"a", body, 1, packet_id=number + 1))
        await until(lambda: len(pressure) == 3)
        log = broker.node.store.log
        end = log.end
        assert log.end - broker.node.store.durable_position < bound + 3 * 512 * KIB, "the bound, and one read of each publisher"
        for _ in range(20):
            assert await reader.drained() == [], "a client that does not publish is served"
        assert log.end == end
        assert pressure.entered == 1
        held.release()
        for client in publishers:
            for number in range(2000):
                assert await client.receive() == (PUBACK, number + 1)
    assert len(broker.stored()) == 6000
    await until(lambda: len(pressure) == 0)


async def test_publishers_that_leave_while_the_disk_is_behind_are_forgotten(start_broker: StartBroker) -> None:
    broker = await start_broker(limits=LimitOptions(undurable_bytes_max=KIB))
    with HeldSync(broker):
        client = await broker.connect("c")
        await client.send(encode_publish(b"a", b"x" * 5000, 1, packet_id=1))
        await until(lambda: len(broker.node.gateway.backpressure) == 1)
        broker.connection("c").outbox.abort()
        await until(lambda: len(broker.node.gateway.backpressure) == 0)


async def test_messages_at_qos_0_ask_for_a_sync_when_the_disk_is_behind(
    start_broker: StartBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "INTERVAL_S", 3600.0)  # so the background sync does not help
    broker = await start_broker(limits=LimitOptions(undurable_bytes_max=KIB))
    client = await broker.connect("c")
    for _ in range(20):
        await client.send(encode_publish(b"a", b"x" * 2000))
        await client.drained()
    assert broker.node.gateway.backpressure.entered > 0


# --- the log ------------------------------------------------------------------------------------------------------------


async def test_clients_cannot_flood_the_log(start_broker: StartBroker) -> None:
    broker: Broker = await start_broker(limits=LimitOptions(log_lines_per_s=5))
    with structlog.testing.capture_logs() as lines:
        for _ in range(50):
            client = await broker.dial()
            await client.send(PING)
            await client.ended()
        broker.node.gateway.logbook.turn_page()
    closed = [line for line in lines if line["event"] == "connection.closed"]
    left_out = sum(line["lines"] for line in lines if line["event"] == "log.left_out")
    assert len(closed) + left_out == 50
    assert len(closed) < 50


def test_each_kind_of_event_has_lines_of_its_own_in_each_second() -> None:
    with structlog.testing.capture_logs() as lines:
        logbook = Logbook(2)
        for _ in range(2):
            for event in ("a", "b", "a", "a", "a"):
                logbook.note(event, value=1)
            logbook.turn_page()
    second: list[Any] = ["a", "b", "a", "log.left_out"]
    assert [line["event"] for line in lines] == second * 2
    assert [(line["of"], line["lines"]) for line in lines if line["event"] == "log.left_out"] == [("a", 2)] * 2


async def test_no_message_is_lost_when_reading_is_paused_for_two_reasons(start_broker: StartBroker) -> None:
    limits = LimitOptions(client_messages_per_s=500, undurable_bytes_max=16 * KIB)
    broker = await start_broker(limits=limits, clock=AheadClock())
    client = await broker.connect("c")
    expected = [Message("a", b"%d" % number + b"x" * 200, 1) for number in range(1500)]
    for number, message in enumerate(expected):
        client.writer.write(encode_publish(b"a", message.body, 1, packet_id=number + 1))
    for number in range(len(expected)):
        assert await client.receive() == (PUBACK, number + 1)
    assert broker.stored() == expected
