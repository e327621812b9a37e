"""`penstock inspect queues`: the durable light queues of a data directory."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from penstock.cli.actions.flushedindex import flushed_index
from penstock.cli.actions.output import cells_of, print_rows
from penstock.store.catalogue import Catalogue
from penstock.store.index import Index


def inspect_queues(data_dir: Path, *, topic_filter: str, limit: int, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Print the durable light queues as of the last flush of the index, as a table or as JSON lines.

    Args:
        data_dir: data directory of a node.
        topic_filter: only queues of exactly this filter are printed. Empty for all.
        limit: maximum number of queues; 0 for all.
        as_json: print one JSON object a line in place of a table.

    Raises:
        IndexMissing: the directory holds no index, or the index was never flushed.
    """
    with flushed_index(data_dir) as index:
        found = (row for row in _queues(index) if topic_filter in ("", row["filter"]))
        rows = list(islice(found, limit or None))
    names = ("id", "filter", "start", "first_offset", "next_offset", "entries", "backfilling")
    cells = ([*cells_of(row, names), ", ".join(row["owners"])] for row in rows)
    columns = ("id", "filter", "start", "first", "next", "entries", "backfilling", "owners")
    print_rows(rows, cells, columns, as_json=as_json, out=out)


def _queues(index: Index) -> Iterator[dict[str, Any]]:
    catalogue = Catalogue(index)
    for queue in catalogue:
        first_offset, next_offset = queue.first_offset(), queue.next_offset
        yield {
            "id": queue.id,
            "filter": queue.filter,
            "start": queue.start,
            "owners": sorted(queue.owners),
            "first_offset": first_offset,
            "next_offset": next_offset,
            "entries": queue.count_from(0),
            "backfilling": catalogue.backfill_position(queue),
        }
