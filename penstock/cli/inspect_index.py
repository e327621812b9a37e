"""`penstock inspect`: the queues, groups, sessions and quotas of a data directory's index."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from heapq import nlargest
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import orjson

from penstock.cli.output import cells_of, print_rows, time_of
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, RETAIN_AS_PUBLISHED
from penstock.gateway.sessions.rows import all_sessions
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.gateway.sessions.stored_subscription import StoredSubscription
from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.group import DAMAGES_ROW
from penstock.pop.core.order import FifoOrder
from penstock.store.errors import StoreError
from penstock.store.index.index import DIRECTORY, Index, KeySpace
from penstock.store.queues.catalogue import Catalogue, load_count_from
from penstock.store.space.accounts import NODE_ACCOUNT, Account, Resource, all_accounts, load_account
from penstock.store.space.causer import AccountKind


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
            raise IndexMissing(f"The index of {data_dir} was not flushed yet. Wait for 30 seconds, or stop the node.")
        yield index
    finally:
        index.close()


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


def inspect_sessions(data_dir: Path, *, client_id: str, limit: int, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Print the stored sessions as of the last flush of the index, as a table or as JSON lines.

    Args:
        data_dir: data directory of a node.
        client_id: client identifier of the only session to print. Empty for all.
        limit: maximum number of sessions; 0 for all.
        as_json: print one JSON object a line in place of a table.

    Raises:
        IndexMissing: the directory holds no index, or the index was never flushed.
        ValueError: there is no session of that client.
    """
    with flushed_index(data_dir) as index:
        found = all_sessions(index, client_id)
        rows = [_session(index, one) for one in islice(found, limit or None) if client_id in ("", one.client_id)]
    if client_id and not rows:
        raise ValueError(f"{data_dir} had no session of the client {client_id!r} when its index was flushed last.")
    names = ("client", "user", "connected", "expiry_s", "ends", "queued", "in_flight", "received", "will_due")
    cells = (
        [*cells_of(row, names), ", ".join(f"{one['filter']} ({one['qos']})" for one in row["subscriptions"])] for row in rows
    )
    print_rows(rows, cells, (*names, "subscriptions"), as_json=as_json, out=out)


def _session(index: Index, stored: StoredSession) -> dict[str, Any]:
    subscriptions = [_subscription(index, one) for one in stored.subscriptions.values()]
    will = stored.will
    return {
        "client": stored.client_id,
        "user": stored.user,
        "connected": stored.connected,
        "expiry_s": stored.expiry_s,
        "ends": time_of(stored.ends_ms),
        "queued": sum(one["queued"] for one in subscriptions),
        "in_flight": len(stored.inflight),
        "received": len(stored.received),
        "has_will": will is not None,
        "will_due": time_of(will.due_ms) if will is not None else None,
        "last_packet_id": stored.last_packet_id,
        "subscriptions": subscriptions,
        "draining": [
            {"filter": one.filter, "queue": one.queue_id, "cursor": one.cursor, "stop": one.stop}
            for one in stored.draining.values()
        ],
    }


def _subscription(index: Index, one: StoredSubscription) -> dict[str, Any]:
    return {
        "filter": one.filter,
        "qos": one.options & QOS,
        "no_local": bool(one.options & NO_LOCAL),
        "retain_as_published": bool(one.options & RETAIN_AS_PUBLISHED),
        "identifier": one.identifier,
        "queue": one.queue_id,
        "cursor": one.cursor,
        "queued": load_count_from(index, one.queue_id, one.cursor),
    }


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
