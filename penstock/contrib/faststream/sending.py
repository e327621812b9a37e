"""Sends what FastStream publishes, and asks what it requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from faststream._internal.endpoint.utils import ParserComposition
from faststream._internal.parser import DefaultCodec
from faststream._internal.producer import ProducerProto
from faststream.exceptions import IncorrectState

from penstock.contrib.faststream.command import PenstockPublishCommand
from penstock.contrib.faststream.streammessage import CORRELATION_ID, PenstockParser
from penstock.pop.client.client import Client
from penstock.pop.client.outgoing import SendReceipt
from penstock.pop.client.producer import Producer
from penstock.pop.client.received import ReceivedMessage

if TYPE_CHECKING:
    from fast_depends.library.serializer import SerializerProto
    from faststream._internal.parser import CodecProto
    from faststream._internal.types import CustomCallable

REQUEST_S = 30.0
"""How long a request waits for its reply by default, in seconds."""


class PenstockSending(ProducerProto[PenstockPublishCommand]):
    """Sends by a producer of the client: in batches, and again where the node did not answer, each message once.

    Parameters:
        parser: The application's own parser of replies, or None.
        decoder: The application's own decoder of replies, or None.
    """

    def __init__(self, parser: CustomCallable | None, decoder: CustomCallable | None) -> None:
        default = PenstockParser()
        self._parser = ParserComposition(parser, default.parse_message)
        self._decoder = ParserComposition(decoder, default.decode_message)
        self.codec: CodecProto = DefaultCodec()
        self._serializer: SerializerProto | None = None
        self._client: Client | None = None
        self._producer: Producer | None = None

    @property
    def client(self) -> Client:
        """The client of the connected broker.

        Raises:
            IncorrectState: The broker is not connected.
        """
        if self._client is None:
            raise IncorrectState("the broker is not connected: use it within `async with broker`, or after `broker.start()`")
        return self._client

    def connect(self, client: Client, serializer: SerializerProto | None, codec: CodecProto | None) -> None:
        """Send with a client from now on."""
        self._client, self._serializer, self.codec = client, serializer, codec or DefaultCodec()
        self._producer = client.producer()

    def disconnect(self) -> None:
        """Send no more."""
        self._client = self._producer = None

    async def publish(self, cmd: PenstockPublishCommand) -> SendReceipt:
        """Send a message; return its receipt when it is durable."""
        body, content_type = await self.codec.encode(cmd.body, self._serializer)
        self.client.check_open()
        assert self._producer is not None
        return await (await self._producer.post(cmd.outgoing(body, content_type)))

    async def publish_batch(self, cmd: PenstockPublishCommand) -> list[SendReceipt]:
        """Send several messages; return their receipts when all are durable."""
        self.client.check_open()
        assert self._producer is not None
        sent = []
        for each in cmd.batch_bodies:
            body, content_type = await self.codec.encode(each, self._serializer)
            sent.append(await self._producer.post(cmd.outgoing(body, content_type)))
        return [await receipt for receipt in sent]

    async def request(self, cmd: PenstockPublishCommand) -> ReceivedMessage:
        """Send a request, and return its reply. The node's clients name a request by its correlation data."""
        body, content_type = await self.codec.encode(cmd.body, self._serializer)
        properties: dict[str, Any] = cmd.properties()
        if cmd.correlation_id:
            properties[CORRELATION_ID] = cmd.correlation_id
        return await self.client.request(
            cmd.destination,
            body,
            timeout=cmd.timeout or REQUEST_S,
            properties=properties,
            content_type=content_type or "",
        )
