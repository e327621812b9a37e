"""The columns of rows that become messages, and the check of a schema."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from pyspark.sql.types import (
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructType,
    TimestampType,
)

from penstock.spark.errors import RowsInvalid

_TEXT: Final = (StringType,)
_BYTES: Final = (BinaryType, StringType)
_WHOLE: Final = (ByteType, ShortType, IntegerType, LongType)
_INSTANT: Final = (TimestampType,)

COLUMNS: Final[dict[str, tuple[type[DataType], ...]]] = {
    "topic": _TEXT,
    "body": _BYTES,
    "deduplication_id": _TEXT,
    "first_sent": _INSTANT,
    "properties": (MapType,),
    "tag": _TEXT,
    "message_group": _TEXT,
    "deliver_at": _INSTANT,
    "delay_ms": _WHOLE,
    "timer_key": _TEXT,
    "expire_after_ms": _WHOLE,
    "content_type": _TEXT,
    "response_topic": _TEXT,
    "correlation_data": _BYTES,
}
"""The columns that rows may have, each with its types of Spark. They mean what the fields of `OutgoingMessage` mean."""

NEEDED: Final = ("topic", "body", "deduplication_id")
"""The columns that rows must have, with a value in each row."""

_NAMES: Final[dict[tuple[type[DataType], ...], str]] = {
    _TEXT: "string",
    _BYTES: "binary or string",
    _WHOLE: "a whole number",
    _INSTANT: "timestamp",
    (MapType,): "map<string,string>",
}


def check_columns(schema: StructType) -> None:
    """Check that the columns of a schema are columns of messages, and that `topic` and `body` are among them.

    Raises:
        RowsInvalid: a column is unknown, missing, there twice, or of another type.
    """
    names = schema.fieldNames()
    for field in schema.fields:
        types = COLUMNS.get(field.name)
        if types is None:
            likely = get_close_matches(field.name.lower(), COLUMNS, 1)
            meant = f" Did you mean {likely[0]}?" if likely else ""
            raise RowsInvalid(f"The column {field.name!r} is unknown.{meant} The columns are {', '.join(COLUMNS)}.")
        if names.count(field.name) > 1:
            raise RowsInvalid(f"The column {field.name!r} is there {names.count(field.name)} times. Keep one of them.")
        if not _fits(field.dataType, types):
            raise RowsInvalid(
                f"The column {field.name!r} is {field.dataType.simpleString()}, but must be {_NAMES[types]}. Cast it."
            )
    for name in ("topic", "body"):
        if name not in names:
            raise RowsInvalid(f"The column {name!r} is missing. Each row needs a topic and a body.")


def check_schema(schema: StructType, *, is_stream: bool) -> None:
    """Check that rows of a schema can be stored once each, whatever Spark tries again.

    Raises:
        RowsInvalid: as `check_columns`, or the rows have nothing by which the node knows them again.
    """
    check_columns(schema)
    names = schema.fieldNames()
    if "deduplication_id" not in names:
        call = "penstock.spark.publishing(rows, name, ...)" if is_stream else "penstock.spark.publish(rows, name, ...)"
        raise RowsInvalid(
            "The column 'deduplication_id' is missing. Spark executes tasks again, and the node would store their rows again. "
            f"Add the column with an id for each row, or call {call}, which makes the ids."
        )
    if is_stream and "first_sent" not in names:
        raise RowsInvalid(
            "The column 'first_sent' is missing. A stream executes its last batch again after a restart, and the node must "
            "know how old its ids may be. Add the column to the stream as current_timestamp(), which stays the same when a "
            "batch is executed again, or call penstock.spark.publishing(rows, name, ...), which adds it."
        )


def _fits(found: DataType, types: tuple[type[DataType], ...]) -> bool:
    if isinstance(found, MapType):
        return MapType in types and isinstance(found.keyType, StringType) and isinstance(found.valueType, StringType)
    return isinstance(found, types)
