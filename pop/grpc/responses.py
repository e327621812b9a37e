"""Popped messages as bytes of a response."""

from __future__ import annotations

from penstock.pop.core.checkpoint import FROM_QUEUE, Checkpoint
from penstock.pop.core.deadletters import DeadLetter
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.handle import Handles
from penstock.pop.core.poll import PopResult
from penstock.pop.core.state import PopState
from penstock.pop.grpc.requests import message_id
from penstock.pop.grpc.wire import popped_messages
from penstock.pop.proto import pop_pb2 as pb


class PopResponses:
    """Makes the responses of pops.

    Parameters:
        state: has the groups and their dead letters.
        handles: makes the handles of deliveries.
    """

    def __init__(self, state: PopState, handles: Handles) -> None:
        self._state = state
        self._handles = handles

    def messages(self, result: PopResult) -> bytes:
        """Return the field `messages` of a PopResponse or a ConsumeResponse."""
        checkpoint = result.checkpoint
        group = self._state.groups_by_id.get(checkpoint.group_id)
        handles = self._handles.deliveries_joined(checkpoint.position, checkpoint.pop_ms, checkpoint.group_id, checkpoint.count)
        dead = self._dead_letters(group, checkpoint) if group is not None and group.dead_letters_of else {}
        return popped_messages(checkpoint.body, result.records, handles, checkpoint.deadline_ms, dead)

    def _dead_letters(self, group: ConsumerGroup, checkpoint: Checkpoint) -> dict[int, pb.DeadLetter]:
        """Return what is known of the messages of a checkpoint as dead letters, by index."""
        found = {}
        for index, entry in enumerate(checkpoint.entries()):
            offset = entry.offset if entry.source == FROM_QUEUE else None
            letter = self._state.dead_letters.of_message(group.queue.id, entry.position, offset)
            if letter is not None:
                origin = self._state.groups_by_id.get(letter.group_id)
                found[index] = dead_letter(letter, group.dead_letters_of, origin.filter if origin else "", "")
        return found


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
    )
