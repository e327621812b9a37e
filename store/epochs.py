"""The epochs of a replicated log: which leader wrote which part of it.

A leader begins its epoch with a record at the end of its log, so the table of epochs is a function of the log. Two logs that
both have an epoch with the same beginning are identical up to where that epoch ends in the one where it ends first: an epoch is
begun by one process, once. That is how a follower finds what it must cut off (the rule of KIP-101 of Apache Kafka).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple, Self


class Epoch(NamedTuple):
    """One epoch of a log."""

    number: int
    """Number of the epoch, from 1 up."""
    begin: int
    """Position of its first record."""


class EpochTable:
    """The epochs of a log, in order. It does not change; `with_epoch` and `cut_to` return another one.

    Parameters:
        epochs: numbers and positions both ascend.

    Raises:
        ValueError: they do not.
    """

    __slots__ = ("_epochs",)

    def __init__(self, epochs: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs = tuple(Epoch(*each) for each in epochs)
        for earlier, later in zip(self._epochs, self._epochs[1:], strict=False):
            if earlier.number >= later.number or earlier.begin >= later.begin:
                raise ValueError(f"epoch {later.number} at position {later.begin} follows {earlier.number} at {earlier.begin}")

    def __iter__(self) -> Iterator[Epoch]:
        return iter(self._epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EpochTable) and self._epochs == other._epochs

    def __hash__(self) -> int:
        return hash(self._epochs)

    def __repr__(self) -> str:
        return f"EpochTable({[tuple(each) for each in self._epochs]})"

    @property
    def last(self) -> int:
        """Number of the last epoch; 0 if there is none."""
        return self._epochs[-1].number if self._epochs else 0

    def with_epoch(self, number: int, begin: int) -> Self:
        """Return the table of a log in which one more epoch has begun. Raises ValueError if it does not follow the last one."""
        return type(self)((*self._epochs, (number, begin)))

    def cut_to(self, end: int) -> Self:
        """Return the table of a log that was cut at position `end`."""
        return type(self)(each for each in self._epochs if each.begin < end)

    def at(self, position: int) -> int:
        """Return the number of the epoch that has a position; 0 for what is before the first epoch."""
        found = bisect_right(self._epochs, position, key=lambda each: each.begin)
        return self._epochs[found - 1].number if found else 0

    def agreed_end(self, end: int, other: EpochTable, other_end: int) -> int:
        """Return the position up to which two logs are known to be identical.

        Args:
            end: of the log with this table.
            other: the table of the other log.
            other_end: end of the other log.
        """
        others = {each.number: (each.begin, stop) for each, stop in other._with_ends(other_end)}
        for (number, begin), stop in reversed(list(self._with_ends(end))):
            other_begin, other_stop = others.get(number, (-1, 0))
            if other_begin == begin:
                return min(stop, other_stop)
        return 0

    def _with_ends(self, end: int) -> Iterator[tuple[Epoch, int]]:
        ends = [*(each.begin for each in self._epochs[1:]), end]
        yield from zip(self._epochs, ends, strict=bool(self._epochs)) if self._epochs else ()
