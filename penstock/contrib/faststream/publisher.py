"""Publishers: of a topic, and of a reply."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Any

from faststream._internal.endpoint.publisher import PublisherUsecase
from faststream._internal.endpoint.publisher.fake import FakePublisher
from faststream.response.publish_type import PublishType

from penstock.contrib.faststream.command import PenstockPublishCommand, SendOptions
from penstock.contrib.faststream.settings import PenstockConfig, PenstockPublisherConfig
from penstock.pop.client.durations import Duration
from penstock.pop.errors import NotPermitted, StatusError
from penstock.worker.replies import drop_refused

if TYPE_CHECKING:
    from faststream._internal.basic_types import SendableMessage
    from faststream._internal.endpoint.publisher import PublisherSpecification
    from faststream._internal.producer import ProducerProto
    from faststream._internal.types import PublisherMiddleware
    from faststream.response.response import PublishCommand

    from penstock.contrib.faststream.streammessage import PenstockMessage
    from penstock.pop.client.message import Message


class PenstockPublisher(PublisherUsecase):
    """Publishes to one topic: what a handler returns, or what `publish` is called with."""

    _outer_config: PenstockConfig

    def __init__(self, config: PenstockPublisherConfig, specification: PublisherSpecification[Any, Any]) -> None:
        super().__init__(config, specification)
        self._topic = config.topic
        self._headers = config.headers
        self._reply_to = config.reply_to
        self._options = config.options

    @property
    def topic(self) -> str:
        """The topic, with the prefix of its router."""
        return f"{self._outer_config.prefix}{self._topic}"

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
    ) -> Any:
        """Publish a message, and return its receipt when it is durable. `PenstockBroker.publish` documents the arguments."""
        options = SendOptions(
            tag=tag,
            message_group=message_group,
            deliver_at=deliver_at,
            delay=delay,
            deduplication_id=deduplication_id,
            expire_after=expire_after,
        )
        cmd = PenstockPublishCommand(
            message,
            topic=topic or self.topic,
            headers=self._headers | (headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            reply_to=reply_to or self._reply_to,
            options=options.or_else(self._options),
            _publish_type=PublishType.PUBLISH,
        )
        return await self._basic_publish(cmd, producer=self._outer_config.producer, _extra_middlewares=())

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[PublisherMiddleware]) -> None:
        """Publish what a handler returned."""
        cmd = PenstockPublishCommand.from_cmd(cmd)
        cmd.destination = cmd.destination or self.topic
        cmd.reply_to = cmd.reply_to or self._reply_to
        cmd.add_headers(self._headers, override=False)
        cmd.options = cmd.options.or_else(self._options)
        await self._basic_publish(cmd, producer=self._outer_config.producer, _extra_middlewares=_extra_middlewares)

    async def request(
        self,
        message: SendableMessage = None,
        topic: str = "",
        *,
        headers: dict[str, str] | None = None,
        correlation_id: str | None = None,
        timeout: Duration = 30.0,  # noqa: ASYNC109 - FastStream's own name
    ) -> PenstockMessage:
        """Publish a request, and return its reply. Raises as `PenstockBroker.request`."""
        cmd = PenstockPublishCommand(
            message,
            topic=topic or self.topic,
            headers=self._headers | (headers or {}),
            correlation_id=correlation_id or self._outer_config.id_generator(),
            timeout=timeout,
            _publish_type=PublishType.REQUEST,
        )
        reply: PenstockMessage = await self._basic_request(cmd, producer=self._outer_config.producer)
        return reply


class ReplyPublisher(FakePublisher):
    """Publishes what a handler returned as the reply to its message, with its correlation data (MQTT 5.0, 4.10).

    A reply that the node refuses is dropped, as by the worker.

    Parameters:
        producer: Sends it.
        topic: Response topic of the message.
        message: The message.
    """

    def __init__(self, producer: ProducerProto[Any], topic: str, message: Message) -> None:
        super().__init__(producer=producer)
        self._topic = topic
        self._message = message

    async def _publish(self, cmd: PublishCommand, *, _extra_middlewares: Iterable[PublisherMiddleware]) -> None:
        try:
            await super()._publish(cmd, _extra_middlewares=_extra_middlewares)
        except (NotPermitted, StatusError) as error:
            drop_refused(error, self._message.topic, self._topic)

    def patch_command(self, cmd: PublishCommand) -> PenstockPublishCommand:
        """Return the command with the topic and the correlation data of the reply."""
        reply = PenstockPublishCommand.from_cmd(super().patch_command(cmd))
        reply.destination = self._topic
        reply.correlation_data = self._message.correlation_data
        return reply
