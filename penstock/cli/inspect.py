"""`penstock inspect`: looks into a data directory, of a live node or a stopped one, and changes nothing."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import orjson

from penstock.cli.rows import show_all
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, RETAIN_AS_PUBLISHED
from penstock.gateway.sessions.sessions import stored_sessions
from penstock.gateway.sessions.stored import Changes, StoredSession, StoredSubscription
from penstock.pop.core.checkpoint import Checkpoint
from penstock.pop.core.order import FifoOrder
from penstock.pop.core.state import DAMAGES_ROW
from penstock.store import topics
from penstock.store.catalogue import Catalogue, load_next_offset
from penstock.store.errors import StoreError
from penstock.store.index import DIRECTORY, Index, KeySpace
from penstock.store.logreader import read_log
from penstock.store.record import BODY_DTYPE, COPY_FIXED, POP_FIXED, QUEUE_FIXED, Flag, Kind, Record, decode

BODY_CHARS = 60
"""Of a body that a table shows. The JSON has all of it."""

_QUEUE_KINDS = (Kind.QUEUE_DECLARED, Kind.QUEUE_DROPPED, Kind.QUEUE_BACKFILLED)


class IndexMissing(StoreError):
    """Raised when a data directory has no index to look into."""


def inspect_log(
    data_dir: Path,
    *,
    kinds: list[str],
    topic_filter: str,
    position: int,
    since_ms: int,
    until_ms: int,
    limit: int,
    as_json: bool,
    out: TextIO = sys.stdout,
) -> None:
    """Print the records of a CommitLog that fit, as a table or as JSON lines.

    Args:
        data_dir: of a node.
        kinds: names of `Kind` in lower case; empty for all.
        topic_filter: of messages, and of queues and groups by what stands in their place (filter, group); empty for all.
        position: where a record begins; 0 for the oldest.
        since_ms, until_ms: store times, ms since 1970; 0 for no bound.
        limit: records printed at most; 0 for all.
        as_json: one JSON object a line.

    Raises:
        StoreError: there is no log, or it is damaged.
    """
    wanted = {Kind[name.upper()] for name in kinds}
    found = _fitting(read_log(data_dir, position), wanted, topic_filter, since_ms, until_ms)
    rows = (describe(record) for _, record in zip(range(limit), found, strict=False)) if limit else map(describe, found)
    names = ("position", "size", "kind", "stored", "topic")
    cells = ([*_texts(row, names), _what(row)] for row in rows)
    show_all(rows, cells, (*names, "what"), as_json=as_json, out=out)


def _fitting(records: Iterator[Record], kinds: set[Kind], topic_filter: str, since_ms: int, until_ms: int) -> Iterator[Record]:
    for record in records:
        if until_ms and record.store_ms > until_ms:
            return  # store times never decrease along the log
        if kinds and record.kind not in kinds:
            continue
        if record.store_ms < since_ms:
            continue
        topic = record.topic.decode(errors="replace")
        if topic_filter and topic != topic_filter and not topics.matches(topic_filter, topic):
            continue
        yield record


def describe(record: Record) -> dict[str, Any]:
    """Return a record as a JSON object: its header, and its fields by their names in `store.record`."""
    kind = Kind(record.kind)
    row: dict[str, Any] = {
        "position": record.position,
        "size": record.size,
        "kind": kind.name.lower(),
        "store_ms": record.store_ms,
        "stored": _time(record.store_ms),
        "topic": record.topic.decode(errors="replace"),
    }
    if kind is Kind.MESSAGE:
        row["qos"] = record.flags & Flag.QOS_MASK
        row["retain"] = bool(record.flags & Flag.RETAIN)
        row["delayed"] = bool(record.flags & Flag.DELAYED)
        row["half"] = bool(record.flags & Flag.HALF)
        row["session"] = bool(record.flags & Flag.SESSION)
    elif record.flags & Flag.SUSPENDED:
        row["suspended"] = True
    if kind in _QUEUE_KINDS:
        row["queue_id"] = QUEUE_FIXED.unpack(record.fixed)[0]
    elif kind is Kind.COPIED:
        row["copy_of"] = describe(decode(record.body, position=COPY_FIXED.unpack(record.fixed)[0]))
    elif record.fixed:
        row["group_id"], row["epoch"], row["deadline_ms"] = POP_FIXED.unpack(record.fixed)
    if record.properties:
        row["properties"] = orjson.loads(record.properties)
    if kind is Kind.SESSION_OFFSETS:
        row |= Changes.decode(record.body, record.properties).describe()
    elif kind in BODY_DTYPE:
        dtype = BODY_DTYPE[kind]
        names = dtype.names or ()
        row["entries"] = [dict(zip(names, entry.tolist(), strict=True)) for entry in np.frombuffer(record.body, dtype=dtype)]
    elif record.body and kind is not Kind.COPIED:
        row["body"] = record.body.decode(errors="backslashreplace")
    return row


def inspect_queues(data_dir: Path, *, topic_filter: str, limit: int, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Print the durable light queues as of the last flush of the index, as a table or as JSON lines.

    Args:
        data_dir: of a node.
        topic_filter: of the queues; empty for all.
        limit: queues printed at most; 0 for all.
        as_json: one JSON object a line.

    Raises:
        IndexMissing: there is no index, or nothing was flushed yet.
    """
    with _flushed(data_dir) as index:
        found = (row for row in _queues(index) if topic_filter in ("", row["filter"]))
        rows = list(islice(found, limit or None))
    names = ("id", "filter", "start", "first_offset", "next_offset", "entries", "filling")
    cells = ([*_texts(row, names), ", ".join(row["owners"])] for row in rows)
    columns = ("id", "filter", "start", "first", "next", "entries", "filling", "owners")
    show_all(rows, cells, columns, as_json=as_json, out=out)


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
            "entries": next_offset - first_offset,
            "filling": catalogue.backfill_position(queue),
        }


def inspect_groups(data_dir: Path, *, name: str, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Print the groups as of the last flush of the index, as a table or as JSON lines.

    Args:
        data_dir: of a node.
        name: of the group; empty for all.
        as_json: one JSON object a line.

    Raises:
        IndexMissing: there is no index, or nothing was flushed yet.
    """
    with _flushed(data_dir) as index:
        rows = [row for row in _groups(index) if name in ("", row["group"])]
    names = ("id", "group", "filter", "new", "retries", "in_flight", "parked", "dead")
    cells = ([*_texts(row, names), orjson.dumps(row["settings"]).decode()] for row in rows)
    show_all(rows, cells, (*names, "settings"), as_json=as_json, out=out)


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
            "new": max(load_next_offset(index, row["queue"]) - row["cursor"], 0),
            "retries": max(load_next_offset(index, row["retry"]) - row["retry_cursor"], 0),
            "in_flight": in_flight[group_id],
            "oldest_pop_ms": oldest_ms.get(group_id),
            "parked": order.parked,
            "dead": row["dead"],
        }


def inspect_sessions(data_dir: Path, *, client_id: str, limit: int, as_json: bool, out: TextIO = sys.stdout) -> None:
    """Print the stored sessions as of the last flush of the index, as a table or as JSON lines.

    Args:
        data_dir: of a node.
        client_id: of the session; empty for all.
        limit: sessions printed at most; 0 for all.
        as_json: one JSON object a line.

    Raises:
        IndexMissing: there is no index, or nothing was flushed yet.
    """
    with _flushed(data_dir) as index:
        found = stored_sessions(index, client_id)
        rows = [_session(index, one) for one in islice(found, limit or None) if client_id in ("", one.client_id)]
    names = ("client", "connected", "expiry_s", "ends", "queued", "in_flight", "received", "will_due")
    cells = (
        [*_texts(row, names), ", ".join(f"{one['filter']} ({one['qos']})" for one in row["subscriptions"])] for row in rows
    )
    show_all(rows, cells, (*names, "subscriptions"), as_json=as_json, out=out)


def _session(index: Index, stored: StoredSession) -> dict[str, Any]:
    subscriptions = [_subscription(index, one) for one in stored.subscriptions.values()]
    will = stored.will
    return {
        "client": stored.client_id,
        "connected": stored.connected,
        "expiry_s": stored.expiry_s,
        "ends": _time(stored.ends_ms),
        "queued": sum(one["queued"] for one in subscriptions),
        "in_flight": len(stored.inflight),
        "received": len(stored.received),
        "has_will": will is not None,
        "will_due": _time(will.due_ms) if will is not None else None,
        "last_packet_id": stored.last_packet_id,
        "subscriptions": subscriptions,
        "leaving": [
            {"filter": one.filter, "queue": one.queue_id, "cursor": one.cursor, "stop": one.stop}
            for one in stored.leaving.values()
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
        "queued": max(load_next_offset(index, one.queue_id) - one.cursor, 0),
    }


def _texts(row: dict[str, Any], names: tuple[str, ...]) -> list[str]:
    """Return fields of a row as cells of a table; empty where there is nothing."""
    return ["" if row[name] is None else str(row[name]) for name in names]


def _time(ms: int) -> str | None:
    """Return a time as ISO 8601 writes it; None for 0, which is no time."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds") if ms else None


@contextmanager
def _flushed(data_dir: Path) -> Iterator[Index]:
    """Open the index of a data directory, read-only."""
    if not (data_dir / DIRECTORY / "CURRENT").exists():
        raise IndexMissing(f"{data_dir} holds no index: give the data directory of a node that was started")
    index = Index(data_dir, read_only=True)
    try:
        if index.covered() is None:
            raise IndexMissing(f"the index of {data_dir} was not flushed yet: wait for store.index_flush_ms, or stop the node")
        yield index
    finally:
        index.close()


def _what(row: dict[str, Any]) -> str:
    if "entries" in row:
        return f"{len(row['entries'])} entries"
    if "copy_of" in row:
        return f"of the {row['copy_of']['kind']} at {row['copy_of']['position']}"
    body = row.get("body", "")
    return body if len(body) <= BODY_CHARS else f"{body[:BODY_CHARS]}..."
