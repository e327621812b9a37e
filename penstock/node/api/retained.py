"""Retained messages over the admin API: a list, one with its body, and the end of one."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Iterator
from http import HTTPStatus
from time import perf_counter
from typing import Annotated, Final

import msgspec

from penstock.gateway.delivery.retained_messages import RetainedMessages, RetainedRow
from penstock.node.api.operation import (
    LOOKED_AT_ONCE,
    SLICE_S,
    ApiCall,
    ApiError,
    ApiRole,
    Done,
    Operation,
    PageQuery,
    check_leads,
    not_found,
)
from penstock.node.api.walk import LOOKED_MAX
from penstock.pop.core.sender import message_id
from penstock.store.errors import TopicInvalid
from penstock.store.options import KIB
from penstock.store.properties import decode_properties
from penstock.store.record import Flag, decode
from penstock.store.space.causer import Causer
from penstock.store.store import Store
from penstock.store.topics import check_filter

BODY_BYTES_SHOWN: Final = 64 * KIB
"""Bytes of a body that an answer has at most."""

CLEARED: Final = int(Flag.RETAIN) | 1
"""Flags of the message without a body that clears a topic: at QoS 1, so that its subscribers surely get it."""


class RetainedQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the list of retained messages."""

    filter: Annotated[str, msgspec.Meta(min_length=1, description="Topic filter; `#` for all.")] = "#"


class RetainedShown(msgspec.Struct, kw_only=True):
    """A retained message without its body."""

    topic: str
    message_id: str
    record_bytes: Annotated[int, msgspec.Meta(description="Size of its record: topic, properties, body and a header.")]
    expires_ms: Annotated[int, msgspec.Meta(description="When it expires; 0 for never.")]


class RetainedList(msgspec.Struct):
    """A page of the retained messages, in the order of their topics. It may be short although there is a cursor."""

    items: list[RetainedShown]
    next: str | None
    total: Annotated[int, msgspec.Meta(description="Retained messages of the node, whether they are listed or not.")]


class RetainedInDetail(RetainedShown, kw_only=True):
    """A retained message with its body."""

    stored_ms: int
    qos: int
    content_type: str
    response_topic: str
    properties: Annotated[list[list[str]], msgspec.Meta(description="User properties in their order: name and value of each.")]
    body_bytes: Annotated[int, msgspec.Meta(description="Size of the whole body.")]
    body_base64: str
    is_cut: Annotated[bool, msgspec.Meta(description=f"Whether only the first {BODY_BYTES_SHOWN} bytes of the body are here.")]
    published_by: Annotated[str, msgspec.Meta(description="Client id of the publisher; empty if it is not known.")]


class RetainedOperations:
    """Serves retained messages.

    Parameters:
        retained: of the node.
        store: of the node.
    """

    def __init__(self, retained: RetainedMessages, store: Store) -> None:
        self._retained = retained
        self._store = store

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
        last = ""
        until_s = perf_counter() + SLICE_S
        for looked, (topic, row) in enumerate(self._retained.listed(query.filter, query.after), 1):
            if topic:
                if last and (len(items) == query.limit or looked > LOOKED_MAX):
                    return items, last
                last = topic
                if row is not None:
                    items.append(_shown(topic, row))
            if looked % LOOKED_AT_ONCE == 0 and perf_counter() > until_s:
                await asyncio.sleep(0)
                until_s = perf_counter() + SLICE_S
        return items, None

    async def message(self, call: ApiCall) -> RetainedInDetail:
        """Return one message."""
        topic = call.path["topic"]
        row = self._row_of(topic)
        if row.position >= self._store.log.written:
            self._store.commit()
        data = self._store.read_intact(row.position, row.size)
        if data is None:
            raise ApiError(
                HTTPStatus.CONFLICT, f"the record of the retained message of {topic[:200]!r} can't be read; see the node's log"
            )
        record = decode(data, position=row.position, verify=False)
        properties = decode_properties(record.properties)
        body = record.body[:BODY_BYTES_SHOWN]
        shown = _shown(topic, row)
        return RetainedInDetail(
            topic=shown.topic,
            message_id=shown.message_id,
            record_bytes=shown.record_bytes,
            expires_ms=shown.expires_ms,
            stored_ms=record.store_ms,
            qos=record.flags & Flag.QOS_MASK,
            content_type=properties.content_type or "",
            response_topic=properties.response_topic or "",
            properties=[list(each) for each in properties.user],
            body_bytes=len(record.body),
            body_base64=b64encode(body).decode(),
            is_cut=len(body) < len(record.body),
            published_by=Causer.from_row(properties.by).client,
        )

    async def delete(self, call: ApiCall) -> Done:
        """Clear the message of a topic."""
        check_leads(self._store)
        topic = call.path["topic"]
        row = self._row_of(topic)
        call.noted |= {"message_id": message_id(row.position)}
        try:
            route = self._store.router.route(topic.encode())
        except TopicInvalid as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
        self._store.append_message(route, b"", flags=CLEARED)
        await self._store.durable()
        return Done()

    def _row_of(self, topic: str) -> RetainedRow:
        row = self._retained.get(topic)
        if row is None:
            raise not_found("retained message of the topic", topic)
        return row


def _shown(topic: str, row: RetainedRow) -> RetainedShown:
    return RetainedShown(topic=topic, message_id=message_id(row.position), record_bytes=row.size, expires_ms=row.expires_at_ms)
