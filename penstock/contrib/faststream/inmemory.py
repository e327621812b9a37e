"""FastStream's test broker: calls handlers in the test's process, without a node."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import anyio
from faststream._internal.broker import BrokerUsecase
from faststream._internal.parser import DefaultCodec
from faststream._internal.testing.broker import EnterType, TestBroker, change_producer
from faststream.exceptions import SubscriberNotFound

from penstock.contrib.faststream.broker import PenstockBroker
from penstock.contrib.faststream.command import PenstockPublishCommand
from penstock.contrib.faststream.publisher import PenstockPublisher
from penstock.contrib.faststream.sending import REQUEST_S, PenstockSending
from penstock.contrib.faststream.subscriber import PenstockSubscriber
from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration
from penstock.pop.client.message import Message
from penstock.pop.client.outgoing import OutgoingMessage, SendReceipt
from penstock.pop.client.settlements import Settlements
from penstock.pop.proto import pop_pb2 as pb

T = TypeVar("T")


class TestPenstockBroker(TestBroker[PenstockBroker, EnterType], broker=PenstockBroker):
    """Calls the handlers of brokers when something is published, without a node.

        async with TestPenstockBroker(broker):
            await broker.publish({"celsius": 21.5}, "plant/1/temperature")
            bill.mock.assert_called_once_with({"celsius": 21.5})

    One subscriber of each group gets a message, at once: there are no delays, attempts and dead letters. With `with_real=True`
    the node is real; `penstock.testing.Node` is ready in less than half a second and has a clock that the test moves.
    """

    def create_publisher_fake_subscriber(
        self, broker: PenstockBroker, publisher: PenstockPublisher
    ) -> tuple[PenstockSubscriber[Any], bool]:
        """Return a subscriber that gets what a publisher publishes, and whether it is the application's own."""
        for each in self.brokers:
            for subscriber in each.subscribers:
                assert isinstance(subscriber, PenstockSubscriber)
                if is_match(subscriber.topic, publisher.topic):
                    return subscriber, True
        return broker.subscriber(publisher.topic, group=f"test of {publisher.topic}", persistent=False), False

    def _fake_start(self, broker: PenstockBroker, *args: Any, **kwargs: Any) -> None:
        for subscriber in broker.subscribers:
            cast("PenstockSubscriber[Any]", subscriber).compose()
        super()._fake_start(broker, *args, **kwargs)

    @contextmanager
    def _patch_producer(self, broker: PenstockBroker) -> Generator[None, None, None]:
        config = broker.config.broker_config
        with change_producer(config, InMemorySending(broker, self.brokers)):
            yield

    async def _fake_connect(self, broker: PenstockBroker, *args: Any, **kwargs: Any) -> None:
        return None


class InMemorySending(PenstockSending):
    """Hands what is published to the subscribers whose topic filter fits.

    Parameters:
        broker: Publishes.
        brokers: Their subscribers get it.
    """

    def __init__(self, broker: PenstockBroker, brokers: tuple[PenstockBroker, ...]) -> None:
        config = broker.config.broker_config
        super().__init__(config.broker_parser, config.broker_decoder)
        self._brokers = brokers
        self._serializer = config.fd_config._serializer
        self.codec = config.broker_codec or DefaultCodec()
        self._number = 0

    @property
    def client(self) -> Client:
        raise NotImplementedError("the broker is under test without a node: use with_real=True to have a client")

    async def publish(self, cmd: PenstockPublishCommand) -> SendReceipt:
        (receipt,) = await self._deliver(cmd, [cmd.body])
        return receipt

    async def publish_batch(self, cmd: PenstockPublishCommand) -> list[SendReceipt]:
        return await self._deliver(cmd, cmd.batch_bodies)

    async def request(self, cmd: PenstockPublishCommand) -> InMemoryMessage:
        message = await self._encoded(cmd, cmd.body)
        for subscriber in self._subscribers(message.topic):
            if subscriber.consuming.batch:
                continue  # It sends no replies.
            with anyio.fail_after(cmd.timeout or REQUEST_S):
                result = await subscriber.process_message(InMemoryMessage(message, subscriber.consuming.group, self._id()))
            reply = PenstockPublishCommand.from_cmd(result.as_publish_command())
            reply.destination = message.topic
            return InMemoryMessage(await self._encoded(reply, result.body), "", self._id())
        raise SubscriberNotFound(f"no subscriber gets messages on {message.topic!r}")

    async def _deliver(self, cmd: PenstockPublishCommand, bodies: Sequence[Any]) -> list[SendReceipt]:
        sent = [(await self._encoded(cmd, body), self._id()) for body in bodies]
        groups: set[str] = set()
        for subscriber in self._subscribers(cmd.destination):
            group, size = subscriber.consuming.group, subscriber.consuming.batch or 1
            if group in groups:
                continue
            groups.add(group)
            messages: list[Message] = [InMemoryMessage(message, group, message_id) for message, message_id in sent]
            for at in range(0, len(messages), size):
                await subscriber.process_message(subscriber.joined(messages[at : at + size]))
        return [SendReceipt(message_id) for _, message_id in sent]

    async def _encoded(self, cmd: PenstockPublishCommand, body: Any) -> OutgoingMessage:
        return cmd.outgoing(*await self.codec.encode(body, self._serializer))

    def _subscribers(self, topic: str) -> list[PenstockSubscriber[Any]]:
        found: list[PenstockSubscriber[Any]] = []
        for broker in self._brokers:
            for subscriber in cast(BrokerUsecase[Any, Any, Any], broker).subscribers:
                assert isinstance(subscriber, PenstockSubscriber)
                if is_match(subscriber.topic, topic):
                    found.append(subscriber)
        return found

    def _id(self) -> str:
        self._number += 1
        return f"{self._number:016x}"


class InMemoryMessage(Message):
    """A message that no node has.

    Parameters:
        sent: What was published.
        group: The group that gets it.
        message_id: Its id.
    """

    __slots__ = ("_group",)

    def __init__(self, sent: OutgoingMessage, group: str, message_id: str) -> None:
        received = pb.PoppedMessage(
            message_id=message_id,
            topic=sent.topic,
            body=sent.body,
            properties=sent.properties,
            message_group=sent.message_group,
            tag=sent.tag,
            attempt=1,
            deduplication_id=sent.deduplication_id,
            response_topic=sent.response_topic,
            correlation_data=sent.correlation_data,
            content_type=sent.content_type,
        )
        super().__init__(received, cast(Settlements, InMemorySettlements()))
        self._group = group

    @property
    def group(self) -> str:
        return self._group

    def ack(self) -> asyncio.Future[None]:
        self.is_settled = True
        return _done(None)

    async def nack(self, *, delay: Duration = 0.0, reason: str = "") -> None:
        self.is_settled = self.went_back = True

    async def suspend(self, delay: Duration = 0.0) -> None:
        self.is_settled = self.went_back = True

    async def extend(self, invisible: Duration) -> None:
        return None

    async def dead_letter(self, *, reason: str = "") -> None:
        self.is_settled = True


class InMemorySettlements:
    """Takes the acknowledgements of a batch."""

    tracing = None

    @property
    def acks(self) -> InMemorySettlements:
        return self

    def submit(self, handles: list[str]) -> asyncio.Future[list[None]]:
        return _done([None] * len(handles))


def _done(result: T) -> asyncio.Future[T]:
    done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
    done.set_result(result)
    return done


def is_match(topic_filter: str, topic: str) -> bool:
    """Return whether a topic fits a topic filter (MQTT 5.0, 4.7)."""
    levels = topic.split("/")
    for at, wanted in enumerate(topic_filter.split("/")):
        if wanted == "#":
            return not topic.startswith("$") or at > 0
        if at == len(levels) or wanted not in ("+", levels[at]) or (wanted == "+" and at == 0 and topic.startswith("$")):
            return False
    return len(levels) == len(topic_filter.split("/"))
