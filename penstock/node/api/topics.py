"""Topics over the admin API: a sample of live traffic, and the filters that have queues."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from http import HTTPStatus
from operator import mul
from typing import Annotated, Final, Literal

import msgspec
import numpy as np

from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Operation, PageQuery
from penstock.node.api.pages import in_slices, page_by_name, page_in_order
from penstock.node.topictraffic import TopicTraffic, TrafficSample
from penstock.store.errors import TopicInvalid
from penstock.store.queues.lightqueue import LightQueue
from penstock.store.queues.queues import Queues
from penstock.store.topics import check_filter, matches

OWNERS_SHOWN: Final = 20
"""Owners of a queue that are named."""


class TopicQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the list of topics."""

    filter: Annotated[str, msgspec.Meta(min_length=1, description="Topic filter; `#` for all.")] = "#"
    contains: Annotated[str, msgspec.Meta(description="A text in the topic, in any case.")] = ""
    order: Annotated[
        Literal["topic", "messages", "bytes"],
        msgspec.Meta(description="By topic, in pages; or those with the highest rates, on one page that has no next one."),
    ] = "topic"


class TopicShown(msgspec.Struct, kw_only=True):
    """A topic that was seen lately. Rates are averages over about half a minute."""

    topic: str
    messages_per_s: float
    bytes_per_s: Annotated[float, msgspec.Meta(description="Bytes of records: topic, properties, body and a header.")]
    last_ms: Annotated[int, msgspec.Meta(description="When the last message that was seen was stored.")]


class TopicList(msgspec.Struct, kw_only=True):
    """A page of the topics that were seen. The sample begins with the first request, and ends when none comes for a while."""

    items: list[TopicShown]
    next: str | None
    since_ms: Annotated[int, msgspec.Meta(description="When the sample began. A new one has no topics yet.")]
    topics: Annotated[int, msgspec.Meta(description="Topics that are remembered.")]
    topics_dropped: Annotated[int, msgspec.Meta(description="Topics that went out because there are too many.")]
    sampled_percent: Annotated[float, msgspec.Meta(description="How much of the newest traffic was looked at.")]


class FilterQuery(PageQuery, forbid_unknown_fields=True, kw_only=True):
    """The parameters of the list of filters."""

    prefix: Annotated[str, msgspec.Meta(description="With which the filter begins.")] = ""
    wildcards: Annotated[bool, msgspec.Meta(description="List those with wildcards; else those without.")] = True


class QueueShown(msgspec.Struct, kw_only=True):
    """A light queue of a filter."""

    queue_id: int
    start: Annotated[str, msgspec.Meta(description="`earliest`, `latest`, or a time in ms since 1970.")]
    next_offset: int
    messages: Annotated[int, msgspec.Meta(description="Entries that retention has not trimmed.")]
    is_backfilling: bool
    owners: Annotated[
        list[str],
        msgspec.Meta(
            description=f"Up to {OWNERS_SHOWN} of those that need the queue: `group:ID`, a group by its number; `sessions`, "
            "the stored sessions together; `root`, messages whose topics begin as the filter."
        ),
    ]
    owner_count: int


class FilterShown(msgspec.Struct, kw_only=True):
    """A filter that has queues."""

    filter: str
    queues: Annotated[list[QueueShown], msgspec.Meta(description="One for each start that was asked for.")]


class FilterList(msgspec.Struct):
    """A page of the filters that have durable queues, in their order."""

    items: list[FilterShown]
    next: str | None
    queues: Annotated[int, msgspec.Meta(description="All queues of the node, those that serve connections only among them.")]
    transient: Annotated[int, msgspec.Meta(description="Queues that serve connections only. They are not listed.")]


class TopicOperations:
    """Serves topics and filters.

    Parameters:
        sample: of the traffic of the node.
        queues: the light queues of the store.
    """

    def __init__(self, sample: TrafficSample, queues: Queues) -> None:
        self._sample = sample
        self._queues = queues

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "listTopics",
            "GET",
            "/topics",
            ApiRole.VIEWER,
            "List topics of live traffic with their rates, from a sample that begins with the first request.",
            self.topics,
            TopicList,
            query=TopicQuery,
        )
        yield Operation(
            "listFilters",
            "GET",
            "/filters",
            ApiRole.VIEWER,
            "List the topic filters that have durable queues.",
            self.filters,
            FilterList,
            query=FilterQuery,
        )

    async def topics(self, call: ApiCall) -> TopicList:
        """Return a page of the topics."""
        query: TopicQuery = call.query
        try:
            check_filter(query.filter)
        except TopicInvalid as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
        sample, text = self._sample, query.contains.casefold()
        sample.ask(asyncio.get_running_loop())

        def is_listed(topic: str, _: TopicTraffic) -> bool:
            return (query.filter == "#" or matches(query.filter, topic)) and text in topic.casefold()

        if query.order == "topic":
            page, cursor = await page_by_name(sample.topics, query, is_listed)
        else:
            listed = await in_slices(each for each in tuple(sample.topics.items()) if is_listed(*each))
            page, cursor = await self._highest(listed, query.order, query.limit), None
        return TopicList(
            items=[self._topic(topic, seen) for topic, seen in page],
            next=cursor,
            since_ms=sample.since_ms,
            topics=len(sample.topics),
            topics_dropped=sample.dropped,
            sampled_percent=round(sample.share * 100, 1),
        )

    def _topic(self, topic: str, seen: TopicTraffic) -> TopicShown:
        factor = self._sample.per_second(seen)
        return TopicShown(
            topic=topic,
            messages_per_s=round(seen.messages * factor, 3),
            bytes_per_s=round(seen.bytes * factor, 1),
            last_ms=seen.last_ms,
        )

    async def _highest(
        self, listed: list[tuple[str, TopicTraffic]], order: Literal["messages", "bytes"], limit: int
    ) -> list[tuple[str, TopicTraffic]]:
        """Return the topics with the highest rates, the highest first."""
        figures = (seen.messages if order == "messages" else seen.bytes for _, seen in listed)
        factors = (self._sample.per_second(seen) for _, seen in listed)
        rates = np.array(await in_slices(map(mul, figures, factors)))
        return [listed[at] for at in np.argsort(-rates, kind="stable")[:limit].tolist()]

    async def filters(self, call: ApiCall) -> FilterList:
        """Return a page of the filters."""
        query: FilterQuery = call.query
        read_filters = partial(self._queues.filters, are_wildcards=query.wildcards)

        def read(start: str, count: int) -> list[tuple[str, None]]:
            return [(topic_filter, None) for topic_filter in read_filters(start, count)]

        def row_of(topic_filter: str, _: None) -> str:
            return topic_filter

        filters, cursor = await page_in_order(query, read, row_of, prefix=query.prefix)
        items = await in_slices(map(self._filter, filters))
        return FilterList(
            [each for each in items if each.queues],  # the queues of others have ended meanwhile
            cursor,
            len(self._queues),
            self._queues.transient,
        )

    def _filter(self, topic_filter: str) -> FilterShown:
        queues = [self._queue(queue) for queue in self._queues.all_of(topic_filter)]
        return FilterShown(filter=topic_filter, queues=queues)

    def _queue(self, queue: LightQueue) -> QueueShown:
        owners = sorted(queue.owners)
        return QueueShown(
            queue_id=queue.id,
            start=str(queue.start),
            next_offset=queue.committed_offset,
            messages=queue.committed_offset - queue.dense_offset(),
            is_backfilling=self._queues.is_backfilling(queue),
            owners=owners[:OWNERS_SHOWN],
            owner_count=len(owners),
        )
