"""`penstock inspect quotas`: who holds how much of what a node has a limited amount of."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from heapq import nlargest
from pathlib import Path
from typing import Any, TextIO

from penstock.cli.actions.flushedindex import flushed_index
from penstock.cli.actions.output import cells_of, print_rows
from penstock.store.accounts import NODE_ACCOUNT, Account, Resource, all_accounts, load_account
from penstock.store.causer import AccountKind
from penstock.store.index import Index


def inspect_quotas(data_dir: Path, *, resource: str, of: str, limit: int, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Print who holds most of each resource as of the last flush of the index, as a table or as JSON lines.

    Args:
        data_dir: data directory of a node.
        resource: name of the only resource to print. Empty for all of which anything is held.
        of: "tenant", "user", "source" or "client" to print only those; empty for all.
        limit: maximum number of holders of each resource; 0 for all.
        as_json: print one JSON object a line in place of a table.

    Raises:
        IndexMissing: the directory holds no index, or the index was never flushed.
    """
    wanted = [each for each in Resource if resource in ("", each.name.lower())]
    with flushed_index(data_dir) as index:
        rows = list(_rows(index, wanted, of, limit))
    names = ("resource", "held", "of", "name")
    cells = ([*cells_of(row, names), " / ".join(row["part_of"])] for row in rows)
    print_rows(rows, cells, (*names, "part of"), as_json=as_json, out=out)


def _rows(index: Index, wanted: list[Resource], of: str, limit: int) -> Iterator[dict[str, Any]]:
    accounts = [one for one in all_accounts(index) if one.kind is not AccountKind.MEMBER]
    for resource in wanted:
        holders = [one for one in accounts if one.counts[resource] and of in ("", one.kind.name.lower())]
        # An account comes after the one that it is part of, which holds no less.
        holders = nlargest(limit or len(holders), holders, key=lambda one: (one.counts[resource], -one.kind))
        for one in holders:
            yield {
                "resource": resource.name.lower(),
                "held": one.counts[resource],
                "of": one.kind.name.lower(),
                "name": one.name,
                "part_of": _part_of(index, one),
            }


def _part_of(index: Index, account: Account) -> list[str]:
    names: list[str] = []
    while account.parent != NODE_ACCOUNT:
        above = load_account(index, account.parent)
        assert above is not None, account.name
        names.insert(0, above.name)
        account = above
    return names
