"""Retained messages over the admin API: a list, one with its body, and the end of one."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from http import HTTPStatus
from typing import Annotated, Final

import msgspec

from penstock.gateway.delivery.retained_messages import RetainedMessages, RetainedRow
from penstock.node.api.changes import DurableChanges, causer_of
from penstock.node.api.messagereader import BODY_BYTES_SHOWN, MessageReader
from penstock.node.api.messages import PropertiesShown, properties_shown
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Done, Operation, PageQuery, not_found
from penstock.node.api.pages import CHARS_MAX, LOOKED_AT_ONCE, LOOKED_MAX
from penstock.node.loopshare import LoopShare
from penstock.pop.core.sender import message_id
from penstock.store.errors import TopicInvalid
from penstock.store.record import Flag
from penstock.store.space.causer import Causer
from penstock.store.store import Store
from penstock.store.topics import check_filter

CLEARED: Final = int(Flag.RETAIN) | 1
"""Flags of the message without a body that clears a topic: at QoS 1, so that its subscribers surely get it."""


class RetainedQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the list of retained messages."""

    filter: Annotated[str, msgspec.Meta(min_length=1, description="Topic filter; `#` for all.")] = "#"


class RetainedShown(msgspec.Struct, kw_only=True):
    """A retained message without its body."""

    topic: str
    message_id: str
    size_bytes: Annotated[int, msgspec.Meta(description="Of its record in the log.")]
    expires_at_ms: Annotated[int, msgspec.Meta(description="When it expires; 0 for never.")]


class RetainedList(msgspec.Struct):
    """A page of the retained messages, in the order of their topics. It may be short although there is a cursor."""

    items: list[RetainedShown]
    next: str | None
    total: Annotated[int, msgspec.Meta(description="Retained messages of the node, whether they are listed or not.")]


class RetainedInDetail(RetainedShown, kw_only=True):
    """A retained message with its body, or its beginning."""

    stored_ms: int
    qos: Annotated[int, msgspec.Meta(description="With which it was published.")]
    client_id: Annotated[str, msgspec.Meta(description="Who has published it; empty if that is not known.")]
    properties: PropertiesShown
    body_base64: str
    body_bytes: Annotated[int, msgspec.Meta(description="Of the whole body.")]
    cut: Annotated[bool, msgspec.Meta(description=f"Whether the body is longer than {BODY_BYTES_SHOWN} bytes, and cut.")]


class RetainedOperations:
    """Serves retained messages.

    Parameters:
        retained: of the node.
        store: takes the messages that clear topics.
        reader: reads messages.
        changes: waits until a topic is cleared durably.
    """

    def __init__(self, retained: RetainedMessages, store: Store, reader: MessageReader, changes: DurableChanges) -> None:
        self._retained = retained
        self._store = store
        self._reader = reader
        self._changes = changes

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "listRetained",
            "GET",
            "/retained",
            ApiRole.VIEWER,
            "List the retained messages whose topics a filter matches.",
            self.messages,
            RetainedList,
            query=RetainedQuery,
        )
        yield Operation(
            "getRetained",
            "GET",
            "/retained/{topic}",
            ApiRole.OPERATOR,
            "Show the retained message of a topic with its body.",
            self.message,
            RetainedInDetail,
        )
        yield Operation(
            "deleteRetained",
            "DELETE",
            "/retained/{topic}",
            ApiRole.ADMIN,
            "Clear the retained message of a topic, as a client does with an empty message, which subscribers get.",
            self.delete,
            Done,
        )

    async def messages(self, call: ApiCall) -> RetainedList:
        """Return a page of the messages."""
        query: RetainedQuery = call.query
        limits = self._store.options
        try:
            check_filter(query.filter, levels_max=limits.topic_levels_max, bytes_max=limits.topic_bytes_max)
        except TopicInvalid as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
        return RetainedList(*await self._page(query), len(self._retained))

    async def _page(self, query: RetainedQuery) -> tuple[list[RetainedShown], str | None]:
        """Return a page and its cursor, in slices between other work of the loop."""
        items: list[RetainedShown] = []
        last, chars = "", 0
        share = LoopShare()
        for looked, (topic, row) in enumerate(self._retained.listed(query.filter, query.after), 1):
            if topic:
                if last and (len(items) == query.limit or looked > LOOKED_MAX or chars > CHARS_MAX):
                    return items, last
                last = topic
                if row is not None:
                    items.append(_shown(topic, row))
                    chars += len(topic)
            if looked % LOOKED_AT_ONCE == 0:
                await share.rest()
        return items, None

    async def message(self, call: ApiCall) -> RetainedInDetail:
        """Return one message."""
        topic = call.path["topic"]
        row = self._row_of(topic)
        message = await self._reader.read(row.position)
        if message is None:
            raise ApiError(
                HTTPStatus.CONFLICT, f"the record of the retained message of {topic[:200]!r} is damaged; publish it again"
            )
        shown = _shown(topic, row)
        return RetainedInDetail(
            topic=shown.topic,
            message_id=shown.message_id,
            size_bytes=shown.size_bytes,
            expires_at_ms=shown.expires_at_ms,
            stored_ms=message.store_ms,
            qos=message.flags & Flag.QOS_MASK,
            client_id=Causer.from_row(message.properties.by).client,
            properties=properties_shown(message.properties),
            body_base64=b64encode(message.body).decode(),
            body_bytes=message.body_bytes,
            cut=len(message.body) < message.body_bytes,
        )

    async def delete(self, call: ApiCall) -> Done:
        """Clear the message of a topic."""
        topic = call.path["topic"]
        async with self._changes.durable():
            row = self._row_of(topic)
            call.noted |= {"message_id": message_id(row.position)}
            route = self._store.router.route(topic.encode(), causer_of(call.subject))
            self._store.append_message(route, b"", flags=CLEARED)
        return Done()

    def _row_of(self, topic: str) -> RetainedRow:
        row = self._retained.get(topic)
        if row is None:
            raise not_found("retained message of the topic", topic)
        return row


def _shown(topic: str, row: RetainedRow) -> RetainedShown:
    return RetainedShown(topic=topic, message_id=message_id(row.position), size_bytes=row.size, expires_at_ms=row.expires_at_ms)
