"""A bounded memory of recent ids."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")


class RecentIds(Generic[K, V]):
    """Remembers the last ids that were added, each with a value, and forgets the oldest beyond a limit.

    Parameters:
        limit: how many ids are remembered, at least 1.
    """

    __slots__ = ("_limit", "_values")

    def __init__(self, limit: int) -> None:
        assert limit >= 1, limit
        self._limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        """Return how many ids are remembered."""
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        """Return whether an id is remembered."""
        return key in self._values

    def get(self, key: K) -> V | None:
        """Return the value that was added with an id; None when the id is not remembered."""
        return self._values.get(key)

    def take(self, key: K) -> V | None:
        """Forget an id, and return its value; None when the id is not remembered."""
        return self._values.pop(key, None)

    def add(self, key: K, value: V) -> K | None:
        """Remember an id as the newest one. Return the id that is forgotten for it; None when there is room."""
        values = self._values
        values[key] = value
        values.move_to_end(key)
        return values.popitem(last=False)[0] if len(values) > self._limit else None
