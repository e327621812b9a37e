"""Publishing over the admin API: one message or a batch, with the options of Send and the retain flag of MQTT."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec

from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.node.api.changes import DurableChanges, causer_of
from penstock.node.api.operation import NUMBER_MAX, ApiCall, ApiError, ApiRole, Operation
from penstock.pop.core.sender import Refusal, Sender, SendRefused, check_properties, message_id
from penstock.store.errors import DiskFull, LimitExceeded, StoreError
from penstock.store.properties import Properties, encode_properties, tag_hash
from penstock.store.record import Flag, record_bytes
from penstock.store.space.causer import Causer
from penstock.store.store import Store

MESSAGES_MAX: Final = 1_000
"""Messages of one call."""

PUBLISHED_AT_ONCE: Final = 16
"""Messages that are stored in one slice."""

_PROPERTIES: Final = (
    "tag",
    "message_group",
    "deliver_at_ms",
    "content_type",
    "response_topic",
    "deduplication_id",
    "timer_key",
)
"""Fields of a message that its properties have under the same name."""


class MessageToPublish(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A message to publish."""

    topic: str
    body_base64: str = ""
    properties: Annotated[dict[str, str], msgspec.Meta(description="User properties.")] = {}
    tag: str = ""
    message_group: str = ""
    delay_ms: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="It is delivered so much later; 0 for at once.")] = 0
    deliver_at_ms: Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="When it is delivered; 0 for at once.")] = 0
    expire_after_ms: Annotated[
        int, msgspec.Meta(ge=0, le=NUMBER_MAX, description="It expires so long after it is sent; 0 for never.")
    ] = 0
    content_type: str | None = None
    response_topic: str | None = None
    deduplication_id: Annotated[str, msgspec.Meta(description="The node stores one message of a topic and id.")] = ""
    timer_key: Annotated[str, msgspec.Meta(description="It replaces the pending message of its topic and key.")] = ""
    retain: Annotated[
        bool, msgspec.Meta(description="Subscribers that come later get it too, until the topic has another one (MQTT).")
    ] = False


class MessagesToPublish(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Messages to publish, in this order."""

    messages: Annotated[list[MessageToPublish], msgspec.Meta(min_length=1, max_length=MESSAGES_MAX)]


class MessagePublished(msgspec.Struct, kw_only=True):
    """What has become of one message: it has an id, or an error."""

    message_id: str | None = None
    repeated: Annotated[bool, msgspec.Meta(description="Whether the id is of an earlier message.")] = False
    error: str | None = None


class MessagesPublished(msgspec.Struct, kw_only=True):
    """What has become of the messages of a call, in their order. What has an id is durable."""

    items: list[MessagePublished]
    failed: Annotated[int, msgspec.Meta(description="How many have an error.")]


class PublishOperations:
    """Publishes messages.

    Parameters:
        sender: stores messages as Send does.
        retained: admits retained messages.
        store: stores those.
        changes: waits until messages are durable.
        bytes_max: maximum size of the body of a message (`pop.message_bytes_max`).
    """

    def __init__(
        self, sender: Sender, retained: RetainedMessages, store: Store, changes: DurableChanges, bytes_max: int
    ) -> None:
        self._sender = sender
        self._retained = retained
        self._store = store
        self._changes = changes
        self._bytes_max = bytes_max

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "publish",
            "POST",
            "/messages",
            ApiRole.OPERATOR,
            "Publish messages. If none can be stored, the call fails with what is wrong with the first one.",
            self.publish,
            MessagesPublished,
            body=MessagesToPublish,
        )

    async def publish(self, call: ApiCall) -> MessagesPublished:
        """Publish messages, and answer when they are durable."""
        asked: MessagesToPublish = call.body
        causer = causer_of(call.subject)
        items: list[MessagePublished] = []
        first_error: StoreError | SendRefused | None = None
        call.noted |= {"topic": asked.messages[0].topic, "messages": 0}
        async with self._changes.durable():
            for number, message in enumerate(asked.messages):
                try:
                    items.append(self._store_message(message, causer))
                    call.noted["messages"] = len(items)
                except (SendRefused, StoreError) as error:
                    first_error = first_error or error
                    items.append(MessagePublished(error=str(error)))
                if number % PUBLISHED_AT_ONCE == 0:
                    await asyncio.sleep(0)
        failed = sum(item.error is not None for item in items)
        call.noted["messages"] = len(items) - failed
        if first_error is not None and failed == len(items):
            status = HTTPStatus.CONFLICT if isinstance(first_error, DiskFull | LimitExceeded) else HTTPStatus.BAD_REQUEST
            raise ApiError(status, str(first_error))
        return MessagesPublished(items=items, failed=failed)

    def _store_message(self, message: MessageToPublish, causer: Causer) -> MessagePublished:
        """Store a message. Raises SendRefused, StoreError."""
        try:
            body = b64decode(message.body_base64, validate=True)
        except ValueError as error:
            raise SendRefused(Refusal.INVALID_PROPERTY, f"body_base64 is not base64: {error}") from error
        properties = self._properties(message)
        if message.retain:
            return MessagePublished(message_id=message_id(self._retain(message, body, properties, causer)))
        stored = self._sender.store(message.topic.encode(), body, properties, causer)
        return MessagePublished(message_id=message_id(stored.position), repeated=stored.is_repeated)

    def _properties(self, message: MessageToPublish) -> Properties:
        now_ms = self._store.now_ms()
        if message.delay_ms and message.deliver_at_ms:
            detail = f"delay_ms is {message.delay_ms} and deliver_at_ms is {message.deliver_at_ms}; give one of them"
            raise SendRefused(Refusal.INVALID_DELIVERY_TIME, detail)
        values: dict[str, Any] = {name: getattr(message, name) for name in _PROPERTIES}
        if message.delay_ms:
            values["deliver_at_ms"] = now_ms + message.delay_ms
        expires_at_ms = now_ms + message.expire_after_ms if message.expire_after_ms else 0
        if expires_at_ms and expires_at_ms <= values["deliver_at_ms"]:
            detail = (
                f"the message expires {message.expire_after_ms} ms after it is sent, before it is due, so nobody would get it; "
                "give a larger expire_after_ms, or 0"
            )
            raise SendRefused(Refusal.INVALID_DELIVERY_TIME, detail)
        return Properties(list(message.properties.items()), expires_at_ms=expires_at_ms, **values)

    def _retain(self, message: MessageToPublish, body: bytes, properties: Properties, causer: Causer) -> int:
        """Store a message that its topic retains, and return its position. Raises SendRefused, StoreError."""
        if properties.deliver_at_ms or properties.deduplication_id or properties.timer_key:
            detail = "a retained message can't be delayed, and has neither a deduplication_id nor a timer_key; leave them out"
            raise SendRefused(Refusal.INVALID_PROPERTY, detail)
        check_properties(properties)
        if len(body) > self._bytes_max:
            detail = f"the body has {len(body)} bytes, and {self._bytes_max} are allowed: see pop.message_bytes_max"
            raise SendRefused(Refusal.MESSAGE_TOO_LARGE, detail)
        topic = message.topic.encode()
        route = self._store.router.route(topic, causer)
        causer = self._store.ledger.with_tenant(causer, route.name)
        encoded = encode_properties(properties._replace(by=causer.row()) if body else properties)
        if body:
            self._retained.admit(topic, record_bytes(topic, body, encoded), causer)
        return self._store.append_message(route, body, encoded, 1 | Flag.RETAIN, tag_hash(properties.tag))
