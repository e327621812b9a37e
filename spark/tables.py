"""The tables of the data source: their columns, and how a block of records becomes an Arrow batch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from penstock.spark.records import FIXED_BYTES, HANDED_OUT, HANDING, SETTLING, Array, Records, handed_out, settled
from penstock.store import record
from penstock.store.record import Flag, Kind

ARROW_TYPES = {
    "bigint": pa.int64(),
    "int": pa.int32(),
    "boolean": pa.bool_(),
    "string": pa.string(),
    "binary": pa.binary(),
}

POP_KINDS = (*sorted({*HANDING, *SETTLING}), Kind.GROUP_CREATED, Kind.GROUP_CHANGED, Kind.DEAD_LETTER_REDRIVEN)

KIND_NAMES = [f"KIND_{number}" for number in range(256)]
"""Values of the column `kind`: names of `store.record.Kind`, or KIND_<number> for a kind that this version doesn't know."""
for _kind in Kind:
    KIND_NAMES[_kind] = _kind.name

Columns = Mapping[str, Callable[[], Any]]
"""The columns of a batch by name. Calling a value makes the Arrow array, so columns that nobody wants cost nothing."""


class Table(NamedTuple):
    """One way to read the log."""

    columns: dict[str, str]
    """Name and Spark type of each column."""
    kinds: tuple[int, ...]
    """Kinds of the records that the table reads; empty for all kinds."""
    time_column: str
    """Name of the column with the record's store time."""
    rows: Callable[[Records], Columns]

    def arrow_schema(self, names: Sequence[str]) -> Any:
        """Return the Arrow schema of these columns."""
        return pa.schema([(name, ARROW_TYPES[self.columns[name]]) for name in names])

    def batch(self, records: Records, names: Sequence[str]) -> Any:
        """Return the rows of some records as an Arrow record batch with the columns `names`."""
        columns = self.rows(records)
        return pa.RecordBatch.from_arrays([columns[name]() for name in names], schema=self.arrow_schema(names))


def _plain(values: Array, dtype: type = np.int64) -> Any:
    return pa.array(values.astype(dtype, copy=False))


def _kind_names(kinds: Array) -> Any:
    return pa.DictionaryArray.from_arrays(pa.array(kinds.astype(np.int16)), pa.array(KIND_NAMES)).cast(pa.string())


def _pop_field(records: Records, name: str) -> Any:
    """Return a fixed field of POP records, null for records of other kinds."""
    is_pop = np.isin(records.header["kind"], POP_KINDS)
    values = np.zeros(len(records), dtype=np.int64)
    values[is_pop] = records.where(is_pop).pop[name]
    return pa.array(values, mask=~is_pop)


def _group_names(records: Records, group_ids: Array) -> Any:
    """Return the names of the groups `group_ids`, each of which has a record among `records`."""
    known, first = np.unique(records.pop["group_id"], return_index=True)
    named = records.where(np.sort(first))
    names = named.texts(named.topic_from, named.props_from)
    by_position = np.argsort(np.argsort(first))  # `names` is in the order of the log, `known` in the order of the ids
    indices = by_position[np.searchsorted(known, group_ids)] if len(known) else group_ids
    return names.take(pa.array(indices))


def _records_rows(records: Records) -> Columns:
    header = records.header
    return {
        "position": lambda: _plain(records.position),
        "size": lambda: _plain(header["size"], np.int32),
        "kind": lambda: _kind_names(header["kind"]),
        "flags": lambda: _plain(header["flags"], np.int32),
        "store_ms": lambda: _plain(header["store_ms"]),
        "topic": lambda: records.texts(records.topic_from, records.props_from),
        "group_id": lambda: _pop_field(records, "group_id"),
        "epoch": lambda: _pop_field(records, "epoch"),
        "deadline_ms": lambda: _pop_field(records, "deadline_ms"),
        "properties": lambda: records.texts(records.props_from, records.body_from),
        "body": lambda: records.slices(records.body_from, records.stop),
    }


def _messages_rows(records: Records) -> Columns:
    header, flags = records.header, records.header["flags"]
    return {
        "position": lambda: _plain(records.position),
        "size": lambda: _plain(header["size"], np.int32),
        "store_ms": lambda: _plain(header["store_ms"]),
        "topic": lambda: records.texts(records.topic_from, records.props_from),
        "qos": lambda: _plain(flags & Flag.QOS_MASK, np.int32),
        "retain": lambda: pa.array((flags & Flag.RETAIN) != 0),
        "delayed": lambda: pa.array((flags & Flag.DELAYED) != 0),
        "body_bytes": lambda: _plain(records.stop - records.body_from, np.int32),
        "properties": lambda: records.texts(records.props_from, records.body_from),
    }


def _checkpoints_rows(records: Records) -> Columns:
    rows = handed_out(records)
    columns = {name: partial(pa.array, values) for name, values in rows.items()}
    via = pa.array(["pop", "change", "wait"])
    return {
        **columns,
        "group": lambda: _group_names(records, rows["group_id"]),
        "via": lambda: via.take(pa.array(rows["via"])),
    }


def _settlements_rows(records: Records) -> Columns:
    rows = settled(records)
    columns = {name: partial(pa.array, values) for name, values in rows.items()}
    return {
        **columns,
        "group": lambda: _group_names(records, rows["group_id"]),
        "kind": lambda: _kind_names(rows["kind"]),
    }


EVENT_VALUES = ("deadline_ms", "return_ms", "message_position", "attempt", "source", "via")
"""Columns of `events` that are null for the end of a delivery."""


def _events_rows(records: Records) -> Columns:
    begun, ended = handed_out(records), settled(records)
    ends = len(ended["key"])

    def both(start: str, end: str) -> Callable[[], Any]:
        return lambda: pa.array(np.concatenate([begun[start], ended[end]]))

    def begun_only(name: str) -> Callable[[], Any]:
        return lambda: pa.concat_arrays([pa.array(begun[name]), pa.nulls(ends, ARROW_TYPES[EVENTS.columns[name]])])

    begun["event"] = np.full(len(begun["key"]), HANDED_OUT, dtype=np.int32)
    return {
        "key": both("key", "key"),
        "position": both("position", "position"),
        "event": both("event", "event"),
        "at_ms": both("pop_ms", "at_ms"),
        "group_id": both("group_id", "group_id"),
        **{name: begun_only(name) for name in EVENT_VALUES},
    }


def _groups_rows(records: Records) -> Columns:
    """Return one row per group id of a block, with the filter if the block holds the record that created the group."""
    group_ids = np.unique(records.pop["group_id"]).astype(np.int64)
    filters = {}
    for offset in records.of_kind(Kind.GROUP_CREATED).offsets.tolist():
        created = record.decode(records.block.buffer, offset, verify=False)
        filters[record.POP_FIXED.unpack(created.fixed)[0]] = json.loads(created.properties or b"{}").get("filter")
    return {
        "group_id": lambda: pa.array(group_ids),
        "group": lambda: _group_names(records, group_ids),
        "filter": lambda: pa.array([filters.get(group_id) for group_id in group_ids.tolist()], pa.string()),
    }


RECORDS = Table(
    {
        "position": "bigint",
        "size": "int",
        "kind": "string",
        "flags": "int",
        "store_ms": "bigint",
        "topic": "string",
        "group_id": "bigint",
        "epoch": "bigint",
        "deadline_ms": "bigint",
        "properties": "string",
        "body": "binary",
    },
    (),
    "store_ms",
    _records_rows,
)

MESSAGES = Table(
    {
        "position": "bigint",
        "size": "int",
        "store_ms": "bigint",
        "topic": "string",
        "qos": "int",
        "retain": "boolean",
        "delayed": "boolean",
        "body_bytes": "int",
        "properties": "string",
    },
    (Kind.MESSAGE,),
    "store_ms",
    _messages_rows,
)

CHECKPOINTS = Table(
    {
        "key": "bigint",
        "position": "bigint",
        "group_id": "bigint",
        "group": "string",
        "pop_ms": "bigint",
        "deadline_ms": "bigint",
        "return_ms": "bigint",
        "message_position": "bigint",
        "queue_offset": "bigint",
        "message_bytes": "int",
        "attempt": "int",
        "source": "int",
        "via": "string",
    },
    HANDING,
    "pop_ms",
    _checkpoints_rows,
)

SETTLEMENTS = Table(
    {"key": "bigint", "position": "bigint", "kind": "string", "group_id": "bigint", "group": "string", "at_ms": "bigint"},
    SETTLING,
    "at_ms",
    _settlements_rows,
)

EVENTS = Table(
    {
        "key": "bigint",
        "position": "bigint",
        "event": "int",
        "at_ms": "bigint",
        "group_id": "bigint",
        "deadline_ms": "bigint",
        "return_ms": "bigint",
        "message_position": "bigint",
        "attempt": "int",
        "source": "int",
        "via": "int",
    },
    tuple(sorted({*HANDING, *SETTLING})),
    "at_ms",
    _events_rows,
)


def _steps_rows(records: Records) -> Columns:
    begin_ms, step_ms = [], []
    for offset in records.offsets.tolist():
        found = record.decode(records.block.buffer, offset, verify=False)
        began_ms, _, moved_ms = record.STEP_FIXED.unpack(found.fixed)
        begin_ms.append(began_ms)
        step_ms.append(moved_ms)
    return {
        "begin_ms": lambda: pa.array(begin_ms, pa.int64()),
        "end_ms": lambda: _plain(records.header["store_ms"]),
        "step_ms": lambda: pa.array(step_ms, pa.int64()),
    }


STEPS = Table({"begin_ms": "bigint", "end_ms": "bigint", "step_ms": "bigint"}, (Kind.CLOCK_STEPPED,), "end_ms", _steps_rows)
"""Steps of the node's clock. A step moves the deadlines that were set from `begin_ms` to `end_ms` and had not passed."""

GROUPS = Table({"group_id": "bigint", "group": "string", "filter": "string"}, POP_KINDS, "", _groups_rows)

TABLES = {
    "records": RECORDS,
    "messages": MESSAGES,
    "checkpoints": CHECKPOINTS,
    "settlements": SETTLEMENTS,
    "events": EVENTS,
    "groups": GROUPS,
    "steps": STEPS,
}

assert all(FIXED_BYTES[kind] == record.POP_FIXED.size for kind in POP_KINDS)
