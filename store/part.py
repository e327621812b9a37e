"""A part: state that is derived from the log, such as POP's groups or the retained messages.

The store knows its parts only by the protocol in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from penstock.store.index.index import Batch, Index
from penstock.store.record import Kind, Record

Apply = Callable[[Record], None]


class Part(Protocol):
    """State that is derived from the log: a function of the records that were applied, in their order."""

    def applies(self) -> Mapping[Kind, Apply]:
        """Return the functions that apply records, by kind. Of `MESSAGE` a part gets those with a flag besides the QoS."""
        ...

    def load(self, index: Index) -> None:
        """Read the state that the index holds. The store calls it once, before any record is applied."""
        ...

    def save(self, batch: Batch) -> None:
        """Put all rows that have changed since the last call into `batch`."""
        ...

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield position and size of each record before `before` that this part still needs. Retention carries those forward.

        Other work runs between two of them. The part need not yield records that it comes to need meanwhile: from the call on,
        no new state refers to a record before `before`.
        """
        ...
