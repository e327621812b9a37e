"""`penstock inspect groups`: the groups of a data directory."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import orjson

from penstock.cli.actions.flushedindex import flushed_index
from penstock.cli.actions.output import cells_of, print_rows
from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.grouptable import DAMAGES_ROW
from penstock.pop.core.order import FifoOrder
from penstock.store.catalogue import load_count_from
from penstock.store.index import Index, KeySpace


def inspect_groups(data_dir: Path, *, name: str, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Print the groups as of the last flush of the index, as a table or as JSON lines.

    Args:
        data_dir: data directory of a node.
        name: name of the only group to print. Empty for all.
        as_json: print one JSON object a line in place of a table.

    Raises:
        IndexMissing: the directory holds no index, or the index was never flushed.
        ValueError: there is no group of that name.
    """
    with flushed_index(data_dir) as index:
        rows = [row for row in _groups(index) if name in ("", row["group"])]
    if name and not rows:
        raise ValueError(f"{data_dir} had no group {name!r} when its index was flushed last.")
    names = ("id", "group", "filter", "new", "retries", "in_flight", "parked", "dead")
    cells = ([*cells_of(row, names), orjson.dumps(row["settings"]).decode()] for row in rows)
    print_rows(rows, cells, (*names, "settings"), as_json=as_json, out=out)


def _groups(index: Index) -> Iterator[dict[str, Any]]:
    in_flight: Counter[int] = Counter()
    oldest_ms: dict[int, int] = {}
    for key, value in index.rows(bytes(KeySpace.CHECKPOINT)):
        checkpoint = Checkpoint.from_row(int.from_bytes(key[1:], "big"), value)
        in_flight[checkpoint.group_id] += checkpoint.open.bit_count()
        oldest_ms[checkpoint.group_id] = min(oldest_ms.get(checkpoint.group_id, checkpoint.pop_ms), checkpoint.pop_ms)
    for key, value in index.rows(bytes(KeySpace.GROUP)):
        group_id = int.from_bytes(key[1:], "big")
        if group_id == DAMAGES_ROW:
            continue
        row = orjson.loads(value)
        order = FifoOrder()
        order.load(index, group_id)
        yield {
            "id": group_id,
            "group": row["name"],
            "filter": row["filter"],
            "settings": row["settings"],
            "resets": row["epoch"],
            "cursor": row["cursor"],
            "new": load_count_from(index, row["queue"], row["cursor"]),
            "retries": load_count_from(index, row["retry"], row["retry_cursor"]),
            "in_flight": in_flight[group_id],
            "oldest_pop_ms": oldest_ms.get(group_id),
            "parked": order.parked,
            "dead": row["dead"],
        }
