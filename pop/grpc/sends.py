"""Send: storing messages."""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from penstock.pop.access.caller import causer_of_call, trace_of_call
from penstock.pop.core.sender import PROPERTIES_MAX, Refusal, Sender, SendRefused, StoredMessage, message_id
from penstock.pop.grpc.requests import check_count
from penstock.pop.grpc.status import OK, SendCutShort
from penstock.pop.grpc.wire import SENT_PLAIN, sent, sent_plain
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.encoding import field_bytes
from penstock.store.errors import DiskFull, LimitExceeded, RecordTooLarge, StoreError, TopicInvalid
from penstock.store.properties import Properties
from penstock.store.record import HEADER_BYTES
from penstock.store.space.causer import Causer
from penstock.store.store import Store
from penstock.tracing.context import TRACEPARENT

MESSAGES_PER_SEND_MAX = 10_000

TOGETHER_MIN = 8
"""Messages of a call from which on it pays to look at all of them before any is stored."""


class Sends:
    """Serves Send: stores the messages of a call.

    Parameters:
        store: stores plain messages.
        sender: stores messages with properties, delayed messages and half messages.
        message_bytes_max: maximum size of a body.
    """

    def __init__(self, store: Store, sender: Sender, message_bytes_max: int) -> None:
        self._store = store
        self._sender = sender
        self._message_bytes_max = message_bytes_max

    async def send(self, request: pb.SendRequest) -> bytes:
        """Store the messages of a request, and return the response when they are durable."""
        check_count("send messages", request.messages, MESSAGES_PER_SEND_MAX)
        end, causer = self._store.log.end, causer_of_call()
        route_of, append = self._store.router.route, self._store.append_message
        bytes_max, sender = self._message_bytes_max, self._sender
        if trace := trace_of_call():
            _add_trace(request, trace)
        # The messages of a call are alike, so if the first one has more than topic and body, it does not pay to look at all.
        may_be_plain = len(request.messages) >= TOGETHER_MIN and not request.messages[0].HasField("extras")
        if may_be_plain and (answer := self._store_together(request, causer)) is not None:
            await self._store.durable()
            return answer
        results: list[bytes] = []
        is_any_repeated = False
        add = results.append
        # DiskFull ends the whole call, so that the client sends all of it again.
        for message in request.messages:
            try:
                has_more = (
                    message.tag
                    or message.message_group
                    or message.deliver_at_ms
                    or message.delay_ms
                    or message.producer
                    or message.properties
                    or len(message.body) > bytes_max
                )
                if not has_more and not message.HasField("extras"):
                    add(SENT_PLAIN % append(route_of(message.topic.encode(), causer), message.body, b"", 1))
                    sender.sent += 1
                    continue
                if not has_more and _are_only_an_id(message.extras):
                    stored = self._store_identified(message, causer)
                    if not stored.is_repeated:
                        add(SENT_PLAIN % stored.position)
                        continue
                    result = _result_of(stored)
                else:
                    result = self._store_message(message, causer)
                is_any_repeated |= result.repeated
                add(sent(result))
            except DiskFull as error:
                if self._store.log.end > end:
                    raise SendCutShort(f"{error}; some messages of the call may be stored") from error
                raise
            except SendRefused as error:
                add(_failed(pb.Code.Value(error.refusal.name), error))
            except TopicInvalid as error:
                add(_failed(pb.INVALID_TOPIC, error))
            except RecordTooLarge as error:
                add(_failed(pb.MESSAGE_TOO_LARGE, error))
            except LimitExceeded as error:
                add(_failed(pb.TOO_MANY_QUEUES, error))
        if self._store.log.end > end or is_any_repeated:  # the first of a repeated message may not be durable yet
            await self._store.durable()
        return b"".join(results)

    def _store_together(self, request: pb.SendRequest, causer: Causer) -> bytes | None:
        """Store messages that have a topic and a body only, and return the response: the hot path.

        Return None, and store nothing, if a message has more, or can't be stored.
        """
        messages = request.messages
        bodies = [message.body for message in messages]
        names = [message.topic for message in messages]
        shapes = [*zip(names, map(len, bodies), strict=True)]
        counts = Counter(shapes)
        topics = {name: name.encode() for name, _ in counts}
        plain_bytes = sum(
            field_bytes(field_bytes(len(topics[name])) + field_bytes(length)) * count
            for (name, length), count in counts.items()
        )
        if request.ByteSize() != plain_bytes or max(length for _, length in counts) > self._message_bytes_max:
            return None
        try:
            routes = {name: self._store.router.route(topic, causer) for name, topic in topics.items()}
        except StoreError:
            return None
        if len(counts) == 1:
            runs = [(routes[names[0]], bodies, 1)]
        else:
            runs = []
            last = None
            for shape, body in zip(shapes, bodies, strict=True):
                if shape != last:
                    last, run = shape, list[bytes]()
                    runs.append((routes[shape[0]], run, 1))
                run.append(body)
        sizes = {(name, length): HEADER_BYTES + len(topics[name]) + length for name, length in counts}
        total = sum(sizes[shape] * count for shape, count in counts.items())
        if not self._store.append_runs(runs, total):
            return None
        self._sender.sent += len(messages)
        begin = self._store.log.end - total
        return sent_plain([*accumulate(map(sizes.__getitem__, shapes[:-1]), initial=begin)])

    def _store_message(self, message: pb.Message, causer: Causer) -> pb.SendResult:
        due_ms = message.deliver_at_ms
        if message.delay_ms:
            if due_ms or message.delay_ms < 0:
                detail = f"delay_ms is {message.delay_ms} and deliver_at_ms is {due_ms}: give one of them, and at least 0"
                raise SendRefused(Refusal.INVALID_DELIVERY_TIME, detail)
            due_ms = self._store.now_ms() + message.delay_ms
        extras = message.extras
        if extras.deduplication_age_ms < 0 or extras.expire_after_ms < 0:
            detail = (
                f"deduplication_age_ms is {extras.deduplication_age_ms} and expire_after_ms is {extras.expire_after_ms}: "
                "give at least 0"
            )
            raise SendRefused(Refusal.INVALID_PROPERTY, detail)
        expires_at_ms = self._store.now_ms() + extras.expire_after_ms if extras.expire_after_ms else 0
        if due_ms and expires_at_ms and expires_at_ms <= due_ms:
            detail = (
                f"the message expires {extras.expire_after_ms} ms after it is sent, before it is due: nobody would get it; "
                "give a larger expire_after_ms, or 0"
            )
            raise SendRefused(Refusal.INVALID_DELIVERY_TIME, detail)
        properties = Properties(
            list(message.properties.items()),
            message.tag,
            message.message_group,
            due_ms,
            expires_at_ms,
            content_type=extras.content_type or None,
            response_topic=extras.response_topic or None,
            correlation_data=extras.correlation_data or None,
            producer=message.producer,
            deduplication_id=extras.deduplication_id,
            timer_key=extras.timer_key,
        )
        topic, age_ms = message.topic.encode(), extras.deduplication_age_ms
        return _result_of(self._sender.store(topic, message.body, properties, causer, age_ms=age_ms))

    def _store_identified(self, message: pb.Message, causer: Causer) -> StoredMessage:
        extras = message.extras
        topic, age_ms = message.topic.encode(), extras.deduplication_age_ms
        return self._sender.store_identified(topic, message.body, extras.deduplication_id, causer, age_ms=age_ms)


def _are_only_an_id(extras: pb.MessageExtras) -> bool:
    """Return whether a message has a deduplication id, with its age or not, and nothing else of the extras."""
    return bool(
        extras.deduplication_id
        and extras.deduplication_age_ms >= 0
        and not (
            extras.expire_after_ms
            or extras.timer_key
            or extras.content_type
            or extras.response_topic
            or extras.correlation_data
        )
    )


def _result_of(stored: StoredMessage) -> pb.SendResult:
    return pb.SendResult(
        status=OK,
        message_id=message_id(stored.position),
        recall_handle=stored.recall_handle,
        transaction_handle=stored.transaction_handle,
        repeated=stored.is_repeated,
    )


def _add_trace(request: pb.SendRequest, trace: dict[str, str]) -> None:
    """Give the trace context of a call to the messages that have none of their own, and have room for more properties."""
    for message in request.messages:
        properties = message.properties
        if TRACEPARENT not in properties and len(properties) + len(trace) <= PROPERTIES_MAX:
            properties.update(trace)


def _failed(code: pb.Code.ValueType, error: Exception) -> bytes:
    return sent(pb.SendResult(status=pb.Status(code=code, detail=str(error))))
