"""The retained messages that a new subscription still gets, and how far they are sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice

from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES


class RetainedReplay:
    """The retained messages that one subscription still gets.

    Parameters:
        found: their entries, as `RetainedMessages.matching` yields them.
        after: topic of the last one that was sent on an earlier connection; empty if none was.
    """

    __slots__ = ("_found", "after", "is_exhausted")

    def __init__(self, found: Iterator[bytes], after: bytes = b"") -> None:
        self._found = found
        self.after = after
        """In a session that lasts: the topic of the last one that was sent."""
        self.is_exhausted = False
        """Whether `read` has returned all of them."""

    def read(self, entries_max: int, bytes_max: int) -> bytes:
        """Return the next entries. There may be none before the end, because a long search pauses.

        Args:
            entries_max: number of entries at most.
            bytes_max: bytes of messages after which no further entry is added.
        """
        entries = bytearray()
        message_bytes = 0
        for entry in islice(self._found, entries_max):
            if not entry:  # The search pauses.
                break
            entries += entry
            message_bytes += ENTRY.unpack(entry)[1]
            if message_bytes >= bytes_max:
                break
        else:
            self.is_exhausted = len(entries) < entries_max * ENTRY_BYTES
        return bytes(entries)

    def put_back(self, entries: bytes) -> None:
        """Have the next `read` return entries again that could not be sent."""
        again = (entries[at : at + ENTRY_BYTES] for at in range(0, len(entries), ENTRY_BYTES))
        self._found = chain(again, self._found)
        self.is_exhausted = False
