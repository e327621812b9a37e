"""The worker: an application's consumers, and how they run."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration, positive_seconds, seconds
from penstock.pop.client.requests import Start
from penstock.pop.client.results import GroupSettings
from penstock.pop.client.security import Security, node_of
from penstock.pop.client.tracing import Tracing
from penstock.pop.errors import ClientClosed
from penstock.worker.codecs import Codec
from penstock.worker.consumerplan import ConsumerPlan
from penstock.worker.context import Middleware, check_middleware
from penstock.worker.counts import WorkerCounts
from penstock.worker.deadletterhooks import DeadLetterHook, hook_plans
from penstock.worker.errors import WorkerError
from penstock.worker.handler import handler_of
from penstock.worker.middleware.tracing import TraceCalls
from penstock.worker.runningconsumer import RunningConsumer

logger = logging.getLogger("penstock.worker")

F = TypeVar("F", bound=Callable[..., Any])
Hook = Callable[[], Awaitable[None] | None]

"""Environment variable with the node's address, for workers that are made without one."""


class Worker:
    """An application's consumers. `penstock worker module:app` runs them, or `await app.run()`.

        from penstock import Worker

        app = Worker("127.0.0.1:8081")

        @app.consumer("plant/+/temperature", group="billing")
        async def bill(reading: dict) -> None:
            ...

    A handler that returns acknowledges its message. One that raises returns the message as a failed attempt, and the group's
    back-off applies; `Reject` makes a dead letter of the message, `RetryLater` returns it with a delay. While a handler runs,
    its message is extended. A body that can't be decoded makes a dead letter. The worker waits for the node while it is away.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener. By default that of PENSTOCK_TARGET, else of the
            current context, else `127.0.0.1:8081`.
        security: TLS and token. None: those of the environment, see `Security`.
        middleware: Surround the calls of all handlers. The first is the outermost.
        grace: Time that running handlers have to end when the worker stops, in seconds or as a timedelta. Then their messages
            go back, which counts no attempt.
        tracing: Makes spans of OpenTelemetry of what the worker receives, handles and settles, outside of all middlewares.
    """

    def __init__(
        self,
        target: str = "",
        *,
        security: Security | None = None,
        middleware: Sequence[Middleware] = (),
        grace: Duration = 30.0,
        tracing: Tracing | None = None,
    ) -> None:
        self._grace_s = seconds(grace, "grace")
        self.target, self._security = node_of(target or None, security)
        """Address of the node."""
        self._tracing = tracing
        self._middleware = check_middleware(middleware)
        if tracing is not None:
            self._middleware.insert(0, TraceCalls(tracing=tracing))
        self._plans: list[ConsumerPlan] = []
        self._dead_letter_hooks: list[DeadLetterHook] = []
        self._start_hooks: list[Hook] = []
        self._stop_hooks: list[Hook] = []
        self._running: list[RunningConsumer] = []
        self._stop = asyncio.Event()
        self._client: Client | None = None

    # --- what the application says ----------------------------------------------------------------------------------

    def consumer(
        self,
        topic_filter: str,
        *,
        group: str,
        concurrency: int = 16,
        timeout: Duration = 60.0,
        batch: int = 0,
        fifo: bool = False,
        codec: Codec | None = None,
        invisible: Duration = 30.0,
        start: Start = "earliest",
        settings: GroupSettings | None = None,
        middleware: Sequence[Middleware] = (),
    ) -> Callable[[F], F]:
        """Return a decorator that makes a function the handler of a group.

        The function takes the body, the message, or both, in any order: the argument that is annotated with `Message` gets the
        message. The annotation of the other one says what the body is (`penstock.worker.codecs`). A coroutine function runs on
        the event loop. A plain function runs in a thread, and must not call the methods of the message.

        Args:
            topic_filter: MQTT topic filter (MQTT 5.0, 4.7), or `$dlq/GROUP` for the dead letters of another group.
            group: Name of the group.
            concurrency: Maximum number of calls at a time, 1 to 10,000. Plain functions have as many threads.
            timeout: Time after which a call is cancelled and its message goes back as a failed attempt, in seconds or as a
                timedelta, above 0. A thread can't be cancelled: it stays busy, and its message goes back all the same.
            batch: The function takes lists, of up to so many messages, 1 to 1,024. 0: it takes one message.
            fifo: The group is in FIFO order. Messages of one message group are handled one after the other, in their order, and
                those after a failed one wait for it.
            codec: Decodes the body, instead of what the annotation says.
            invisible: Time in which a message comes back if the worker dies, in seconds or as a timedelta, 0.1 to 43,200
                seconds. Running calls are extended.
            start: Where the group starts if this worker creates it, as for `Client.consume`.
            settings: Settings of the group, from `group_settings`. The worker creates the group with them, or changes it.
            middleware: Surround the calls of this handler, inside those of the worker.

        Raises:
            HandlerInvalid: The function or the codec can't be used.
            TypeError: A middleware can't be called, or a duration is none.
            ValueError: A number or a duration is out of its bounds.
        """
        if fifo:
            settings = GroupSettings(fifo=True) if settings is None else replace(settings, fifo=True)

        inner = check_middleware(middleware)
        timeout_s, invisible_s = positive_seconds(timeout, "timeout"), seconds(invisible, "invisible")

        def register(function: F) -> F:
            plan = ConsumerPlan(
                topic_filter=topic_filter,
                group=group,
                handler=handler_of(function, batch=batch, codec=codec),
                concurrency=concurrency,
                timeout_s=timeout_s,
                invisible_s=invisible_s,
                fifo=fifo,
                start=start,
                settings=settings,
                middleware=(*self._middleware, *inner),
            )
            self._plans.append(plan)
            return function

        return register

    def on_dead_letter(self, hook: DeadLetterHook) -> DeadLetterHook:
        """Call a function with each dead letter of the worker's groups, and with the reason. Usable as a decorator.

        The reason is what the last attempt raised, what `Reject` says, or that the message was never acknowledged. `origin` of
        the message says more. Of several workers one calls the function. If it raises, it is called again later, as a handler
        is. The worker consumes `$dlq/GROUP` as the group `GROUP.on-dead-letter`, which begins when the first worker with such a
        function starts, and needs the right to consume that.
        """
        self._dead_letter_hooks.append(hook)
        return hook

    def on_start(self, hook: Hook) -> Hook:
        """Call a function before the first message is taken, for example to open a database. Usable as a decorator."""
        self._start_hooks.append(hook)
        return hook

    def on_stop(self, hook: Hook) -> Hook:
        """Call a function after the last message was settled. Usable as a decorator."""
        self._stop_hooks.append(hook)
        return hook

    # --- running ----------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client of the running worker, with which handlers may send messages.

        Raises:
            ClientClosed: The worker is not running.
        """
        if self._client is None:
            raise ClientClosed("the worker is not running: its client exists while it runs")
        return self._client

    @property
    def counts(self) -> dict[str, WorkerCounts]:
        """What each consumer has done, by group and filter."""
        return {consumer.name: consumer.counts for consumer in self._running}

    @property
    def problems(self) -> dict[str, str]:
        """Why consumers get no messages now, by group and filter. Empty if all is well."""
        return {consumer.name: consumer.problem for consumer in self._running if consumer.problem}

    @property
    def busy(self) -> int:
        """Number of calls of handlers that are running."""
        return sum(consumer.busy for consumer in self._running)

    def stop(self) -> None:
        """Stop taking messages. `run` returns when the handlers have ended, or their grace is over.

        A worker that does not run yet ends as soon as it starts.
        """
        self._stop.set()
        for consumer in self._running:
            consumer.take_no_more()

    async def run(self, *, handle_signals: bool = True) -> None:
        """Run all consumers until `stop`, SIGTERM or SIGINT.

        Args:
            handle_signals: Stop at SIGTERM and SIGINT. Only the main thread may handle signals.

        Raises:
            WorkerError: The worker has no consumer, or the name of a group is too long for `on_dead_letter`.
            PopError: The node refuses a group or a filter. While it is away, or refuses the caller, the worker waits and tries
                again.
        """
        if not self._plans:
            raise WorkerError("the worker has no consumer: decorate a function with @app.consumer(...)")
        loop = asyncio.get_running_loop()
        handled = (signal.SIGTERM, signal.SIGINT) if handle_signals else ()
        for number in handled:
            loop.add_signal_handler(number, self.stop)
        threads = sum(each.concurrency for each in self._plans if not each.handler.is_async)
        executor = ThreadPoolExecutor(threads, "penstock-worker") if threads else None
        try:
            async with Client(self.target, security=self._security, tracing=self._tracing) as client:
                self._client = client
                for hook in self._start_hooks:
                    await _called(hook)
                try:
                    await self._run(client, executor)
                finally:
                    for hook in self._stop_hooks:
                        await _called(hook)
        finally:
            self._client = None
            self._stop.clear()
            for number in handled:
                loop.remove_signal_handler(number)
            if executor is not None:
                executor.shutdown(wait=False, cancel_futures=True)

    async def _run(self, client: Client, executor: ThreadPoolExecutor | None) -> None:
        consumers = [RunningConsumer(client, plan, executor) for plan in self._plans]
        hooking = [RunningConsumer(client, plan, executor) for plan in hook_plans(self._plans, self._dead_letter_hooks)]
        self._running = [*consumers, *hooking]
        stopping = asyncio.create_task(self._stop.wait())
        running: list[asyncio.Task[None]] = []
        try:
            # What hinders the hooks, such as a right that is missing, does not keep the others from their messages.
            running = [asyncio.create_task(_open_and_run(consumer)) for consumer in hooking]
            opening = asyncio.gather(*(consumer.open_when_possible() for consumer in consumers))
            await asyncio.wait((opening, stopping), return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
                return
            opening.result()
            logger.info("the worker handles %s of the node at %s", ", ".join(each.name for each in self._plans), self.target)
            running += [asyncio.create_task(consumer.run()) for consumer in consumers]
            await asyncio.wait((*running, stopping), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            await asyncio.gather(*(consumer.stop(self._grace_s) for consumer in self._running))
            for task in running:
                if not task.done():
                    task.cancel()
            for ended in await asyncio.gather(*running, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended


async def _open_and_run(consumer: RunningConsumer) -> None:
    await consumer.open_when_possible()
    await consumer.run()


async def _called(hook: Hook) -> None:
    returned = hook()
    if returned is not None:
        await returned
