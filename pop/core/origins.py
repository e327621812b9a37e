"""The origins of dead letters that are popped from `$dlq/GROUP`."""

from __future__ import annotations

from typing import NamedTuple

from penstock.pop.core.checkpoint import FROM_QUEUE, Checkpoint
from penstock.pop.core.deadletters import DeadLetter
from penstock.pop.core.state import PopState


class DeadLetterOrigin(NamedTuple):
    """Where a popped message came from.

    Parameters:
        letter: the dead letter that the message is.
        group: name of the group that failed to process the message.
        filter: by which that group got the message; empty if the group was deleted.
    """

    letter: DeadLetter
    group: str
    filter: str


class DeadLetterOrigins:
    """Finds the origins of dead letters.

    Parameters:
        state: has the groups and their dead letters.
    """

    def __init__(self, state: PopState) -> None:
        self._dead_letters = state.dead_letters
        self._group_with_id = state.groups_by_id.get

    def of_checkpoint(self, checkpoint: Checkpoint) -> dict[int, DeadLetterOrigin]:
        """Return the origins of the dead letters among the messages of a checkpoint, by index."""
        group = self._group_with_id(checkpoint.group_id)
        if group is None or not group.dead_letters_of:
            return {}
        found = {}
        for index, entry in enumerate(checkpoint.entries()):
            offset = entry.offset if entry.source == FROM_QUEUE else None
            letter = self._dead_letters.of_message(group.queue.id, entry.position, offset)
            if letter is not None:
                found[index] = DeadLetterOrigin(letter, group.dead_letters_of, self.filter_of(letter))
        return found

    def filter_of(self, letter: DeadLetter) -> str:
        """Return the filter by which a group got the message of a dead letter; empty if the group was deleted."""
        group = self._group_with_id(letter.group_id)
        return group.filter if group is not None else ""
