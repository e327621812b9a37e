"""Dead letters: where each came from, and why. The messages are in the light queue `$dlq/GROUP`.

A dead letter has a row from the record that dead-lettered the message to the record that redrives it, or until retention drops
the message. So a row also tells that the dead letter was not redriven. Rows are read from the index when somebody asks; only
those of the open commit are in memory.

Rows of the index: key b"D", id of the `$dlq/` queue u32, position u64, group id u32, all big-endian; value offset in that
queue u64, size u32, attempts u16, reason u8, failed ms i64, and what the consumer said in UTF-8.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import IntEnum
from itertools import takewhile
from struct import Struct
from typing import NamedTuple

from penstock.pop.errors import RequestInvalid
from penstock.store.index.index import Batch, Index, KeySpace, after

_KEY = Struct(">cIQI")
_QUEUE_PREFIX = Struct(">cI")
_MESSAGE_PREFIX = Struct(">cIQ")
_ROW = Struct("<QIHBq")

DETAIL_BYTES_MAX = 2_000
"""Maximum length of the detail of a dead letter, in bytes of UTF-8."""

Key = tuple[int, int, int]
"""Id of the `$dlq/` queue, position of the message, id of the group."""


class Reason(IntEnum):
    """Why a message is a dead letter. The index has the numbers, the log has the names."""

    ATTEMPTS_EXHAUSTED = 1
    """It was handed out as often as its group allows, and never acknowledged."""
    UNREADABLE = 2
    """Its record can't be read any more."""
    FORWARDED = 3
    """A consumer dead-lettered it."""


class DeadLetter(NamedTuple):
    """One dead letter.

    Parameters:
        queue_id: id of the `$dlq/` queue.
        position: of the message.
        group_id: of the group that failed to process the message.
        offset: in the `$dlq/` queue.
        size: of the message's record.
        attempts: how often the message was handed out.
        reason: why it is a dead letter.
        failed_ms: when it became one, in ms since 1970.
        detail: why a consumer dead-lettered it, in the consumer's words; or why the last attempt failed, if the node knows.
    """

    queue_id: int
    position: int
    group_id: int
    offset: int
    size: int
    attempts: int
    reason: Reason
    failed_ms: int
    detail: str = ""

    @property
    def key(self) -> Key:
        return self.queue_id, self.position, self.group_id


def check_detail(detail: str) -> None:
    """Check the length of what a consumer says about a failure. Raises RequestInvalid."""
    if len(detail) * 4 > DETAIL_BYTES_MAX and len(detail.encode()) > DETAIL_BYTES_MAX:
        raise RequestInvalid(f"the reason of a failure has {len(detail.encode())} bytes: use up to {DETAIL_BYTES_MAX}")


class DeadLetters:
    """The dead letters of all groups. Only `PopState` changes them."""

    def __init__(self) -> None:
        self._changed: dict[Key, DeadLetter | None] = {}
        self._queues_deleted: set[int] = set()
        """Ids of deleted `$dlq/` queues whose rows must be deleted."""
        self._index: Index | None = None

    def add(self, letter: DeadLetter) -> None:
        """Add a dead letter."""
        self._changed[letter.key] = letter

    def remove(self, key: Key) -> None:
        """Remove a dead letter that was redriven, or whose message was dropped."""
        self._changed[key] = None

    def delete_queue(self, queue_id: int) -> None:
        """Remove all dead letters of a `$dlq/` queue that is deleted."""
        self._queues_deleted.add(queue_id)

    def get(self, key: Key) -> DeadLetter | None:
        """Return a dead letter; None if there is none with this key, or it was redriven."""
        if key in self._changed:
            return self._changed[key]
        assert self._index is not None
        row = self._index.get(_KEY.pack(KeySpace.DEAD, *key))
        return _letter(key, row) if row is not None else None

    def of_message(self, queue_id: int, position: int, offset: int | None = None) -> DeadLetter | None:
        """Return the dead letter that a message in a `$dlq/` queue is; None if there is none.

        With `offset`, return only the dead letter that has this offset in the queue.
        """
        found = {letter.key: letter for letter in self._saved(_MESSAGE_PREFIX.pack(KeySpace.DEAD, queue_id, position))}
        for key, letter in self._changed.items():
            if key[:2] == (queue_id, position):
                found.pop(key, None)
                if letter is not None:
                    found[key] = letter
        return next((letter for letter in found.values() if offset is None or letter.offset == offset), None)

    def listed(self, queue_id: int, position: int = 0) -> Iterator[DeadLetter]:
        """Yield the committed dead letters of a `$dlq/` queue in the order of the log, from `position` on."""
        return self._saved(_QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id), position.to_bytes(8, "big"))

    def listed_at(self, queue_id: int, position: int) -> Iterator[DeadLetter]:
        """Yield the committed dead letters that one message is: one for each filter by which its group got the message."""
        return self._saved(_MESSAGE_PREFIX.pack(KeySpace.DEAD, queue_id, position))

    def before(self, position: int) -> Iterator[DeadLetter]:
        """Yield the committed dead letters of all queues whose messages are before `position` in the log."""
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
                    _ROW.pack(letter.offset, letter.size, letter.attempts, letter.reason, letter.failed_ms)
                    + letter.detail.encode(),
                )
        self._changed.clear()
        for queue_id in self._queues_deleted:
            prefix = _QUEUE_PREFIX.pack(KeySpace.DEAD, queue_id)
            batch.delete_range(prefix, after(prefix))
        self._queues_deleted.clear()


def _letter(key: Key, row: bytes) -> DeadLetter:
    offset, size, attempts, reason, failed_ms = _ROW.unpack_from(row)
    return DeadLetter(*key, offset, size, attempts, Reason(reason), failed_ms, row[_ROW.size :].decode())
