"""POP and delayed messages on a full disk: the reserve lets consumers finish, and below the floor everything waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.groups import ResetTo
from penstock.pop.core.transactions import EndOutcome
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.errors import DiskFull
from penstock.store.files import Usage
from penstock.store.options import GIB, MIB, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from penstock.store.store import Store
from penstock.timer.delayed import Recalled
from tests.pop.wiring import FILTER, GROUP, TOPIC, Delivered, Node, Parts, stub_of

TOTAL = 100 * GIB
READ_ONLY, EXHAUSTED = GIB // 2, 0
OPTIONS = StoreOptions(segment_bytes=MIB, reserve_bytes=GIB)


def free(store: Store, amount: int) -> None:
    store.space.probe = lambda: Usage(amount, TOTAL)
    store.measure_disk()
    store.commit()


def bodies(delivered: list[Delivered]) -> list[bytes]:
    return [each.body for each in delivered]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    parts = Parts(tmp_path / "data", store=OPTIONS, pop=PopOptions(attempts_max=2))
    parts.publish(b"0", b"1")
    parts.group()
    yield parts
    parts.close()


def test_a_read_only_node_pops_acknowledges_revives_and_dead_letters(parts: Parts) -> None:
    free(parts.store, READ_ONLY)
    first, _ = parts.pop(2, 1000)
    assert parts.ack(first.handle) == [AckOutcome.OK]
    parts.advance(1000)
    (again,) = parts.pop(2, 1000)
    assert (again.body, again.attempt) == (b"1", 2)
    parts.advance(1000)
    assert parts.pop() == []
    assert parts.store.queues.find(f"$dlq/{GROUP}") is not None, "the queue of the dead letters is declared from the reserve"
    assert parts.core.counters.dead_lettered == 1


def test_a_read_only_node_makes_no_group_and_leaves_no_half_of_one(parts: Parts) -> None:
    free(parts.store, READ_ONLY)
    for topic_filter in ("office/#", FILTER):
        with pytest.raises(DiskFull):
            parts.core.groups.get_or_create("auditors", topic_filter)
    free(parts.store, TOTAL)
    assert bodies(parts.pop(group="auditors")) == [b"0", b"1"]


def test_below_the_floor_pops_find_nothing_and_acknowledgements_are_refused(parts: Parts) -> None:
    (first,) = parts.pop(1, 1000)
    free(parts.store, EXHAUSTED)
    assert parts.pop() == []
    with pytest.raises(DiskFull):
        parts.ack(first.handle)
    with pytest.raises(DiskFull):
        parts.change(first.handle, 0)
    free(parts.store, READ_ONLY)
    assert parts.ack(first.handle) == [AckOutcome.OK]
    assert bodies(parts.pop()) == [b"1"]


def test_below_the_floor_nothing_is_revived_and_nothing_is_lost(parts: Parts) -> None:
    parts.pop(1, 1000)
    parts.pop(1, 200_000)
    free(parts.store, EXHAUSTED)
    end = parts.store.log.end
    for _ in range(300):
        parts.advance(1000)
    assert parts.store.log.end == end
    free(parts.store, READ_ONLY)
    parts.advance(1000)
    assert sorted(bodies(parts.pop())) == [b"0", b"1"]


def test_below_the_floor_what_has_a_back_off_is_revived_once_when_there_is_room(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data", store=OPTIONS)
    parts.create(backoff=(3_000,))
    parts.publish(b"0", b"1", b"2")
    for invisible_ms in (1_000, 1_500, 1_500):
        parts.pop(1, invisible_ms)
    parts.advance(4_000)  # the first message is due, and the others wait
    assert parts.core.counters.revived == 1
    free(parts.store, EXHAUSTED)
    for _ in range(10):
        parts.advance(1_000)
    free(parts.store, READ_ONLY)
    parts.advance(1_000)
    assert sorted(bodies(parts.pop())) == [b"0", b"1", b"2"]
    assert (parts.core.counters.revived, parts.core.counters.revive_lateness.counts.count(0)) == (3, 16)
    parts.close()


@pytest.mark.parametrize("settings", [{"fifo": True}, {"expression": "rare"}])
def test_below_the_floor_a_selective_group_finds_nothing_and_skips_nothing(parts: Parts, settings: dict) -> None:
    group = parts.create("careful", **settings)
    parts.publish(b"2", properties=Properties(tag="rare"))
    free(parts.store, EXHAUSTED)
    assert parts.pop(group="careful") == []
    assert not parts.core.polls._may_scan_further(group), "a poll that waits would look for ever"
    free(parts.store, TOTAL)
    found = [parts.pop(1, group="careful") for _ in range(2)]
    assert bodies([each for some in found for each in some]) == ([b"0"] if "fifo" in settings else [b"2"])


def test_transactions_end_from_the_reserve_and_wait_below_the_floor(tmp_path: Path) -> None:
    pop = PopOptions(transaction_check_ms=1_000, transaction_checks_max=1)
    parts = Parts(tmp_path / "data", store=OPTIONS, pop=pop)
    parts.group()
    route = parts.store.router.route(TOPIC.encode())
    half = encode_properties(Properties(producer="orders"))
    committed, given_up = (parts.store.append_message(route, body, half, 1 | Flag.HALF) for body in (b"0", b"1"))
    free(parts.store, EXHAUSTED)
    with pytest.raises(DiskFull):
        parts.transactions.end(committed, commit=True)
    for _ in range(5):
        parts.advance(1_000)
    assert len(parts.transactions) == 2, "neither asked nor given up"
    free(parts.store, READ_ONLY)
    assert parts.transactions.end(committed, commit=True) is EndOutcome.OK
    for _ in range(5):
        parts.advance(1_000)
    assert parts.transactions.end(given_up, commit=True) is EndOutcome.ALREADY_ROLLED_BACK
    assert bodies(parts.pop()) == [b"0"]
    parts.close()


def test_groups_are_changed_with_room_and_deleted_without(parts: Parts) -> None:
    (dead,) = parts.pop(1)
    parts.core.deliveries.dead_letter(GROUP, [dead.handle])
    free(parts.store, READ_ONLY)
    for change in (lambda: parts.groups.pause(GROUP), lambda: parts.dead_letters.redrive(GROUP)):
        with pytest.raises(DiskFull):
            change()
    parts.groups.reset(GROUP, FILTER, ResetTo(end="latest"))
    assert parts.pop() == []
    free(parts.store, EXHAUSTED)
    parts.groups.delete(GROUP)
    parts.store.commit()
    assert parts.store.queues.find("$retry/1") is None


def test_below_the_floor_delayed_messages_wait_and_come_in_their_order(parts: Parts) -> None:
    due_ms = parts.clock.now_ms() + 1000
    for number in range(3):
        route = parts.store.router.route(TOPIC.encode())
        properties = b'{"deliver_at_ms":%d}' % (due_ms + number)
        position = parts.store.append_message(route, b"late %d" % number, properties, int(Flag.DELAYED))
    parts.settle()
    assert bodies(parts.pop()) == [b"0", b"1"]
    free(parts.store, EXHAUSTED)
    for _ in range(5):
        parts.advance(777)
    with pytest.raises(DiskFull):
        parts.delayed.recall(position, due_ms)
    free(parts.store, TOTAL)
    for _ in range(5):
        parts.advance(777)
    assert bodies(parts.pop()) == [b"late 0", b"late 1", b"late 2"]
    assert parts.delayed.fired == 3
    assert parts.delayed.recall(position, due_ms) is Recalled.ALREADY_FIRED


# --- over gRPC --------------------------------------------------------------------------------------------------------


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "data", store=OPTIONS) as node:
        yield node


async def refused(call: Awaitable[object]) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return caught.value.details() or ""


async def test_every_call_that_can_not_be_stored_hears_resource_exhausted(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        stub = stub_of(channel)
        message = pb.Message(topic=TOPIC, body=b"0")
        later = pb.Message(topic=TOPIC, body=b"1", deliver_at_ms=node.store.now_ms() + 3_600_000)
        half = pb.Message(topic=TOPIC, body=b"2", producer="orders")
        sent = await stub.Send(pb.SendRequest(messages=[message, later, half]))
        pop = pb.PopRequest(group=GROUP, filter=FILTER, messages_max=1, invisible_ms=60_000, wait_ms=60_000)
        (popped,) = (await stub.Pop(pop)).messages
        free(node.store, READ_ONLY)
        assert "store.reserve_bytes" in await refused(stub.Send(pb.SendRequest(messages=[message])))
        assert "store.reserve_bytes" in await refused(stub.Pop(pb.PopRequest(group="auditors", filter=FILTER)))
        free(node.store, EXHAUSTED)
        await refused(stub.Ack(pb.AckRequest(group=GROUP, handles=[popped.handle])))
        await refused(stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER, acks=[popped.handle])))
        change = pb.InvisibleChange(handle=popped.handle, invisible_ms=1)
        await refused(stub.ChangeInvisible(pb.ChangeInvisibleRequest(group=GROUP, changes=[change])))
        await refused(stub.DeadLetter(pb.AckRequest(group=GROUP, handles=[popped.handle])))
        end = pb.TransactionEnd(transaction_handle=sent.results[2].transaction_handle, commit=True)
        await refused(stub.EndTransactions(pb.EndTransactionsRequest(ends=[end])))
        await refused(stub.Recall(pb.RecallRequest(recall_handles=[sent.results[1].recall_handle])))
        free(node.store, READ_ONLY)
        acked = await stub.Ack(pb.AckRequest(group=GROUP, handles=[popped.handle]))
        assert [status.code for status in acked.statuses] == [pb.OK]


async def test_a_pop_that_waits_is_served_when_there_is_room_again(node: Node) -> None:
    async with grpc.aio.insecure_channel(node.target) as channel:
        stub = stub_of(channel)
        await stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER))
        await stub.Send(pb.SendRequest(messages=[pb.Message(topic=TOPIC, body=b"0")]))
        free(node.store, EXHAUSTED)
        call = stub.Pop(pb.PopRequest(group=GROUP, filter=FILTER, wait_ms=60_000))
        waiting = asyncio.ensure_future(call)
        await node.until(lambda: node.core.waiting == 1)
        free(node.store, READ_ONLY)
        assert [message.body for message in (await waiting).messages] == [b"0"]
