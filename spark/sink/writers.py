"""What Spark pickles on the driver and calls in each task."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage

from penstock.spark.sink.options import SinkOptions
from penstock.spark.sink.requests import requests_of
from penstock.spark.sink.sending import RowSender


@dataclass(slots=True)
class PublishedRows(WriterCommitMessage):
    """Number of rows that a task has published, and of those that the node had before."""

    rows: int
    repeated: int


class _Publication:
    """Publishes the rows of each task of a write.

    Parameters:
        options: the options of the write.
        planned_ms: when Spark planned the write, in ms since 1970, if no row was sent before; None if rows say it themselves.
    """

    def __init__(self, options: SinkOptions, planned_ms: int | None) -> None:
        self._options = options
        self._planned_ms = planned_ms

    def write(self, iterator: Iterator[pa.RecordBatch]) -> PublishedRows:
        """Publish rows; return when all of them are durable. This runs on an executor.

        Raises:
            RowsInvalid, WriteOptionInvalid, PublishFailed: the rows can't be published. The error says why.
        """
        with RowSender(self._options) as sender:
            sent = sender.send(requests_of(iterator, self._planned_ms))
        return PublishedRows(sent.rows, sent.repeated)


class MessageWriter(_Publication, DataSourceArrowWriter):
    """The writer of a batch.

    Parameters:
        options: the options of the write.
    """

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options, time.time_ns() // 1_000_000)


class MessageStreamWriter(_Publication, DataSourceStreamArrowWriter):
    """The writer of a stream, which may execute a batch again after a restart.

    Parameters:
        options: the options of the write.
    """

    def __init__(self, options: SinkOptions) -> None:
        super().__init__(options, None)
