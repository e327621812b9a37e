"""The source and sink of Spark with the name `penstock`.

Spark imports each top-level module whose name begins with `pyspark_`, in all sessions of an environment where it is installed,
and an error in one of them breaks all Python sources. So this module imports nothing but pyspark. All else is in
`penstock.spark`.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
)
from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """`format("penstock")`: reads the log of a node, follows it as a stream, and publishes rows.

    `penstock.spark.source.options` explains the options of reading, `penstock.spark.sink` those of publishing.
    """

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        from penstock.spark.source.options import table_of

        return ", ".join(f"`{column.name}` {column.type}" for column in table_of(self.options).columns)

    def reader(self, schema: StructType) -> DataSourceReader:
        from penstock.spark.source.options import BatchOptions, chosen_columns
        from penstock.spark.source.reader import LogReader

        options = BatchOptions.of(self.options)
        return LogReader(options, chosen_columns(options.table, _columns(schema)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        from penstock.spark.source.options import StreamOptions, chosen_columns
        from penstock.spark.source.stream import LogStreamReader

        options = StreamOptions.of(self.options)
        return LogStreamReader(options, chosen_columns(options.table, _columns(schema)))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from penstock.spark.sink import writer

        return writer(schema, self.options, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        from penstock.spark.sink import stream_writer

        return stream_writer(schema, self.options, overwrite=overwrite)


def _columns(schema: StructType) -> list[tuple[str, str]]:
    return [(field.name, field.dataType.simpleString()) for field in schema.fields]
