"""The broker: FastStream's object for one node."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any

from fast_depends import dependency_provider
from faststream._internal.broker import BrokerUsecase
from faststream._internal.constants import EMPTY
from faststream._internal.context.repository import ContextRepo
from faststream._internal.di import FastDependsConfig
from faststream._internal.logger import DefaultLoggerStorage, make_logger_state
from faststream._internal.logger.logging import get_broker_logger
from faststream.message import gen_cor_id
from faststream.middlewares import AckPolicy
from faststream.response.publish_type import PublishType
from faststream.specification.schema import BrokerSpec

from penstock.contrib.faststream.command import PenstockPublishCommand, SendOptions
from penstock.contrib.faststream.registrator import PenstockRegistrator
from penstock.contrib.faststream.sending import PenstockSending
from penstock.contrib.faststream.settings import PenstockConfig
from penstock.contrib.faststream.subscriber import PenstockSubscriber
from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration, seconds
from penstock.pop.client.message import Message
from penstock.pop.client.outgoing import SendReceipt
from penstock.pop.client.security import Security, node_of
from penstock.pop.client.tracing import Tracing

if TYPE_CHECKING:
    from fast_depends import Provider
    from fast_depends.dependencies import Dependant
    from fast_depends.library.serializer import SerializerProto
    from faststream._internal.basic_types import LoggerProto, SendableMessage
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import BrokerMiddleware, CustomCallable, IdGenerator
    from faststream.specification.schema.extra import Tag, TagDict

    from penstock.contrib.faststream.streammessage import PenstockMessage

PING_S = 5.0
"""How long `ping` waits for the node by default, in seconds."""


class PenstockBroker(PenstockRegistrator, BrokerUsecase[Message, Client, PenstockConfig]):
    """FastStream's broker for one node.

    Parameters:
        target: `HOST:PORT` of the node's gRPC listener. By default that of PENSTOCK_TARGET, else of the
            current context, else `127.0.0.1:8081`.
        security: TLS and token. None: those of the environment, see `Security`.
        tracing: Makes spans of OpenTelemetry of what the broker sends, receives, handles and settles.
        inbox: Name of the inbox to which replies to requests come, as for `Client`.
        graceful_timeout: Time that running handlers have to end when the broker stops, in seconds or as a timedelta. Then their
            messages go back, which counts no attempt.
        ack_policy: Default of the subscribers.
        decoder: As in FastStream's own brokers.
        parser: As in FastStream's own brokers.
        codec: As in FastStream's own brokers.
        dependencies: As in FastStream's own brokers.
        middlewares: As in FastStream's own brokers.
        routers: As in FastStream's own brokers.
        id_generator: As in FastStream's own brokers.
        specification_url: For AsyncAPI.
        description: For AsyncAPI.
        tags: For AsyncAPI.
        logger: As in FastStream's own brokers.
        log_level: As in FastStream's own brokers.
        apply_types: As in FastStream's own brokers.
        serializer: As in FastStream's own brokers.
        provider: As in FastStream's own brokers.
        context: As in FastStream's own brokers.
    """

    def __init__(
        self,
        target: str = "",
        *,
        security: Security | None = None,
        tracing: Tracing | None = None,
        inbox: str = "",
        graceful_timeout: Duration | None = 30.0,
        ack_policy: AckPolicy = EMPTY,
        decoder: CustomCallable | None = None,
        parser: CustomCallable | None = None,
        codec: CodecProto | None = None,
        dependencies: Sequence[Dependant] = (),
        middlewares: Sequence[BrokerMiddleware[Any, Any]] = (),
        routers: Iterable[PenstockRegistrator] = (),
        id_generator: IdGenerator = gen_cor_id,
        specification_url: str | None = None,
        description: str | None = None,
        tags: Iterable[Tag | TagDict] = (),
        logger: LoggerProto | None = EMPTY,
        log_level: int = logging.INFO,
        apply_types: bool = True,
        serializer: SerializerProto | None = EMPTY,
        provider: Provider | None = None,
        context: ContextRepo | None = None,
    ) -> None:
        self._target, self._security = node_of(target or None, security)
        self._inbox = inbox
        self._starting: asyncio.Task[None] | None = None
        """Starts the subscribers. Some applications serve, and stop the broker, before all have started."""
        super().__init__(
            routers=routers,
            config=PenstockConfig(
                producer=PenstockSending(parser, decoder),
                tracing=tracing,
                broker_middlewares=middlewares,
                broker_parser=parser,
                broker_decoder=decoder,
                broker_codec=codec,
                logger=make_logger_state(logger=logger, log_level=log_level, default_storage_cls=PenstockLogColumns),
                fd_config=FastDependsConfig(
                    use_fastdepends=apply_types,
                    serializer=serializer,
                    provider=provider or dependency_provider,
                    context=context or ContextRepo(),
                ),
                broker_dependencies=dependencies,
                graceful_timeout=seconds(graceful_timeout, "graceful_timeout") if graceful_timeout is not None else None,
                ack_policy=ack_policy,
                id_generator=id_generator,
                extra_context={"broker": self},
            ),
            specification=BrokerSpec(
                description=description,
                url=[specification_url or f"penstock://{self._target}"],
                protocol="penstock",
                protocol_version="1",
                tags=tags,
                security=None,
            ),
        )

    @property
    def client(self) -> Client:
        """The client of the connected broker, for what FastStream has no words for: groups, transactions, recall.

        Raises:
            IncorrectState: The broker is not connected.
        """
        return self._sending.client

    @property
    def problems(self) -> dict[str, str]:
        """Why subscribers get no messages now, by group and topic filter. Empty if all is well."""
        found = {}
        for subscriber in self.subscribers:
            if isinstance(subscriber, PenstockSubscriber) and subscriber.problem:
                found[f"{subscriber.consuming.group} on {subscriber.topic}"] = subscriber.problem
        return found

    @property
    def _sending(self) -> PenstockSending:
        sending = self.config.producer
        assert isinstance(sending, PenstockSending)
        return sending

    # --- the life of the broker -------------------------------------------------------------------------------------

    async def _connect(self) -> Client:
        config = self.config.broker_config
        client = Client(self._target, security=self._security, inbox=self._inbox, tracing=config.tracing)
        self._sending.connect(client, config.fd_config._serializer, config.broker_codec)
        return client

    async def start(self) -> None:
        """Connect, and start all subscribers. This waits while the node is away, or refuses the caller; `stop` ends it.

        Raises:
            PopError: The node refuses a group.
        """
        await self.connect()
        self._starting = starting = asyncio.get_running_loop().create_task(super().start())
        try:
            await starting
        except asyncio.CancelledError:
            if self._starting is starting:  # The caller was cancelled, not the start by `stop`.
                raise
        finally:
            if self._starting is starting:
                self._starting = None

    async def stop(
        self,
        exc_type: type[BaseException] | None = None,
        exc_val: BaseException | None = None,
        exc_tb: TracebackType | None = None,
    ) -> None:
        """Stop all subscribers, send what waits, and close the connection."""
        starting, self._starting = self._starting, None
        if starting is not None:
            starting.cancel()
            await asyncio.wait((starting,))
        await super().stop(exc_type, exc_val, exc_tb)
        client, self._connection = self._connection, None
        if client is not None:
            self._sending.disconnect()
            await client.aclose()

    async def ping(self, timeout: Duration | None = None) -> bool:  # noqa: ASYNC109 - FastStream's own name
        """Return whether all is well: the node answers within `timeout`, 5 seconds by default, `start` does not wait for
        anything, and no subscriber has a problem.
        """
        starting = self._starting is not None and not self._starting.done()
        if self._connection is None or starting or self.problems:
            return False
        return await self._connection.is_serving(PING_S if timeout is None else timeout)

    # --- publishing -------------------------------------------------------------------------------------------------

    async def publish(
        self,
        message: SendableMessage = None,
        topic: str = "",
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        tag: str = "",
        message_group: str = "",
        deliver_at: datetime | None = None,
        delay: Duration = 0.0,
        deduplication_id: str = "",
        expire_after: Duration = 0.0,
    ) -> SendReceipt:
        """Publish a message, and return its receipt when it is durable. It is stored once, also if the node restarts meanwhile.

        Args:
            message: The body: bytes, text, or anything that FastStream writes as JSON.
            topic: MQTT topic, without wildcards.
            headers: User properties.
            correlation_id: Names the message. It is the correlation data of MQTT 5.0. By default a random one.
            reply_to: Response topic: where handlers of the message publish what they return.
            tag: Kind of the message, for groups that filter by tags.
            message_group: Groups in FIFO order get the messages of one message group in order, one at a time.
            deliver_at: When to deliver the message, with a time zone.
            delay: Time until the message is delivered, in seconds or as a timedelta, instead of `deliver_at`.
            deduplication_id: The node stores one message with this id. By default each message has one of its own.
            expire_after: Nobody gets the message after this time, in seconds or as a timedelta. 0: it never expires.

        Raises:
            ValueError: Both `deliver_at` and `delay` are given, `deliver_at` has no time zone, or a duration is out of bounds.
            StatusError: The node refused the message.
            SendOutcomeUnknown: The node did not answer for two minutes, and the message may be stored.
        """
        cmd = PenstockPublishCommand(
            message,
            topic=topic,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            reply_to=reply_to,
            options=SendOptions(
                tag=tag,
                message_group=message_group,
                deliver_at=deliver_at,
                delay=delay,
                deduplication_id=deduplication_id,
                expire_after=expire_after,
            ),
            _publish_type=PublishType.PUBLISH,
        )
        receipt: SendReceipt = await self._basic_publish(cmd, producer=self.config.producer)
        return receipt

    async def publish_batch(  # type: ignore[override]
        self,
        *messages: SendableMessage,
        topic: str,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        reply_to: str = "",
        tag: str = "",
        message_group: str = "",
    ) -> list[SendReceipt]:
        """Publish several messages in few calls, and return their receipts when all are durable.

        The messages share the other arguments, which are those of `publish`. Raises as `publish` does, for the first message
        that failed.
        """
        if not messages:
            return []
        cmd = PenstockPublishCommand(
            *messages,
            topic=topic,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            reply_to=reply_to,
            options=SendOptions(tag=tag, message_group=message_group),
            _publish_type=PublishType.PUBLISH,
        )
        receipts: list[SendReceipt] = await self._basic_publish_batch(cmd, producer=self.config.producer)
        return receipts

    async def request(  # type: ignore[override]
        self,
        message: SendableMessage = None,
        topic: str = "",
        *,
        timeout: Duration = 30.0,  # noqa: ASYNC109 - FastStream's own name
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
    ) -> PenstockMessage:
        """Publish a request, and return its reply: from a handler of any service, or from a device.

        Args:
            message: As for `publish`.
            topic: As for `publish`.
            timeout: How long to wait for the reply, in seconds or as a timedelta. The request expires then.
            headers: User properties.
            correlation_id: Names the request. By default a random one.

        Raises:
            RequestTimedOut: No reply came in time. The request may or may not have been handled.
            StatusError, NotPermitted: The node refused the request.
        """
        cmd = PenstockPublishCommand(
            message,
            topic=topic,
            headers=headers,
            correlation_id=correlation_id or self.config.id_generator(),
            timeout=timeout,
            _publish_type=PublishType.REQUEST,
        )
        reply: PenstockMessage = await self._basic_request(cmd, producer=self.config.producer)
        return reply


class PenstockLogColumns(DefaultLoggerStorage):
    """The columns of FastStream's log: group, topic and message id."""

    def __init__(self) -> None:
        super().__init__()
        self._widths = {"group": 5, "topic": 5}

    def register_subscriber(self, params: dict[str, Any]) -> None:
        """Make room for the names of a subscriber."""
        self._widths = {name: max(width, len(params.get(name, ""))) for name, width in self._widths.items()}

    def get_logger(self, *, context: ContextRepo) -> LoggerProto:
        """Return the logger of the broker."""
        if (found := self._get_logger_ref()) is None:
            columns = "".join(f"%({name})-{width}s | " for name, width in self._widths.items())
            found = get_broker_logger(
                name="penstock",
                default_context={"group": "", "topic": ""},
                message_id_ln=16,
                fmt=f"%(asctime)s %(levelname)-8s - {columns}%(message_id)-16s - %(message)s",
                context=context,
                log_level=self.logger_log_level,
            )
            self._logger_ref.add(found)
        return found
