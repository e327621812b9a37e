"""Polls of consumers whose answers are lost: their messages come back at once, and no attempt counts."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

import grpc
import grpc.aio

from penstock import Client, SyncClient
from tests.pop.client.consuming import in_flight
from tests.pop.looptime import LoopTime
from tests.pop.wiring import FILTER, GROUP, TOPIC, Node
from tests.waiting import WAIT_S_MAX, until


class LostAnswer:
    """A call whose answer does not reach the caller: it ends with an error then, or when it is cancelled.

    Parameters:
        call: that the node answers.
        error: with which it ends; None if it goes on without end.
    """

    def __init__(self, call: Any, error: Exception | None) -> None:
        self._call = call
        self._error = error
        self._never: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def cancel(self) -> bool:
        return self._never.cancel()

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self._call.__await__()
        if self._error is not None:
            raise self._error
        yield from self._never


def lose_answers(client: Client, lost: int, error: Exception | None) -> None:
    """Lose the next answers to polls of a client that have messages."""
    stub: Any = client._stub
    pop = stub.Pop

    def lossy(request: Any, **options: Any) -> Any:
        nonlocal lost
        if request.wait_ms and lost:
            lost -= 1
            return LostAnswer(pop(request, **options), error)
        return pop(request, **options)

    stub.Pop = lossy


async def test_closing_returns_what_a_poll_had_got_when_it_was_cancelled(node: Node, client: Client) -> None:
    loop_time = LoopTime()
    lose_answers(client, 1, None)
    consumer = client.consume(FILTER, group=GROUP)
    async with consumer:
        waiting = asyncio.create_task(anext(aiter(consumer)))
        await until(lambda: node.core.waiting == 1)
        loop_time.advance(1)  # A younger poll would not be cancelled.
        node.publish(b"a")
        await until(lambda: in_flight(node) == 1)
        waiting.cancel()
        await asyncio.wait((waiting,))
    assert in_flight(node) == 0
    (message,) = await client.pop(FILTER, group=GROUP)
    assert (message.body, message.attempt) == (b"a", 1)


async def test_a_poll_whose_answer_was_lost_is_repeated_and_gets_the_same_messages(node: Node, client: Client) -> None:
    error = grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Connection reset", None
    )
    lose_answers(client, 1, error)
    await client.send(TOPIC, b"a")
    await client.send(TOPIC, b"b")
    got = []
    async with asyncio.timeout(WAIT_S_MAX):
        async for message in client.consume(FILTER, group=GROUP):
            got.append((message.body, message.attempt))
            await message.ack()
            if len(got) == 2:
                break
    assert got == [(b"a", 1), (b"b", 1)]
    assert in_flight(node) == 0


class ResetError(grpc.RpcError):
    """What a call ends with whose connection was reset."""

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.UNAVAILABLE

    def details(self) -> str:
        return "Connection reset"


def consume_in_thread(target: str, error: BaseException) -> list[tuple[bytes, int]]:
    """Consume one message; the answer to the first poll is lost."""
    with SyncClient(target) as client:
        stub: Any = client._stub
        pop, lost = stub.Pop, [error]

        def lossy(request: Any, **options: Any) -> Any:
            answer = pop(request, **options)
            if lost:
                raise lost.pop()
            return answer

        stub.Pop = lossy
        for message in client.consume(FILTER, group=GROUP):
            message.ack()
            return [(message.body, message.attempt)]
    return []


async def test_a_poll_of_a_thread_whose_answer_was_lost_is_repeated(node: Node, client: Client) -> None:
    await client.send(TOPIC, b"a")
    assert await asyncio.to_thread(consume_in_thread, node.target, ResetError()) == [(b"a", 1)]
    assert in_flight(node) == 0


async def test_a_poll_of_a_thread_that_is_interrupted_returns_what_it_had_got(node: Node, client: Client) -> None:
    await client.send(TOPIC, b"a")
    assert await asyncio.to_thread(is_interrupted, node.target)
    (message,) = await client.pop(FILTER, group=GROUP)
    assert (message.body, message.attempt) == (b"a", 1)


def is_interrupted(target: str) -> bool:
    """Consume, with an interrupt within the first poll."""
    try:
        consume_in_thread(target, KeyboardInterrupt())
    except KeyboardInterrupt:
        return True
    return False
