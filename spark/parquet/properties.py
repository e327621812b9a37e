"""The properties of many messages as columns. `store.properties` defines the JSON."""

from __future__ import annotations

import io
from typing import Any, NamedTuple

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json

_STRINGS = pa.list_(pa.string())

_FIELDS = pa.schema(
    [
        ("tag", pa.string()),
        ("keys", _STRINGS),
        ("message_group", pa.string()),
        ("content_type", pa.string()),
        ("deliver_at_ms", pa.int64()),
        ("expires_at_ms", pa.int64()),
        ("replaces", pa.int64()),
        ("user", pa.list_(_STRINGS)),
    ]
)


class PropertyColumns(NamedTuple):
    """Arrow arrays with one element per message, null for what a message doesn't have."""

    tag: Any
    keys: Any
    message_group: Any
    content_type: Any
    deliver_at_ms: Any
    expires_at_ms: Any
    replaces: Any
    user_names: Any
    user_values: Any


def property_columns(encoded: Any) -> PropertyColumns:
    """Return the properties of messages, given an Arrow array of binary with their JSON. An empty element has none.

    Messages whose properties are not the JSON of an object have none either: the checksum covers them, so they are as they were
    written, and one message must not stop the table of all.
    """
    has_some = pc.greater(pc.binary_length(encoded), 0).to_numpy(zero_copy_only=False)
    table = _parsed(encoded.filter(pa.array(has_some)))
    rows = np.cumsum(has_some) - 1
    columns = table.take(pa.array(rows, mask=~has_some)).combine_chunks() if len(encoded) else table
    *plain, user = (_whole(column) for column in columns.columns)
    return PropertyColumns._make([*plain, *_pairs(user)])


def _whole(column: Any) -> Any:
    whole = column.combine_chunks()
    return whole if isinstance(whole, pa.Array) else pa.concat_arrays(whole.chunks)


def _parsed(encoded: Any) -> Any:
    """Return the fields of each JSON as a table."""
    if not len(encoded):
        return _FIELDS.empty_table()
    lines = pc.binary_join_element_wise(encoded, b"\n", b"")
    _, _, data = lines.buffers()
    # JSON of orjson has no line ends. The block covers all lines, because a line must not be longer than a block.
    options = pa.json.ReadOptions(use_threads=False, block_size=len(data) + 1)
    parse = pa.json.ParseOptions(explicit_schema=_FIELDS, newlines_in_values=False, unexpected_field_behavior="ignore")
    try:
        table = pa.json.read_json(pa.BufferReader(data), read_options=options, parse_options=parse)
        if len(table) == len(encoded):
            return table.select(_FIELDS.names)
    except pa.ArrowInvalid:
        pass  # a message has other JSON than the node writes
    return pa.concat_tables([_parsed_alone(each) for each in encoded.to_pylist()])


def _parsed_alone(encoded: bytes) -> Any:
    """Return the fields of one JSON as a table of one row."""
    nothing = pa.table({name: pa.nulls(1, _FIELDS.field(name).type) for name in _FIELDS.names})
    try:
        line = orjson.dumps(orjson.loads(encoded))
        parse = pa.json.ParseOptions(explicit_schema=_FIELDS, unexpected_field_behavior="ignore")
        options = pa.json.ReadOptions(use_threads=False, block_size=len(line) + 1)
        table = pa.json.read_json(io.BytesIO(line), read_options=options, parse_options=parse).select(_FIELDS.names)
    except (orjson.JSONDecodeError, pa.ArrowInvalid, pa.ArrowKeyError, KeyError):
        return nothing
    return table if len(table) == 1 else nothing


def _pairs(user: Any) -> tuple[Any, ...]:
    """Return the first and the second elements of lists of pairs."""
    pairs = user.flatten()
    if not len(pairs):
        return pa.nulls(len(user), _STRINGS), pa.nulls(len(user), _STRINGS)
    texts = pairs.flatten()
    offsets = np.concatenate([[0], np.cumsum(pc.fill_null(pc.list_value_length(user), 0).to_numpy(zero_copy_only=False))])
    nulls = pc.is_null(user)
    return tuple(
        pa.ListArray.from_arrays(
            pa.array(offsets.astype(np.int32)), texts.take(pa.array(np.arange(at, len(texts), 2))), mask=nulls
        )
        for at in (0, 1)
    )
