"""The index of a data directory, opened read-only by commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.store.errors import StoreError
from penstock.store.index import DIRECTORY, Index


class IndexMissing(StoreError):
    """Raised when a data directory has no index, or an index that was never flushed."""


@contextmanager
def flushed_index(data_dir: Path) -> Iterator[Index]:
    """Open the index of a data directory read-only, and close it at the end of the context.

    Raises:
        IndexMissing
    """
    if not (data_dir / DIRECTORY / "CURRENT").exists():
        raise IndexMissing(f"{data_dir} holds no index. Name the data directory of a node that was started.")
    index = Index(data_dir, read_only=True)
    try:
        if index.covered() is None:
            raise IndexMissing(f"The index of {data_dir} was not flushed yet. Wait for store.index_flush_ms, or stop the node.")
        yield index
    finally:
        index.close()
