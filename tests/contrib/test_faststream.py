"""The broker for FastStream: FastStream's own behaviour on a real node, and no attempt lost that no handler has seen."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import httpx
import pytest
from fastapi import Depends as FastAPIDepends
from fastapi import FastAPI
from faststream import AckPolicy, BaseMiddleware, Depends, FastStream, TestApp
from faststream import Path as TopicLevel
from faststream.asgi import AsgiFastStream, make_ping_asgi
from faststream.exceptions import AckMessage, NackMessage, RejectMessage, SetupError, StopConsume
from faststream.specification import AsyncAPI
from faststream_fastapi import FastStreamAPI
from pydantic import BaseModel, ValidationError

from penstock import Client, OutgoingMessage, group_settings
from penstock.contrib.faststream import (
    PenstockBatch,
    PenstockBroker,
    PenstockMessage,
    PenstockResponse,
    PenstockRouter,
    TestPenstockBroker,
)
from penstock.contrib.faststream.inmemory import is_match
from penstock.pop.errors import RequestInvalid, RequestTimedOut
from penstock.worker import runningconsumer
from tests.pop.looptime import LoopTime
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.system.processes import NodeProcess
from tests.waiting import WAIT_S_MAX, until


class Reading(BaseModel):
    celsius: float


def current_tariff() -> str:
    """A dependency. FastAPI finds it by its name, so it is no local function."""
    return "night"


@pytest.fixture
def broker(node: Node) -> PenstockBroker:
    return PenstockBroker(node.target, logger=None)


# --- handlers --------------------------------------------------------------------------------------------------------


async def test_a_handler_gets_what_is_published_and_returning_acknowledges_it(node: Node, broker: PenstockBroker) -> None:
    seen: list[tuple[Reading, str, int]] = []

    @broker.subscriber("plant/{press}/#", group=GROUP)
    async def bill(body: Reading, message: PenstockMessage, press: Annotated[str, TopicLevel()]) -> None:
        seen.append((body, press, message.raw_message.attempt))

    async with broker:
        await broker.start()
        receipt = await broker.publish(Reading(celsius=21.5), TOPIC, headers={"unit": "C"})
        await until(lambda: node.core.counters.acked == 1)
    assert seen == [(Reading(celsius=21.5), "1", 1)]
    assert len(receipt.message_id) == 16


async def test_bodies_come_as_their_content_type_says(broker: PenstockBroker) -> None:
    seen: list[Any] = []

    @broker.subscriber(FILTER, group=GROUP)
    async def bill(body: Any) -> None:
        seen.append(body)

    async with broker:
        await broker.start()
        bodies: list[Any] = [b"\xff\x00", "21.5", {"celsius": 21.5}, [1, 2]]
        for body in bodies:
            await broker.publish(body, TOPIC)
        await until(lambda: len(seen) == 4)
    assert seen == bodies


async def test_what_a_handler_returns_is_published_with_its_options(node: Node, client: Client, broker: PenstockBroker) -> None:
    @broker.publisher("bills/1", tag="bill", headers={"currency": "EUR"})
    @broker.subscriber(FILTER, group=GROUP)
    async def bill(celsius: float) -> PenstockResponse:
        return PenstockResponse({"price": celsius * 2}, headers={"rate": "2"}, message_group="press 1")

    async with broker:
        await broker.start()
        await broker.publish(21.5, TOPIC, correlation_id="reading 7")
        (message,) = await client.pop("bills/+", group="bills", wait=60.0)
    assert message.body == b'{"price":43.0}'
    assert (message.properties, message.tag, message.message_group) == ({"currency": "EUR", "rate": "2"}, "bill", "press 1")
    assert (message.content_type, message.correlation_data) == ("application/json", b"reading 7")


async def test_publishing_in_batches_with_delays_and_deduplication(node: Node, client: Client, broker: PenstockBroker) -> None:
    async with broker:
        receipts = await broker.publish_batch(1, 2, 3, topic=TOPIC, tag="reading")
        first = await broker.publish(b"once", TOPIC, deduplication_id="x")
        again = await broker.publish(b"once", TOPIC, deduplication_id="x")
        later = await broker.publish(b"later", TOPIC, delay=60)
        await broker.publish(b"at", TOPIC, deliver_at=datetime.now(UTC) + timedelta(hours=1))
        with pytest.raises(ValueError, match="no time zone"):
            await broker.publish(b"at", TOPIC, deliver_at=datetime.now())
        with pytest.raises(ValueError, match="not both"):
            await broker.publish(b"at", TOPIC, deliver_at=datetime.now(UTC), delay=1)
        await broker.client.recall(later.recall_handle)
    assert (len(receipts), again.message_id, again.repeated) == (3, first.message_id, True)
    node.group()
    found = await client.pop(FILTER, group=GROUP, messages_max=9, wait=60.0)
    assert [message.body for message in found] == [b"1", b"2", b"3", b"once"]
    node.advance(3_700_000)
    found = await client.pop(FILTER, group=GROUP, messages_max=9, wait=60.0)
    assert b"at" in {message.body for message in found}


async def test_routers_middlewares_dependencies_filters_and_decoders_are_faststream_s(node: Node) -> None:
    seen: list[Any] = []

    class Noting(BaseMiddleware):
        async def consume_scope(self, call_next: Callable[[Any], Awaitable[Any]], msg: Any) -> Any:
            seen.append("consume")
            return await call_next(msg)

        async def publish_scope(self, call_next: Callable[[Any], Awaitable[Any]], cmd: Any) -> Any:
            seen.append("publish")
            return await call_next(cmd)

    async def reversed_body(message: PenstockMessage, original: Callable[..., Awaitable[Any]]) -> Any:
        message.body = message.body[::-1]
        return await original(message)

    router = PenstockRouter("plant/", decoder=reversed_body)
    consumer = router.subscriber("#", group=GROUP)

    @consumer(filter=lambda message: message.headers.get("unit") == "F")
    async def fahrenheit(body: bytes) -> None:
        seen.append(("fahrenheit", body))

    @consumer
    async def celsius(body: bytes, double: int = Depends(lambda: 2)) -> None:
        seen.append(("celsius", body, double))

    broker = PenstockBroker(node.target, logger=None, middlewares=[Noting])
    broker.include_router(router)
    async with broker:
        await broker.start()
        await broker.publish(b"ab", TOPIC)
        await until(lambda: len(seen) == 3)
        await broker.publish(b"cd", TOPIC, headers={"unit": "F"})
        await until(lambda: len(seen) == 6)
    assert seen == ["publish", "consume", ("celsius", b"ba", 2), "publish", "consume", ("fahrenheit", b"dc")]


async def test_no_more_handlers_run_at_a_time_than_max_workers(node: Node, broker: PenstockBroker) -> None:
    together = threading.Barrier(3, timeout=WAIT_S_MAX)

    @broker.subscriber(FILTER, group=GROUP, max_workers=3)
    def bill(body: bytes) -> None:
        assert threading.current_thread() is not threading.main_thread()
        together.wait()

    async with broker:
        await broker.start()
        await broker.publish_batch(*[b"x"] * 6, topic=TOPIC)
        await until(lambda: node.core.counters.acked == 6)


def test_a_parameter_that_is_part_of_a_level_is_refused() -> None:
    with pytest.raises(SetupError, match="only part of a level"):
        PenstockBroker().subscriber("plant/press{number}/temperature", group=GROUP)


# --- acknowledgement -------------------------------------------------------------------------------------------------


async def test_a_handler_that_raises_returns_its_message_as_a_failed_attempt(broker: PenstockBroker) -> None:
    attempts: list[int] = []

    @broker.subscriber(FILTER, group=GROUP, settings=group_settings(backoff=()))
    async def bill(message: PenstockMessage) -> None:
        attempts.append(message.raw_message.attempt)
        if len(attempts) < 3:
            raise LookupError("no such customer")

    async with broker:
        await broker.start()
        await broker.publish(b"x", TOPIC)
        await until(lambda: len(attempts) == 3)
    assert attempts == [1, 2, 3]


@pytest.mark.parametrize(
    ("policy", "error", "reason"),
    [
        (AckPolicy.REJECT_ON_ERROR, LookupError("no such customer"), "LookupError: no such customer"),
        (AckPolicy.NACK_ON_ERROR, RejectMessage(reason="a test reading"), "a test reading"),
        (AckPolicy.NACK_ON_ERROR, RejectMessage(), "the handler rejected the message"),
    ],
)
async def test_a_rejected_message_is_a_dead_letter_with_the_reason(
    client: Client, broker: PenstockBroker, policy: AckPolicy, error: Exception, reason: str
) -> None:
    @broker.subscriber(FILTER, group=GROUP, ack_policy=policy)
    async def bill(body: bytes) -> None:
        raise error

    async with broker:
        await broker.start()
        await broker.publish(b"x", TOPIC)
        (dead,) = await client.pop(f"$dlq/{GROUP}", group="dead", wait=60.0)
    assert dead.origin is not None
    assert (dead.body, dead.origin.detail) == (b"x", reason)


@pytest.mark.parametrize(
    ("policy", "error"),
    [
        (AckPolicy.ACK, LookupError()),
        (AckPolicy.ACK_FIRST, LookupError()),
        (AckPolicy.NACK_ON_ERROR, AckMessage()),
    ],
)
async def test_policies_that_acknowledge_in_spite_of_an_error(
    node: Node, broker: PenstockBroker, policy: AckPolicy, error: Exception
) -> None:
    @broker.subscriber(FILTER, group=GROUP, ack_policy=policy)
    async def bill(body: bytes) -> None:
        raise error

    async with broker:
        await broker.start()
        await broker.publish(b"x", TOPIC)
        await until(lambda: node.core.counters.acked == 1)


async def test_a_nack_with_a_delay_waits_for_it(node: Node, broker: PenstockBroker) -> None:
    attempts: list[int] = []

    @broker.subscriber(FILTER, group=GROUP, settings=group_settings(backoff=()))
    async def bill(message: PenstockMessage) -> None:
        attempts.append(message.raw_message.attempt)
        if len(attempts) == 1:
            raise NackMessage(delay=3_600)

    async with broker:
        await broker.start()
        await broker.publish(b"x", TOPIC)
        await until(lambda: node.group().delayed == 1)
        node.advance(3_590_000)
        assert attempts == [1]
        node.advance(20_000)
        await until(lambda: len(attempts) == 2)
    assert attempts == [1, 2]


async def test_manual_messages_are_the_handler_s_and_come_back_at_their_deadline(node: Node, broker: PenstockBroker) -> None:
    seen: list[tuple[bytes, int]] = []

    @broker.subscriber(FILTER, group=GROUP, ack_policy=AckPolicy.MANUAL, settings=group_settings(backoff=()))
    async def bill(body: bytes, message: PenstockMessage) -> None:
        seen.append((body, message.raw_message.attempt))
        if body == b"acked" or message.raw_message.attempt == 2:
            await message.ack()
            await message.ack()

    async with broker:
        await broker.start()
        await broker.publish_batch(b"acked", b"left", topic=TOPIC)
        await until(lambda: node.core.counters.acked == 1)
        await until(lambda: len(seen) == 2)
        node.advance(31_000)
        await until(lambda: node.core.counters.acked == 2)
    assert seen == [(b"acked", 1), (b"left", 1), (b"left", 2)]


async def test_a_body_that_is_not_valid_is_a_dead_letter_with_the_reason(client: Client, broker: PenstockBroker) -> None:
    seen: list[AckPolicy] = []

    def subscribe(policy: AckPolicy) -> None:
        @broker.subscriber(FILTER, group=policy.value, ack_policy=policy)
        async def bill(body: Reading, message: PenstockMessage) -> None:
            seen.append(policy)
            await message.ack()

    for policy in AckPolicy:
        subscribe(policy)
    async with broker:
        await broker.start()
        await client.send(TOPIC, b'{"celsius": "hot"}')
        await client.send(TOPIC, b"{{", content_type="application/json")
        await client.send(TOPIC, b'{"celsius": 1}', content_type="application/json")
        await client.send(TOPIC, b'{"celsius": 1}')
        await until(lambda: len(seen) == 2 * len(AckPolicy))
        for policy in set(AckPolicy) - {AckPolicy.ACK_FIRST}:  # It acknowledges before it looks at the body.
            (invalid,) = await client.pop(f"$dlq/{policy.value}", group="dead", messages_max=1, wait=60.0)
            (no_json,) = await client.pop(f"$dlq/{policy.value}", group="dead", messages_max=1, wait=60.0)
            assert invalid.origin is not None
            assert no_json.origin is not None
            for origin in (invalid.origin, no_json.origin):
                assert origin.detail.startswith("the body of "), policy
            assert ("celsius" in invalid.origin.detail, "celsius" in no_json.origin.detail) == (True, False), policy


async def test_a_handler_that_raises_a_validation_error_itself_fails_an_attempt(broker: PenstockBroker) -> None:
    attempts: list[int] = []

    @broker.subscriber(FILTER, group=GROUP, settings=group_settings(backoff=()))
    async def bill(message: PenstockMessage) -> None:
        attempts.append(message.raw_message.attempt)
        if len(attempts) == 1:
            Reading.model_validate({})

    async with broker:
        await broker.start()
        await broker.publish(b"x", TOPIC)
        await until(lambda: len(attempts) == 2)


async def test_in_fifo_order_messages_wait_for_the_failed_one_before_them(client: Client, broker: PenstockBroker) -> None:
    seen: list[tuple[int, int]] = []

    @broker.subscriber(FILTER, group=GROUP, fifo=True, max_workers=4, settings=group_settings(backoff=(0.005,)))
    async def bill(body: int, message: PenstockMessage) -> None:
        seen.append((body, message.raw_message.attempt))
        if body == 3 and message.raw_message.attempt == 1:
            raise LookupError

    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % each, message_group="a") for each in range(10)])
    async with broker:
        await broker.start()
        await until(lambda: len(seen) == 11)
    assert seen == [*((each, 1) for each in range(4)), (3, 2), *((each, 1) for each in range(4, 10))]


# --- batches ---------------------------------------------------------------------------------------------------------


async def send_numbers(client: Client, count: int, message_group: str = "") -> None:
    await client.send_batch(
        [OutgoingMessage(topic=TOPIC, body=b"%d" % each, message_group=message_group) for each in range(count)]
    )


async def test_a_handler_of_batches_gets_what_waits(node: Node, client: Client, broker: PenstockBroker) -> None:
    seen: list[list[int]] = []

    @broker.publisher("sums/1")
    @broker.subscriber(FILTER, group=GROUP, batch=4)
    async def total(bodies: list[int], batch: PenstockBatch) -> int:
        assert [message.body for message in batch.raw_message] == [b"%d" % body for body in bodies]
        seen.append(bodies)
        return sum(bodies)

    await send_numbers(client, 10)
    async with broker:
        await broker.start()
        await until(lambda: node.core.counters.acked == 10)
        sums = await client.pop("sums/+", group="sums", messages_max=9, wait=60.0)
    assert seen == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [message.body for message in sums] == [b"6", b"22", b"17"]


async def test_a_batch_whose_handler_raises_comes_back_as_failed_attempts(client: Client, broker: PenstockBroker) -> None:
    seen: list[tuple[list[int], int]] = []

    @broker.subscriber(FILTER, group=GROUP, batch=8, settings=group_settings(backoff=()))
    async def total(bodies: list[int], batch: PenstockBatch) -> None:
        seen.append((bodies, batch.raw_message[0].attempt))
        if len(seen) == 1:
            raise LookupError

    await send_numbers(client, 3)
    async with broker:
        await broker.start()
        await until(lambda: sum(len(bodies) for bodies, _ in seen) == 6)
    assert seen[0] == ([0, 1, 2], 1)
    assert {attempt for _, attempt in seen[1:]} == {2}


async def test_a_handler_settles_messages_of_a_batch_one_by_one_and_the_policy_the_others(
    node: Node, client: Client, broker: PenstockBroker
) -> None:
    seen: list[list[int]] = []

    @broker.subscriber(FILTER, group=GROUP, batch=8, settings=group_settings(backoff=()))
    async def total(bodies: list[int], batch: PenstockBatch) -> None:
        seen.append(bodies)
        if len(seen) == 1:
            await batch.raw_message[1].nack()
            await batch.raw_message[2].dead_letter(reason="it is two")

    await send_numbers(client, 4)
    async with broker:
        await broker.start()
        await until(lambda: node.core.counters.acked == 3)
    assert seen == [[0, 1, 2, 3], [1]]
    (letter,) = await client.dead_letters.of_group(GROUP)
    assert letter.detail == "it is two"


async def test_bodies_of_a_batch_that_are_not_valid_are_dead_letters_and_the_handler_gets_the_others(
    node: Node, client: Client, broker: PenstockBroker
) -> None:
    seen: dict[AckPolicy, list[float]] = {policy: [] for policy in AckPolicy}

    def subscribe(policy: AckPolicy) -> None:
        @broker.subscriber(FILTER, group=policy.value, batch=16, ack_policy=policy)
        async def bill(bodies: list[Reading], batch: PenstockBatch) -> None:
            seen[policy] += [body.celsius for body in bodies]
            await batch.ack()

    for policy in AckPolicy:
        subscribe(policy)
    bodies = [b'{"celsius": %d}' % each for each in range(16)]
    bodies[3], bodies[11] = b'{"celsius": "hot"}', b"{{"
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=body) for body in bodies])
    async with broker:
        await broker.start()
        await until(lambda: all(len(bodies) == 14 for bodies in seen.values()))
        await until(lambda: all(group.in_flight == 0 for group in node.core.groups))
        letters = {policy: await client.dead_letters.of_group(policy.value) for policy in AckPolicy}
    for policy in AckPolicy:
        assert sorted(seen[policy]) == [each for each in range(16) if each not in (3, 11)], policy
        if policy is AckPolicy.ACK_FIRST:
            continue  # It acknowledges before it looks at the bodies.
        assert len(letters[policy]) == 2, policy
        assert all(letter.detail.startswith("the body of ") for letter in letters[policy])
        assert "celsius" in letters[policy][0].detail


async def test_in_fifo_order_the_part_of_a_batch_after_a_failed_one_waits_for_it(
    client: Client, broker: PenstockBroker
) -> None:
    seen: list[list[int]] = []

    @broker.subscriber(FILTER, group=GROUP, fifo=True, batch=4, settings=group_settings(backoff=(0.005,)))
    async def bill(bodies: list[int]) -> None:
        seen.append(bodies)
        if len(seen) == 1:
            raise LookupError

    sent = [b"0", b"1", b"two", b"3", b"4"]
    await client.send_batch([OutgoingMessage(topic=TOPIC, body=body, message_group="a") for body in sent])
    async with broker:
        await broker.start()
        await until(lambda: sum(map(len, seen)) == 6)
    assert seen[0] == [0, 1], "the batch was halved, because of its third body"
    assert [body for bodies in seen[1:] for body in bodies] == [0, 1, 3, 4]
    (letter,) = await client.dead_letters.of_group(GROUP)
    assert letter.detail.startswith("the body of 3 bytes")


async def test_a_subscriber_of_batches_without_handlers_gives_batches(client: Client, broker: PenstockBroker) -> None:
    subscriber = broker.subscriber(FILTER, group=GROUP, batch=3)
    await send_numbers(client, 5)
    async with broker:
        await broker.start()
        batch = await subscriber.get_one(timeout=WAIT_S_MAX)
        assert await batch.decode() == [0, 1, 2]
        await batch.ack()
        async for batch in subscriber:
            assert await batch.decode() == [3, 4]
            await batch.nack(delay=60)
            break


def test_a_parameter_in_the_address_of_batches_is_refused(broker: PenstockBroker) -> None:
    with pytest.raises(SetupError, match="use \\+ instead"):
        broker.subscriber("plant/{press}/#", group=GROUP, batch=10)


async def test_the_test_broker_calls_handlers_of_batches(broker: PenstockBroker) -> None:
    @broker.subscriber("plant/#", group=GROUP, batch=2)
    async def total(bodies: list[int], batch: PenstockBatch) -> None:
        assert all(message.group == GROUP for message in batch.raw_message)

    async with TestPenstockBroker(broker):
        receipts = await broker.publish_batch(1, 2, 3, topic="plant/1")
        total.mock.assert_called_with([3])
        await broker.publish(4, "plant/1")
        total.mock.assert_called_with([4])
        with pytest.raises(ValidationError):
            await broker.publish_batch(1, "two", topic="plant/1")
        total.mock.assert_any_call([1])
    assert len(receipts) == 3


# --- requests --------------------------------------------------------------------------------------------------------


async def test_a_request_gets_what_the_handler_returns(broker: PenstockBroker) -> None:
    @broker.subscriber("questions/{number}", group=GROUP)
    async def answer(body: int, message: PenstockMessage) -> dict[str, Any]:
        return {"twice": body * 2, "asked": message.correlation_id}

    @broker.subscriber("orders/+", group="silent", no_reply=True)
    async def silent(body: int) -> int:
        return body

    async with broker:
        await broker.start()
        reply = await broker.request(21, "questions/7", correlation_id="q7")
        assert await reply.decode() == {"twice": 42, "asked": "q7"}
        assert reply.correlation_id == "q7"
        with pytest.raises(RequestTimedOut):
            await broker.request(21, "orders/1", timeout=0.5)


async def test_a_reply_repeats_correlation_data_of_any_bytes(client: Client, broker: PenstockBroker) -> None:
    @broker.subscriber("questions/+", group=GROUP)
    async def answer(body: int) -> int:
        return body * 2

    async with broker:
        await broker.start()
        await client.send("questions/1", b"21", response_topic="answers/1", correlation_data=b"\xff\x00")
        (reply,) = await client.pop("answers/+", group="answers", wait=60.0)
        assert (reply.body, reply.correlation_data) == (b"42", b"\xff\x00")
        assert (await client.request("questions/2", b"4", timeout=WAIT_S_MAX)).body == b"8"


async def test_a_reply_that_the_node_refuses_does_not_fail_its_handler(
    node: Node, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    broker = PenstockBroker(node.target, logger=None)
    seen: list[int] = []

    @broker.subscriber("questions/+", group=GROUP)
    async def answer(body: int) -> int:
        seen.append(body)
        return body

    async with broker:
        await broker.start()
        await client.send("questions/1", b"21", response_topic="$delayed/1/x")
        await until(lambda: bool(seen) and node.group().in_flight == 0)
    assert (seen, node.core.counters.acked) == ([21], 1)
    assert "the reply to a message from 'questions/1' was refused, and is dropped: '$delayed/1/x': " in caplog.text


async def test_a_subscriber_without_handlers_gives_messages_one_by_one(node: Node, broker: PenstockBroker) -> None:
    subscriber = broker.subscriber(FILTER, group=GROUP, persistent=False)
    async with broker:
        await broker.start()
        await broker.publish_batch({"celsius": 1}, {"celsius": 2}, topic=TOPIC)
        first = await subscriber.get_one()
        assert first is not None
        assert await first.decode() == {"celsius": 1}
        await first.ack()
        async for message in subscriber:
            assert await message.decode() == {"celsius": 2}
            await message.ack()
            break
        assert await subscriber.get_one(timeout=0.01) is None
    assert node.core.counters.acked == 2


# --- time, stops and restarts ----------------------------------------------------------------------------------------


@pytest.fixture
async def loop_time(monkeypatch: pytest.MonkeyPatch) -> LoopTime:
    """The subscribers' time. They look at their messages every 10 ms."""
    monkeypatch.setattr(runningconsumer, "CHECK_S_MAX", 0.01)
    return LoopTime()


async def test_a_message_is_extended_while_its_handler_runs(node: Node, broker: PenstockBroker, loop_time: LoopTime) -> None:
    attempts: list[int] = []

    @broker.subscriber(FILTER, group=GROUP, invisible=600, timeout=3_600)
    async def bill(message: PenstockMessage) -> None:
        attempts.append(message.raw_message.attempt)
        for _ in range(2):
            handle = message.raw_message.handle
            loop_time.advance(301)
            await until(lambda: message.raw_message.handle != handle)  # noqa: B023 - awaited at once

    async with broker:
        await broker.start()
        await broker.publish(b"x", TOPIC)
        await until(lambda: node.core.counters.acked == 1)
    assert attempts == [1]


async def test_a_handler_that_hangs_is_cancelled_and_its_message_fails(
    node: Node, broker: PenstockBroker, loop_time: LoopTime
) -> None:
    seen: list[str] = []

    @broker.subscriber(FILTER, group=GROUP, timeout=600, settings=group_settings(backoff=()))
    async def bill(message: PenstockMessage) -> None:
        if message.raw_message.attempt == 1:
            loop_time.advance(601)
            try:
                await asyncio.sleep(3_600)
            except asyncio.CancelledError:
                seen.append("cancelled")
                raise
        seen.append(f"attempt {message.raw_message.attempt}")

    async with broker:
        await broker.start()
        await broker.publish(b"x", TOPIC)
        await until(lambda: node.core.counters.acked == 1)
    assert seen == ["cancelled", "attempt 2"]


async def test_a_stop_finishes_what_runs_and_returns_the_rest_uncounted(node: Node, client: Client) -> None:
    broker = PenstockBroker(node.target, logger=None, graceful_timeout=WAIT_S_MAX)
    began, release = asyncio.Event(), asyncio.Event()
    handled: list[int] = []

    @broker.subscriber(FILTER, group=GROUP)
    async def bill(body: int) -> None:
        began.set()
        await release.wait()
        handled.append(body)

    await client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % each) for each in range(50)])
    await broker.start()
    await began.wait()
    stopping = asyncio.create_task(broker.stop())
    await until(lambda: node.group().in_flight == 1)
    release.set()
    await stopping
    assert handled in ([0], [0, 1]), "it may have taken the next message when the stop began"
    rest = await client.pop(FILTER, group=GROUP, messages_max=100)
    assert sorted(int(message.body) for message in rest) == list(range(len(handled), 50))
    assert {message.attempt for message in rest} == {1}


async def test_after_the_graceful_timeout_messages_go_back_uncounted(node: Node, client: Client) -> None:
    broker = PenstockBroker(node.target, logger=None, graceful_timeout=0.1)
    began = asyncio.Event()

    @broker.subscriber(FILTER, group=GROUP)
    async def bill(body: bytes) -> None:
        began.set()
        await asyncio.sleep(3_600)

    await client.send(TOPIC, b"x")
    await broker.start()
    await began.wait()
    await broker.stop()
    (message,) = await client.pop(FILTER, group=GROUP)
    assert message.attempt == 1


async def test_a_handler_can_stop_its_subscriber_and_the_application(node: Node, client: Client) -> None:
    broker = PenstockBroker(node.target, logger=None)
    app = FastStream(broker, logger=None)
    handled: list[Any] = []

    @broker.subscriber("one/+", group="one", ack_policy=AckPolicy.ACK)
    async def one(body: int) -> None:
        handled.append(body)
        raise StopConsume

    @broker.subscriber("two/+", group="two", ack_policy=AckPolicy.ACK)
    async def two(body: bytes) -> None:
        handled.append(body)
        raise SystemExit

    running = asyncio.create_task(app.run())
    await client.send_batch([OutgoingMessage(topic="one/1", body=b"%d" % each) for each in range(5)])
    await until(lambda: handled == [0])
    await until(lambda: node.group("one", "one/+").in_flight == 0)
    await client.send("two/1", b"end")
    await asyncio.wait_for(running, WAIT_S_MAX)
    assert handled == [0, b"end"]
    assert {message.attempt for message in await client.pop("one/+", group="one", messages_max=9)} == {1}


@pytest.mark.nightly
async def test_a_subscriber_goes_on_when_its_node_was_killed(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data")
    await asyncio.to_thread(node.start)
    port = node.port("pop")
    broker = PenstockBroker(f"127.0.0.1:{port}", logger=None)
    seen: list[int] = []

    @broker.subscriber(FILTER, group=GROUP, max_workers=8, invisible=1.0)
    async def bill(number: int) -> None:
        await asyncio.sleep(0.001)
        seen.append(number)

    try:
        async with broker:
            await broker.start()
            publishing = asyncio.gather(*(broker.publish(number, TOPIC) for number in range(300)))
            await until(lambda: len(seen) > 50)
            assert await broker.ping()
            await asyncio.to_thread(node.kill)
            assert not await broker.ping(0.1)
            await asyncio.to_thread(node.start, "--pop", f"127.0.0.1:{port}")
            await publishing
            await until(lambda: set(seen) == set(range(300)))
            await broker.client.groups.delete(GROUP)
            await broker.publish(300, TOPIC)
            await until(lambda: 300 in seen)
            await until(lambda: not broker.problems)
            assert await broker.ping()
    finally:
        await asyncio.to_thread(node.close)


async def test_a_broker_that_the_node_refuses_does_not_start(node: Node) -> None:
    broker = PenstockBroker(node.target, logger=None)

    @broker.subscriber("plant/#/temperature", group=GROUP, settings=group_settings(attempts_max=3))
    async def bill(body: bytes) -> None: ...

    async with broker:
        with pytest.raises(RequestInvalid):
            await broker.start()
    assert not await broker.ping(), "it is not connected"


# --- applications ----------------------------------------------------------------------------------------------------


async def test_an_asgi_application_tells_its_health(node: Node, broker: PenstockBroker) -> None:
    app = AsgiFastStream(broker, asgi_routes=[("/health", make_ping_asgi(broker, timeout=WAIT_S_MAX))], logger=None)

    @broker.subscriber(FILTER, group=GROUP)
    async def bill(body: bytes) -> None: ...

    transport = httpx.ASGITransport(app=app)
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        async with app.start_lifespan_context():
            await until(lambda: broker.running)
            assert (await http.get("/health")).status_code == 204
        assert (await http.get("/health")).status_code == 500


async def test_a_broker_that_has_not_started_is_not_healthy_and_stops(node: Node) -> None:
    broker = PenstockBroker(node.target, logger=None)
    app = AsgiFastStream(broker, logger=None)
    asked, may_start = asyncio.Event(), asyncio.Event()

    @broker.subscriber(FILTER, group=GROUP)
    async def bill(body: bytes) -> None: ...

    async def wait() -> None:
        asked.set()
        await may_start.wait()

    (subscriber,) = broker.subscribers
    start = subscriber.start

    async def start_late() -> None:
        await wait()
        await start()

    subscriber.start = start_late  # type: ignore[method-assign]
    async with app.start_lifespan_context():
        await asked.wait()
        assert not await broker.ping(), "no subscriber gets messages yet"
    assert not broker.running
    may_start.set()
    async with app.start_lifespan_context():
        await until(lambda: broker.running)
        assert await broker.ping(WAIT_S_MAX)
    starting = asyncio.create_task(broker.start())
    may_start.clear()
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait((starting,))
    assert starting.cancelled(), "who cancels a start is told so"
    await broker.stop()


async def test_a_broker_stops_while_its_node_is_away() -> None:
    broker = PenstockBroker("127.0.0.1:1", logger=None)

    @broker.subscriber(FILTER, group=GROUP, settings=group_settings(attempts_max=3))
    async def bill(body: bytes) -> None: ...

    starting = asyncio.create_task(broker.start())
    await asyncio.sleep(0.2)
    assert not starting.done(), "it waits for the node"
    await broker.stop()
    await starting


async def test_fastapi_s_dependencies_paths_and_requests_work_in_handlers(node: Node, broker: PenstockBroker) -> None:
    http_app = FastAPI()
    seen: list[Any] = []

    @broker.publisher("bills/1")
    @broker.subscriber("plant/{press}/#", group=GROUP)
    async def bill(body: Reading, press: str, tariff: Annotated[str, FastAPIDepends(current_tariff)]) -> Reading:
        seen.append((body, press, tariff))
        return body

    @http_app.post("/readings")
    async def reading(body: Reading) -> str:
        return (await broker.publish(body, TOPIC)).message_id

    app = FastStreamAPI(broker, application=http_app)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(app._lifespan_context(http_app))  # type: ignore[arg-type]
        http = await stack.enter_async_context(
            httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test")
        )
        answer = await http.post("/readings", json={"celsius": 21.5})
        assert (answer.status_code, len(answer.json())) == (200, 16)
        await until(lambda: node.core.counters.acked == 1)
        await broker.client.send(TOPIC, b'{"celsius": "hot"}')
        (dead,) = await broker.client.pop(f"$dlq/{GROUP}", group="dead", wait=60.0)
        assert dead.body == b'{"celsius": "hot"}'
    assert seen == [(Reading(celsius=21.5), "1", "night")]


def test_asyncapi_describes_subscribers_and_publishers() -> None:
    broker = PenstockBroker()

    @broker.publisher("bills/1", description="Bills")
    @broker.subscriber("plant/{press}/#", group=GROUP)
    async def bill(body: Reading) -> Reading:
        return body

    found = AsyncAPI(broker).to_specification().to_jsonable()
    assert {channel["address"] for channel in found["channels"].values()} == {"plant/{press}/#", "bills/1"}
    assert found["servers"]["development"]["protocol"] == "penstock"


# --- tests of applications -------------------------------------------------------------------------------------------


async def test_the_test_broker_calls_handlers_without_a_node() -> None:
    broker = PenstockBroker()

    @broker.publisher("bills/1")
    @broker.subscriber("plant/{press}/#", group=GROUP)
    async def bill(body: Reading, press: Annotated[str, TopicLevel()]) -> dict[str, Any]:
        return {"press": press, "celsius": body.celsius}

    @broker.subscriber("plant/#", group=GROUP)
    async def other_of_the_group(body: Reading) -> None: ...

    @broker.subscriber("plant/#", group="audit")
    async def audit(body: Any) -> None: ...

    async with TestPenstockBroker(broker) as tested:
        await tested.publish(Reading(celsius=21.5), TOPIC)
        called = [handler.mock.call_count for handler in (bill, other_of_the_group)]
        assert sum(called) == 1
        audit.mock.assert_called_once_with({"celsius": 21.5})
        with pytest.raises(ValueError, match="celsius"):
            await tested.publish({"celsius": "hot"}, "plant/1/temperature")


async def test_the_test_broker_answers_requests_and_works_in_a_test_application() -> None:
    broker = PenstockBroker()
    app = FastStream(broker)

    @broker.subscriber("questions/+", group=GROUP)
    async def answer(body: int) -> int:
        return body * 2

    async with TestPenstockBroker(broker) as tested, TestApp(app):
        assert await (await tested.request(21, "questions/1")).decode() == 42


async def test_the_test_broker_can_use_a_real_node(node: Node) -> None:
    broker = PenstockBroker(node.target)

    @broker.subscriber(FILTER, group=GROUP)
    async def bill(body: float) -> None: ...

    async with TestPenstockBroker(broker, with_real=True) as tested:
        await tested.publish(21.5, TOPIC)
        await bill.wait_call(WAIT_S_MAX)
        bill.mock.assert_called_once_with(21.5)


@pytest.mark.parametrize(
    ("topic_filter", "topic", "matches"),
    [
        ("a/+/c", "a/b/c", True),
        ("a/+", "a/b/c", False),
        ("a/#", "a", True),
        ("a/#", "a/b/c", True),
        ("#", "$SYS/x", False),
        ("+/x", "$SYS/x", False),
        ("$SYS/#", "$SYS/x", True),
        ("a/b", "a", False),
        ("a", "a/b", False),
        ("+", "a", True),
    ],
)
def test_topics_match_filters_as_in_mqtt(topic_filter: str, topic: str, matches: bool) -> None:
    assert is_match(topic_filter, topic) is matches
