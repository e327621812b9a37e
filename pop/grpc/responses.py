"""Popped messages as bytes of a response."""

from __future__ import annotations

from penstock.pop.core.deadletters import DeadLetter, DeadLetters
from penstock.pop.core.handle import Handles
from penstock.pop.core.pops import PopResult
from penstock.pop.core.sender import message_id
from penstock.pop.grpc.wire import popped_messages
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.properties import decode_properties
from penstock.store.record import Record


class PopResponses:
    """Makes the responses of pops.

    Parameters:
        dead_letters: tells where dead letters came from.
        handles: makes the handles of deliveries.
    """

    def __init__(self, dead_letters: DeadLetters, handles: Handles) -> None:
        self._dead_letters = dead_letters
        self._handles = handles

    def messages(self, result: PopResult) -> bytes:
        """Return the fields `messages` and `invisible_ms` of a PopResponse or a ConsumeResponse."""
        checkpoint = result.checkpoint
        handles = self._handles.deliveries_joined(checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count)
        origins = self._dead_letters.origins(checkpoint)
        dead = {index: dead_letter(letter, group, origin, "") for index, (letter, group, origin) in origins.items()}
        deadline_ms = checkpoint.deadline_ms
        return popped_messages(checkpoint.body, result.records, handles, deadline_ms, deadline_ms - checkpoint.pop_ms, dead)


def dead_letter(letter: DeadLetter, group: str, topic_filter: str, topic: str) -> pb.DeadLetter:
    """Return a dead letter as a message of the API."""
    return pb.DeadLetter(
        group=group,
        filter=topic_filter,
        attempts=letter.attempts,
        reason=pb.Reason.ValueType(letter.reason),
        failed_ms=letter.failed_ms,
        message_id=message_id(letter.position),
        topic=topic,
        detail=letter.detail,
    )


def stored_message(record: Record) -> pb.PoppedMessage:
    """Return a message as the log has it, without a handle and what else comes of a pop."""
    about = decode_properties(record.properties)
    return pb.PoppedMessage(
        topic=record.topic.decode(errors="replace"),
        body=record.body,
        properties=dict(about.user),
        message_group=about.message_group,
        tag=about.tag,
        stored_ms=record.store_ms,
        deduplication_id=about.deduplication_id,
        response_topic=about.response_topic or "",
        correlation_data=about.correlation_data or b"",
        content_type=about.content_type or "",
    )
