"""The gRPC face of POP: `millrace.pop.v1`, defined in pop.proto.

One response carries a whole batch: a stream item per message would cost more than everything else together. Whatever
changes state is answered when it is durable. A call that can't be served at all fails with a gRPC status; what is wrong
with one message or handle of a batch is its own `Status`, and the others go on.
"""

from __future__ import annotations

from typing import NoReturn, TypeVar

import grpc
import grpc.aio
import structlog

from pop import pop_pb2 as pb
from pop import pop_pb2_grpc
from pop.core import Change, Outcome, PopCore
from pop.errors import Overloaded, PopError, RequestInvalid
from pop.poll import Taken
from store.errors import DiskFull, LimitExceeded, RecordTooLarge, StoreError, TopicInvalid
from store.lightqueue import Start
from store.record import (
    HEADER,
    HEADER_BYTES,
    Flag,
    Properties,
    decode_properties,
    encode_properties,
    tag_hash,
)
from timer.delayed import DelayedMessages, Recalled
from timer.options import TimerOptions

logger = structlog.get_logger("pop.service")

MESSAGES_PER_SEND_MAX = 10_000
HANDLES_MAX = 16_384
PROPERTIES_MAX = 128
PROPERTY_BYTES_MAX = 65_535
"""Of a name, a value, a tag, a message group: MQTT 5.0, 1.5.4 allows no more, and messages go out over MQTT too."""

TOPIC_NAMES_MAX = 100_000
"""Decoded topic names that are kept: a pop decodes each topic once, not once a message."""

_OK = pb.Status(code=pb.OK)
_STATUS = {outcome: pb.Status(code=pb.Code.Value(outcome.name), detail=outcome.value) for outcome in Outcome}
_STATUS[Outcome.OK] = _OK
_RECALLED = {
    Recalled.CANCELLED: _OK,
    Recalled.ALREADY_FIRED: pb.Status(code=pb.ALREADY_FIRED, detail="the message was delivered before"),
    Recalled.ALREADY_CANCELLED: pb.Status(code=pb.ALREADY_RECALLED, detail="the message was recalled before"),
    Recalled.UNKNOWN: pb.Status(code=pb.UNKNOWN_MESSAGE, detail="the log holds no such delayed message"),
}


Q = TypeVar("Q")
A = TypeVar("A")


class _Refused(Exception):
    """Raised for one message of a batch; becomes its status."""

    def __init__(self, code: pb.Code.ValueType, detail: str) -> None:
        self.status = pb.Status(code=code, detail=detail)
        super().__init__(detail)


class PopService(pop_pb2_grpc.PopServiceServicer):
    """Serves the API from a core.

    Parameters:
        core: groups, checkpoints, acknowledgements.
        delayed: delayed messages.
        timer: bounds of their delays.
    """

    def __init__(self, core: PopCore, delayed: DelayedMessages, timer: TimerOptions) -> None:
        self._core = core
        self._store = core.store
        self._delayed = delayed
        self._timer = timer
        self._names: dict[bytes, str] = {}

    # --- Send -------------------------------------------------------------------------------------------------------

    async def Send(
        self, request: pb.SendRequest, context: grpc.aio.ServicerContext[pb.SendRequest, pb.SendResponse]
    ) -> pb.SendResponse:
        if len(request.messages) > MESSAGES_PER_SEND_MAX:
            await _refuse(
                context, RequestInvalid(f"send at most {MESSAGES_PER_SEND_MAX} messages a call, not {len(request.messages)}")
            )
        results = []
        stored = False
        for message in request.messages:
            try:
                results.append(self._store_message(message))
                stored = True
            except _Refused as refused:
                results.append(pb.SendResult(status=refused.status))
            except TopicInvalid as error:
                results.append(pb.SendResult(status=pb.Status(code=pb.INVALID_TOPIC, detail=str(error))))
            except RecordTooLarge as error:
                results.append(pb.SendResult(status=pb.Status(code=pb.MESSAGE_TOO_LARGE, detail=str(error))))
            except LimitExceeded as error:
                results.append(pb.SendResult(status=pb.Status(code=pb.TOO_MANY_QUEUES, detail=str(error))))
            except DiskFull as error:
                # The whole call, so that it is sent again: where the disk got full in its midst, its first messages come twice.
                await _refuse(context, error)
        if stored:
            await self._store.durable()
        return pb.SendResponse(results=results)

    def _store_message(self, message: pb.Message) -> pb.SendResult:
        topic = message.topic.encode()
        properties = self._properties(message)
        due_ms = properties.deliver_at_ms
        route = self._store.queues.route(topic)
        encoded = (
            encode_properties(properties) if properties.tag or properties.user or properties.message_group or due_ms else b""
        )
        if len(topic) + len(encoded) + len(message.body) > self._core.options.message_bytes_max:
            limit = self._core.options.message_bytes_max
            raise _Refused(pb.MESSAGE_TOO_LARGE, f"topic, properties and body have more than {limit} bytes together")
        if due_ms:
            return self._store_delayed(route.topic, message.body, encoded, due_ms)
        position = self._store.append_message(route, message.body, encoded, 1, tag_hash(properties.tag))
        return pb.SendResult(status=_OK, message_id=f"{position:016x}")

    def _store_delayed(self, topic: bytes, body: bytes, properties: bytes, due_ms: int) -> pb.SendResult:
        try:
            self._delayed.check_room()
        except LimitExceeded as error:
            raise _Refused(pb.TOO_MANY_TIMERS, str(error)) from error
        route = self._store.queues.route(topic)
        position = self._store.append_message(route, body, properties, 1 | Flag.DELAYED)
        handle = self._core.handles.recall(position, due_ms)
        return pb.SendResult(status=_OK, message_id=f"{position:016x}", recall_handle=handle)

    def _properties(self, message: pb.Message) -> Properties:
        """Return the properties of a message to be sent; `deliver_at_ms` is 0 where that is now or past."""
        user = list(message.properties.items())
        if len(user) > PROPERTIES_MAX:
            raise _Refused(pb.INVALID_PROPERTY, f"a message may have {PROPERTIES_MAX} properties, not {len(user)}")
        texts = [text for pair in user for text in pair] + [message.tag, message.message_group]
        for text in texts:
            if len(text.encode()) > PROPERTY_BYTES_MAX:
                raise _Refused(pb.INVALID_PROPERTY, f"{text[:40]!r}... has more than {PROPERTY_BYTES_MAX} bytes")
        due_ms, now_ms = message.deliver_at_ms, self._store.now_ms()
        if due_ms < 0 or due_ms - now_ms > self._timer.delay_ms_max:
            raise _Refused(
                pb.INVALID_DELIVERY_TIME,
                f"deliver_at_ms is {due_ms}: give ms since 1970, at most {self._timer.delay_ms_max} ms ahead of now "
                f"({now_ms}), or 0 for at once",
            )
        return Properties(user, message.tag, message.message_group, due_ms if due_ms > now_ms else 0)

    # --- Pop --------------------------------------------------------------------------------------------------------

    async def Pop(
        self, request: pb.PopRequest, context: grpc.aio.ServicerContext[pb.PopRequest, pb.PopResponse]
    ) -> pb.PopResponse:
        core = self._core
        options = core.options
        try:
            messages_max = _bounded("messages_max", request.messages_max, options.messages_default)
            invisible_ms = _bounded(
                "invisible_ms", request.invisible_ms, options.invisible_ms_default, options.invisible_ms_max
            )
            wait_ms = min(_bounded("wait_ms", request.wait_ms, 0), options.wait_ms_max)
            if request.start not in (pb.EARLIEST, pb.LATEST):
                raise RequestInvalid(f"start is {request.start}: use EARLIEST (0) or LATEST (1)")
            start: Start = "latest" if request.start == pb.LATEST else "earliest"
            group = core.group(request.group, request.filter, start)
            taken = await core.pop(group, min(messages_max, options.messages_max), invisible_ms, wait_ms)
        except (PopError, StoreError) as error:
            await _refuse(context, error)
        if taken is None:
            return pb.PopResponse()
        try:
            await self._store.durable()
            return self._response(taken)
        except BaseException:
            core.release(taken.checkpoint)  # the consumer went away: it never saw them
            raise

    def _response(self, taken: Taken) -> pb.PopResponse:
        """Return the answer to a pop. The hot path: about 4 us a message, most of it protobuf's."""
        checkpoint = taken.checkpoint
        handles = self._core.handles.deliveries(checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count)
        names, unpack, popped = self._names, HEADER.unpack_from, pb.PoppedMessage
        deadline_ms = checkpoint.deadline_ms
        messages = []
        for handle, entry, data in zip(handles, checkpoint.entries(), taken.records, strict=True):
            if data is None:
                continue
            _, _, _, _, topic_len, props_len, store_ms = unpack(data)
            body_from = HEADER_BYTES + topic_len + props_len
            topic = data[HEADER_BYTES : HEADER_BYTES + topic_len]
            name = names.get(topic) or self._name(topic)
            message = popped(
                handle=handle,
                message_id=f"{entry.position:016x}",
                topic=name,
                body=data[body_from:],
                stored_ms=store_ms,
                queue_offset=entry.offset,
                attempt=entry.attempt,
                visible_at_ms=deadline_ms,
            )
            if props_len:
                properties = decode_properties(data[HEADER_BYTES + topic_len : body_from])
                message.properties.update(properties.user)
                message.tag, message.message_group = properties.tag, properties.message_group
            messages.append(message)
        return pb.PopResponse(messages=messages)

    def _name(self, topic: bytes) -> str:
        if len(self._names) >= TOPIC_NAMES_MAX:
            self._names.clear()
        name = self._names[topic] = topic.decode()
        return name

    # --- Ack, ChangeInvisible, Recall -------------------------------------------------------------------------------

    async def Ack(
        self, request: pb.AckRequest, context: grpc.aio.ServicerContext[pb.AckRequest, pb.AckResponse]
    ) -> pb.AckResponse:
        if len(request.handles) > HANDLES_MAX:
            await _refuse(
                context, RequestInvalid(f"acknowledge at most {HANDLES_MAX} handles a call, not {len(request.handles)}")
            )
        try:
            outcomes = self._core.ack(request.group, list(request.handles))
        except DiskFull as error:
            await _refuse(context, error)
        await self._store.durable()
        return pb.AckResponse(statuses=[_STATUS[outcome] for outcome in outcomes])

    async def ChangeInvisible(
        self,
        request: pb.ChangeInvisibleRequest,
        context: grpc.aio.ServicerContext[pb.ChangeInvisibleRequest, pb.ChangeInvisibleResponse],
    ) -> pb.ChangeInvisibleResponse:
        if len(request.changes) > HANDLES_MAX:
            await _refuse(context, RequestInvalid(f"change at most {HANDLES_MAX} handles a call, not {len(request.changes)}"))
        changes = [Change(change.handle, change.invisible_ms, change.suspend) for change in request.changes]
        try:
            outcomes = self._core.change_invisible(request.group, changes)
        except DiskFull as error:
            await _refuse(context, error)
        await self._store.durable()
        results = [pb.ChangeInvisibleResult(status=_STATUS[outcome], handle=handle) for outcome, handle in outcomes]
        return pb.ChangeInvisibleResponse(results=results)

    async def Recall(
        self, request: pb.RecallRequest, context: grpc.aio.ServicerContext[pb.RecallRequest, pb.RecallResponse]
    ) -> pb.RecallResponse:
        if len(request.recall_handles) > HANDLES_MAX:
            await _refuse(context, RequestInvalid(f"recall at most {HANDLES_MAX} messages a call"))
        statuses = []
        for handle in request.recall_handles:
            named = self._core.handles.read_recall(handle)
            if named is None:
                statuses.append(pb.Status(code=pb.INVALID_HANDLE, detail="this is not a recall handle that this node gave"))
            else:
                try:
                    statuses.append(_RECALLED[self._delayed.recall(*named)])
                except DiskFull as error:
                    await _refuse(context, error)
        await self._store.durable()
        return pb.RecallResponse(statuses=statuses)


def _bounded(name: str, value: int, default: int, maximum: int | None = None) -> int:
    """Return `value`, or `default` where it is 0. Raises RequestInvalid outside of 0 to `maximum`."""
    if value < 0:
        raise RequestInvalid(f"{name} is {value}: it can't be negative")
    if maximum is not None and value > maximum:
        raise RequestInvalid(f"{name} is {value}: the most that this node allows is {maximum}")
    return value or default


async def _refuse(context: grpc.aio.ServicerContext[Q, A], error: Exception) -> NoReturn:
    """End the call with the gRPC status that fits `error`."""
    overloaded = isinstance(error, Overloaded | LimitExceeded | DiskFull)
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED if overloaded else grpc.StatusCode.INVALID_ARGUMENT, str(error))
