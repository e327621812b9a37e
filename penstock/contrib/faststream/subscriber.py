"""What all subscribers do: FastStream's handlers, on a consumer of the worker."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import nullcontext
from re import Pattern
from typing import TYPE_CHECKING, Any, TypeVar

from faststream._internal.endpoint.subscriber import SubscriberUsecase
from faststream._internal.endpoint.subscriber.mixins import TasksMixin
from faststream._internal.endpoint.utils import process_msg
from faststream.exceptions import StopConsume

from penstock.contrib.faststream.settings import PenstockConfig, PenstockSubscriberConfig
from penstock.contrib.faststream.specification import PenstockSubscriberSpecification
from penstock.contrib.faststream.undecodable import PROGRESS, HandlerProgress, UndecodableBodies, noting_calls
from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.message import Message
from penstock.worker.codecs import undecodable
from penstock.worker.consumerplan import ConsumerPlan
from penstock.worker.handler import MESSAGE, Handler
from penstock.worker.middleware.tracing import TraceCalls
from penstock.worker.runningconsumer import RunningConsumer

if TYPE_CHECKING:
    from faststream._internal.endpoint.subscriber.call_item import CallsCollection
    from faststream._internal.types import AsyncCallable, BrokerMiddleware, CustomCallable
    from faststream.message import StreamMessage
    from faststream.response import Response
from typing import TYPE_CHECKING

from penstock.contrib.faststream.publisher import ReplyPublisher
from penstock.contrib.faststream.streammessage import PenstockParser

if TYPE_CHECKING:
    from faststream._internal.endpoint.publisher import PublisherProto
    from faststream._internal.types import AsyncCallable
    from faststream.message import StreamMessage
from faststream.exceptions import IgnoredException
from faststream.response import ensure_response

from penstock.contrib.faststream.streammessage import PenstockBatchParser

if TYPE_CHECKING:
    from faststream._internal.endpoint.publisher import PublisherProto
    from faststream._internal.types import AsyncCallable
    from faststream.message import StreamMessage
    from faststream.response import Response

WAIT_S = 1.0
"""How long one poll of `get_one` waits at the node at most, in seconds."""

M = TypeVar("M", Message, list[Message])
"""What a handler is called with: a message, or the messages of a batch."""


class PenstockSubscriber(TasksMixin, SubscriberUsecase[M]):
    """Consumes a group: takes messages, extends them while they are handled, and returns the rest when it stops."""

    _outer_config: PenstockConfig

    def __init__(
        self,
        config: PenstockSubscriberConfig,
        specification: PenstockSubscriberSpecification,
        calls: CallsCollection[M],
    ) -> None:
        self._address = config.address
        self.consuming = config.consuming
        config.parser, config.decoder = self._parsing(None)
        super().__init__(config, specification, calls)
        self._call_decorators = (noting_calls,)
        self._running: RunningConsumer | None = None
        self._stopper: asyncio.Task[None] | None = None

    @property
    def topic(self) -> str:
        """The topic filter, with the prefix of its router."""
        return self._address.add_prefix(self._outer_config.prefix).broker_address

    @property
    def problem(self) -> str:
        """Why the subscriber gets no messages now; empty if all is well."""
        return self._running.problem if self._running is not None else ""

    def compose(self) -> None:
        """Parse by the complete address. Its prefix is known when the routers are included."""
        self._parser, self._decoder = self._parsing(self._address.add_prefix(self._outer_config.prefix).regex)

    # --- one message, or batches ------------------------------------------------------------------------------------

    @abstractmethod
    def _parsing(self, path: Pattern[str] | None) -> tuple[AsyncCallable, AsyncCallable]:
        """Return the parser and the decoder. `path` takes the parameters of the address out of a topic."""

    @abstractmethod
    def joined(self, messages: list[Message]) -> M:
        """Return what a handler is called with for up to `consuming.batch` messages, or one."""

    @abstractmethod
    def _first(self, msg: M) -> Message:
        """Return the first message of what a handler is called with."""

    # --- the life of the subscriber ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to consume. This waits while the node is away, or refuses the caller.

        Raises:
            PopError: The node refuses the group.
        """
        self.compose()
        await super().start()
        if self.calls:
            running = RunningConsumer(self._client, self._plan(), None)
            await running.open_when_possible()
            self._running = running
            self.add_task(running.run, restart_on_failure=False)
        self._post_start()

    async def stop(self) -> None:
        """Take no more messages, let handlers end within the broker's `graceful_timeout`, and return all others uncounted."""
        running, self._running = self._running, None
        if running is not None:
            await running.stop(self._outer_config.graceful_timeout or 0.0)
        self.lock = nullcontext()  # FastStream would wait for the same handlers once more.
        await super().stop()

    def _stop_soon(self) -> None:
        # A handler asked for it, and `stop` waits for handlers.
        if self._running is not None:
            self._running.take_no_more()
        self._stopper = asyncio.get_running_loop().create_task(self.stop())

    def _plan(self) -> ConsumerPlan:
        consuming, tracing = self.consuming, self._outer_config.tracing
        return ConsumerPlan(
            topic_filter=self.topic,
            group=consuming.group,
            handler=Handler(self.consume, self.specification.call_name, True, (MESSAGE,), None, consuming.batch, settles=True),
            concurrency=consuming.max_workers,
            timeout_s=consuming.timeout_s,
            invisible_s=consuming.invisible_s,
            fifo=consuming.fifo,
            start=consuming.start,
            settings=consuming.settings,
            middleware=(TraceCalls(tracing=tracing),) if tracing is not None else (),
        )

    @property
    def _client(self) -> Client:
        client: Client = self._outer_config.producer.client  # type: ignore[attr-defined]
        return client

    # --- handling ---------------------------------------------------------------------------------------------------

    async def consume(self, msg: M) -> None:
        """Handle a message or a batch, and settle it by the acknowledgement policy."""
        try:
            await self.process_message(msg)
        except StopConsume:
            self._stop_soon()
        except SystemExit:
            self._stop_soon()
            if app := self._outer_config.context.get("app"):
                app.exit()
        except Exception:
            pass  # FastStream has logged it, and the acknowledgement policy has settled the message.

    async def process_message(self, msg: M) -> Response:
        """Run the middlewares and the handler for a message or a batch. Raises what they raise."""
        return await self._process(msg, HandlerProgress())

    async def _process(self, msg: M, progress: HandlerProgress) -> Response:
        token = PROGRESS.set(progress)
        try:
            return await super().process_message(msg)
        finally:
            PROGRESS.reset(token)

    @property
    def _broker_middlewares(self) -> Sequence[BrokerMiddleware[M]]:
        return (UndecodableBodies, *self._outer_config.broker_middlewares)

    def _get_parser_and_decoder(
        self, item_parser: CustomCallable | None = None, item_decoder: CustomCallable | None = None
    ) -> tuple[AsyncCallable, AsyncCallable]:
        parser, decoder = super()._get_parser_and_decoder(item_parser, item_decoder)

        async def decode(message: StreamMessage[M]) -> Any:
            try:
                return await decoder(message)
            except (ValueError, TypeError) as error:
                raise undecodable(self._first(message.raw_message).body, error) from error

        return parser, decode

    def get_log_context(self, message: StreamMessage[M] | None) -> dict[str, str]:
        """Return what each line of the log says besides."""
        return {
            "topic": self._first(message.raw_message).topic if message is not None else self.topic,
            "group": self.consuming.group,
            "message_id": message.message_id if message is not None else "",
        }

    # --- without handlers -------------------------------------------------------------------------------------------

    async def get_one(self, *, timeout: Duration = 5.0) -> Any:  # noqa: ASYNC109 - FastStream's own name
        """Return the next PenstockMessage or PenstockBatch, or None if none comes within `timeout`.

        `timeout` is in seconds or a timedelta. The caller settles the message.
        """
        assert not self.calls, "a subscriber with handlers has no get_one: its handlers get the messages"
        self.compose()
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + seconds(timeout, "timeout")
        while True:
            left_s = max(deadline_s - loop.time(), 0.0)
            messages = await self._client.pop(
                self.topic,
                group=self.consuming.group,
                messages_max=self.consuming.batch or 1,
                invisible=self.consuming.invisible_s,
                wait=min(left_s, WAIT_S),
                start=self.consuming.start,
            )
            if messages:
                return await self._parsed(messages)
            if loop.time() >= deadline_s:
                return None

    async def __aiter__(self) -> AsyncIterator[Any]:
        """Iterate over PenstockMessages or PenstockBatches. The caller settles them."""
        self.compose()
        loop = asyncio.get_running_loop()
        consumer = self._client.consume(
            self.topic,
            group=self.consuming.group,
            invisible=self.consuming.invisible_s,
            start=self.consuming.start,
        )
        async with consumer:
            while (messages := await consumer.take(self.consuming.batch or 1)) is not None:
                began_s = loop.time()
                yield await self._parsed(messages)
                consumer.handled(loop.time() - began_s, 1)

    async def _parsed(self, messages: list[Message]) -> Any:
        parser, decoder = self._get_parser_and_decoder()
        context = self._outer_config.context
        msg = self.joined(messages)
        middlewares = (each(msg, context=context) for each in self._outer_config.broker_middlewares)
        return await process_msg(msg=msg, middlewares=middlewares, parser=parser, decoder=decoder)


class SingleSubscriber(PenstockSubscriber[Message]):
    """Calls its handler with one message, and answers those that ask for a reply."""

    def _parsing(self, path: Pattern[str] | None) -> tuple[AsyncCallable, AsyncCallable]:
        parser = PenstockParser(path)
        return parser.parse_message, parser.decode_message

    def joined(self, messages: list[Message]) -> Message:
        """Return the only message."""
        (message,) = messages
        return message

    def _first(self, msg: Message) -> Message:
        return msg

    def _make_response_publisher(self, message: StreamMessage[Message]) -> tuple[PublisherProto, ...]:
        return (ReplyPublisher(self._outer_config.producer, message.reply_to, message.raw_message),)


class BatchSubscriber(PenstockSubscriber[list[Message]]):
    """Calls its handler with the messages that wait, up to `batch` of them. They have no replies."""

    def _parsing(self, path: Pattern[str] | None) -> tuple[AsyncCallable, AsyncCallable]:
        parser = PenstockBatchParser()
        return parser.parse_batch, parser.decode_batch

    def joined(self, messages: list[Message]) -> list[Message]:
        """Return the messages."""
        return messages

    def _first(self, msg: list[Message]) -> Message:
        return msg[0]

    def _make_response_publisher(self, message: StreamMessage[list[Message]]) -> tuple[PublisherProto, ...]:
        return ()

    async def process_message(self, msg: list[Message]) -> Response:
        """Run the middlewares and the handler for a batch. Raises what they raise.

        The handler gets no batch with a body that it can't take. Such a batch is halved until that body is alone, which makes a
        dead letter of its message, and the handler gets the others.
        """
        response, failure = ensure_response(None), None
        waiting = [msg]
        while waiting:
            some = waiting.pop()
            progress = HandlerProgress(can_split=len(some) > 1)
            try:
                response = await self._process(some, progress)
            except IgnoredException:
                raise
            except Exception as error:
                failure = failure or error
            if progress.must_split:
                half = len(some) // 2
                waiting += [some[half:], some[:half]]
            elif self.consuming.fifo and any(each.went_back or not each.is_settled for each in some):
                await _give_back([each for others in reversed(waiting) for each in others])
                break
        if failure is not None:
            raise failure
        return response


async def _give_back(messages: list[Message]) -> None:
    """Return messages that wait for a failed one before them. One that can't be returned comes back at its deadline."""
    returned = (message.suspend() for message in messages if not message.is_settled)
    await asyncio.gather(*returned, return_exceptions=True)
