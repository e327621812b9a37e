"""`penstock inspect log`: the records of a CommitLog."""

from __future__ import annotations

import sys
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import orjson

from penstock.cli.output import body_fields, cells_of, print_rows, shortened, text_of, time_of
from penstock.gateway.sessions.acked import decode_acked
from penstock.gateway.sessions.changes import Changes
from penstock.pop.core.suspicion import together_max
from penstock.store import topics
from penstock.store.bodies import BODY_DTYPE
from penstock.store.log.logreader import missing_beginning, read_log
from penstock.store.record import COPY_FIXED, LEVEL_MASK, POP_FIXED, QUEUE_FIXED, Flag, Kind, Record, decode

_WITH_LEVEL = (Kind.POP_CHECKPOINT, Kind.POP_INVISIBLE_CHANGED, Kind.POP_REVIVED)
_QUEUE_KINDS = (Kind.QUEUE_DECLARED, Kind.QUEUE_DROPPED, Kind.QUEUE_BACKFILLED)


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
    """Print records of a CommitLog, as a table or as JSON lines.

    Args:
        data_dir: data directory of a node.
        kinds: names of `Kind` in lower case; only these are printed. Empty for all.
        topic_filter: only records whose topic fits are printed. The topic of a queue's record is its filter, and that of a
            group's record is the group's name. Empty for all.
        position: position of the first record; 0 for the oldest.
        since_ms, until_ms: first and last store time, in milliseconds since 1970; 0 for no bound.
        limit: maximum number of records; 0 for all.
        as_json: print one JSON object a line in place of a table.

    Raises:
        StoreError: the directory holds no log, or the log is damaged.
    """
    missing = missing_beginning(data_dir)
    if missing is not None:
        first, stop = missing
        print(
            f"penstock inspect: the log begins at position {first}, but the files of the {stop - first} bytes before position "
            f"{stop} are missing; restore them, or run `penstock repair` on the stopped node's directory",
            file=sys.stderr,
        )
    wanted = {Kind[name.upper()] for name in kinds}
    found = _fitting(read_log(data_dir, position), wanted, topic_filter, since_ms, until_ms)
    rows = (
        (describe_record(record) for _, record in zip(range(limit), found, strict=False))
        if limit
        else map(describe_record, found)
    )
    names = ("position", "size", "kind", "stored", "topic")
    cells = ([*cells_of(row, names), _what(row)] for row in rows)
    print_rows(rows, cells, (*names, "what"), as_json=as_json, out=out)


def _fitting(records: Iterator[Record], kinds: set[Kind], topic_filter: str, since_ms: int, until_ms: int) -> Iterator[Record]:
    for record in records:
        if until_ms and record.store_ms > until_ms:
            return  # store times never decrease along the log, so no later record fits
        if kinds and record.kind not in kinds:
            continue
        if record.store_ms < since_ms:
            continue
        topic = record.topic.decode(errors="replace")
        if topic_filter and topic != topic_filter and not topics.matches(topic_filter, topic):
            continue
        yield record


def describe_record(record: Record) -> dict[str, Any]:
    """Return a record as a JSON object: its header, and its fields under their names in `store.record` and `store.bodies`."""
    kind = Kind(record.kind)
    row: dict[str, Any] = {
        "position": record.position,
        "size": record.size,
        "kind": kind.name.lower(),
        "store_ms": record.store_ms,
        "stored": time_of(record.store_ms),
        "topic": record.topic.decode(errors="replace"),
    }
    if kind is Kind.MESSAGE:
        row["message_id"] = f"{record.position:016x}"
        row["qos"] = record.flags & Flag.QOS_MASK
        row["retain"] = bool(record.flags & Flag.RETAIN)
        row["delayed"] = bool(record.flags & Flag.DELAYED)
        row["half"] = bool(record.flags & Flag.HALF)
        row["session"] = bool(record.flags & Flag.SESSION)
        row["scheduled"] = bool(record.flags & Flag.SCHEDULED)
    elif record.flags & Flag.SUSPENDED:
        row["suspended"] = True
    if kind in _WITH_LEVEL and record.flags & LEVEL_MASK:
        row["together_max"] = together_max(record.flags & LEVEL_MASK)
    if kind in _QUEUE_KINDS:
        row["queue_id"] = QUEUE_FIXED.unpack(record.fixed)[0]
    elif kind is Kind.COPIED:
        row["copy_of"] = describe_record(decode(record.body, position=COPY_FIXED.unpack(record.fixed)[0]))
    elif record.fixed:
        row["group_id"], row["epoch"], row["deadline_ms"] = POP_FIXED.unpack(record.fixed)
    if record.properties:
        row["properties"] = orjson.loads(record.properties)
    if kind is Kind.SESSION_OFFSETS:
        row |= Changes.decode(record.body, record.properties).describe()
    elif kind is Kind.SESSIONS_ACKED:
        row |= decode_acked(record.body).describe()
    elif kind in BODY_DTYPE:
        dtype = BODY_DTYPE[kind]
        names = dtype.names or ()
        row["entries"] = [dict(zip(names, entry.tolist(), strict=True)) for entry in np.frombuffer(record.body, dtype=dtype)]
    elif record.body and kind is not Kind.COPIED:
        row |= body_fields(record.body)
    return row


def _what(row: dict[str, Any]) -> str:
    if "entries" in row:
        return f"{len(row['entries'])} entries"
    if "copy_of" in row:
        return f"copy of the {row['copy_of']['kind']} at {row['copy_of']['position']}"
    body = row.get("body", "")
    return shortened(text_of(b64decode(body)) if "encoding" in row else body)
