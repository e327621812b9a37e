"""Defects that users of other brokers report. Numbers are issues of apache/rocketmq or of its clients."""

from __future__ import annotations

import asyncio
import tracemalloc
from pathlib import Path

import grpc
import grpc.aio
import pytest

from penstock import Client
from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import PopServiceStub
from penstock.store.options import MIB, StoreOptions
from penstock.store.properties import Properties
from penstock.timer.options import TimerOptions
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node, Parts

RESTARTS = pytest.mark.parametrize("keep_index", [None, True, False])


def restarted(parts: Parts, keep_index: bool | None) -> Parts:
    return parts if keep_index is None else parts.after_crash("restarted", keep_index=keep_index)


# --- lost, or wrong ---------------------------------------------------------------------------------------------------


@RESTARTS
def test_7914_and_7724_a_revival_takes_what_is_not_acked_and_nothing_else(parts: Parts, keep_index: bool | None) -> None:
    parts.publish(*(b"%d" % n for n in range(100)))
    messages = parts.pop(100)
    parts.ack(*(message.handle for message in messages[::2]))
    after = restarted(parts, keep_index)
    after.advance(10_000)
    returned = [[message.body for message in after.pop(1_000)] for _ in range(3)]
    assert list(map(len, returned)) == [32, 18, 0], "messages that were out together return in smaller batches"
    assert [body for bodies in returned for body in bodies] == [b"%d" % n for n in range(1, 100, 2)]
    after.close()


@RESTARTS
def test_8479_a_group_that_is_deleted_and_made_again_begins_anew(parts: Parts, keep_index: bool | None) -> None:
    parts.create()
    parts.publish(b"old")
    (old,) = parts.pop()
    parts.groups.delete(GROUP)
    parts.store.commit()
    after = restarted(parts, keep_index)
    after.create(start="latest")
    after.publish(b"new")
    assert [message.body for message in after.pop()] == [b"new"]
    assert after.ack(old.handle) == [AckOutcome.INVALID_HANDLE]
    after.close()


@RESTARTS
def test_3503_a_restart_resets_no_offset(parts: Parts, keep_index: bool | None) -> None:
    parts.publish(b"1", b"2", b"3")
    parts.ack(parts.pop(1)[0].handle)
    after = restarted(parts, keep_index)
    assert [message.body for message in after.pop()] == [b"2", b"3"]
    after.close()


def test_9318_a_group_that_was_idle_misses_nothing(parts: Parts) -> None:
    parts.publish(b"1")
    parts.ack(parts.pop()[0].handle)
    for number in range(50):
        parts.publish(b"x", topic=f"elsewhere/{number}")
        parts.advance(3_600_000)
    parts.publish(b"2")
    assert [message.body for message in parts.pop()] == [b"2"]


@RESTARTS
def test_9583_and_11174_the_handle_of_a_change_acknowledges_and_is_not_lost(parts: Parts, keep_index: bool | None) -> None:
    parts.publish(b"a")
    (message,) = parts.pop()
    _, renewed = parts.change(message.handle, 30_000)
    _, renewed = parts.change(renewed, 60_000)
    after = restarted(parts, keep_index)
    after.advance(59_999)
    assert after.ack(renewed) == [AckOutcome.OK]
    after.advance(43_200_000)
    assert after.pop() == []
    after.close()


# --- twice ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep_index", [True, False])
def test_10736_a_flush_resurrects_nothing_that_was_acked(parts: Parts, keep_index: bool) -> None:
    parts.publish(b"a", b"b")
    first, second = parts.pop()
    parts.store.index.flush()
    parts.ack(first.handle)
    parts.store.index.flush()
    parts.ack(second.handle)
    after = parts.after_crash("again", keep_index=keep_index)
    after.advance(43_200_000)
    assert after.pop() == []
    after.close()


@pytest.mark.parametrize("keep_index", [True, False])
def test_10278_a_crash_voids_no_handle(parts: Parts, keep_index: bool) -> None:
    parts.publish(b"a")
    (message,) = parts.pop()
    after = parts.after_crash("again", keep_index=keep_index)
    assert after.ack(message.handle) == [AckOutcome.OK]
    after.close()


def test_9105_a_light_queue_is_popped_once(parts: Parts) -> None:
    for number in range(20):
        parts.publish(b"%d" % number, topic=f"plant/{number}/t")
    seen = [message.body for _ in range(20) for message in parts.pop(3, topic_filter="plant/+/t")]
    assert sorted(seen) == sorted(b"%d" % n for n in range(20))


# --- slow, or stuck ---------------------------------------------------------------------------------------------------


def test_9956_many_equal_deadlines_are_revived_in_portions_that_leave_room(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "many", pop=PopOptions(messages_max=100), timer=TimerOptions(fire_max=400))
    for _ in range(40):
        parts.publish(*([b"x"] * 100))
        parts.pop(100)
    parts.clock.advance(10_000)  # type: ignore[attr-defined]
    portions: list[int] = []
    more = True
    while more:
        before = parts.core.counters.revived
        more = parts.core.fire_due()
        parts.store.commit()
        portions.append(parts.core.counters.revived - before)
    assert parts.group().visible_retries == sum(portions) == 4_000
    assert max(portions) <= 400
    parts.close()


def test_10658_one_bad_record_stops_no_other(parts: Parts) -> None:
    parts.group()
    positions = parts.publish(*(b"%d" % n for n in range(10)))
    parts.damage(positions[4], positions[5] - positions[4])
    assert [message.body for message in parts.pop()] == [b"%d" % n for n in range(10) if n != 4]


def test_9112_a_pop_does_not_scan_messages_that_were_acknowledged_before(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(30):
        parts.publish(*([b"x"] * 100))
        parts.ack(*(message.handle for message in parts.pop(100)))
    parts.publish(b"last")
    rows = []
    around = parts.store.index.rows_around

    def counted(key: bytes, prefix: bytes):  # type: ignore[no-untyped-def]
        for row in around(key, prefix):
            rows.append(row)
            yield row

    monkeypatch.setattr(parts.store.index, "rows_around", counted)
    assert [message.body for message in parts.pop()] == [b"last"]
    assert len(rows) <= 2


@pytest.mark.parametrize("how", ["expiry", "nack"])
async def test_6681_and_9632_a_retry_wakes_the_poll_that_waits(tmp_path: Path, how: str) -> None:
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        await client.send(TOPIC, b"a")
        (message,) = await client.pop(FILTER, group=GROUP, invisible=600.0)
        poll = asyncio.ensure_future(client.pop(FILTER, group=GROUP, wait=60.0))
        await node.until(lambda: node.core.waiting == 1)
        if how == "nack":
            await message.nack()
        else:
            node.advance(600_000)
        (again,) = await poll  # by itself it would end without a message
        assert again.attempt == 2


async def test_9145_a_consumer_waits_on_no_empty_queue_while_another_has_messages(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node, Client(node.target) as client:
        poll = asyncio.ensure_future(client.pop("plant/#", group=GROUP, wait=60.0))
        await node.until(lambda: node.core.waiting == 1)
        await client.send("plant/never/seen/before", b"a")
        assert len(await poll) == 1, "a poll that did not wake would end without a message"


def test_8472_a_sparse_filter_finds_its_message_and_keeps_its_place(parts: Parts) -> None:
    group = parts.create(expression="rare")
    for _ in range(20):
        parts.publish(*([b"x"] * 100), properties=Properties([], "common"))
    parts.publish(b"found", properties=Properties([], "rare"))
    seen: list[bytes] = []
    for _ in range(5):
        seen += [message.body for message in parts.pop()]
    assert seen == [b"found"]
    assert group.scanned == group.queue.committed_offset


@RESTARTS
def test_10827_a_lost_answer_blocks_no_fifo_group(parts: Parts, keep_index: bool | None) -> None:
    parts.create(fifo=True)
    for body in (b"1", b"2"):
        parts.publish(body, properties=Properties(message_group="a"))
    parts.pop(attempt_id="lost")
    after = restarted(parts, keep_index)
    (again,) = after.pop(attempt_id="lost")
    assert (again.body, again.attempt) == (b"1", 1)
    after.ack(again.handle)
    assert [message.body for message in after.pop(attempt_id="next")] == [b"2"]
    after.close()


def test_8657_and_10058_a_backlog_of_retries_starves_no_new_message_nor_the_other_way(parts: Parts) -> None:
    parts.publish(*([b"retry"] * 100))
    parts.fail()
    parts.publish(*([b"new"] * 100))
    served = [message.body for _ in range(10) for message in parts.pop(10)]
    assert (served.count(b"new"), served.count(b"retry")) == (50, 50)


# --- memory, and counts -----------------------------------------------------------------------------------------------


def test_7772_a_consumer_that_never_acks_stops_at_its_limit(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "never", pop=PopOptions(in_flight_max=100))
    parts.publish(*([b"x"] * 500))
    taken = 0
    while messages := parts.pop(30):
        taken += len(messages)
    assert (taken, parts.group().in_flight) == (100, 100)
    parts.close()


def test_10052_a_message_in_flight_takes_less_than_a_hundred_bytes(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "memory", pop=PopOptions(in_flight_max=1_000_000), store=StoreOptions(segment_bytes=64 * MIB))
    parts.publish(*([b"x"] * 5_000))
    parts.group()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    while parts.core.popper.pop(parts.group(), 256, 43_000_000) is not None:
        parts.store.commit()
    used = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert parts.group().in_flight == 5_000
    assert used / 5_000 < 100
    parts.close()


@RESTARTS
def test_9217_and_10899_counts_are_exact_whatever_happened(parts: Parts, keep_index: bool | None) -> None:
    parts.create(attempts_max=2, backoff=(5_000,))
    parts.publish(*(b"%d" % n for n in range(10)))
    messages = parts.pop(8)
    parts.ack(messages[0].handle, messages[0].handle)
    parts.change(messages[1].handle, 0)
    parts.change(messages[2].handle, 0, suspend=True)
    _, renewed = parts.change(messages[3].handle, 60_000)
    parts.core.deliveries.dead_letter(GROUP, [messages[4].handle])
    parts.settle()
    after = restarted(parts, keep_index)
    (told,) = after.snapshots([after.group()])
    assert (told.visible, told.retries, told.in_flight, told.delayed, told.dead) == (3, 1, 5, 1, 1)
    after.advance(60_000)
    assert after.ack(renewed) == [AckOutcome.HANDLE_EXPIRED]
    while messages := after.pop():
        after.ack(*(message.handle for message in messages))
        after.advance(5_000)
    (told,) = after.snapshots([after.group()])
    assert (told.visible, told.in_flight, told.delayed, told.dead) == (0, 0, 0, 1)
    after.close()


# --- feature requests -------------------------------------------------------------------------------------------------


def test_8332_and_10050_an_extension_is_no_attempt(parts: Parts) -> None:
    parts.create(attempts_max=2)
    parts.publish(b"a")
    handle = parts.pop()[0].handle
    for _ in range(20):
        parts.advance(9_000)
        outcome, handle = parts.change(handle, 10_000)
        assert outcome is AckOutcome.OK
    parts.advance(10_000)
    assert [message.attempt for message in parts.pop()] == [2]


async def test_9515_an_error_of_a_change_gives_the_handle_back(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node:
        async with grpc.aio.insecure_channel(node.target) as channel:
            change = pb.InvisibleChange(handle="00" * 30, invisible_ms=1_000)
            answer = await PopServiceStub(channel).ChangeInvisible(pb.ChangeInvisibleRequest(group=GROUP, changes=[change]))
        assert (answer.results[0].status.code, answer.results[0].handle) == (pb.INVALID_HANDLE, "00" * 30)


async def test_9253_what_never_reached_its_consumer_is_visible_at_once_and_uncounted(tmp_path: Path) -> None:
    async with Node(tmp_path / "data") as node:
        async with grpc.aio.insecure_channel(node.target) as channel:
            polls = [PopServiceStub(channel).Pop(pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=60_000)) for _ in range(20)]
            await node.until(lambda: node.core.waiting == 20)
            for poll in polls:
                poll.cancel()
            # What gRPC has taken for a call before the news of its end came in may have reached the consumer.
            await node.until(lambda: node.core.waiting == 0)
            node.publish(*(b"%d" % n for n in range(20)))
        async with Client(node.target) as client:
            seen: list[bytes] = []
            while len(seen) < 20:
                messages = await client.pop(FILTER, group=GROUP, wait=60.0)
                assert messages
                assert {message.attempt for message in messages} == {1}
                seen += [message.body for message in messages]


def test_clients_1218_message_groups_of_one_queue_go_side_by_side(parts: Parts) -> None:
    parts.create(fifo=True)
    for number in range(30):
        parts.publish(b"%d" % number, properties=Properties(message_group=f"group {number % 10}"))
    assert len(parts.pop(100)) == 10


# --- assertions of RocketMQ's own tests -------------------------------------------------------------------------------


def test_of_1_2_3_4_in_order_a_nack_of_2_brings_2_before_3(parts: Parts) -> None:
    """RocketMQ delivers 1, 2, 3 as a batch, and after a nack of 2 again 2, 3 and then 4. Penstock lets 3 wait for 2."""
    parts.create(fifo=True)
    for number in (b"1", b"2", b"3", b"4"):
        parts.publish(number)
    seen = []
    while messages := parts.pop():
        (message,) = messages
        seen.append(message.body)
        if seen.count(b"2") == 1 and message.body == b"2":
            parts.change(message.handle, 0)
            parts.settle()
        else:
            parts.ack(message.handle)
    assert seen == [b"1", b"2", b"2", b"3", b"4"]


def test_acks_of_one_batch_of_new_messages_and_retries_hold_for_both(parts: Parts) -> None:
    parts.publish(*([b"retry"] * 5))
    parts.fail()
    parts.publish(*([b"new"] * 5))
    messages = parts.pop()
    assert len(messages) == 10
    assert set(parts.ack(*(message.handle for message in messages))) == {AckOutcome.OK}
    parts.advance(43_200_000)
    assert parts.pop() == []


def test_a_large_body_is_the_same_after_a_retry(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "large", store=StoreOptions(segment_bytes=64 * MIB))
    body = bytes(range(256)) * 8_192
    parts.publish(body)
    parts.pop()
    parts.advance(10_000)
    assert [(message.body, message.attempt) for message in parts.pop()] == [(body, 2)]
    parts.close()
