"""Calls of `apache.rocketmq.v2.MessagingService` by hand, for requests that no official client sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from penstock.pop.rocketmq.names import encode
from penstock.pop.rocketmq.stubs import SERVICE, pb, service_pb
from tests.pop.wiring import GROUP, TOPIC
from tests.waiting import WAIT_S_MAX

TYPE = pb.MessageType
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # it is there


class Caller:
    """A client that sends exactly what a test wants.

    Parameters:
        channel: Channel to the node.
        client_id: Client id in the metadata; empty to leave it out.
        metadata: More metadata.
    """

    def __init__(self, channel: grpc.aio.Channel, client_id: str = "c1", *metadata: tuple[str, str]) -> None:
        self._channel = channel
        self.metadata = (*((("x-mq-client-id", client_id),) if client_id else ()), *metadata)

    def _method(self, name: str, make: Any) -> Any:
        method = SERVICE.methods_by_name[name]
        return make(
            f"/{SERVICE.full_name}/{name}",
            request_serializer=lambda request: request.SerializeToString(),
            response_deserializer=getattr(service_pb, method.output_type.name).FromString,
        )

    async def call(self, name: str, request: Any) -> Any:
        """Return the answer to a request."""
        return await self._method(name, self._channel.unary_unary)(request, metadata=self.metadata, timeout=WAIT_S_MAX)

    def stream(self, name: str, request: Any, timeout_s: float = WAIT_S_MAX) -> Any:
        """Return the call of a method whose response is a stream."""
        return self._method(name, self._channel.unary_stream)(request, metadata=self.metadata, timeout=timeout_s)

    def telemetry(self) -> Any:
        """Return an open Telemetry stream."""
        return self._method("Telemetry", self._channel.stream_stream)(metadata=self.metadata)

    async def send(self, *messages: Any) -> Any:
        return await self.call("SendMessage", service_pb.SendMessageRequest(messages=messages))

    async def receive(self, **wanted: Any) -> tuple[int, list[Any]]:
        """Return the code of the status and the messages of a poll."""
        code, messages = 0, []
        async for response in self.stream("ReceiveMessage", receive_request(**wanted)):
            if response.HasField("status"):
                code = response.status.code
            elif response.HasField("message"):
                messages.append(response.message)
        return code, messages

    async def ack(self, *handles: str, group: str = GROUP) -> Any:
        entries = [service_pb.AckMessageEntry(receipt_handle=handle) for handle in handles]
        return await self.call("AckMessage", service_pb.AckMessageRequest(group=named(group), entries=entries))

    async def change(self, handle: str, invisible_ms: int, group: str = GROUP) -> Any:
        request = service_pb.ChangeInvisibleDurationRequest(group=named(group), receipt_handle=handle)
        request.invisible_duration.FromMilliseconds(invisible_ms)
        return await self.call("ChangeInvisibleDuration", request)


def named(name: str) -> Any:
    """Return the resource of a topic, filter or group."""
    return pb.Resource(name=encode(name))


def outgoing(body: bytes = b"x", topic: str = TOPIC, kind: int = TYPE.NORMAL, **system: Any) -> Any:
    """Return a message to send."""
    return pb.Message(topic=named(topic), body=body, system_properties=pb.SystemProperties(message_type=kind, **system))


def receive_request(
    topic: str = TOPIC,
    group: str = GROUP,
    count: int = 32,
    *,
    invisible_ms: int | None = 10_000,
    wait_ms: int = 60_000,
    expression: str = "*",
    sql: bool = False,
    attempt_id: str = "",
    auto_renew: bool = False,
) -> Any:
    """Return a request for messages."""
    request = service_pb.ReceiveMessageRequest(
        group=named(group),
        message_queue=pb.MessageQueue(topic=named(topic)),
        filter_expression=pb.FilterExpression(type=pb.FilterType.SQL if sql else pb.FilterType.TAG, expression=expression),
        batch_size=count,
        auto_renew=auto_renew,
    )
    if invisible_ms is not None and not auto_renew:
        request.invisible_duration.FromMilliseconds(invisible_ms)
    request.long_polling_timeout.FromMilliseconds(wait_ms)
    if attempt_id:
        request.attempt_id = attempt_id
    return request


def settings(client_type: int, **more: Any) -> Any:
    """Return the command with which a client states its settings."""
    return service_pb.TelemetryCommand(settings=pb.Settings(client_type=client_type, **more))


async def commands(stream: Any) -> AsyncIterator[Any]:
    """Yield the commands from the node on a Telemetry stream."""
    while (command := await asyncio.wait_for(stream.read(), WAIT_S_MAX)) is not EOF:
        yield command
