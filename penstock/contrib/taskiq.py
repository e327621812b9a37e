"""A broker for taskiq: its tasks are messages of a topic, and its workers are consumers of a group.

    from penstock.contrib.taskiq import PenstockTasks

    broker = PenstockTasks("127.0.0.1:8081")

    @broker.task
    async def bill(press: int, celsius: float) -> None:
        ...

    await bill.kiq(7, 21.5)
    await bill.kicker().with_labels(delay=60).kiq(7, 21.5)

A task is acknowledged when taskiq says so. Until then its message is extended, so a task may run for any time, and the tasks of
a process that dies come back. What a process that stops has not begun goes back at once, and no attempt is counted.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from taskiq import AckableMessage, AsyncBroker, BrokerMessage, ScheduleSource
from taskiq.kicker import AsyncKicker
from taskiq.scheduler.scheduled_task import ScheduledTask

from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.message import Message
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.producer import Producer
from penstock.pop.client.requests import Start
from penstock.pop.client.results import GroupSettings
from penstock.pop.client.security import Security, node_of
from penstock.pop.client.tracing import Tracing
from penstock.pop.errors import AlreadyFired, AlreadyRecalled, ClientClosed
from penstock.worker.consumerplan import ConsumerPlan
from penstock.worker.handler import MESSAGE, Handler
from penstock.worker.runningconsumer import RunningConsumer

logger = logging.getLogger("penstock.taskiq")

DELAY = "delay"
"""Label of a task: time until it is delivered, as a number of seconds or a timedelta. taskiq's own retries use it."""

MESSAGE_GROUP = "message_group"
"""Label of a task: groups in FIFO order run the tasks of one message group one after the other."""


@dataclass(slots=True, eq=False)
class HeldTask:
    """A task that this process has, from its delivery until it is settled."""

    message: Message
    settled: asyncio.Future[None]
    """Done when taskiq has acknowledged the task, or when it must go back."""

    async def ack(self) -> None:
        """Acknowledge the task; return when that is durable. Acknowledging twice does nothing.

        Raises:
            StatusError, NodeUnavailable: The node refused it, or did not answer. The task may run again.
        """
        if self.message.is_settled:
            return
        try:
            await self.message.ack()
        finally:
            self.give_up()

    def give_up(self) -> None:
        """Hold the task no longer. Unless it is acknowledged it goes back, and no attempt is counted."""
        if not self.settled.done():
            self.settled.set_result(None)


class TaskListener:
    """What one `listen` of a broker has taken: tasks that nobody has asked for yet, and tasks that run.

    Parameters:
        client: A client of the node.
        topic, group, held_max, invisible, start, settings: As for `PenstockTasks`.
    """

    def __init__(
        self,
        client: Client,
        *,
        topic: str,
        group: str,
        held_max: int,
        invisible: Duration,
        start: Start,
        settings: GroupSettings | None,
    ) -> None:
        self._taken: asyncio.Queue[HeldTask] = asyncio.Queue()
        self._held: set[HeldTask] = set()
        self._is_over = False
        plan = ConsumerPlan(
            topic_filter=topic,
            group=group,
            handler=Handler(self._hold, "taskiq", True, (MESSAGE,), None, 0, settles=True),
            concurrency=held_max,
            timeout_s=math.inf,
            invisible_s=seconds(invisible, "invisible"),
            fifo=False,
            start=start,
            settings=settings,
            middleware=(),
            on_demand=True,
        )
        self._consumer = RunningConsumer(client, plan, None)
        self._running: asyncio.Task[None] | None = None

    @property
    def problem(self) -> str:
        """Why no tasks come now; empty if all is well."""
        return self._consumer.problem

    async def open(self) -> None:
        """Begin to consume. This waits while the node is away, or refuses the caller.

        Raises:
            PopError: The node refuses the group.
        """
        await self._consumer.open_when_possible()
        self._running = asyncio.create_task(self._consumer.run())

    async def next(self) -> HeldTask:
        """Return the next task as soon as there is one."""
        assert self._running is not None
        self._consumer.admit()
        taken = asyncio.ensure_future(self._taken.get())
        try:
            await asyncio.wait((taken, self._running), return_when=asyncio.FIRST_COMPLETED)
            if not taken.done():
                self._running.result()  # A defect of the consumer, if it raises.
                raise ClientClosed("the broker was shut down while taskiq listened")
            return taken.result()
        except asyncio.CancelledError:
            if taken.done() and not taken.cancelled():
                self._taken.put_nowait(taken.result())  # `return_unseen` gives it back.
            raise
        finally:
            taken.cancel()

    async def return_unseen(self) -> None:
        """Take no more tasks, and return uncounted those that nobody has asked for. Others can still be acknowledged."""
        self._is_over = True
        while not self._taken.empty():
            self._taken.get_nowait().give_up()
        await self._consumer.return_unseen()

    async def close(self) -> None:
        """Return all tasks that are not acknowledged. No attempt is counted."""
        await self.return_unseen()
        for held in self._held:
            held.give_up()
        await self._consumer.stop(CLOSE_S)
        if self._running is not None:
            await asyncio.wait((self._running,))

    async def _hold(self, message: Message) -> None:
        if self._is_over:
            await message.suspend()
            return
        held = HeldTask(message, asyncio.get_running_loop().create_future())
        self._held.add(held)
        self._taken.put_nowait(held)
        try:
            await held.settled
        finally:
            self._held.discard(held)
        if not message.is_settled:
            await message.suspend()


CLOSE_S = 2.0
"""How long a listener that closes waits for the node's answers, in seconds."""


class PenstockTasks(AsyncBroker):
    """taskiq's broker for one node. Processes that send tasks and workers use it alike.

    Labels of a task: `delay` in seconds or as a timedelta, and `message_group` for groups in FIFO order. The others are
    taskiq's, such as `timeout`, which ends a task that hangs.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener. By default that of PENSTOCK_TARGET, else of the
            current context, else `127.0.0.1:8081`.
        topic: MQTT topic of the tasks.
        group: Name of the group. Workers of one group share the tasks.
        security: TLS and token. None: those of the environment, see `Security`.
        tracing: Makes spans of OpenTelemetry of what the broker sends, receives and settles.
        invisible: Time in which tasks come back if the process dies, in seconds or as a timedelta, 0.1 to 43,200 seconds.
            Tasks that run are extended.
        held_max: Maximum number of tasks that one listener holds, 1 to 10,000. It must be at least taskiq's
            `--max-async-tasks` and `--max-prefetch` together.
        start: Where the group starts if a worker creates it, as for `Client.consume`.
        settings: Settings of the group, from `group_settings`. Workers create the group with them, or change it.
    """

    def __init__(
        self,
        target: str = "",
        *,
        topic: str = "tasks",
        group: str = "tasks",
        security: Security | None = None,
        tracing: Tracing | None = None,
        invisible: Duration = 30.0,
        held_max: int = 1_000,
        start: Start = "earliest",
        settings: GroupSettings | None = None,
    ) -> None:
        super().__init__()
        self._target, self._security = node_of(target or None, security)
        self._topic = topic
        self._group = group
        self._tracing = tracing
        self._invisible = invisible
        self._held_max = held_max
        self._start: Start = start
        self._settings = settings
        self._client: Client | None = None
        self._producer: Producer | None = None
        self._listeners: set[TaskListener] = set()

    @property
    def client(self) -> Client:
        """The client of the broker that was started, for what taskiq has no words for.

        Raises:
            ClientClosed: The broker was not started, or was shut down.
        """
        if self._client is None:
            raise ClientClosed("the broker has not started: await broker.startup()")
        return self._client

    @property
    def problems(self) -> list[str]:
        """Why no tasks come now. Empty if all is well."""
        return [listener.problem for listener in self._listeners if listener.problem]

    async def startup(self) -> None:
        """Open the client, and run taskiq's hooks. A second call without a shutdown opens no second client."""
        if self._client is None:
            self._client = Client(self._target, security=self._security, tracing=self._tracing)
            self._producer = self._client.producer()
        await super().startup()

    async def shutdown(self) -> None:
        """Run taskiq's hooks, return the tasks that are not acknowledged, and close the client."""
        await super().shutdown()
        listeners, self._listeners = self._listeners, set()
        await asyncio.gather(*(listener.close() for listener in listeners))
        client, self._client, self._producer = self._client, None, None
        if client is not None:
            await client.aclose()

    async def kick(self, message: BrokerMessage) -> None:
        """Send a task; return when it is durable. It is stored once, also if the node restarts meanwhile.

        Raises:
            ValueError: The label `delay` is no duration.
            StatusError: The node refused the task.
            SendOutcomeUnknown: The node did not answer for two minutes, and the task may be stored.
        """
        await self.send(message)

    async def send(self, message: BrokerMessage, deliver_at: datetime | None = None) -> SendReceipt:
        """Send a task, and return its receipt. Raises as `kick`.

        Args:
            message: The task.
            deliver_at: When to deliver it, instead of the delay that its label says.
        """
        self.client.check_open()
        assert self._producer is not None
        delay = message.labels.get(DELAY)
        outgoing = OutgoingMessage(
            topic=self._topic,
            body=message.message,
            properties={"task_name": message.task_name, "task_id": message.task_id},
            message_group=str(message.labels.get(MESSAGE_GROUP) or ""),
            delay=_delay(delay) if delay and deliver_at is None else 0.0,
            deliver_at_ms=round(deliver_at.timestamp() * 1000) if deliver_at is not None else 0,
        )
        return await (await self._producer.post(outgoing))

    async def listen(self) -> AsyncGenerator[AckableMessage, None]:
        """Yield tasks, as many as taskiq asks for. While the node is away, this waits for it."""
        listener = TaskListener(
            self.client,
            topic=self._topic,
            group=self._group,
            held_max=self._held_max,
            invisible=self._invisible,
            start=self._start,
            settings=self._settings,
        )
        self._listeners.add(listener)
        try:
            await listener.open()
            while True:
                held = await listener.next()
                yield AckableMessage(data=held.message.body, ack=held.ack)
        finally:
            await listener.return_unseen()  # `shutdown` closes it: tasks that run are acknowledged until then.


class PenstockSchedules(ScheduleSource):
    """A source for schedules of taskiq that have one time: the node keeps them, and delivers the tasks itself.

        schedules = PenstockSchedules(broker)
        schedule = await bill.schedule_by_time(schedules, datetime.now(UTC) + timedelta(hours=1), 7, 21.5)
        await schedule.unschedule()

    No scheduler process is needed. Schedules by cron or interval need another source, such as taskiq's LabelScheduleSource.

    Parameters:
        broker: Sends the tasks.
    """

    def __init__(self, broker: PenstockTasks) -> None:
        self._broker = broker

    async def get_schedules(self) -> list[ScheduledTask]:
        """Return nothing: the node sends the tasks when they are due, and not a scheduler."""
        return []

    async def add_schedule(self, schedule: ScheduledTask) -> None:
        """Send a task that is delivered at its time. The id of the schedule becomes the handle that cancels it.

        Raises:
            ValueError: The schedule has no time, or the time has no time zone.
            PopError: As `PenstockTasks.kick`.
        """
        if schedule.time is None:
            raise ValueError(
                f"the schedule of {schedule.task_name} has a cron expression or an interval: this source takes a time only"
            )
        if schedule.time.tzinfo is None:
            raise ValueError(f"the time {schedule.time} has no time zone: use for example datetime.now(UTC)")
        kicker: AsyncKicker[Any, Any] = AsyncKicker(schedule.task_name, self._broker, dict(schedule.labels))
        message = kicker.with_task_id(schedule.task_id)._prepare_message(*schedule.args, **schedule.kwargs)
        receipt = await self._broker.send(self._broker.formatter.dumps(message), schedule.time)
        schedule.schedule_id = receipt.recall_handle or schedule.schedule_id

    async def delete_schedule(self, schedule_id: str) -> None:
        """Cancel a task before it is delivered. Nothing happens if it was delivered or cancelled already.

        Raises:
            InvalidHandle: The id is none that `add_schedule` has made.
            NodeUnavailable: The node did not answer. It may have cancelled the task.
        """
        try:
            await self._broker.client.recall(schedule_id)
        except (AlreadyFired, AlreadyRecalled) as error:
            logger.info("a schedule is over: %s", error)


def _delay(delay: Any) -> Duration:
    if isinstance(delay, timedelta):
        return delay
    try:
        return max(float(delay), 0.0)
    except (ValueError, TypeError) as error:
        raise ValueError(f"the label delay is {delay!r}: use a number of seconds, or a timedelta") from error
