"""A stored message over the admin API, by its id: its properties, its body, and its deliveries."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from typing import Annotated, Any, Final

import msgspec

from penstock.node.api.changes import refusals
from penstock.node.api.deliverystates import DeliveryState, DeliveryStates
from penstock.node.api.messagereader import BODY_BYTES_SHOWN, MessageRead, MessageReader
from penstock.node.api.operation import ApiCall, ApiRole, Operation, not_found
from penstock.pop.core.sender import message_id
from penstock.pop.grpc.requests import position_of
from penstock.store.properties import Properties
from penstock.store.record import Flag
from penstock.store.space.causer import Causer

KINDS: Final = {
    Flag.RETAIN: "retained",
    Flag.DELAYED: "delayed",
    Flag.HALF: "transaction",
    Flag.SCHEDULED: "scheduled",
    Flag.SESSION: "session",
    Flag.IDENTIFIED: "deduplicated",
}
"""What the flags of a message say of it."""


class MessageProperty(msgspec.Struct):
    """A user property. A message may have several of one name."""

    name: str
    value: str


class PropertiesShown(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The properties of a message. Those that it does not have are left out."""

    user: list[MessageProperty] = []
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0
    expires_at_ms: int = 0
    content_type: str | None = None
    response_topic: str | None = None
    correlation_data_base64: str | None = None
    producer: str = ""
    keys: list[str] = []
    deduplication_id: str = ""
    timer_key: str = ""
    priority: int = 0


class MessageShown(msgspec.Struct, kw_only=True):
    """A stored message without its body."""

    message_id: str
    topic: str
    stored_ms: int
    size_bytes: Annotated[int, msgspec.Meta(description="Of its record in the log.")]
    body_bytes: int
    qos: Annotated[int, msgspec.Meta(description="With which it was published.")]
    flags: Annotated[list[str], msgspec.Meta(description=f"Any of {', '.join(KINDS.values())}.")]
    user: Annotated[str, msgspec.Meta(description="Who is charged for it; empty if nobody is, or that is not known.")]
    address: str
    client_id: str
    properties: PropertiesShown


class MessageBody(msgspec.Struct, kw_only=True):
    """The body of a message, or its beginning."""

    message_id: str
    content_type: str | None
    body_base64: str
    body_bytes: Annotated[int, msgspec.Meta(description="Of the whole body.")]
    cut: Annotated[bool, msgspec.Meta(description=f"Whether the body is longer than {BODY_BYTES_SHOWN} bytes, and cut.")]


class MessageDeliveries(msgspec.Struct, kw_only=True):
    """What has become of a message in each group whose filter matches its topic."""

    message_id: str
    items: list[DeliveryState]
    more: Annotated[bool, msgspec.Meta(description="Whether there are more groups, which are left out.")]


class MessageOperations:
    """Serves stored messages.

    Parameters:
        reader: reads them.
        deliveries: finds their deliveries.
    """

    def __init__(self, reader: MessageReader, deliveries: DeliveryStates) -> None:
        self._reader = reader
        self._deliveries = deliveries

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        one, viewer = "/messages/{message_id}", ApiRole.VIEWER
        yield Operation("getMessage", "GET", one, ApiRole.OPERATOR, "Show a message without its body.", self.show, MessageShown)
        yield Operation(
            "getMessageBody", "GET", f"{one}/body", ApiRole.OPERATOR, "Show the body of a message.", self.body, MessageBody
        )
        yield Operation(
            "listMessageDeliveries",
            "GET",
            f"{one}/deliveries",
            viewer,
            "Say what has become of a message in each group.",
            self.deliveries,
            MessageDeliveries,
        )

    async def show(self, call: ApiCall) -> MessageShown:
        """Return a message without its body."""
        return message_shown(await self._message(call))

    async def body(self, call: ApiCall) -> MessageBody:
        """Return the body of a message, or its beginning."""
        message = await self._message(call)
        return MessageBody(
            message_id=message_id(message.position),
            content_type=message.properties.content_type,
            body_base64=b64encode(message.body).decode(),
            body_bytes=message.body_bytes,
            cut=len(message.body) < message.body_bytes,
        )

    async def deliveries(self, call: ApiCall) -> MessageDeliveries:
        """Return what has become of a message."""
        message = await self._message(call)
        states, has_more = await self._deliveries.of(message)
        return MessageDeliveries(message_id=message_id(message.position), items=states, more=has_more)

    async def _message(self, call: ApiCall) -> MessageRead:
        with refusals():
            position = position_of(call.path["message_id"])
        message = await self._reader.read(position)
        if message is None:
            raise not_found("message", call.path["message_id"])
        return message


def message_shown(message: MessageRead) -> MessageShown:
    """Return a message as the API shows it, without its body."""
    causer = Causer.from_row(message.properties.by)
    return MessageShown(
        message_id=message_id(message.position),
        topic=message.topic,
        stored_ms=message.store_ms,
        size_bytes=message.size,
        body_bytes=message.body_bytes,
        qos=message.flags & Flag.QOS_MASK,
        flags=[name for flag, name in KINDS.items() if message.flags & flag],
        user=causer.user,
        address=causer.source,
        client_id=causer.client or message.properties.publisher,
        properties=properties_shown(message.properties),
    )


def properties_shown(properties: Properties) -> PropertiesShown:
    """Return the properties of a message as the API has them."""
    data = properties.correlation_data
    values: dict[str, Any] = {name: getattr(properties, name) for name in PropertiesShown.__struct_fields__ if name in _SAME}
    return PropertiesShown(
        user=[MessageProperty(name, value) for name, value in properties.user],
        correlation_data_base64=b64encode(data).decode() if data is not None else None,
        **values,
    )


_SAME: Final = frozenset(Properties._fields) - {"user"}
"""Properties that the API has as they are stored."""
