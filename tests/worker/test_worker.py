"""The worker: handlers on messages of a real node."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from penstock import (
    Client,
    Message,
    NodeUnavailable,
    OutgoingMessage,
    Reject,
    RetryLater,
    Security,
    Worker,
    WorkerError,
    group_settings,
)
from penstock.pop.options import PopOptions
from penstock.worker import runningconsumer
from penstock.worker.runningconsumer import YIELD_AFTER, RunningConsumer
from tests.pop.looptime import LoopTime
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX, until
from tests.worker.accessfile import access_file
from tests.worker.running import counts, running, send


async def test_a_handler_gets_each_message_and_returning_acknowledges_it(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    seen: list[bytes] = []

    @worker.consumer(FILTER, group=GROUP, concurrency=4)
    async def handle(body: bytes) -> None:
        seen.append(body)

    await send(client, (b"%d" % number for number in range(300)))
    async with running(worker):
        await until(lambda: counts(worker).handled == 300)
    assert sorted(seen) == sorted(b"%d" % number for number in range(300))
    assert (node.group().in_flight, node.core.counters.acked) == (0, 300)


async def test_no_more_calls_run_at_a_time_than_the_concurrency(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    running_now = most = 0

    @worker.consumer(FILTER, group=GROUP, concurrency=3)
    async def handle(body: bytes) -> None:
        nonlocal running_now, most
        running_now += 1
        most = max(most, running_now)
        await asyncio.sleep(0.001)
        running_now -= 1

    await send(client, [b"x"] * 50)
    async with running(worker):
        await until(lambda: counts(worker).handled == 50)
    assert most == 3


async def test_a_plain_function_runs_in_as_many_threads_as_the_concurrency(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    together = threading.Barrier(4, timeout=WAIT_S_MAX)

    @worker.consumer(FILTER, group=GROUP, concurrency=4)
    def handle(body: bytes, message: Message) -> None:
        assert threading.current_thread() is not threading.main_thread()
        assert message.body == body
        together.wait()

    await send(client, [b"x"] * 8)
    async with running(worker):
        await until(lambda: counts(worker).handled == 8)


async def test_a_batch_handler_gets_lists(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    sizes: list[int] = []

    @worker.consumer(FILTER, group=GROUP, concurrency=2, batch=10)
    async def handle(messages: list[Message], bodies: list[int]) -> None:
        assert [int(message.body) for message in messages] == bodies
        sizes.append(len(bodies))

    await send(client, (b"%d" % number for number in range(95)))
    async with running(worker):
        await until(lambda: counts(worker).handled == 95)
    assert sum(sizes) == 95
    assert max(sizes) == 10


async def test_the_event_loop_has_its_turns_though_no_handler_awaits_anything(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    handled_at_turn: list[int] = []
    turns = 0

    @worker.consumer(FILTER, group=GROUP, concurrency=1)
    async def handle(body: bytes) -> None:
        handled_at_turn.append(turns)

    await send(client, [b"x"] * 400)
    async with running(worker):
        while len(handled_at_turn) < 400:
            turns += 1
            await asyncio.sleep(0)
        await until(lambda: node.group().in_flight == 0)
    assert max(handled_at_turn.count(turn) for turn in set(handled_at_turn)) <= YIELD_AFTER
    assert counts(worker).handled == 400


async def test_several_consumers_run_in_one_worker(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    seen: list[str] = []

    @worker.consumer(FILTER, group="one")
    @worker.consumer(FILTER, group="two")
    async def handle(message: Message) -> None:
        seen.append(message.group)

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: len(seen) == 2)
    assert sorted(seen) == ["one", "two"]


async def test_hooks_run_before_the_first_message_and_after_the_last(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    seen: list[str] = []

    @worker.on_start
    async def connect() -> None:
        seen.append("start")
        await worker.client.send(TOPIC, b"x")

    @worker.on_stop
    def disconnect() -> None:
        seen.append("stop")

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        seen.append("message")

    async with running(worker):
        await until(lambda: len(seen) == 2)
    assert seen == ["start", "message", "stop"]


async def test_a_worker_without_a_consumer_does_not_start() -> None:
    with pytest.raises(WorkerError, match="no consumer"):
        await Worker("127.0.0.1:1").run()


# --- handlers that raise ---------------------------------------------------------------------------------------------


async def test_a_handler_that_raises_returns_its_message_as_a_failed_attempt(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    attempts: list[int] = []

    @worker.consumer(FILTER, group=GROUP, settings=group_settings(backoff=(0.005,)))
    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        if message.attempt < 3:
            raise LookupError("no such customer")

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 1)
    assert attempts == [1, 2, 3]
    assert counts(worker).failed == 2


async def test_retry_later_adds_a_delay(node: Node, client: Client) -> None:
    worker = Worker(node.target)

    @worker.consumer(FILTER, group=GROUP)
    async def handle(message: Message) -> None:
        raise RetryLater(3_600, "the tariff is not known yet")

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: node.group().delayed == 1)
    assert counts(worker).failed == 1


async def test_a_rejected_message_is_a_dead_letter_with_the_reason(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    told: list[tuple[bytes, str]] = []

    @worker.consumer(FILTER, group=GROUP)
    async def handle(message: Message) -> None:
        raise Reject("the customer is gone")

    @worker.on_dead_letter
    async def tell(message: Message, reason: str) -> None:
        told.append((message.body, reason))

    @worker.on_dead_letter
    def fail_once(message: Message, reason: str) -> None:
        if len(told) == 1:
            raise LookupError("a hook that fails is called again")

    async with running(worker):
        await until(lambda: node.group(f"{GROUP}.on-dead-letter", f"$dlq/{GROUP}", "latest").polls)
        await send(client, [b"x"])
        await until(lambda: len(told) == 2)
    assert told.pop() == told[0]
    (letter,) = await client.dead_letters.of_group(GROUP)
    assert (letter.detail, told) == ("the customer is gone", [(b"x", "the customer is gone")])
    assert counts(worker).dead_lettered == 1


async def test_the_hooks_hear_of_messages_whose_attempts_are_used_up_and_why(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    told: dict[str, bytes] = {}

    @worker.consumer(FILTER, group=GROUP, timeout=0.05, settings=group_settings(attempts_max=2, backoff=()))
    async def handle(body: bytes) -> None:
        if body == b"slow":
            await asyncio.sleep(WAIT_S_MAX)
        raise LookupError(f"no tariff for {body.decode()}")

    @worker.on_dead_letter
    def tell(message: Message, reason: str) -> None:
        told[reason] = message.body
        assert message.origin is not None
        assert (message.origin.group, message.origin.attempts) == (GROUP, 2)

    async with running(worker):
        await until(lambda: node.group(f"{GROUP}.on-dead-letter", f"$dlq/{GROUP}", "latest").polls)
        await send(client, [b"x", b"slow"])
        await until(lambda: len(told) == 2)
    late = "the handler did not end within its timeout of 0.05 s"
    assert told == {"LookupError: no tariff for x": b"x", late: b"slow"}
    letters = await client.dead_letters.of_group(GROUP)
    assert sorted(letter.detail for letter in letters) == sorted(told)


async def test_a_group_whose_name_leaves_no_room_for_that_of_the_hooks_is_refused(node: Node) -> None:
    worker = Worker(node.target)

    @worker.consumer(FILTER, group="g" * 241)
    async def handle(body: bytes) -> None:
        raise AssertionError(body)

    worker.on_dead_letter(lambda message, reason: None)
    with pytest.raises(WorkerError, match="of up to 240 bytes"):
        await worker.run(handle_signals=False)


async def test_hooks_that_may_not_consume_the_dead_letters_keep_no_message_from_its_handler(tmp_path: Path) -> None:
    rules, security = access_file(tmp_path / "access.toml", "s3cret", consume=GROUP), Security(token="s3cret")
    async with Node(tmp_path / "data", access=rules) as node, Client(node.target, security=security) as client:
        worker = Worker(node.target, security=security)
        seen: list[bytes] = []

        @worker.consumer(FILTER, group=GROUP)
        async def handle(body: bytes) -> None:
            seen.append(body)

        @worker.on_dead_letter
        def tell(message: Message, reason: str) -> None:
            raise AssertionError(reason)

        async with running(worker):
            await send(client, [b"x"])
            await until(lambda: seen == [b"x"] and bool(worker.problems))
            assert [*worker.problems] == [f"{GROUP}.on-dead-letter on $dlq/{GROUP}"]


async def test_a_body_that_can_t_be_decoded_is_a_dead_letter_with_the_reason(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    seen: list[Any] = []

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: dict[str, Any]) -> None:
        seen.append(body)

    await send(client, [b"{", b'{"a": 1}', b"[1]"])
    async with running(worker):
        await until(lambda: node.group().dead_letter_count == 2 and seen)
    assert seen == [{"a": 1}]
    details = sorted(letter.detail for letter in await client.dead_letters.of_group(GROUP))
    assert all("is not valid" in detail for detail in details)
    assert counts(worker).undecodable == 2


@pytest.mark.parametrize("batch", [0, 10])
async def test_a_codec_that_fails_costs_an_attempt_and_the_worker_goes_on(node: Node, client: Client, batch: int) -> None:
    worker = Worker(node.target)
    seen: list[bytes] = []
    is_away = True

    def looked_up(body: bytes) -> bytes:
        if body == b"a" and is_away:
            raise LookupError("the schema registry is away")
        return body

    async def one(body: bytes) -> None:
        seen.append(body)

    async def many(bodies: list[bytes]) -> None:
        seen.extend(bodies)

    worker.consumer(FILTER, group=GROUP, batch=batch, concurrency=1, codec=looked_up)(many if batch else one)
    await send(client, [b"a", b"b"])
    async with running(worker):
        await until(lambda: counts(worker).failed)
        is_away = False
        await until(lambda: len(seen) == 2)
    assert (sorted(seen), node.group().dead_letter_count) == ([b"a", b"b"], 0)


async def test_a_defect_of_the_worker_ends_it_with_the_error(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(node.target)

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        pass

    async def broken(*_: object) -> None:
        raise AssertionError("a defect")

    monkeypatch.setattr(RunningConsumer, "_watch", broken)
    with pytest.raises(AssertionError, match="a defect"):
        await asyncio.wait_for(worker.run(handle_signals=False), WAIT_S_MAX)


async def test_a_batch_leaves_out_what_can_t_be_decoded(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    seen: list[int] = []

    @worker.consumer(FILTER, group=GROUP, batch=10, concurrency=1)
    async def handle(bodies: list[int]) -> None:
        seen.extend(bodies)

    await send(client, [b"1", b"x", b"3"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 2)
    assert sorted(seen) == [1, 3]
    assert node.group().dead_letter_count == 1


async def test_a_handler_may_settle_its_message_itself_and_twice(node: Node, client: Client) -> None:
    worker = Worker(node.target)

    @worker.consumer(FILTER, group=GROUP)
    async def handle(message: Message) -> None:
        if message.body == b"acked":
            await message.ack()
        elif message.body == b"dead":
            await message.dead_letter(reason="seen enough")
        else:
            await message.nack(delay=3_600.0)

    await send(client, [b"acked", b"dead", b"later"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 3)
        await until(lambda: node.group().in_flight == node.group().delayed == 1)
    assert node.group().dead_letter_count == 1
    assert counts(worker).late == 0


async def test_a_result_that_nobody_asked_for_is_dropped_with_one_warning(
    node: Node, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(node.target)

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> int:
        return 1

    await send(client, [b"x"] * 3)
    async with running(worker):
        await until(lambda: counts(worker).handled == 3)
    assert caplog.text.count("nobody asked for a reply") == 1


async def test_what_a_handler_returns_is_the_reply_to_a_request(node: Node, client: Client) -> None:
    worker = Worker(node.target)

    @worker.consumer("questions/+", group=GROUP)
    async def answer(body: int) -> dict[str, int]:
        return {"twice": 2 * body}

    await client.send("questions/1", b"21", properties={"reply_to": "answers/7", "correlation_id": "x"})
    async with running(worker):
        (reply,) = await client.pop("answers/+", group="asking", wait=60.0)
    assert (reply.topic, reply.body, reply.properties) == ("answers/7", b'{"twice":42}', {"correlation_id": "x"})


async def test_a_result_that_can_t_be_written_fails_the_attempt(node: Node, client: Client) -> None:
    worker = Worker(node.target)

    @worker.consumer("questions/+", group=GROUP, settings=group_settings(attempts_max=1))
    async def answer(body: int) -> object:
        return object()

    await client.send("questions/1", b"21", properties={"reply_to": "answers/7"})
    async with running(worker):
        await until(lambda: counts(worker).failed == 1)


@pytest.mark.parametrize("reply_to", ["$delayed/1/x", "$SYS/x", "answers/#", "a/" * 200 + "a"])
async def test_a_reply_that_the_node_refuses_does_not_fail_its_handler(node: Node, client: Client, reply_to: str) -> None:
    worker = Worker(node.target)

    @worker.consumer("questions/+", group=GROUP)
    async def answer(body: int) -> int:
        return body

    await client.send("questions/1", b"21", properties={"reply_to": reply_to})
    async with running(worker):
        await until(lambda: counts(worker).handled + counts(worker).failed == 1)
    assert (counts(worker).handled, counts(worker).replies_refused) == (1, 1)
    assert (node.core.counters.acked, node.group().in_flight) == (1, 0)


async def test_a_reply_that_is_too_large_does_not_fail_its_handler(
    node: Node, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(node.target)

    @worker.consumer("questions/+", group=GROUP)
    async def answer(body: int) -> bytes:
        return bytes(PopOptions().message_bytes_max + 1)

    await client.send("questions/1", b"21", response_topic="answers/1")
    async with running(worker):
        await until(lambda: counts(worker).handled + counts(worker).failed == 1)
    assert (counts(worker).handled, counts(worker).replies_refused) == (1, 1)
    assert "the reply to a message from 'questions/1' was refused, and is dropped: 'answers/1': the body has" in caplog.text


async def test_a_reply_that_nobody_has_answered_fails_the_attempt(
    node: Node, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker(node.target)
    attempts: list[int] = []

    @worker.consumer("questions/+", group=GROUP, settings=group_settings(backoff=()))
    async def answer(message: Message) -> int:
        attempts.append(message.attempt)
        return 42

    sends = Client.send

    async def send_later(self: Client, topic: str, body: bytes = b"", **more: Any) -> Any:
        if len(attempts) == 1:
            raise NodeUnavailable("the node did not answer in time")
        return await sends(self, topic, body, **more)

    await client.send("questions/1", response_topic="answers/1")
    monkeypatch.setattr(Client, "send", send_later)
    async with running(worker):
        (reply,) = await client.pop("answers/+", group="asking", wait=60.0)
        await until(lambda: counts(worker).handled == 1)
    assert (reply.body, attempts) == (b"42", [1, 2])
    assert (counts(worker).failed, counts(worker).replies_refused) == (1, 0)


async def test_a_reply_that_the_worker_may_not_send_does_not_hold_up_those_that_it_may(tmp_path: Path) -> None:
    access, security = access_file(tmp_path / "access.toml", "s3cret", write="+/public"), Security(token="s3cret")
    async with Node(tmp_path / "data", access=access) as node, Client(node.target, security=security) as client:
        worker = Worker(node.target, security=security)
        together = asyncio.Barrier(3)

        @worker.consumer("questions/public", group=GROUP)
        async def answer(body: bytes) -> bytes:
            await together.wait()
            return body

        for reply_to in ("1/public", "2/secret", "3/public"):
            await client.send("questions/public", reply_to.encode(), response_topic=reply_to)
        async with running(worker):
            await until(lambda: counts(worker).handled + counts(worker).failed == 3)
        assert (counts(worker).handled, counts(worker).replies_refused) == (3, 1)
        replies = [*await client.pop("1/#", group="one", wait=9.0), *await client.pop("3/#", group="three", wait=9.0)]
        assert [reply.body for reply in replies] == [b"1/public", b"3/public"]


# --- time ------------------------------------------------------------------------------------------------------------


@pytest.fixture
async def loop_time(monkeypatch: pytest.MonkeyPatch) -> LoopTime:
    """The worker's time. The worker looks at its slots every 10 ms."""
    monkeypatch.setattr(runningconsumer, "CHECK_S_MAX", 0.01)
    return LoopTime()


async def test_a_message_is_extended_while_its_handler_runs(node: Node, client: Client, loop_time: LoopTime) -> None:
    worker = Worker(node.target)
    attempts: list[int] = []

    @worker.consumer(FILTER, group=GROUP, invisible=600, timeout=3_600)
    async def handle(message: Message) -> None:
        attempts.append(message.attempt)
        for number in (1, 2):
            loop_time.advance(301)
            await until(lambda: counts(worker).extended == number)  # noqa: B023 - awaited at once

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 1)
        await until(lambda: node.group().in_flight == 0)
    assert attempts == [1]
    assert counts(worker).late == 0


async def test_a_message_whose_deadline_has_passed_is_extended_once_in_vain(
    node: Node, client: Client, loop_time: LoopTime, caplog: pytest.LogCaptureFixture
) -> None:
    worker = Worker(node.target)
    release = asyncio.Event()

    @worker.consumer(FILTER, group=GROUP, invisible=600, timeout=3_600, settings=group_settings(backoff=()))
    async def handle(message: Message) -> None:
        if message.attempt == 1:
            node.advance(601_000)
            loop_time.advance(301)
            await release.wait()

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: "comes back at its deadline" in caplog.text)
        await until(lambda: counts(worker).handled == 1)
        await asyncio.sleep(0.05)  # A few more looks at the slots.
        release.set()
        await until(lambda: counts(worker).late == 1)
    assert caplog.text.count("comes back at its deadline") == 1


async def test_a_handler_that_hangs_is_cancelled_and_its_message_fails(node: Node, client: Client, loop_time: LoopTime) -> None:
    worker = Worker(node.target)
    cancelled: list[int] = []

    @worker.consumer(FILTER, group=GROUP, concurrency=1, timeout=600, settings=group_settings(backoff=()))
    async def handle(message: Message) -> None:
        if message.attempt == 1:
            loop_time.advance(601)
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                cancelled.append(message.attempt)
                raise

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 1)
    assert cancelled == [1]
    assert (counts(worker).timed_out, counts(worker).failed) == (1, 1)


async def test_a_handler_that_ignores_its_cancellation_settles_nothing(node: Node, client: Client, loop_time: LoopTime) -> None:
    worker = Worker(node.target)

    @worker.consumer(FILTER, group=GROUP, concurrency=1, timeout=600, settings=group_settings(backoff=()))
    async def handle(message: Message) -> None:
        if message.attempt == 1:
            loop_time.advance(601)
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                return

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 1)
    assert (counts(worker).timed_out, counts(worker).late) == (1, 1)


async def test_a_thread_that_hangs_keeps_its_slot_and_its_message_fails(
    node: Node, client: Client, loop_time: LoopTime
) -> None:
    worker = Worker(node.target)
    released = threading.Event()

    @worker.consumer(FILTER, group=GROUP, concurrency=2, timeout=600, settings=group_settings(backoff=()))
    def handle(message: Message) -> None:
        if message.attempt == 1:
            loop_time.advance(601)
            released.wait(WAIT_S_MAX)

    await send(client, [b"x"])
    async with running(worker):
        await until(lambda: counts(worker).handled == 1)
        released.set()
        await until(lambda: counts(worker).late == 1)
    assert counts(worker).timed_out == 1


# --- order -----------------------------------------------------------------------------------------------------------


async def test_in_fifo_order_a_message_group_is_handled_in_order_and_waits_for_a_failed_message(
    node: Node, client: Client
) -> None:
    worker = Worker(node.target)
    seen: dict[str, list[tuple[bytes, int]]] = {"a": [], "b": []}

    @worker.consumer(FILTER, group=GROUP, fifo=True, concurrency=8, settings=group_settings(backoff=(0.005,)))
    async def handle(message: Message) -> None:
        await asyncio.sleep(0)
        seen[message.message_group].append((message.body, message.attempt))
        if message.body == b"7" and message.attempt < 3:
            raise LookupError

    for key in "ab":
        await send(client, (b"%d" % number for number in range(10)), message_group=key)
    async with running(worker):
        await until(lambda: counts(worker).handled == 20)
    handled = [(b"%d" % number, 1) for number in range(10)]
    expected = [*handled[:8], (b"7", 2), (b"7", 3), *handled[8:]]
    assert seen == {"a": expected, "b": expected}


async def test_in_fifo_order_messages_wait_for_one_that_its_handler_returned_itself(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    seen: list[tuple[bytes, int]] = []

    @worker.consumer(FILTER, group=GROUP, fifo=True, settings=group_settings(backoff=(0.005,)))
    async def handle(message: Message) -> None:
        seen.append((message.body, message.attempt))
        if message.body == b"3" and message.attempt == 1:
            await message.nack()

    await send(client, (b"%d" % number for number in range(8)), message_group="a")
    async with running(worker):
        await until(lambda: len(seen) == 9)
    assert seen == [*((b"%d" % each, 1) for each in range(4)), (b"3", 2), *((b"%d" % each, 1) for each in range(4, 8))]


# --- stopping and restarts -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fifo", [False, True])
async def test_a_worker_that_stops_finishes_what_runs_and_returns_the_rest_uncounted(
    node: Node, client: Client, fifo: bool
) -> None:
    worker = Worker(node.target)
    began = asyncio.Event()
    release = asyncio.Event()

    @worker.consumer(FILTER, group=GROUP, concurrency=2, fifo=fifo)
    async def handle(body: bytes) -> None:
        began.set()
        await release.wait()

    await send(client, (b"%d" % number for number in range(100)))
    async with running(worker) as task:
        await asyncio.wait_for(began.wait(), WAIT_S_MAX)
        worker.stop()
        await until(lambda: 0 < node.group().in_flight <= 2)
        assert not task.done()
        release.set()
        await task
        handled = counts(worker).handled
    assert 1 <= handled <= 2
    rest = await client.pop(FILTER, group=GROUP, messages_max=200, in_order_max=200)
    assert len(rest) == 100 - handled
    assert {message.attempt for message in rest} == {1}


async def test_after_the_grace_the_messages_of_running_handlers_go_back_uncounted(node: Node, client: Client) -> None:
    worker = Worker(node.target, grace=0.05)
    began = asyncio.Event()

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        began.set()
        await asyncio.sleep(3_600)

    await send(client, [b"x"])
    async with running(worker):
        await asyncio.wait_for(began.wait(), WAIT_S_MAX)
    (message,) = await client.pop(FILTER, group=GROUP, wait=60.0)
    assert message.attempt == 1
    assert counts(worker).returned == 1


async def test_a_worker_goes_on_when_its_node_was_away(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    worker = Worker(node.target)
    seen: set[bytes] = set()

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        seen.add(body)

    async with running(worker), Client(node.target) as client:
        await client.send(TOPIC, b"before")
        await until(lambda: seen)
        await node.stop()
        node = Node(tmp_path / "data")
        await node.start(port)
        await client.send(TOPIC, b"after")
        await until(lambda: len(seen) == 2)
    await until(lambda: node.group().in_flight == 0)
    await node.stop()


async def test_a_worker_waits_for_a_node_that_starts_later(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    port = node.port
    await node.stop()
    worker = Worker(f"127.0.0.1:{port}")
    seen: set[bytes] = set()

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        seen.add(body)

    async with running(worker):
        node = Node(tmp_path / "data")
        await node.start(port)
        async with Client(node.target) as client:
            await client.send(TOPIC, b"x")
        await until(lambda: seen)
    await node.stop()


async def test_a_group_that_is_deleted_under_a_worker_is_created_again(node: Node, client: Client) -> None:
    worker = Worker(node.target)
    seen: list[bytes] = []

    @worker.consumer(FILTER, group=GROUP, start="latest", settings=group_settings(attempts_max=5))
    async def handle(body: bytes) -> None:
        seen.append(body)

    async with running(worker):
        await until(lambda: node.core.waiting == 1)
        await client.groups.delete(GROUP)
        await until(lambda: counts(worker).reconnects > 0)
        await until(lambda: node.core.waiting == 1)
        await client.send(TOPIC, b"x")
        await until(lambda: seen == [b"x"] and not worker.problems)
    assert node.group().attempts_max == 5


async def test_a_worker_whose_group_is_refused_says_so_and_goes_on_when_it_is_allowed(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(groups_auto_create=False))
    await node.start()
    worker = Worker(node.target)

    @worker.consumer(FILTER, group=GROUP)
    async def handle(body: bytes) -> None:
        raise AssertionError

    async with running(worker):
        await until(lambda: any("there is no group" in problem for problem in worker.problems.values()))
        assert GROUP in next(iter(worker.problems.values()))
        node.create()
        await until(lambda: node.core.waiting == 1 and not worker.problems)
    await node.stop()


async def test_a_full_node_is_waited_for(tmp_path: Path) -> None:
    node = Node(tmp_path / "data", pop=PopOptions(waiters_max=1))
    await node.start()
    seen: list[bytes] = []
    async with Client(node.target) as client:
        blocking = asyncio.create_task(client.pop("other/#", group="other", wait=60.0))
        await until(lambda: node.core.waiting == 1)
        worker = Worker(node.target)

        @worker.consumer(FILTER, group=GROUP)
        async def handle(body: bytes) -> None:
            seen.append(body)

        async with running(worker):
            await until(lambda: node.core.counters.refused > 0)
            blocking.cancel()
            await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"x")])
            await until(lambda: seen)
    await node.stop()
