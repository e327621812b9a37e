"""The spans of messages that services send, that groups hand out, and that consumers settle."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Final, NamedTuple

from penstock.pop.core.checkpoint import Checkpoint, delivery_id
from penstock.pop.core.group import ConsumerGroup
from penstock.store.bodies import CHANGE_ENTRY, CHECKPOINT_ENTRY, REFERENCE
from penstock.store.properties import decode_properties
from penstock.store.recent import RecentIds
from penstock.store.record import LEVEL_MASK, PROPS_LEN_AT, STORE_MS_AT, Flag, Kind, split
from penstock.tracing.context import TRACEPARENT, TraceContext, sampled_context
from penstock.tracing.traces import AttributeValue, SpanKind, Traces, TraceSpan

NO_PROPERTIES_LEN: Final = bytes(STORE_MS_AT - PROPS_LEN_AT)
"""The length of the properties in the record of a message without any."""

_NAMED: Final = f'"{TRACEPARENT}"'.encode()
"""What the encoded properties of a message with a trace context contain."""


class _Delivery(NamedTuple):
    """A delivery under way whose message is traced."""

    context: TraceContext
    """The span of the delivery."""
    topic: bytes
    position: int
    """Of the message."""


class PopTraces:
    """Makes the spans of messages whose traces are sampled. Only a node with `[tracing]` has one.

    Parameters:
        traces: Makes and keeps spans.
        when_durable: Calls back when all that was stored is durable; see `Store.when_durable`.
    """

    def __init__(self, traces: Traces, when_durable: Callable[[Callable[[], None]], None]) -> None:
        self._traces = traces
        self._when_durable = when_durable
        self._open: RecentIds[int, _Delivery] = RecentIds(traces.options.open_max)
        """The deliveries under way, by their ids."""

    # --- sending ----------------------------------------------------------------------------------------------------

    def now_ns(self) -> int:
        """Return the time in ns since 1970."""
        return self._traces.now_ns()

    def sent(
        self, user: list[tuple[str, str]], topic: bytes, body: bytes, began_ns: int, position: int, error: str = ""
    ) -> None:
        """Make the span of a message that a service has sent; it ends when the message is durable.

        Args:
            user: Its user properties.
            topic, body: Of the message.
            began_ns: When the node began to store it.
            position: Of its record; `NOT_STORED` if the message was refused.
            error: Why it was refused.
        """
        context = sampled_context(user)
        if context is None:
            return
        attributes: dict[str, AttributeValue] = {"messaging.message.body.size": len(body)}
        span = self._traces.begin(context, "publish", "send", SpanKind.SERVER, topic, position, attributes, began_ns=began_ns)
        if span is None:
            return
        if error:
            self._traces.end(span, error)
        else:
            self._when_durable(partial(self._traces.end, span))

    # --- handing out ------------------------------------------------------------------------------------------------

    def handed_out(self, group: ConsumerGroup, checkpoint: Checkpoint, records: list[bytes | None]) -> None:
        """Make the spans of deliveries; they end when their checkpoint is durable. A record that is None was not handed out."""
        spans: list[TraceSpan] = []
        for index, data in enumerate(records):
            if data is None or data[PROPS_LEN_AT:STORE_MS_AT] == NO_PROPERTIES_LEN:
                continue
            topic, encoded, body = split(data)
            if _NAMED not in encoded or (context := sampled_context(decode_properties(encoded).user)) is None:
                continue
            position, _, _, attempt, _, _ = CHECKPOINT_ENTRY.unpack_from(checkpoint.body, index * CHECKPOINT_ENTRY.size)
            attributes: dict[str, AttributeValue] = {
                "messaging.consumer.group.name": group.name,
                "messaging.destination.subscription.name": group.filter,
                "messaging.message.body.size": len(body),
                "messaging.message.delivery_attempt": attempt,
            }
            span = self._traces.begin(context, "deliver", "deliver", SpanKind.PRODUCER, topic, position, attributes)
            if span is not None:
                spans.append(span)
                self._open.add(delivery_id(checkpoint.position, index), _Delivery(span.context, topic, position))
        if spans:
            self._when_durable(partial(self._end, spans))

    def _end(self, spans: list[TraceSpan]) -> None:
        for span in spans:
            self._traces.end(span)

    # --- settling ---------------------------------------------------------------------------------------------------

    def appended(self, kind: Kind, group: str, body: bytes, flags: int, position: int) -> None:
        """Make the spans of what a record of a group has settled; they end when the record is durable.

        Args:
            kind: Of the record.
            group: Name of the group.
            body: Of the record.
            flags: Of the record.
            position: Of the record.
        """
        if not len(self._open):
            return
        if kind is Kind.POP_INVISIBLE_CHANGED:
            self._changed(group, body, flags, position)
        elif kind in _SETTLING:
            operation, kind_of_span = _SETTLING[kind]
            if kind is Kind.POP_REVIVED:
                operation = "requeue" if flags & Flag.SUSPENDED and not flags & LEVEL_MASK else "expire"
            for checkpoint, index in REFERENCE.iter_unpack(body):
                delivery = self._open.take(delivery_id(checkpoint, index))
                if delivery is not None:
                    self._settled(delivery, operation, group, kind_of_span)

    def _changed(self, group: str, body: bytes, flags: int, position: int) -> None:
        """Follow deliveries whose invisible time was changed. What a consumer has returned is settled by that."""
        operation = "suspend" if flags & Flag.SUSPENDED else "nack" if flags & Flag.RETURNED else ""
        for number, (checkpoint, index, *_) in enumerate(CHANGE_ENTRY.iter_unpack(body)):
            delivery = self._open.take(delivery_id(checkpoint, index))
            if delivery is None:
                continue
            if operation:
                self._settled(delivery, operation, group, SpanKind.SERVER)
            else:
                self._open.add(delivery_id(position, number), delivery)

    def _settled(self, delivery: _Delivery, operation: str, group: str, kind: SpanKind) -> None:
        attributes: dict[str, AttributeValue] = {"messaging.consumer.group.name": group}
        span = self._traces.begin(delivery.context, operation, "settle", kind, delivery.topic, delivery.position, attributes)
        if span is not None:
            self._when_durable(partial(self._traces.end, span))


_SETTLING: Final = {
    Kind.POP_ACK: ("ack", SpanKind.SERVER),
    Kind.POP_DEAD_LETTER: ("dead_letter", SpanKind.INTERNAL),
    Kind.POP_REVIVED: ("expire", SpanKind.INTERNAL),
}
"""The operation and the kind of the span of each kind of record that settles deliveries."""
