"""`penstock inspect sessions`: the stored MQTT sessions of a data directory."""

from __future__ import annotations

import sys
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from penstock.cli.actions.flushedindex import flushed_index
from penstock.cli.actions.output import cells_of, print_rows, time_of
from penstock.gateway.protocol.packets import NO_LOCAL, QOS, RETAIN_AS_PUBLISHED
from penstock.gateway.sessions.rows import all_sessions
from penstock.gateway.sessions.stored_session import StoredSession
from penstock.gateway.sessions.stored_subscription import StoredSubscription
from penstock.store.catalogue import load_count_from
from penstock.store.index import Index


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
