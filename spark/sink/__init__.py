"""The way back from Spark: rows of a DataFrame become messages of a node, over gRPC.

A worker needs grpcio, grpcio-health-checking, protobuf and pyarrow for it, and nothing of the node.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter
from pyspark.sql.types import StructType

from penstock.spark.sink.columns import check_schema
from penstock.spark.sink.options import SinkOptions
from penstock.spark.sink.writers import MessageStreamWriter, MessageWriter


def writer(schema: StructType, options: Mapping[str, str], *, overwrite: bool = False) -> DataSourceArrowWriter:
    """Return the writer of `DataFrame.write.format("penstock")`.

    Raises:
        WriteOptionInvalid: an option is invalid, or the rows are to replace others.
        RowsInvalid: the columns can't be published.
    """
    checked = SinkOptions.of(options, overwrite=overwrite)
    check_schema(schema, is_stream=False)
    return MessageWriter(checked)


def stream_writer(schema: StructType, options: Mapping[str, str], *, overwrite: bool = False) -> DataSourceStreamArrowWriter:
    """Return the writer of `DataFrame.writeStream.format("penstock")`. Raises as `writer`."""
    checked = SinkOptions.of(options, overwrite=overwrite)
    check_schema(schema, is_stream=True)
    return MessageStreamWriter(checked)
