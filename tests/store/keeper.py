"""A part of a store that needs the records which a test names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.store.index.index import Batch, Index
from penstock.store.part import Apply
from penstock.store.record import Kind


class Keeper:
    """A part that needs the records at the positions in `needed`, which has their sizes, for ever."""

    def __init__(self) -> None:
        self.needed: dict[int, int] = {}

    def applies(self) -> Mapping[Kind, Apply]:
        return {}

    def load(self, index: Index) -> None: ...

    def save(self, batch: Batch) -> None: ...

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        yield from ((position, size) for position, size in list(self.needed.items()) if position < before)
