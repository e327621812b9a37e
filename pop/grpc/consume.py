"""Consume: receiving messages on a stream, which also carries acknowledgements and changes of invisible time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator

from penstock.pop.access.caller import causer_of_call
from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import VisibilityChange
from penstock.pop.core.handle import Handles
from penstock.pop.core.pops import PopResult
from penstock.pop.core.selection import RESPONSE_BYTES
from penstock.pop.errors import RequestInvalid
from penstock.pop.grpc.consumestream import CREDITS_DEFAULT, CREDITS_MAX, STATED_STEP, AckReport, ConsumeStream, StreamTerms
from penstock.pop.grpc.requests import HANDLES_MAX, bounded, start_of
from penstock.pop.grpc.responsebytes import bytes_of_stream
from penstock.pop.grpc.status import ACK_STATUS
from penstock.pop.grpc.wire import MessageEncoder, serialize
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.store import Store


class Consumption:
    """Serves Consume.

    Parameters:
        core: hands out messages.
        store: tells when a pop or an acknowledgement is durable.
        handles: reads handles.
        popped: makes responses of popped messages.
        options: bounds and defaults.
    """

    def __init__(self, core: PopCore, store: Store, handles: Handles, popped: MessageEncoder, options: PopOptions) -> None:
        self._core = core
        self._groups = core.groups
        self._store = store
        self._handles = handles
        self._popped = popped
        self._options = options

    async def consume(self, requests: AsyncIterator[pb.ConsumeRequest]) -> AsyncGenerator[bytes, None]:
        """Yield messages and reports until the caller ends its stream of requests."""
        stream: ConsumeStream | None = None
        give_back, is_broken = False, True
        reader: asyncio.Task[None] | None = None
        try:
            first = await anext(aiter(requests), None)
            if first is None or not first.HasField("open"):
                raise RequestInvalid("the first request of a Consume stream must have 'open'")
            stream = self._open(first.open)
            give_back = first.open.give_back
            _apply(stream, first)
            stream.pop_more()
            reader = asyncio.create_task(_read(requests, stream))
            reader.add_done_callback(lambda _: stream.wake.set())
            while not reader.done() and stream.failure is None:
                await stream.wake.wait()
                stream.wake.clear()
                while stream.outbox:
                    data, count = self._join(stream.outbox)
                    yield data
                    for _ in range(count):
                        stream.sent()  # only after the write: what a broken stream didn't write is requeued
            if stream.failure is not None:
                raise stream.failure
            reader.result()
            # The client has closed its side. It hears what came of its last acknowledgements when they are durable.
            await self._store.durable()
            while stream.outbox:
                item = stream.outbox.popleft()
                if isinstance(item, AckReport):
                    yield serialize(self._encode(item))
                else:
                    self._core.deliveries.requeue(item.checkpoint)
            is_broken = False
        finally:
            if reader is not None:
                reader.cancel()
            if stream is not None:
                stream.end(give_back=give_back, is_broken=is_broken)

    def _open(self, request: pb.ConsumeOpen) -> ConsumeStream:
        options = self._options
        credits = bounded("credits", request.credits, CREDITS_DEFAULT, CREDITS_MAX)
        batch_max = bounded("batch_max", request.batch_max, options.messages_default)
        asked_ms = bounded("invisible_ms", request.invisible_ms, 0, options.invisible_ms_max)
        start = start_of(request.start, request.start_at_ms)
        causer = causer_of_call()
        group = self._groups.get_or_create(request.group, request.filter, start, causer)
        return ConsumeStream(
            self._core,
            self._store.when_durable,
            self._handles,
            group,
            StreamTerms(credits, min(batch_max, options.messages_max), asked_ms or group.invisible_ms),
            caller=causer,
            stream_bytes=bytes_of_stream(),
        )

    def _join(self, outbox: deque[PopResult | AckReport]) -> tuple[bytes, int]:
        """Return one response for the first items of the outbox, and their number. Large items lose their records.

        Protocol buffers merge messages whose bytes are joined.
        """
        parts: list[bytes] = []
        size = 0
        for at, item in enumerate(outbox):
            if parts and size > RESPONSE_BYTES // 2:
                break
            parts.append(serialize(self._encode(item)))
            size += len(parts[-1])
            if isinstance(item, PopResult) and item.size >= STATED_STEP:
                outbox[at] = item._replace(records=[])  # gRPC copies the response, and may keep both for long
        return b"".join(parts), len(parts)

    def _encode(self, item: PopResult | AckReport) -> bytes | pb.ConsumeResponse:
        if isinstance(item, PopResult):
            return self._popped.encode(item)
        return pb.ConsumeResponse(
            acked=item.acked,
            refused=[pb.HandleStatus(handle=handle, status=ACK_STATUS[outcome]) for handle, outcome in item.refused],
            changed=[pb.ChangeInvisibleResult(status=ACK_STATUS[outcome], handle=handle) for outcome, handle in item.changed],
        )


async def _read(requests: AsyncIterator[pb.ConsumeRequest], stream: ConsumeStream) -> None:
    async for request in requests:
        if request.HasField("open"):
            raise RequestInvalid("only the first request of a Consume stream may have 'open'")
        _apply(stream, request)
        await stream.has_room()


def _apply(stream: ConsumeStream, request: pb.ConsumeRequest) -> None:
    if len(request.acks) > HANDLES_MAX or len(request.changes) > HANDLES_MAX:
        raise RequestInvalid(f"acknowledge or change at most {HANDLES_MAX} handles a request")
    if request.credits:
        bounded("credits", abs(request.credits), 0, CREDITS_MAX)
        stream.grant(request.credits)
    if request.acks or request.changes:
        changes = [
            VisibilityChange(change.handle, change.invisible_ms, change.suspend, change.nack, change.reason)
            for change in request.changes
        ]
        stream.ack(list(request.acks), changes)
