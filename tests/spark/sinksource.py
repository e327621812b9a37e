"""A Spark data source with the name `penstock` that can only publish, for the tests of the sink."""

from __future__ import annotations

from pyspark.sql.datasource import DataSource, DataSourceStreamWriter, DataSourceWriter
from pyspark.sql.types import StructType


class SinkSource(DataSource):
    """`format("penstock")` of the sink alone."""

    @classmethod
    def name(cls) -> str:
        return "penstock"

    def schema(self) -> str:
        return "topic string, body binary"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from penstock.spark.sink import writer

        return writer(schema, self.options, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:
        from penstock.spark.sink import stream_writer

        return stream_writer(schema, self.options, overwrite=overwrite)
