"""Gathers single requests of many tasks into few calls."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from typing import Generic, TypeVar

from penstock.pop.errors import ClientClosed, NodeUnavailable, PopError

Q = TypeVar("Q")
A = TypeVar("A")

CLOSED = "this client was closed: create a new one"
UNANSWERED = "the client was closed before the node answered"


def runs_by_topic(messages: Sequence[Q], topic_of: Callable[[Q], str]) -> list[list[Q]]:
    """Return messages in their order, split wherever the topic changes."""
    return [list(run) for _, run in groupby(messages, topic_of)]


class Batcher(Generic[Q, A]):
    """Sends single items as few, large calls, one call at a time. Items that arrive during a call go out with the next one.

    Without `linger_s` the batcher has no timer: a single item leaves at the end of the loop's next turn, and a thousand items
    of one turn leave together, unless another call carries them before (`take`). The order of the items is kept.

    Parameters:
        send: Performs one call. It returns the answer or the error of each item, in order, or raises PopError for all items.
        count_max: Maximum number of items in one call.
        size_max: Maximum size of one call, as the sum of `size_of`; 0 for no bound. A larger item goes alone.
        size_of: Returns the size of an item, such as its bytes.
        linger_s: How long a call that is not full waits for more items, in seconds.
    """

    def __init__(
        self,
        send: Callable[[list[Q]], Awaitable[list[A | PopError]]],
        *,
        count_max: int,
        size_max: int = 0,
        size_of: Callable[[Q], int] = lambda _: 0,
        linger_s: float = 0,
    ) -> None:
        self._send = send
        self._count_max = count_max
        self._size_max = size_max
        self._size_of = size_of
        self._linger_s = linger_s
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._waiting_size = 0
        """Size of the waiting items, counted only if calls linger."""
        self._hurried = 0
        """How many of the first waiting items go out without lingering."""
        self._is_due = asyncio.Event()
        """Set when the next call need not wait for more items."""
        self._sender: asyncio.Task[None] | None = None
        self._hold: asyncio.TimerHandle | None = None
        """While it is set, items wait for `take`, until `release` or this timer."""
        self._closed = False

    def submit(self, item: Q) -> asyncio.Future[A]:
        """Queue an item; return the future of its answer.

        Raises:
            ClientClosed: `close` was called.
        """
        if self._closed:
            raise ClientClosed(CLOSED)
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._linger_s:
            self._waiting_size += self._size_of(item)
            if self._is_full():
                self._is_due.set()
        self._ensure_sender()
        return future

    def _is_full(self) -> bool:
        """Return whether the waiting items fill a call."""
        return len(self._waiting) >= self._count_max or self._waiting_size >= self._size_max > 0

    def _ensure_sender(self) -> None:
        if self._sender is None and self._waiting and self._hold is None:
            self._sender = asyncio.get_running_loop().create_task(self._run())

    async def submit_all(self, items: Iterable[Q]) -> list[A | PopError]:
        """Queue many items; return the answer or the error of each, in order."""
        futures = [self.submit(item) for item in items]
        if futures:
            await asyncio.wait(futures)
        answers: list[A | PopError] = []
        for future in futures:
            error = future.exception()
            answers.append(error if isinstance(error, PopError) else future.result())
        return answers

    def take(self) -> list[tuple[Q, asyncio.Future[A]]]:
        """Remove and return the waiting items of one call, because another call carries them.

        The caller must pass the items to `answer` or to `put_back`.
        """
        return self._next_batch() if self._waiting else []

    def put_back(self, batch: list[tuple[Q, asyncio.Future[A]]]) -> None:
        """Send items from `take` before all others, because the call that carried them got no answer."""
        if self._closed:
            _fail(batch, NodeUnavailable(UNANSWERED))
            return
        self._waiting.extendleft(reversed(batch))
        if self._linger_s:
            self._waiting_size += sum(self._size_of(item) for item, _ in batch)
        self._ensure_sender()

    def hold(self, within_s: float) -> None:
        """Let items wait for `take` until `release` is called, or `within_s` seconds from now have passed."""
        if self._closed:
            return
        if self._hold is not None:
            self._hold.cancel()
        self._hold = asyncio.get_running_loop().call_later(within_s, self.release)

    def release(self) -> None:
        """End `hold`: what waits goes out at the end of the loop's next turn, unless it is taken before."""
        if self._hold is not None:
            self._hold.cancel()
            self._hold = None
            self._ensure_sender()

    def answer(self, batch: list[tuple[Q, asyncio.Future[A]]], answers: Iterable[A | PopError]) -> None:
        """Resolve the future of each item with its answer or its error."""
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue  # The task that waited was cancelled.
            if isinstance(answer, PopError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def close(self, within_s: float) -> None:
        """Accept no more items, and flush as `flush` does."""
        self._closed = True
        await self.flush(within_s)

    async def flush(self, within_s: float) -> None:
        """Return when all items are answered. Items without an answer after `within_s` seconds fail with NodeUnavailable."""
        self.release()
        sender = self._sender
        if sender is None:
            return
        self.hurry()
        _, late = await asyncio.wait((sender,), timeout=within_s)
        if late:
            sender.cancel()
            await asyncio.wait(late)

    def hurry(self) -> None:
        """Send the items that wait now without waiting for more."""
        self._hurried = len(self._waiting)
        self._is_due.set()

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)  # Callers of `take` run before.
            while self._waiting and self._hold is None:
                if self._linger_s:
                    await self._linger()
                await self._send_batch(self._next_batch())
        except BaseException:  # The client was closed, or the loop ends.
            _fail(self._waiting, NodeUnavailable(UNANSWERED))
            self._waiting.clear()
            self._waiting_size = self._hurried = 0
            raise
        finally:
            self._sender = None

    async def _linger(self) -> None:
        """Wait until the next call is full, but not for longer than `linger_s`."""
        if self._closed or self._hurried or self._is_full():
            return
        self._is_due.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._linger_s):
                await self._is_due.wait()

    def _next_batch(self) -> list[tuple[Q, asyncio.Future[A]]]:
        batch = [self._waiting.popleft()]
        size = self._size_of(batch[0][0])
        while self._waiting and len(batch) < self._count_max:
            size += self._size_of(self._waiting[0][0])
            if size > self._size_max > 0:
                break
            batch.append(self._waiting.popleft())
        if self._linger_s:
            self._waiting_size -= sum(self._size_of(item) for item, _ in batch)
            self._hurried = max(0, self._hurried - len(batch))
        return batch

    async def _send_batch(self, batch: list[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._send([item for item, _ in batch])
        except PopError as error:
            _fail(batch, error)
            return
        except BaseException:
            _fail(batch, NodeUnavailable(UNANSWERED))
            raise
        self.answer(batch, answers)


def _fail(batch: deque[tuple[Q, asyncio.Future[A]]] | list[tuple[Q, asyncio.Future[A]]], error: PopError) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
