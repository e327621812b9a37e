"""A part: a state that is derived from the log. What every part can do is all that the store knows of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from penstock.store.index import Batch, Index
from penstock.store.record import Kind, Record

Apply = Callable[[Record], None]


class Part(Protocol):
    """A state that is derived from the log."""

    def applies(self) -> Mapping[Kind, Apply]:
        """Return what this part does with records, by kind. For `MESSAGE` only those that have a flag besides the QoS."""
        ...

    def load(self, index: Index) -> None:
        """Read the state as of the covered position. Called once, before anything is applied."""
        ...

    def save(self, batch: Batch) -> None:
        """Put all rows that changed since the last call into `batch`."""
        ...

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield position and size of each record before `before` that this part still needs: retention carries those forward.

        Other work goes on between two of them. What the part comes to need meanwhile need not be named: nothing new refers to
        a record before `before` from the moment of the call on.
        """
        ...
