"""The client against a real node."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock import Client, Message, OutgoingMessage
from penstock.pop.client.batcher import Batcher
from penstock.pop.client.retrydelays import RETRY_MS_MAX, RETRY_MS_MIN, RetryDelays
from penstock.pop.client.statuses import error_of_status
from penstock.pop.errors import (
    AlreadyAcked,
    AlreadyFired,
    AlreadyRecalled,
    BatchFailed,
    ClientClosed,
    HandleExpired,
    HandleReplaced,
    InvalidDeliveryTime,
    InvalidHandle,
    InvalidInvisibleTime,
    InvalidTopic,
    MessageTooLarge,
    NodeUnavailable,
    Overloaded,
    PopError,
    RequestInvalid,
    StatusError,
)
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.record import Kind
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node

LONG_MS = 50_000


@pytest.fixture
async def client(node: Node) -> AsyncIterator[Client]:
    async with Client(node.target) as made:
        yield made


def in_flight(node: Node) -> int:
    return sum(group.in_flight for group in node.core)


async def first_of(client: Client, count: int, **options: int) -> list[Message]:
    """Return the first messages of a consumer, and leave it."""
    got: list[Message] = []
    async for message in client.consume(FILTER, group=GROUP, **options):
        got.append(message)
        if len(got) == count:
            break
    return got


# --- sending --------------------------------------------------------------------------------------------------------


async def test_what_is_sent_is_consumed_with_all_that_it_carries(client: Client) -> None:
    sent = await client.send(TOPIC, b"21.5", properties={"unit": "°C"}, tag="reading", message_group="plant/1")
    (message,) = await first_of(client, 1)
    assert (message.topic, message.body, message.properties) == (TOPIC, b"21.5", {"unit": "°C"})
    assert (message.tag, message.message_group, message.attempt, message.group) == ("reading", "plant/1", 1, GROUP)
    assert (message.message_id, sent.recall_handle) == (sent.message_id, "")
    assert message.stored_ms <= time.time() * 1000 < message.visible_at_ms
    assert repr(message) == f"<Message {sent.message_id} '{TOPIC}', 4 bytes, attempt 1>"


async def test_what_many_tasks_send_at_once_shares_calls_and_keeps_its_order(node: Node, client: Client) -> None:
    syncs = node.store.syncs
    sent = await asyncio.gather(*(client.send(TOPIC, b"%d" % n) for n in range(3_000)))
    assert node.store.syncs - syncs < 30
    assert [one.message_id for one in sent] == sorted(one.message_id for one in sent)
    got = await first_of(client, 3_000, batch=500, prefetch=1_000)
    assert [message.body for message in got] == [b"%d" % n for n in range(3_000)]


async def test_large_messages_that_are_sent_at_once_do_not_make_one_huge_call(client: Client) -> None:
    body = bytes(3 * 1024 * 1024)
    sent = await asyncio.gather(*(client.send(TOPIC, body) for _ in range(25)))  # 75 MiB; a node takes 64 MiB a call
    assert len({one.message_id for one in sent}) == 25


async def test_a_batch_is_one_call_with_a_result_each(client: Client) -> None:
    sent = await client.send_batch(OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(100))
    assert [one.message_id for one in sent] == sorted(one.message_id for one in sent)
    assert [message.body for message in await first_of(client, 100)] == [b"%d" % n for n in range(100)]
    assert await client.send_batch([]) == []


async def test_a_batch_of_which_some_are_refused_names_them_and_stores_the_others(client: Client) -> None:
    messages = [OutgoingMessage(topic=topic) for topic in (TOPIC, "a/+", TOPIC, "$SYS/x")]
    with pytest.raises(BatchFailed, match=r"2 of 4 failed; number 1: .*wildcard") as raised:
        await client.send_batch(messages)
    assert {place: type(error) for place, error in raised.value.errors.items()} == {1: InvalidTopic, 3: InvalidTopic}
    stored = [message.message_id for message in await first_of(client, 2)]
    assert [result and result.message_id for result in raised.value.results] == [stored[0], None, stored[1], None]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"topic": "a/#"}, InvalidTopic),
        ({"topic": TOPIC, "body": bytes(5 * 1024 * 1024)}, MessageTooLarge),
        ({"topic": TOPIC, "deliver_at_ms": 2**62}, InvalidDeliveryTime),
        ({"topic": TOPIC, "deliver_at_ms": 1, "delay_ms": 1}, ValueError),
    ],
)
async def test_a_message_that_is_refused_raises_and_the_client_goes_on(
    client: Client, message: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        await client.send(**message)  # type: ignore[arg-type]
    await client.send(TOPIC, b"good")
    assert [one.body for one in await first_of(client, 1)] == [b"good"]


async def test_one_refused_message_does_not_fail_those_that_share_its_call(client: Client) -> None:
    answers = await asyncio.gather(client.send(TOPIC), client.send("a/+"), client.send(TOPIC), return_exceptions=True)
    assert [isinstance(answer, InvalidTopic) for answer in answers] == [False, True, False]


@pytest.mark.parametrize("how", ["delay_ms", "deliver_at_ms"])
async def test_a_delayed_message_comes_when_it_is_due_and_can_be_recalled_before(client: Client, how: str) -> None:
    now_ms = time.time_ns() // 1_000_000
    when = {"delay_ms": 150} if how == "delay_ms" else {"deliver_at_ms": now_ms + 150}
    late, never = [await client.send(TOPIC, body, **when) for body in (b"late", b"never")]  # type: ignore[arg-type]
    await client.recall(never.recall_handle)
    with pytest.raises(AlreadyRecalled):
        await client.recall(never.recall_handle)
    (message,) = await first_of(client, 1)
    assert message.body == b"late"
    assert time.time_ns() // 1_000_000 >= now_ms + 150
    with pytest.raises(AlreadyFired):
        await client.recall(late.recall_handle)
    with pytest.raises(InvalidHandle):
        await client.recall("00")


# --- settling -------------------------------------------------------------------------------------------------------


async def test_acks_of_one_turn_go_out_in_one_call(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 500)
    messages = await client.pop(FILTER, group=GROUP, messages_max=500)
    position = node.store.log.end
    await asyncio.gather(*(message.ack() for message in messages))
    record = node.store.log.record(position)
    assert len(record.body) == 500 * 12  # one record of 500 references
    assert node.store.log.end == position + record.size


async def test_an_ack_that_nobody_awaits_is_sent_before_the_client_closes(node: Node) -> None:
    async with Client(node.target) as client:
        await client.send(TOPIC)
        async for message in client.consume(FILTER, group=GROUP):
            message.ack()
            break
    assert in_flight(node) == 0
    assert node.core.counters.acked == 1


async def test_each_ack_tells_its_own_outcome(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 3)
    a, b, c = await client.pop(FILTER, group=GROUP)
    await c.extend(1)
    await node.until(lambda: node.core.counters.revived == 1)
    outcomes = await asyncio.gather(a.ack(), a.ack(), b.ack(), c.ack(), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), AlreadyAcked, type(None), HandleExpired]
    with pytest.raises(AlreadyAcked, match="before"):
        await a.ack()


async def test_many_handles_are_acknowledged_at_once(client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 10)
    handles = [message.handle for message in await client.pop(FILTER, group=GROUP)]
    await client.ack(handles[:5], group=GROUP)
    with pytest.raises(BatchFailed) as raised:
        await client.ack(handles, group=GROUP)
    assert {type(error) for error in raised.value.errors.values()} == {AlreadyAcked}
    assert list(raised.value.errors) == [0, 1, 2, 3, 4]
    await client.ack([], group=GROUP)


async def test_a_pop_acknowledges_the_batch_before_and_names_what_was_refused(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(4)])
    first = await client.pop(FILTER, group=GROUP, messages_max=2)
    handles = [message.handle for message in first]
    second = await client.pop(FILTER, group=GROUP, messages_max=1, acks=handles)
    assert ([message.body for message in second], second.refused) == ([b"2"], {})
    third = await client.pop(FILTER, group=GROUP, acks=[second[0].handle, "x", handles[0]])
    assert [message.body for message in third] == [b"3"]
    assert {handle: type(error) for handle, error in third.refused.items()} == {"x": InvalidHandle, handles[0]: AlreadyAcked}
    assert in_flight(node) == 1


async def test_a_pop_with_acks_waits_for_messages_when_these_are_durable(node: Node, client: Client) -> None:
    await client.send(TOPIC, b"a")
    (message,) = await client.pop(FILTER, group=GROUP)
    waiting = asyncio.create_task(client.pop(FILTER, group=GROUP, wait_ms=LONG_MS, acks=[message.handle, "x"]))
    await node.until(lambda: node.core.waiting == 1)
    assert in_flight(node) == 0
    await client.send(TOPIC, b"b")
    popped = await waiting
    assert ([message.body for message in popped], list(popped.refused)) == ([b"b"], ["x"])


async def test_a_consumer_acknowledges_with_the_pop_of_its_next_batch(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(100)])
    left = 100
    async for message in client.consume(FILTER, group=GROUP, batch=10, prefetch=10):
        acked = message.ack()
        left -= 1
        if not left:
            break
    await acked
    settled = [record for record in node.store.log.scan(0) if record.kind in (Kind.POP_CHECKPOINT, Kind.POP_ACK)]
    assert [record.kind for record in settled] == [Kind.POP_CHECKPOINT, Kind.POP_ACK] * 10
    # All but the last are in front of the next checkpoint, within one turn of the node's loop: nothing is between them.
    pairs = zip(settled[1:-1:2], settled[2::2], strict=True)
    assert all(ack.position + ack.size == checkpoint.position for ack, checkpoint in pairs)
    assert in_flight(node) == 0


async def test_an_ack_in_a_pop_without_an_answer_is_told_again_and_may_have_been_done(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(3)])
    done, undone, wrong = await client.pop(FILTER, group=GROUP)
    acks = [done.ack(), undone.ack(), wrong.ack()]
    settlements = done._settlements
    taken = settlements.acks.take()
    assert [handle for handle, _ in taken] == [done.handle, undone.handle, wrong.handle]
    await wrong.nack()
    await client._stub.Ack(pb.AckRequest(group=GROUP, handles=[done.handle]))  # as by the pop whose answer is lost
    settlements.put_back(taken)
    outcomes = await asyncio.gather(*acks, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(None), type(None), HandleReplaced]
    with pytest.raises(BatchFailed):
        await client.ack([done.handle], group=GROUP)  # nothing was lost of this one


async def test_a_nack_returns_the_message_as_a_failed_attempt(client: Client) -> None:
    await client.send(TOPIC, b"a")
    attempts = []
    async for message in client.consume(FILTER, group=GROUP):
        attempts.append(message.attempt)
        if message.attempt == 3:
            await message.ack()
            break
        await message.nack(delay_ms=10 if message.attempt == 2 else 0)
        with pytest.raises(HandleReplaced):
            await message.ack()
    assert attempts == [1, 2, 3]


async def test_a_suspended_message_comes_back_uncounted(client: Client) -> None:
    await client.send(TOPIC, b"a")
    seen = 0
    async for message in client.consume(FILTER, group=GROUP):
        assert message.attempt == 1
        seen += 1
        if seen == 4:
            break
        await message.suspend(seen)
    assert seen == 4


async def test_an_extended_message_is_acknowledged_after_its_first_deadline(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=body) for body in (b"kept", b"let go")])
    kept, let_go = await client.pop(FILTER, group=GROUP, invisible_ms=100)
    old = kept.handle
    await kept.extend(60_000)
    assert kept.handle != old
    (again,) = await client.pop(FILTER, group=GROUP, wait_ms=LONG_MS)
    assert again.body == b"let go"
    await kept.ack()
    with pytest.raises(HandleExpired):
        await let_go.ack()
    with pytest.raises(InvalidInvisibleTime):
        await again.extend(-1)
    await again.ack()
    assert in_flight(node) == 0


# --- consuming ------------------------------------------------------------------------------------------------------


async def test_messages_that_come_later_wake_the_loop(node: Node, client: Client) -> None:
    task = asyncio.create_task(first_of(client, 2))
    await node.until(lambda: node.core.waiting == 1)
    await client.send(TOPIC, b"a")
    await node.until(lambda: node.core.counters.handed_out == 1 and node.core.waiting == 1)
    await client.send(TOPIC, b"b")
    assert [message.body for message in await task] == [b"a", b"b"]


async def test_no_more_is_popped_than_may_wait(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(100)])
    got = []
    async with client.consume(FILTER, group=GROUP, batch=4, prefetch=8) as consumer:
        async for message in consumer:
            got.append(message.body)
            assert node.core.counters.handed_out <= len(got) + 8
            await message.ack()
            if len(got) == 100:
                break
    assert got == [b"%d" % n for n in range(100)]
    assert in_flight(node) == 0


async def test_a_loop_that_does_not_go_on_pops_nothing_more(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC)] * 50)
    async for _ in client.consume(FILTER, group=GROUP, batch=5, prefetch=10):
        # 1 is in the loop's hands, 9 wait: one more batch would be 14.
        await node.until(lambda: node.core.counters.handed_out == 10)
        await client.send(TOPIC)
        assert node.core.counters.handed_out == 10
        assert node.core.waiting == 0
        break


@pytest.mark.parametrize("way", ["break", "exception", "aclose", "client"])
async def test_leaving_returns_what_nobody_looked_at_at_once_and_uncounted(node: Node, way: str) -> None:
    client = Client(node.target)
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(30)])
    consumer = client.consume(FILTER, group=GROUP, batch=10, prefetch=20)
    seen = []
    try:
        async for message in consumer:
            seen.append(message.body)
            message.ack()
            if len(seen) < 3:
                continue
            await node.until(lambda: node.core.counters.handed_out >= 20)
            if way == "break":
                break
            if way == "exception":
                raise LookupError
            await (consumer.aclose() if way == "aclose" else client.aclose())
    except LookupError:
        assert way == "exception"
    del consumer
    await node.until(lambda: in_flight(node) == 0 and node.core.waiting == 0)
    await client.aclose()
    assert seen == [b"0", b"1", b"2"]
    assert node.core.counters.acked == 3
    async with Client(node.target) as other:
        rest = await first_of(other, 27)
        assert sorted(int(message.body) for message in rest) == list(range(3, 30))
        assert {message.attempt for message in rest} == {1}


async def test_leaving_ends_the_poll_that_waits(node: Node, client: Client) -> None:
    async with client.consume(FILTER, group=GROUP):
        await node.until(lambda: node.core.waiting == 1)
    await node.until(lambda: node.core.waiting == 0)
    await client.send(TOPIC, b"a")
    assert [message.attempt for message in await client.pop(FILTER, group=GROUP)] == [1]


async def test_a_cancelled_task_leaves_as_any_other_way_does(node: Node, client: Client) -> None:
    task = asyncio.create_task(first_of(client, 1))
    await node.until(lambda: node.core.waiting == 1)
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
    await node.until(lambda: node.core.waiting == 0)


async def test_several_tasks_share_one_consumer(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(200)])
    got: list[bytes] = []

    async with client.consume(FILTER, group=GROUP, batch=10, prefetch=20) as consumer:

        async def work() -> None:
            async for message in consumer:
                got.append(message.body)
                await message.ack()

        workers = [asyncio.create_task(work()) for _ in range(5)]
        await node.until(lambda: node.core.counters.acked == 200)
        await consumer.aclose()
        await asyncio.gather(*workers)
    assert sorted(got) == sorted(b"%d" % n for n in range(200))


async def test_a_message_that_expired_while_it_waited_is_not_handed_to_the_loop(node: Node, client: Client) -> None:
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(3)])
    seen = []
    async for message in client.consume(FILTER, group=GROUP, batch=3, prefetch=3, invisible_ms=1000):
        seen.append((message.body, message.attempt))
        if len(seen) == 1:
            await node.until(lambda: node.core.counters.revived == 3)
            continue
        await message.ack()
        if len(seen) == 4:
            break
    assert seen == [(b"0", 1), (b"0", 2), (b"1", 2), (b"2", 2)]


async def test_what_a_consumer_asks_for_wrongly_is_raised_in_its_loop(client: Client) -> None:
    for group, topic_filter in (("", FILTER), (GROUP, "a/#/b"), (GROUP, f"$dlq/{GROUP}")):
        consumer = client.consume(topic_filter, group=group)
        with pytest.raises(RequestInvalid):
            await anext(aiter(consumer))
    with pytest.raises(RequestInvalid):
        await client.pop(FILTER, group="a/b")


@pytest.mark.parametrize("options", [{"batch": 0}, {"batch": 9, "prefetch": 8}, {"invisible_ms": 0}, {"wait_ms": -1}])
async def test_numbers_out_of_bounds_are_refused_before_any_call(client: Client, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least"):
        client.consume(FILTER, group=GROUP, **options)


async def test_dead_letters_can_be_consumed_by_another_group(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(attempts_max=1))
    await node.start()
    async with Client(node.target) as client:
        await client.send(TOPIC, b"poison")
        (message,) = await client.pop(FILTER, group=GROUP)
        await message.nack()
        async for dead in client.consume(f"$dlq/{GROUP}", group="operators"):
            assert dead.body == b"poison"
            await dead.ack()
            break
    await node.stop()


# --- a node that goes away ------------------------------------------------------------------------------------------


async def test_messages_continue_when_the_node_is_back(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    got = []
    async with Client(node.target) as client:
        await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % n) for n in range(10)])
        async for message in client.consume(FILTER, group=GROUP, batch=2, prefetch=4):
            got.append(message.body)
            if len(got) == 3:
                port = node.port
                await node.stop()
                node = Node(tmp_path / "data")
                ack = message.ack()  # on its way while nobody listens
                await node.start(port)
                await ack
            else:
                await message.ack()
            if len(got) == 10:
                await client.send(TOPIC, b"after")
            if len(got) == 11:
                break
    assert sorted(got) == sorted([*(b"%d" % n for n in range(10)), b"after"])
    assert in_flight(node) == 0
    await node.stop()


async def test_a_client_waits_for_a_node_that_is_not_there_yet(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    await node.stop()
    async with Client(f"127.0.0.1:{port}") as client:
        sending = asyncio.create_task(client.send(TOPIC, b"early"))
        consuming = asyncio.create_task(first_of(client, 1))
        node = Node(tmp_path / "data")
        await node.start(port)
        assert (await sending).message_id
        assert [message.body for message in await consuming] == [b"early"]
    await node.stop()


async def test_without_a_node_calls_fail_in_time_and_closing_does_not_hang() -> None:
    began_s = time.monotonic()
    async with Client("127.0.0.1:1", timeout_ms=100, close_ms=100) as client:
        for call in (
            client.send(TOPIC),
            client.recall("00"),
            client.pop(FILTER, group=GROUP),
            client.send_batch([OutgoingMessage(topic=TOPIC)]),
        ):
            with pytest.raises(NodeUnavailable):
                await call
        with pytest.raises(BatchFailed, match="did not answer"):
            await client.ack(["00"], group=GROUP)
        consumer = client.consume(FILTER, group=GROUP)
        async with consumer:
            pass
    assert time.monotonic() - began_s < 5


async def test_a_closed_client_says_so(node: Node) -> None:
    async with Client(node.target) as client:
        await client.send(TOPIC)
        (message,) = await client.pop(FILTER, group=GROUP)
        consumer = client.consume(FILTER, group=GROUP)
    await client.aclose()
    for call in (client.send(TOPIC), client.pop(FILTER, group=GROUP), client.recall(""), client.ack([], group=GROUP)):
        with pytest.raises(ClientClosed):
            await call
    with pytest.raises(ClientClosed):
        await message.ack()
    with pytest.raises(ClientClosed):
        await message.extend(1)
    with pytest.raises(ClientClosed):
        client.consume(FILTER, group=GROUP)
    with pytest.raises(ClientClosed):
        await anext(aiter(consumer))


def test_a_client_is_made_on_a_loop() -> None:
    with pytest.raises(RuntimeError, match="loop"):
        Client("127.0.0.1:1")


# --- its parts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [code for code in pb.Code.values() if code != pb.OK])
def test_each_code_of_the_api_has_an_error_of_its_own(code: pb.Code.ValueType) -> None:
    error = error_of_status(pb.Status(code=code, detail="why"))
    assert error is not None
    assert (type(error) is not StatusError, error.code, str(error)) == (True, pb.Code.Name(code), "why")


def test_a_code_of_a_newer_node_is_an_error_too() -> None:
    error = error_of_status(pb.Status(code=99, detail="why"))  # type: ignore[arg-type]
    assert type(error) is StatusError
    assert "99" in str(error)
    assert error_of_status(pb.Status()) is None


def test_back_off_doubles_up_to_its_bound_and_differs_from_client_to_client() -> None:
    first, second = RetryDelays(), RetryDelays()
    waits = [first.next_s() * 1000 for _ in range(12)]
    bounds = [min(RETRY_MS_MIN * 2**n, RETRY_MS_MAX) for n in range(12)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert waits != [second.next_s() * 1000 for _ in range(12)]
    first.reset()
    assert first.next_s() * 1000 <= RETRY_MS_MIN


async def test_wishes_that_come_during_a_call_share_the_next_within_its_bounds() -> None:
    calls: list[list[int]] = []
    gate, started = asyncio.Event(), asyncio.Event()

    async def send(wishes: list[int]) -> list[int | PopError]:
        calls.append(wishes)
        started.set()
        await gate.wait()
        return [Overloaded("odd") if wish % 2 else wish * 10 for wish in wishes]

    batched: Batcher[int, int] = Batcher(send, count_max=3, bytes_max=100, size_of=lambda wish: wish)
    first = batched.submit(2)
    await started.wait()
    rest = asyncio.create_task(batched.submit_all([4, 5, 6, 8, 60, 60, 200, 1]))
    await asyncio.sleep(0)
    gate.set()
    assert await first == 20
    answers = await rest
    assert calls == [[2], [4, 5, 6], [8, 60], [60], [200], [1]]
    assert [str(answer) if isinstance(answer, PopError) else answer for answer in answers] == [
        40, "odd", 60, 80, 600, 600, 2000, "odd",
    ]  # fmt: skip


async def test_wishes_that_were_taken_along_are_answered_or_go_out_first_of_all() -> None:
    calls: list[list[int]] = []

    async def send(wishes: list[int]) -> list[int | PopError]:
        calls.append(wishes)
        return [wish * 10 for wish in wishes]

    batched: Batcher[int, int] = Batcher(send, count_max=3)
    futures = [batched.submit(wish) for wish in range(4)]
    taken = batched.take()
    assert [wish for wish, _ in taken] == [0, 1, 2]
    batched.answer(taken[:1], [7])
    error = Overloaded("full")
    batched.answer(taken[1:2], [error])
    batched.put_back(taken[2:])
    assert await asyncio.gather(*futures, return_exceptions=True) == [7, error, 20, 30]
    assert calls == [[2, 3]]
    assert batched.take() == []
    late = batched.submit(5)
    taken = batched.take()
    await batched.close(1)
    batched.put_back(taken)
    with pytest.raises(NodeUnavailable, match="closed"):
        await late


async def test_closing_fails_what_got_no_answer_in_time_and_takes_nothing_more() -> None:
    async def never(wishes: list[int]) -> list[int | PopError]:
        await asyncio.Event().wait()
        return []

    batched: Batcher[int, int] = Batcher(never, count_max=1)
    futures = [batched.submit(1), batched.submit(2)]
    await batched.close(0.01)
    for future in futures:
        with pytest.raises(NodeUnavailable):
            await future
    with pytest.raises(ClientClosed):
        batched.submit(3)
