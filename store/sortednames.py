"""Names in their order, such as those of a hundred thousand clients, of which some come and go all the time."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

CHUNK_NAMES_MAX: Final = 1_024
"""Names of one chunk. Each change moves half of them at most, and a search looks at few chunks."""


class SortedNames:
    """A set of names that can be read in their order from any name on."""

    __slots__ = ("_chunks", "_lasts")

    def __init__(self) -> None:
        self._chunks: list[list[str]] = []
        """The names in order, in chunks that are never empty."""
        self._lasts: list[str] = []
        """The last name of each chunk."""

    def add(self, name: str) -> None:
        """Add a name, which must not be there."""
        if not self._chunks:
            self._chunks.append([name])
            self._lasts.append(name)
            return
        at = min(bisect_left(self._lasts, name), len(self._chunks) - 1)
        chunk = self._chunks[at]
        insort(chunk, name)
        if len(chunk) > CHUNK_NAMES_MAX:
            half = len(chunk) // 2
            self._chunks.insert(at + 1, chunk[half:])
            self._lasts.insert(at + 1, chunk[-1])
            del chunk[half:]
        self._lasts[at] = chunk[-1]

    def remove(self, name: str) -> None:
        """Remove a name, which must be there."""
        at = bisect_left(self._lasts, name)
        chunk = self._chunks[at]
        del chunk[bisect_left(chunk, name)]
        if chunk:
            self._lasts[at] = chunk[-1]
        else:
            del self._chunks[at], self._lasts[at]

    def at_or_after(self, start: str, count: int) -> list[str]:
        """Return up to `count` names from `start` on, in order. Fewer may come although more follow; none if none follow."""
        at = bisect_left(self._lasts, start)
        if at == len(self._chunks):
            return []
        begin = bisect_left(self._chunks[at], start)
        return self._chunks[at][begin : begin + count]

    def count_before(self, name: str) -> int:
        """Return how many names come before one, which need not be there."""
        at = bisect_left(self._lasts, name)
        within = bisect_left(self._chunks[at], name) if at < len(self._chunks) else 0
        return sum(map(len, self._chunks[:at])) + within
