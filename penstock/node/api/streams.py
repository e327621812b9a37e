"""Streams of the admin API: messages as they are stored, and metrics again and again."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from math import isfinite
from time import perf_counter
from typing import Annotated, Final

import msgspec
from prometheus_client import CollectorRegistry

from penstock.node.api.messagereader import BODY_BYTES_SHOWN, MessageRead, MessageReader
from penstock.node.api.messages import MessageShown, message_shown
from penstock.node.api.operation import ApiCall, ApiError, ApiRole, Operation
from penstock.node.loopshare import LoopShare
from penstock.node.messagetail import MessageTail
from penstock.store.errors import TopicInvalid
from penstock.store.store import Store
from penstock.store.topics import check_filter

LOOK_S: Final = 0.05
"""Seconds between two looks at a log that has nothing new."""

REST_FACTOR: Final = 9
"""How much longer than a look a tail rests before the next one. So a tail takes at most a tenth of the loop."""

STATE_S: Final = 5.0
"""Seconds after which a tail says how it is, although no message came."""

LOSS_S: Final = 1.0
"""Seconds after which it says so if it has left something out."""

SAMPLES_MAX: Final = 5_000
"""Samples of one line of metrics."""


class TailQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a tail."""

    filter: Annotated[str, msgspec.Meta(min_length=1, description="Topic filter; `#` for all.")] = "#"
    per_s: Annotated[
        int, msgspec.Meta(ge=1, le=1_000, description="The most messages of one second that are shown. Others are counted.")
    ] = 100
    body_bytes: Annotated[
        int, msgspec.Meta(ge=0, le=BODY_BYTES_SHOWN, description="Bytes of a body that are shown. A longer one is cut.")
    ] = 1_024


class TailedMessage(MessageShown, tag="message", tag_field="type", kw_only=True):
    """A message that was stored just now. One with a delay is shown when it is stored, and not when it is due."""

    body_base64: str
    cut: Annotated[bool, msgspec.Meta(description="Whether the body is longer than what is shown.")]


class TailState(msgspec.Struct, tag="state", tag_field="type", kw_only=True):
    """How the tail is: the first line, and then one every few seconds. Both figures count from the line before."""

    time_ms: int
    left_out: Annotated[
        int,
        msgspec.Meta(
            description="Messages that match, but were more than `per_s`, or are damaged, expired or deleted already."
        ),
    ]
    skipped_bytes: Annotated[
        int,
        msgspec.Meta(
            description="Bytes of the log that were passed over: to keep up, or because they are damaged or deleted already."
        ),
    ]


class MetricsQuery(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The parameters of a stream of metrics."""

    interval_ms: Annotated[int, msgspec.Meta(ge=500, le=30_000, description="Time between two lines.")] = 2_000
    names: Annotated[
        str,
        msgspec.Meta(max_length=4_096, description="Beginnings of the wanted names, separated by commas; empty for all."),
    ] = ""


class MetricSample(msgspec.Struct, omit_defaults=True):
    """A sample, as `/metrics` has it."""

    name: str
    value: Annotated[float | None, msgspec.Meta(description="null for what is no finite number.")]
    labels: dict[str, str] = {}


class MetricsLine(msgspec.Struct, kw_only=True):
    """All samples that are wanted, at one time."""

    time_ms: int
    samples: list[MetricSample]
    cut: Annotated[bool, msgspec.Meta(description=f"Whether there are more than {SAMPLES_MAX}, which are left out.")]


class StreamOperations:
    """Serves the streams.

    Parameters:
        store: whose log is followed.
        reader: reads messages.
        registry: has the metrics.
        prepare: is awaited before the metrics are collected.
    """

    def __init__(
        self, store: Store, reader: MessageReader, registry: CollectorRegistry, prepare: Callable[[], Awaitable[None]]
    ) -> None:
        self._store = store
        self._reader = reader
        self._registry = registry
        self._prepare = prepare

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "tailMessages",
            "GET",
            "/streams/messages",
            ApiRole.OPERATOR,
            "Show messages as they are stored.",
            self.messages,
            TailedMessage | TailState,
            query=TailQuery,
            is_stream=True,
        )
        yield Operation(
            "streamMetrics",
            "GET",
            "/streams/metrics",
            ApiRole.VIEWER,
            "Show metrics again and again.",
            self.metrics,
            MetricsLine,
            query=MetricsQuery,
            is_stream=True,
        )

    async def messages(self, call: ApiCall) -> AsyncIterator[TailedMessage | TailState]:
        """Return the lines of a tail."""
        query: TailQuery = call.query
        limits = self._store.options
        try:
            check_filter(query.filter, levels_max=limits.topic_levels_max, bytes_max=limits.topic_bytes_max)
        except TopicInvalid as error:
            raise ApiError(HTTPStatus.BAD_REQUEST, str(error)) from error
        return self._tailed(query, MessageTail(self._store, query.filter))

    async def _tailed(self, query: TailQuery, tail: MessageTail) -> AsyncIterator[TailedMessage | TailState]:
        yield TailState(time_ms=self._store.now_ms(), left_out=0, skipped_bytes=0)
        said_s = second_s = perf_counter()
        shown = left_out = 0
        while True:
            began_s = perf_counter()
            if began_s - second_s >= 1:
                second_s, shown = began_s, 0
            positions = tail.look()
            spent_s = perf_counter() - began_s
            for position in positions:
                message = await self._reader.read(position) if shown < query.per_s else None
                if message is None:
                    left_out += 1
                else:
                    shown += 1
                    yield _tailed(message, query.body_bytes)
            if perf_counter() - said_s > (LOSS_S if left_out or tail.skipped_bytes else STATE_S):
                yield TailState(time_ms=self._store.now_ms(), left_out=left_out, skipped_bytes=tail.skipped_bytes)
                said_s, left_out, tail.skipped_bytes = perf_counter(), 0, 0
            await asyncio.sleep(LOOK_S if tail.is_at_end else spent_s * REST_FACTOR)

    async def metrics(self, call: ApiCall) -> AsyncIterator[MetricsLine]:
        """Return the lines of metrics."""
        query: MetricsQuery = call.query
        return self._metrics(query.interval_ms / 1000, tuple(filter(None, query.names.split(","))))

    async def _metrics(self, interval_s: float, names: tuple[str, ...]) -> AsyncIterator[MetricsLine]:
        due_s = perf_counter()
        while True:
            yield await self._sampled(names)
            due_s = max(due_s + interval_s, perf_counter() + interval_s / 2)  # one that takes long gets no burst
            await asyncio.sleep(due_s - perf_counter())

    async def _sampled(self, names: tuple[str, ...]) -> MetricsLine:
        await self._prepare()
        line = MetricsLine(time_ms=self._store.now_ms(), samples=[], cut=False)
        share = LoopShare()
        for family in self._registry.collect():
            for sample in family.samples:
                if names and not sample.name.startswith(names):
                    continue
                if len(line.samples) == SAMPLES_MAX:
                    line.cut = True
                    return line
                value = float(sample.value)
                line.samples.append(MetricSample(sample.name, value if isfinite(value) else None, sample.labels))
            await share.rest()
        return line


def _tailed(message: MessageRead, body_bytes: int) -> TailedMessage:
    body = message.body[:body_bytes]
    fields = msgspec.structs.asdict(message_shown(message))
    return TailedMessage(**fields, body_base64=b64encode(body).decode(), cut=len(body) < message.body_bytes)
