"""Dead letters: where each came from, and why. The messages are in the light queue `$dlq/GROUP`; here is what it doesn't say.

A row is there from the record that made a message a dead letter until the one that sent it back, so it also tells whether
that was done; or until retention has dropped the message. Rows are read from the index when somebody asks; none is kept in
memory but those of the open commit.

Rows of the index: key b"D", id of the `$dlq/` queue u32, position u64, group id u32, all big-endian; value offset in that
queue u64, size u32, attempts u16, reason u8, failed ms i64.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import takewhile
from struct import Struct
from typing import NamedTuple

from penstock.store.index import Batch, Index, KeySpace, after

_KEY = Struct(">cIQI")
_QUEUE_PREFIX = Struct(">cI")
_MESSAGE_PREFIX = Struct(">cIQ")
_ROW = Struct("<QIHBq")

Key = tuple[int, int, int]
"""Id of the `$dlq/` queue, position of the message, id of the group."""


class Reason(IntEnum):
    """Why a message is a dead letter. The numbers are in the index, the names in the log."""

    ATTEMPTS_EXHAUSTED = 1
    """It was handed out as often as its group allows, and never acknowledged."""
    UNREADABLE = 2
    """Its record can't be read any more."""
    FORWARDED = 3
    """A consumer gave it up."""


class DeadLetter(NamedTuple):
    """One dead letter."""

    queue_id: int
    position: int
    group_id: int
    offset: int
    """In the `$dlq/` queue."""
    size: int
    attempts: int
    reason: Reason
    failed_ms: int

    @property
    def key(self) -> Key:
        return self.queue_id, self.position, self.group_id


class DeadLetters:
    """The dead letters of all groups. Only `PopState` changes them."""

    def __init__(self) -> None:
        self._changed: dict[Key, DeadLetter | None] = {}
        self._index: Index | None = None

    def add(self, letter: DeadLetter) -> None:
        """Note a new one."""
        self._changed[letter.key] = letter

    def remove(self, key: Key) -> None:
        """Note that one was sent back."""
        self._changed[key] = None

    def get(self, key: Key) -> DeadLetter | None:
        """Return one, or None where there is none, or it was sent back."""
        if key in self._changed:
            return self._changed[key]
        assert self._index is not None
        row = self._index.get(_KEY.pack(KeySpace.DEAD, *key))
        return _letter(key, row) if row is not None else None

    def of_message(self, queue_id: int, position: int, offset: int | None = None) -> DeadLetter | None:
        """Return what made a message a dead letter; with `offset`, only where that is its place in the `$dlq/` queue."""
        found = {letter.key: letter for letter in self._saved(_MESSAGE_PREFIX.pack(KeySpace.DEAD, queue_id, position))}
        for key, letter in self._changed.items():
            if key[:2] == (queue_id, position):
                found.pop(key, None)
                if letter is not None:
                    found[key] = letter
        return next((letter for letter in found.values() if offset is None or letter.offset == offset), None)

    def listed(self, queue_id: int, position: int = 0) -> Iterator[DeadLetter]:
        """Yield those of a `$dlq/` queue in the order of the log, from `position` on. Only what is committed."""
        return self._saved(_QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id), position.to_bytes(8, "big"))

    def listed_at(self, queue_id: int, position: int) -> Iterator[DeadLetter]:
        """Yield those that one message is: one, or one for each filter by which its group got it. Only what is committed."""
        return self._saved(_MESSAGE_PREFIX.pack(KeySpace.DEAD, queue_id, position))

    def before(self, position: int) -> Iterator[DeadLetter]:
        """Yield those of all queues whose message stands before `position`. Only what is committed."""
        assert self._index is not None
        queue_id = 0
        while (
            row := self._index.first_at_or_after(_QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id), bytes(KeySpace.DEAD))
        ) is not None:
            queue_id = _KEY.unpack(row[0])[1]
            yield from takewhile(lambda letter: letter.position < position, self.listed(queue_id))
            queue_id += 1

    def _saved(self, prefix: bytes, start: bytes = b"") -> Iterator[DeadLetter]:
        assert self._index is not None
        for key, row in self._index.rows(prefix, start):
            _, queue_id, position, group_id = _KEY.unpack(key)
            yield _letter((queue_id, position, group_id), row)

    # --- the index --------------------------------------------------------------------------------------------------

    def load(self, index: Index) -> None:
        """Read from `index` from now on."""
        self._index = index

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        for key, letter in self._changed.items():
            if letter is None:
                batch.delete(_KEY.pack(KeySpace.DEAD, *key))
            else:
                batch.put(
                    _KEY.pack(KeySpace.DEAD, *key),
                    _ROW.pack(letter.offset, letter.size, letter.attempts, letter.reason, letter.failed_ms),
                )
        self._changed.clear()

    @staticmethod
    def delete_queue(batch: Batch, queue_id: int) -> None:
        """Delete all rows of a `$dlq/` queue that is gone, with one range delete."""
        prefix = _QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id)
        batch.delete_range(prefix, after(prefix))


def _letter(key: Key, row: bytes) -> DeadLetter:
    offset, size, attempts, reason, failed_ms = _ROW.unpack(row)
    return DeadLetter(*key, offset, size, attempts, Reason(reason), failed_ms)
