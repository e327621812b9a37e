"""A real log in several sealed segments."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.dataset

from penstock.spark.parquet.writer import WrittenSegment, backfill
from penstock.store.options import KIB, StoreOptions
from tests.pop.wiring import Parts
from tests.store.wiring import work_on

SEGMENT_BYTES = 16 * KIB
STORE = StoreOptions(segment_bytes=SEGMENT_BYTES)
TRIMMED = replace(STORE, retention_bytes=1)
"""Options with which `trim` drops whatever was sealed."""

FILLER_TOPIC = "filler/1"
_FILLER = b"x" * 2000


def bases(data_dir: Path) -> list[int]:
    """Return the positions of the segments."""
    return sorted(int(path.stem) for path in (data_dir / "commitlog").glob("*.log"))


def seal(parts: Parts) -> int:
    """Publish messages that no group gets until the last segment is sealed; return how many."""
    count, before = 0, bases(parts.data_dir)[-1]
    while bases(parts.data_dir)[-1] == before:
        parts.publish(_FILLER, topic=FILLER_TOPIC)
        count += 1
    return count


def trim(parts: Parts) -> int:
    """Seal the log until retention drops what was sealed; return where the log begins then. The options are `TRIMMED`."""
    before = bases(parts.data_dir)[0]
    while bases(parts.data_dir)[0] == before:
        seal(parts)
        work_on(parts.store)  # the snapshot
        parts.store.retention.begin_due()
        work_on(parts.store)
        parts.store.commit()
    return bases(parts.data_dir)[0]


def make_durable(parts: Parts) -> None:
    """Sync the log, and let the sync mark say so: the tables get nothing else of a running node."""
    parts.store.log.sync()
    parts.store.log.mark(parts.store.log.written)


def write_tables(parts: Parts) -> list[WrittenSegment]:
    """Write what the tables lack of the sealed segments; return these segments."""
    make_durable(parts)
    return list(backfill(parts.data_dir))


def rows_of(data_dir: Path, table: str) -> list[dict[str, Any]]:
    """Return the rows of a table of the log."""
    rows: list[dict[str, Any]] = pyarrow.dataset.dataset(data_dir / "tables" / table).to_table().to_pylist()
    return rows
