"""The messages that a group has got back from its dead letters. They don't expire.

A dead letter has no time to live any more, because an operator decides what becomes of it, so a redriven one has none either.
A message is known until the group is reset or deleted, or retention drops the message. So it doesn't expire in later attempts.

Rows of the index: key b"d", group id u32 big-endian, position u64 big-endian; no value. They are looked up where they are
needed, so the messages take no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from struct import Struct

from penstock.store.index.index import Batch, Index, KeySpace, after

_KEY = Struct(">cIQ")
_PREFIX = Struct(">cI")


class RedrivenMessages:
    """The positions of the messages that a group has got back from its dead letters.

    Parameters:
        group_id: of the group.
        index: has the rows of earlier commits.
    """

    __slots__ = ("_changed", "_group_id", "_index", "_is_cleared", "_may_have_rows")

    def __init__(self, group_id: int, index: Index) -> None:
        self._group_id = group_id
        self._index = index
        self._changed: dict[int, bool] = {}
        """Positions that were added, or removed, since the last call of `save`."""
        self._is_cleared = False
        """True if all rows must be deleted before those of `_changed` are written."""
        self._may_have_rows: bool | None = None
        """False if there are no rows; None before the first look."""

    def __contains__(self, position: object) -> bool:
        """Return whether a message was redriven."""
        assert isinstance(position, int)
        found = self._changed.get(position)
        if found is not None:
            return found
        return self._has_rows() and self._index.get(_KEY.pack(KeySpace.REDRIVEN, self._group_id, position)) is not None

    def __bool__(self) -> bool:
        """Return whether there may be any."""
        return any(self._changed.values()) or self._has_rows()

    def _has_rows(self) -> bool:
        """Return whether there may be rows. Most groups have none, and then a message that has expired costs no lookup."""
        if self._may_have_rows is None:
            prefix = _PREFIX.pack(KeySpace.REDRIVEN, self._group_id)
            self._may_have_rows = self._index.first_at_or_after(prefix, prefix) is not None
        return self._may_have_rows

    def add(self, position: int) -> None:
        """Note that a message was redriven."""
        self._changed[position] = True

    def remove(self, position: int) -> None:
        """Forget a message that retention has dropped."""
        self._changed[position] = False

    def clear(self) -> None:
        """Forget all messages, because the group was reset."""
        self._changed.clear()
        self._is_cleared, self._may_have_rows = True, False

    def before(self, position: int) -> Iterator[int]:
        """Yield the committed positions before `position`, in order."""
        if self._has_rows():
            rows = self._index.rows(_PREFIX.pack(KeySpace.REDRIVEN, self._group_id))
            yield from takewhile(lambda each: each < position, (_KEY.unpack(key)[2] for key, _ in rows))

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        if self._is_cleared:
            delete_redriven(batch, self._group_id)
            self._is_cleared = False
        for position, is_redriven in self._changed.items():
            key = _KEY.pack(KeySpace.REDRIVEN, self._group_id, position)
            if is_redriven:
                batch.put(key, b"")
                self._may_have_rows = True
            else:
                batch.delete(key)
        self._changed.clear()


def delete_redriven(batch: Batch, group_id: int) -> None:
    """Delete all rows of a group, with one range delete."""
    prefix = _PREFIX.pack(KeySpace.REDRIVEN, group_id)
    batch.delete_range(prefix, after(prefix))
