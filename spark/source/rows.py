"""Rows of `messages` and `records`, made a block at a time from the columns that a query wants."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.spark.parquet.properties import PropertyColumns, property_columns
from penstock.spark.parquet.rows import flag_columns
from penstock.spark.parquet.schema import MESSAGES, ColumnType, ParquetTable
from penstock.spark.records import HANDING, SETTLING, Array, Records
from penstock.store.record import Kind
from penstock.store.topics import matches

ARROW_TYPES = {
    ColumnType.BIGINT: pa.int64(),
    ColumnType.INT: pa.int32(),
    ColumnType.BOOLEAN: pa.bool_(),
    ColumnType.STRING: pa.string(),
    ColumnType.STRINGS: pa.list_(pa.field("element", pa.string())),
    ColumnType.BINARY: pa.binary(),
    ColumnType.TIMESTAMP: pa.timestamp("us", "UTC"),
}
"""The types that Spark expects of a source."""

POP_KINDS = (
    *sorted({*HANDING, *SETTLING}),
    Kind.GROUP_CREATED,
    Kind.GROUP_CHANGED,
    Kind.DEAD_LETTER_REDRIVEN,
    Kind.DEAD_LETTER_PURGED,
)

KIND_NAMES = [f"KIND_{number}" for number in range(256)]
for _kind in Kind:
    KIND_NAMES[_kind] = _kind.name

Columns = Mapping[str, Callable[[], Any]]
"""Columns by name. A call makes the array, so a column that nobody wants costs nothing."""


def arrow_schema(table: ParquetTable, names: Sequence[str]) -> Any:
    """Return the Arrow schema of some columns of a table, as Spark expects it."""
    types = {column.name: ARROW_TYPES[column.type] for column in table.columns}
    return pa.schema([(name, types[name]) for name in names])


def batch(columns: Columns, schema: Any) -> Any:
    """Return a record batch with the columns of a schema."""
    return pa.RecordBatch.from_arrays([_cast(columns[field.name](), field.type) for field in schema], schema=schema)


def _cast(values: Any, to: Any) -> Any:
    array = pa.array(values) if isinstance(values, np.ndarray) else values
    return array if array.type == to else array.cast(to)


def milliseconds(ms: Array) -> Any:
    """Return times in ms since 1970 as Arrow timestamps."""
    return pa.array(ms.astype("datetime64[ms]")).cast(ARROW_TYPES[ColumnType.TIMESTAMP])


def message_columns(records: Records, position: Array, copied_at: Any) -> Columns:
    """Return the columns of messages, or of the messages in copies.

    What became of a delayed message or of a half of a transaction is null: the records after it tell, and not all of them are
    read.

    Args:
        records: the messages.
        position: of each.
        copied_at: positions of the copies as an Arrow array; null for messages that are no copies.
    """
    header = records.header
    by_flags = flag_columns(header["flags"])
    is_half, is_delayed = by_flags["half"], by_flags["delayed"]
    never = np.zeros(len(records), bool)

    @cache
    def properties() -> PropertyColumns:
        return property_columns(records.slices(records.props_from, records.body_from))

    def of_properties(name: str) -> Callable[[], Any]:
        return lambda: getattr(properties(), name)

    return {
        "position": lambda: position,
        "at_ms": lambda: header["store_ms"],
        "time": lambda: milliseconds(header["store_ms"]),
        "topic": lambda: records.texts(records.topic_from, records.props_from),
        **{name: partial(by_flags.__getitem__, name) for name in by_flags},
        "recalled": lambda: pa.array(never, mask=is_delayed & ~is_half),
        "rolled_back": lambda: pa.array(never, mask=is_half),
        "copied_at": lambda: copied_at,
        **{column.name: of_properties(column.name) for column in MESSAGES.columns if column.name in PropertyColumns._fields},
        "body": lambda: records.slices(records.body_from, records.stop),
    }


def record_columns(records: Records) -> Columns:
    """Return the columns of records of any kind."""
    header = records.header
    is_pop = np.isin(header["kind"], POP_KINDS)

    def of_pop(name: str) -> Callable[[], Any]:
        def column() -> Any:
            values = np.zeros(len(records), dtype=np.int64)
            values[is_pop] = records.where(is_pop).pop[name]
            return pa.array(values, mask=~is_pop)

        return column

    def kinds() -> Any:
        return pa.DictionaryArray.from_arrays(pa.array(header["kind"].astype(np.int16)), pa.array(KIND_NAMES))

    return {
        "position": lambda: records.position,
        "size": lambda: header["size"].astype(np.int32),
        "kind": lambda: kinds().cast(pa.string()),
        "flags": lambda: header["flags"].astype(np.int32),
        "at_ms": lambda: header["store_ms"],
        "time": lambda: milliseconds(header["store_ms"]),
        "topic": lambda: records.texts(records.topic_from, records.props_from),
        "group_id": of_pop("group_id"),
        "epoch": of_pop("epoch"),
        "deadline_ms": of_pop("deadline_ms"),
        "properties": lambda: records.texts(records.props_from, records.body_from),
        "body": lambda: records.slices(records.body_from, records.stop),
    }


def is_of_topic(records: Records, topic_filter: str) -> Array:
    """Return which records have a topic that a filter of MQTT matches. Each topic of a block is matched once."""
    if not len(records):
        return np.zeros(0, bool)
    topics = records.texts(records.topic_from, records.props_from).dictionary_encode()
    matched = np.array([matches(topic_filter, topic) for topic in topics.dictionary.to_pylist()], bool)
    return np.asarray(matched[topics.indices.to_numpy()])
