"""One consumer of a running worker: slots that handle messages, and a watch that extends and ends their work."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.pop.client.client import Client
from penstock.pop.client.consumer import Consumer
from penstock.pop.client.message import Message, ack_together
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.errors import (
    ClientClosed,
    GroupExists,
    GroupUnknown,
    NodeUnavailable,
    NotAuthenticated,
    NotPermitted,
    Overloaded,
    PopError,
    RequestInvalid,
    StatusError,
)
from penstock.worker.consumerplan import POP_MAX, ConsumerPlan
from penstock.worker.context import CallNext, HandlerCall, Middleware
from penstock.worker.counts import WorkerCounts
from penstock.worker.errors import Reject, RetryLater, Undecodable
from penstock.worker.replies import Replies

logger = logging.getLogger("penstock.worker")

EXTEND_AT = 0.5
"""Part of the invisible time after which a message whose handler runs is extended."""

CHECKS = 10
"""How often the watch looks at the slots within one invisible time or timeout, whichever is shorter."""

CHECK_S_MAX = 1.0
AHEAD = 4
"""How many messages wait for each slot at most, unless that is less than `AHEAD_MIN`, or the handlers are very fast."""

AHEAD_MIN = 512
"""How many messages wait at most, however few slots there are."""

HOLD_S = 0.05
"""How long acknowledgements wait at most for the next pop to carry them, in seconds. That saves a call, a commit and a sync."""

YIELD_AFTER = 128
"""Messages after which the event loop gets a turn, even if no handler awaits anything. Otherwise nothing would be popped."""

HEALTHY_S = 0.5
"""A consumer that started again, was answered, and was not refused for so long is well."""

REPEATED_S = 30.0
"""A problem that stays is logged again after so many seconds."""

BLOCKED_S = 1.0
"""A watch that runs later than this was kept waiting by a handler that blocks the event loop."""


class WorkerSlot:
    """One of the places in which a consumer handles messages at a time."""

    __slots__ = ("began_s", "extension", "is_lost", "is_over", "is_settling", "messages", "task")

    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.messages: list[Message] = []
        """The messages that are not settled yet."""
        self.began_s = 0.0
        self.is_over = False
        """True if the handler has had its time, and the messages went back."""
        self.is_settling = False
        """True after the handler has ended, while the node hears what came of it."""
        self.is_lost = False
        """True after the node refused to extend a message, because it is over. Nothing tries again."""
        self.extension: asyncio.Task[None] | None = None


class RunningConsumer:
    """Runs one consumer of a worker until `stop`.

    Parameters:
        client: A client of the node.
        plan: What to consume, and how.
        executor: Runs handlers that are no coroutine functions. It must have a thread for each slot.
    """

    def __init__(
        self,
        client: Client,
        plan: ConsumerPlan,
        executor: ThreadPoolExecutor | None,
    ) -> None:
        self._client = client
        self._plan = plan
        self._handler = plan.handler
        self._executor = executor
        self.counts = WorkerCounts()
        self._replies = Replies(client, self.counts)
        self._call = self._chain()
        self._consumer: Consumer | None = None
        self._slots = [WorkerSlot() for _ in range(plan.concurrency)]
        self._stopping = asyncio.Event()
        self._opening = asyncio.Lock()
        self._delays = RetryDelays()
        self._refused = ""
        """Why the consumer had to start again; empty after the node has answered it, and not before `HEALTHY_S`."""
        self._warned = ""
        """Which problem was logged last."""
        self._warned_s = 0.0
        self._opened_s = math.inf
        """When the consumer was opened; infinity after it has failed."""
        self._fatal: PopError | None = None
        """Why the consumer can never get messages, and ends."""
        self._done: list[Message] = []
        """Messages that were handled in this turn of the loop."""
        self._since_turn = 0
        """Messages that were handled since the event loop had a turn."""
        self._demand = asyncio.Semaphore(0) if plan.on_demand else None

    @property
    def problem(self) -> str:
        """Why the consumer gets no messages now; empty if all is well."""
        return self._refused or (self._consumer.problem if self._consumer is not None else "the consumer has not started yet")

    @property
    def _is_answered(self) -> bool:
        return self._consumer is not None and self._consumer.was_answered

    @property
    def name(self) -> str:
        """Names the consumer: its group and filter."""
        return self._plan.name

    @property
    def busy(self) -> int:
        """Number of slots whose handler runs."""
        return sum(bool(slot.messages) for slot in self._slots)

    # --- the life of the consumer -----------------------------------------------------------------------------------

    async def open(self) -> None:
        """Create the group where it has settings, and begin to pop.

        Raises:
            PopError: The node refuses the group or the caller.
        """
        plan = self._plan
        if plan.settings is not None:
            groups = self._client.groups
            try:
                await groups.create(plan.group, plan.topic_filter, start=plan.start, settings=plan.settings)
            except GroupExists:
                await groups.update(plan.group, plan.settings, topic_filter=plan.topic_filter)
        consumer = self._client.consume(
            plan.topic_filter,
            group=plan.group,
            batch=POP_MAX,
            prefetch=max(AHEAD * plan.concurrency * max(self._handler.batch, 1), AHEAD_MIN),
            invisible=plan.invisible_s,
            start=plan.start,
            in_order_max=(self._handler.batch or AHEAD_MIN // 2) if plan.fifo else 1,
            first_max=plan.concurrency * max(self._handler.batch, 1),
            fast_max=2 * POP_MAX,
            ack_hold=HOLD_S,
        )
        consumer.problem = self._refused  # Its first poll is answered at once then, which says that all is well.
        await consumer.__aenter__()
        self._consumer = consumer
        self._opened_s = asyncio.get_running_loop().time()

    async def open_when_possible(self) -> None:
        """Open the consumer. While the node is away, is overloaded, or refuses the caller, this waits and tries again.

        Raises:
            PopError: The node refuses the group.
        """
        delays = RetryDelays()
        try:
            await self._client.check_reachable()
        except NodeUnavailable as error:  # `open` waits for it. Somebody who looks on wants to know that at once.
            self._warn(error, "the worker waits for it")
        while True:
            try:
                await self.open()
                self._refused = self._warned = ""
                return
            except (NodeUnavailable, Overloaded, NotAuthenticated, NotPermitted) as error:
                self._warn(error, "the worker tries again and again")
                await asyncio.sleep(delays.next_s())

    async def run(self) -> None:
        """Handle messages until `stop`. What a slot or the watch raises is a defect, and is raised here.

        Raises:
            RequestInvalid: The node has never answered a pop, because the filter or the name of the group is not valid.
        """
        loop = asyncio.get_running_loop()
        pending = set()
        for slot in self._slots:
            slot.task = loop.create_task(self._work(slot))
            pending.add(slot.task)
        watch = loop.create_task(self._watch())
        try:
            while pending:
                ended, pending = await asyncio.wait({*pending, watch}, return_when=asyncio.FIRST_COMPLETED)
                pending.discard(watch)
                for task in ended:
                    if not task.cancelled():
                        task.result()
            if self._fatal is not None:
                raise self._fatal
        finally:
            watch.cancel()
            await asyncio.wait((watch,))

    def admit(self) -> None:
        """Let one more slot take messages, once. For a plan that says `on_demand`."""
        assert self._demand is not None
        self._demand.release()

    def take_no_more(self) -> None:
        """Take no more messages. `stop` must follow."""
        self._stopping.set()
        if self._demand is not None:
            for _ in self._slots:
                self._demand.release()

    async def return_unseen(self) -> None:
        """Take no more messages, and return uncounted those that no handler has seen. `stop` must follow."""
        self.take_no_more()
        if self._consumer is not None:
            await self._consumer.aclose()

    async def stop(self, grace_s: float) -> None:
        """Take no more messages, let handlers end within `grace_s` seconds, and return all other messages uncounted."""
        await self.return_unseen()
        consumer = self._consumer
        tasks = [slot.task for slot in self._slots if slot.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=grace_s)
            for slot in self._slots:
                if slot.task in late:
                    logger.warning(
                        "%s: %s did not end within the grace of %g s; its messages go back",
                        self._plan.name,
                        self._handler.name,
                        grace_s,
                    )
                    await self._give_back(slot)
                    slot.task.cancel()
            if late and self._handler.is_async:
                await asyncio.wait(late, timeout=1.0)  # A handler that swallows its cancellation must not stop the process.
        if consumer is not None:
            self._ack_done()
            await consumer.__aexit__(None, None, None)

    async def _give_back(self, slot: WorkerSlot) -> None:
        messages, slot.messages, slot.is_over = slot.messages, [], True
        self.counts.returned += len(messages)
        await self._settled(*(message.suspend() for message in messages if not message.is_settled))

    async def _reopen(self, failed: Consumer | None, error: PopError) -> None:
        """Start again after the consumer failed, for example because its group was deleted."""
        async with self._opening:
            if self._consumer is not failed or self._stopping.is_set():
                return
            if isinstance(error, RequestInvalid) and failed is not None and not failed.was_answered:
                self._fatal = error  # No later try can succeed.
                self.take_no_more()
                return
            self.counts.reconnects += 1
            self._opened_s = math.inf
            wait_s = self._delays.next_s()
            if isinstance(error, ClientClosed):
                logger.error("%s: %s; the worker tries again in %.2f s", self._plan.name, error, wait_s)
            elif isinstance(error, GroupUnknown):
                start = self._plan.start
                at = f"the {start} message" if isinstance(start, str) else f"the messages of {start} ms since 1970"
                self._warn(error, f"the worker begins anew, and a group that it creates begins with {at}")
            else:
                self._warn(error, "the worker tries again and again")
            if failed is not None:
                await failed.aclose()
            try:
                async with asyncio.timeout(wait_s):
                    await self._stopping.wait()
                return
            except TimeoutError:
                pass
            try:
                await self.open()
            except PopError as again:
                self._warn(again, "the worker tries again and again")  # The next slot does.

    def _warn(self, error: PopError, outcome: str) -> None:
        """Note why the consumer gets no messages. Log it, unless the same was logged within `REPEATED_S`."""
        now_s = asyncio.get_running_loop().time()
        self._refused = str(error)
        if self._refused != self._warned or now_s >= self._warned_s + REPEATED_S:
            self._warned, self._warned_s = self._refused, now_s
            logger.warning("%s: %s; %s", self.name, error, outcome)

    # --- slots ------------------------------------------------------------------------------------------------------

    async def _work(self, slot: WorkerSlot) -> None:
        time_s = asyncio.get_running_loop().time
        count = self._handler.batch or 1
        while not self._stopping.is_set():
            if self._demand is not None:
                await self._demand.acquire()
                if self._stopping.is_set():
                    return
            consumer = self._consumer
            assert consumer is not None
            messages = consumer.take_now(count) or await self._take(count)
            if not messages:
                return
            slot.began_s = began_s = time_s()
            if len(messages) > 1 and not self._handler.batch:
                await self._handle_in_order(slot, messages)
            else:
                slot.messages = messages
                await self._handle(slot, messages)
                slot.messages = []
            takers = len(self._slots) if self._demand is None else self.busy + 1
            consumer.handled(time_s() - began_s, takers)
            self._since_turn += len(messages)
            if self._since_turn >= YIELD_AFTER:
                self._since_turn = 0
                await asyncio.sleep(0)

    async def _take(self, count: int) -> list[Message]:
        """Return messages as soon as there are any; none when the consumer stops."""
        while not self._stopping.is_set():
            consumer = self._consumer
            assert consumer is not None
            try:
                messages = await consumer.take(count)
            except ClientClosed as error:
                if not self._stopping.is_set():
                    await self._reopen(consumer, error)
                continue
            except PopError as error:
                await self._reopen(consumer, error)
                continue
            if messages is not None:
                return messages
            if not self._stopping.is_set():
                await self._reopen(consumer, ClientClosed("the consumer was closed"))
        return []

    async def _handle_in_order(self, slot: WorkerSlot, messages: list[Message]) -> None:
        """Handle messages of one message group, one after the other."""
        slot.messages = messages[:]
        time_s = asyncio.get_running_loop().time
        for at, message in enumerate(messages):
            if at:
                slot.began_s = time_s()
            if at and self._stopping.is_set():
                break
            may_follow = await self._handle(slot, [message])
            del slot.messages[:1]
            if not may_follow:
                break
        if slot.messages:  # They wait for the message before them, or the worker stops.
            await self._give_back(slot)

    async def _handle(self, slot: WorkerSlot, messages: list[Message]) -> bool:
        """Call the handler with its messages and settle them; return whether the messages after them may follow."""
        try:
            bodies = self._handler.bodies_of(messages)
        except Exception:  # The slow way finds out which message it was.
            messages, bodies, may_follow = await self._decoded(messages)
            if self._handler.batch:
                slot.messages = messages
            if not messages:
                return may_follow
        slot.is_over = slot.is_settling = slot.is_lost = False
        call = HandlerCall(messages, bodies, self._handler.name, self._plan.group)
        try:
            result = await self._call(call)
        except asyncio.CancelledError:
            if not slot.is_over:
                raise  # The event loop ends.
            task = asyncio.current_task()
            if task is not None:
                task.uncancel()
            return False
        except Exception as error:
            slot.is_settling = True
            if slot.extension is not None:
                await slot.extension
            if not slot.is_over:
                await self._failed(messages, error)
            return isinstance(error, Reject)
        slot.is_settling = True
        if slot.extension is not None:
            await slot.extension
        if slot.is_over:
            # It was in a thread that went on after its timeout, or it ignored its cancellation: the messages went back.
            self.counts.late += len(messages)
            return False
        if result is not None and not await self._answered(messages, result):
            return False
        self.counts.handled += len(messages)
        may_follow = True
        for message in messages:
            if message.is_settled:
                may_follow = may_follow and not message.went_back
            elif self._handler.settles:
                may_follow = False
        if not self._handler.settles:
            self._ack(messages)
        return may_follow

    async def _answered(self, messages: list[Message], result: Any) -> bool:
        """Send the result of a handler as the reply that its message asks for; return whether the messages are handled."""
        try:
            await self._replies.send(messages, result, self._handler.name)
        except Exception as error:
            await self._failed(messages, error)
            return False
        return True

    def _ack(self, messages: list[Message]) -> None:
        """Acknowledge what was handled, together with all that is handled in this turn of the loop."""
        if not self._done:
            asyncio.get_running_loop().call_soon(self._ack_done)
        for message in messages:
            if not message.is_settled:
                message.is_settled = True
                self._done.append(message)

    def _ack_done(self) -> None:
        done, self._done = self._done, []
        if done:
            ack_together(done).add_done_callback(self._acked)

    def _acked(self, acked: asyncio.Future[Any]) -> None:
        """Count and log the messages that were not acknowledged."""
        if acked.cancelled():
            return
        error = acked.exception()
        errors = [error] if error is not None else [each for each in acked.result() if each is not None]
        if errors:
            self.counts.late += len(errors)
            logger.warning("%s: %d acknowledgements came too late or failed: %s", self._plan.name, len(errors), errors[0])

    # --- failures ---------------------------------------------------------------------------------------------------

    async def _failed(self, messages: list[Message], error: Exception) -> None:
        """Settle messages whose handler raised."""
        if isinstance(error, Reject):
            await self._dead_letter(messages, str(error) or "the handler rejected the message")
            return
        self.counts.failed += len(messages)
        delay = error.delay if isinstance(error, RetryLater) else 0.0
        message = messages[0]
        logger.warning(
            "%s: %s failed for %d messages from %r, attempt %d: %s: %s",
            self._plan.name,
            self._handler.name,
            len(messages),
            message.topic,
            message.attempt,
            type(error).__name__,
            error,
            exc_info=None if isinstance(error, RetryLater) else error,
        )
        reason = f"{type(error).__name__}: {error}"
        await self._settled(*(message.nack(delay=delay, reason=reason) for message in messages if not message.is_settled))

    async def _decoded(self, messages: list[Message]) -> tuple[list[Message], list[Any], bool]:
        """Decode messages, and settle those that can't be.

        A codec that raises something else than Undecodable has failed, which says nothing about the message.

        Returns:
            The other messages, their bodies, and whether messages that come after them in order may follow.
        """
        good: list[Message] = []
        bodies: list[Any] = []
        may_follow = True
        for message in messages:
            try:
                body = self._handler.body_of(message)
            except Undecodable as error:
                self.counts.undecodable += 1
                await self._dead_letter([message], str(error))
            except Exception as error:
                may_follow = False
                await self._failed([message], error)
            else:
                good.append(message)
                bodies.append(body)
        return good, bodies, may_follow

    async def _dead_letter(self, messages: list[Message], reason: str) -> None:
        for message in messages:
            logger.error(
                "%s: message %s from %r becomes a dead letter: %s",
                self._plan.name,
                message.message_id,
                message.topic,
                reason,
            )
        self.counts.dead_lettered += len(messages)
        await self._settled(*(message.dead_letter(reason=reason) for message in messages if not message.is_settled))

    async def _settled(self, *settling: Awaitable[None]) -> list[PopError]:
        """Await calls about messages; return the errors of those whose messages come back at their deadlines."""
        failed: list[PopError] = []
        for error in await asyncio.gather(*settling, return_exceptions=True):
            if isinstance(error, PopError):
                logger.warning("%s: a message comes back at its deadline: %s", self._plan.name, error)
                failed.append(error)
            elif isinstance(error, BaseException):
                raise error
        return failed

    # --- the watch --------------------------------------------------------------------------------------------------

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        plan = self._plan
        interval_s = min(plan.invisible_s / CHECKS, plan.timeout_s / CHECKS, CHECK_S_MAX)
        while True:
            due_s = loop.time() + interval_s
            await asyncio.sleep(interval_s)
            now_s = loop.time()
            if now_s - due_s > BLOCKED_S:
                logger.warning(
                    "%s: something blocked the event loop for %.1f s, so messages could not be extended; let %s await, or be "
                    "a plain function, which runs in a thread",
                    plan.name,
                    now_s - due_s,
                    self._handler.name,
                )
            if self._refused and self._is_answered and now_s - self._opened_s > HEALTHY_S:
                logger.info("%s: gets messages again", plan.name)
                self._refused = self._warned = ""
                self._delays.reset()
            for slot in self._slots:
                if not slot.messages or slot.is_over or slot.is_settling:
                    continue
                if now_s - slot.began_s >= plan.timeout_s:
                    await self._time_out(slot)
                elif (
                    slot.extension is None
                    and not slot.is_lost
                    and slot.messages[0].deadline - now_s < EXTEND_AT * plan.invisible_s
                ):
                    slot.extension = loop.create_task(self._extend(slot))

    async def _time_out(self, slot: WorkerSlot) -> None:
        """End the work of a handler that takes too long. The message that it has failed; those after it did not."""
        messages, slot.messages, slot.is_over = slot.messages, [], True
        failed = messages if self._handler.batch else messages[:1]
        rest = messages[len(failed) :]
        self.counts.failed += len(failed)
        self.counts.timed_out += len(failed)
        logger.warning(
            "%s: %s did not end within its timeout of %g s; its messages go back%s",
            self._plan.name,
            self._handler.name,
            self._plan.timeout_s,
            "" if self._handler.is_async else ", and its thread stays busy until it returns",
        )
        if self._handler.is_async and slot.task is not None:
            slot.task.cancel()
        reason = f"the handler did not end within its timeout of {self._plan.timeout_s:g} s"
        await self._settled(
            *(message.nack(reason=reason) for message in failed if not message.is_settled),
            *(message.suspend() for message in rest),
        )

    async def _extend(self, slot: WorkerSlot) -> None:
        """Move the deadlines of a slot's messages."""
        messages = list(slot.messages)
        try:
            extending = [message.extend(self._plan.invisible_s) for message in messages if not message.is_settled]
            failed = await self._settled(*extending)
            self.counts.extended += len(extending) - len(failed)
            slot.is_lost = any(isinstance(error, StatusError) for error in failed)
        finally:
            slot.extension = None

    # --- calling the handler ----------------------------------------------------------------------------------------

    def _chain(self) -> CallNext:
        call: CallNext = self._call_async if self._handler.is_async else self._call_in_thread
        for middleware in reversed(self._plan.middleware):
            call = _surrounded(call, middleware)
        return call

    async def _call_async(self, call: HandlerCall) -> Any:
        return await self._handler.function(*self._handler.arguments(call.messages, call.bodies))

    async def _call_in_thread(self, call: HandlerCall) -> Any:
        arguments = self._handler.arguments(call.messages, call.bodies)
        result = await asyncio.get_running_loop().run_in_executor(self._executor, self._handler.function, *arguments)
        return await result if asyncio.iscoroutine(result) else result


def _surrounded(call: CallNext, middleware: Middleware) -> CallNext:
    async def surrounded(made: HandlerCall) -> Any:
        return await middleware(made, call)

    return surrounded
