"""What clients of both kinds, asyncio and synchronous, send and get."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from penstock.pop.backoff import Backoff, Exponential
from penstock.pop.client.calls import error_of_status
from penstock.pop.errors import BatchFailed, PopError, StatusError
from penstock.pop.proto import pop_pb2 as pb

if TYPE_CHECKING:
    from penstock.store.lightqueue import End, Start

A = TypeVar("A")


class Sent(NamedTuple):
    """What came of a message that was sent: it is durable.

    `message_id` is its position in the log, 16 hexadecimal digits. `recall_handle` is empty unless it is delayed, and
    `transaction_handle` unless it is half of a transaction.
    """

    message_id: str
    recall_handle: str = ""
    transaction_handle: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingMessage:
    """A message to be sent.

    Parameters:
        topic: MQTT topic, without wildcards.
        body: anything; with topic and properties at most `pop.message_bytes_max` of the node (4 MiB by default).
        properties: up to 128 pairs of text, each up to 65,535 bytes.
        tag: what kind of message it is, for filters.
        message_group: messages of one group are in order for groups of consumers that ask for it.
        deliver_at_ms: ms since 1970, by the node's clock; 0, or what is past, is at once.
        delay_ms: instead of `deliver_at_ms`, ms from now by this machine's clock.
        producer: not empty: half of a transaction of this producer, delivered when that is committed.

    Raises:
        ValueError: both `deliver_at_ms` and `delay_ms` are given.
    """

    topic: str
    body: bytes = b""
    properties: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    message_group: str = ""
    deliver_at_ms: int = 0
    delay_ms: int = 0
    producer: str = ""

    def __post_init__(self) -> None:
        if self.deliver_at_ms and self.delay_ms:
            raise ValueError("give deliver_at_ms or delay_ms, not both")

    def encoded(self) -> pb.Message:
        """Return the message as it goes over the wire."""
        deliver_at_ms = self.deliver_at_ms if not self.delay_ms else time.time_ns() // 1_000_000 + self.delay_ms
        return pb.Message(
            topic=self.topic,
            body=self.body,
            properties=self.properties,
            tag=self.tag,
            message_group=self.message_group,
            deliver_at_ms=deliver_at_ms,
            producer=self.producer,
        )


def sent_of(result: pb.SendResult) -> Sent:
    """Return what came of a message."""
    return Sent(result.message_id, result.recall_handle, result.transaction_handle)


class Popped(list[A]):
    """The messages that a pop returned.

    `refused` are the handles of its `acks` that were not acknowledged, each with the reason. All others are, and durable.
    """

    def __init__(self, messages: Iterable[A], refused: Mapping[str, StatusError]) -> None:
        super().__init__(messages)
        self.refused = refused


def refused_of(request: pb.PopRequest, answer: pb.PopResponse) -> dict[str, StatusError]:
    """Return the handles that a pop was to acknowledge and could not, each with the reason."""
    errors = zip(request.acks, map(error_of_status, answer.ack_statuses), strict=False)  # no statuses: all are acknowledged
    return {handle: error for handle, error in errors if error is not None}


def pop_request(
    topic_filter: str,
    group: str,
    messages_max: int,
    invisible_ms: int,
    wait_ms: int,
    start: Start,
    attempt_id: str = "",
    acks: Iterable[str] = (),
) -> pb.PopRequest:
    """Return a request for messages."""
    return pb.PopRequest(
        group=group,
        filter=topic_filter,
        messages_max=messages_max,
        invisible_ms=invisible_ms,
        wait_ms=wait_ms,
        attempt_id=attempt_id,
        acks=acks,
        **start_fields(start),
    )


def start_fields(start: Start) -> dict[str, Any]:
    """Return the fields of a request that say where a group begins."""
    return {"start_at_ms": start} if isinstance(start, int) else {"start": end_of(start)}


def end_of(end: End) -> pb.Start.ValueType:
    """Return one end of a queue as it goes over the wire."""
    return pb.LATEST if end == "latest" else pb.EARLIEST


def settings_of(
    *,
    attempts_max: int | None = None,
    backoff: Backoff | None = None,
    invisible_ms: int | None = None,
    in_flight_max: int | None = None,
    fifo: bool | None = None,
    tags: str | None = None,
    sql: str | None = None,
    paused: bool | None = None,
) -> pb.GroupSettings:
    """Return settings of a group as they go over the wire. What is None stays as it is; 0 is the node's option.

    Raises:
        ValueError: both `tags` and `sql` are given.
    """
    if tags is not None and sql is not None:
        raise ValueError("a group filters by tags or by sql, not by both")
    settings = pb.GroupSettings(
        attempts_max=attempts_max,
        invisible_ms=invisible_ms,
        in_flight_max=in_flight_max,
        fifo=fifo,
        paused=paused,
    )
    if isinstance(backoff, Exponential):
        rule = pb.Exponential(min_ms=backoff.min_ms, max_ms=backoff.max_ms, factor=backoff.factor)
        settings.backoff.CopyFrom(pb.Backoff(exponential=rule))
    elif backoff is not None:
        settings.backoff.CopyFrom(pb.Backoff(list_ms=backoff))
    if tags is not None:
        settings.expression, settings.expression_type = tags, pb.TAG
    elif sql is not None:
        settings.expression, settings.expression_type = sql, pb.SQL
    return settings


def reset_request(
    group: str, topic_filter: str, end: End | None, time_ms: int | None, message_id: str | None
) -> pb.ResetGroupRequest:
    """Return a request to begin anew elsewhere."""
    if sum(value is not None for value in (end, time_ms, message_id)) != 1:
        raise ValueError("give one of end, time_ms and message_id")
    request = pb.ResetGroupRequest(group=group, filter=topic_filter)
    if end is not None:
        request.end = end_of(end)
    elif time_ms is not None:
        request.time_ms = time_ms
    elif message_id is not None:
        request.message_id = message_id
    return request


def redrive_request(group: str, message_ids: Iterable[str] | None) -> pb.RedriveRequest:
    """Return a request to send dead letters back. An empty list would mean all of them: that is asked for by None.

    Raises:
        ValueError: the list is empty.
    """
    ids = list(message_ids) if message_ids is not None else []
    if message_ids is not None and not ids:
        raise ValueError("name the messages to send back, or give None for all")
    return pb.RedriveRequest(group=group, message_ids=ids)


def all_or_raise(answers: list[A | PopError]) -> list[A]:
    """Return the answers of a batch. Raises BatchFailed where one of them is an error."""
    results = [None if isinstance(answer, PopError) else answer for answer in answers]
    errors = {place: answer for place, answer in enumerate(answers) if isinstance(answer, PopError)}
    if errors:
        raise BatchFailed(errors, results)
    return [answer for answer in answers if not isinstance(answer, PopError)]
