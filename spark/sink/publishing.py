"""Deduplication ids for the rows of a batch, and streams whose batches get them.

The id of a row is made of the name of the query, the number of the batch, a hash of the row, and a number among the rows of the
batch that are equal. So a row has the same id whichever task has it, and however often Spark executes the batch.
"""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F
from pyspark.sql.types import MapType, StringType, StructField, StructType, TimestampType
from pyspark.sql.window import Window

from penstock.spark.errors import RowsInvalid, WriteOptionInvalid
from penstock.spark.sink.columns import check_columns
from penstock.spark.sink.options import SinkOptions

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

Option = str | int | bool

NAME_BYTES_MAX: Final = 128
"""Maximum size of the name of a query. A deduplication id has 256 bytes, and the other parts of it need fewer than half."""

HASH_DIGITS: Final = 32
"""Hexadecimal digits of the hash of a row: 128 bits. Each id is in the log and in the node's memory, so ids are short."""


def publish(rows: DataFrame, name: str, *, epoch: int = 0, first_sent: datetime | None = None, **options: Option) -> None:
    """Publish the rows of a batch: `penstock.spark.publish` documents it."""
    _check(rows, name, options)
    if epoch < 0:
        raise WriteOptionInvalid(f"epoch is {epoch}, but must be a whole number of at least 0.")
    if first_sent is not None:
        if first_sent.tzinfo is None:
            raise WriteOptionInvalid(
                f"first_sent is {first_sent}, which has no time zone. Give one, such as datetime.now(UTC)."
            )
        if "first_sent" in rows.columns:
            raise RowsInvalid("The rows have a column 'first_sent' already. Drop it, or leave the argument first_sent out.")
        rows = rows.withColumn("first_sent", F.timestamp_micros(F.lit(round(first_sent.timestamp() * 1e6))))
    _write(rows, name, epoch, options)


def publishing(rows: DataFrame, name: str, **options: Option) -> DataStreamWriter:
    """Return the writer of a stream that publishes each batch: `penstock.spark.publishing` documents it."""
    if not rows.isStreaming:
        raise RowsInvalid("The rows are no stream. Call penstock.spark.publish for a batch.")
    _check(rows, name, options)
    if "first_sent" in rows.columns:
        raise RowsInvalid("The stream has a column 'first_sent' already. Drop it: publishing adds the time of each batch.")
    # In the plan of a stream this is the time of the batch, which the checkpoint keeps for when the batch is executed again.
    stamped = rows.withColumn("first_sent", F.current_timestamp())

    def publish_batch(batch: DataFrame, epoch: int) -> None:
        _write(batch, name, epoch, options)

    return stamped.writeStream.foreachBatch(publish_batch)


def _write(rows: DataFrame, name: str, epoch: int, options: dict[str, Option]) -> None:
    with_ids(rows, f"{name}/{epoch}").write.format("penstock").mode("append").options(**options).save()


def with_ids(rows: DataFrame, prefix: str) -> DataFrame:
    """Return rows with the column `deduplication_id`: the prefix, the hash of the row, and its number among equal rows."""
    equal_rows = Window.partitionBy("_hash").orderBy("_hash")
    number = F.row_number().over(equal_rows) - 1
    return (
        rows.withColumn("_hash", _hash(rows))
        .withColumn("_number", number)
        .withColumn("deduplication_id", F.concat_ws("/", F.lit(prefix), F.col("_hash"), F.col("_number").cast("string")))
        .drop("_hash", "_number")
    )


def _hash(rows: DataFrame) -> Column:
    """Return a hash of all columns but `first_sent`, which is the same for equal rows and for no others."""
    fields = sorted((field for field in rows.schema.fields if field.name != "first_sent"), key=lambda field: field.name)
    comparable = [_comparable(field).alias(field.name) for field in fields]
    return F.substring(F.sha2(F.to_json(F.struct(*comparable)), 256), 1, HASH_DIGITS)


def _comparable(field: StructField) -> Column:
    """Return a column whose JSON is the same for equal values and for no others."""
    column = F.col(field.name)
    if isinstance(field.dataType, MapType):
        return F.array_sort(F.map_entries(column))  # A map has no order.
    if isinstance(field.dataType, TimestampType):
        return F.unix_micros(column)  # JSON has ms only.
    if isinstance(field.dataType, StringType):
        return column.cast("binary")  # JSON would replace bytes that are not UTF-8.
    return column


def _check(rows: DataFrame, name: str, options: dict[str, Option]) -> None:
    """Check what can be checked before the query starts. Raises WriteOptionInvalid or RowsInvalid."""
    if not name or len(name.encode()) > NAME_BYTES_MAX:
        raise WriteOptionInvalid(
            f"name is {name!r:.80}, but must have 1 to {NAME_BYTES_MAX} bytes of UTF-8, and be of this query alone."
        )
    SinkOptions.of({key: str(value) for key, value in options.items()})
    if "deduplication_id" in rows.columns:
        raise RowsInvalid(
            "The rows have a column 'deduplication_id' already. Write them with format('penstock'), or drop the column to have "
            "ids made."
        )
    schema: StructType = rows.schema
    check_columns(schema)
