"""Reads a log once: plans its parts on the driver, and reads each of them on a worker."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceReader, InputPartition

from penstock.spark import segments
from penstock.spark.parquet.files import DIRECTORY, reading
from penstock.spark.parquet.rows import message_records, origins, read_segment
from penstock.spark.parquet.schema import MESSAGES, RECORDS, ParquetTable
from penstock.spark.parquet.seals import state_before
from penstock.spark.parquet.writer import segment_tables
from penstock.spark.records import Records
from penstock.spark.segments import LogSegment, RecordBlock
from penstock.spark.source import rows
from penstock.spark.source.filters import FilterIntake, RecordFilter
from penstock.spark.source.options import FAR, BatchOptions
from penstock.spark.source.places import position_of
from penstock.store.record import Kind

PARTITION_BYTES = 32 * 1024 * 1024
"""Bytes of the log that one task reads: enough that the start of a task costs little beside its work."""

SEGMENTS_MANY = 16
"""From so many segments on, each is the input of one task."""

ROWS_MAX = 65_536
"""Maximum number of rows in an Arrow batch. It bounds the memory of the worker and of the JVM."""


@dataclass(frozen=True)
class LogPartition(InputPartition):
    """The input of one task: whole records of a segment, from position `start` to `stop`."""

    path: str
    base: int
    start: int
    stop: int


@dataclass(frozen=True)
class LogRangePartition(InputPartition):
    """The input of one task: whole segments, of which it makes the rows from position `start` to `stop`."""

    data_dir: str
    segments: tuple[LogSegment, ...]
    """The log up to `stop`."""
    start: int


def pieces(listed: list[LogSegment], start: int, stop: int, piece_bytes: int) -> Iterator[LogPartition]:
    """Yield the records from position `start` to `stop` in pieces of about `piece_bytes`, each within a segment."""
    for segment in listed:
        first, last = max(start, segment.base), min(segment.stop, stop)
        if first < last <= first + piece_bytes:
            yield LogPartition(segment.path, segment.base, first, last)
        elif first < last:
            for begin, end in segments.split(LogSegment(segment.path, segment.base, last), piece_bytes, first):
                yield LogPartition(segment.path, segment.base, begin, end)


def piece_size(listed: list[LogSegment], start: int, stop: int) -> int:
    """Return how many bytes a task is to read of a range: whole segments where they are many, because all records of a segment
    have to be visited to split it."""
    count = sum(segment.base < stop and segment.stop > start for segment in listed)
    return PARTITION_BYTES if count < SEGMENTS_MANY else FAR


@dataclass(frozen=True, slots=True)
class RowReader:
    """Reads the rows of `messages` and `records` in a piece of the log."""

    table: ParquetTable
    names: tuple[str, ...]
    topic: str | None
    filter: RecordFilter
    origins_from: int = 0
    origins_until: int = 0
    """Range of the positions whose messages are read from their copies, because the log has nothing else of them any more."""

    def read(self, piece: LogPartition) -> Iterator[Any]:
        """Yield record batches.

        Raises:
            RecordCorrupt: a record is damaged.
            LogMissing: retention has removed the segment meanwhile.
        """
        schema = rows.arrow_schema(self.table, self.names)
        for block in segments.blocks(piece.path, piece.base, piece.start, piece.stop):
            for columns in self._columns(block):
                batch = rows.batch(columns, schema)
                for start in range(0, batch.num_rows, ROWS_MAX):
                    yield batch.slice(start, ROWS_MAX)

    def _columns(self, block: RecordBlock) -> Iterator[rows.Columns]:
        records = Records.of(block)
        if self.table.name == RECORDS.name:
            chosen = self._chosen(records)
            yield rows.record_columns(chosen)
            return
        messages = self._chosen(records.of_kind(Kind.MESSAGE))
        if len(messages):
            yield rows.message_columns(messages, messages.position, pa.nulls(len(messages), pa.int64()))
        if self.origins_from < self.origins_until:
            yield from self._copied(records)

    def _chosen(self, records: Records) -> Records:
        """Return the records that are wanted, verified."""
        chosen = records.where(self.filter.mask(records))
        if self.topic is not None:
            chosen = chosen.where(rows.is_of_topic(chosen, self.topic))
        chosen.verify()
        return chosen

    def _copied(self, records: Records) -> Iterator[rows.Columns]:
        """Yield the columns of the messages in copies. The filter's positions are those of the messages."""
        _, copied, copied_at = message_records(records)
        position = origins(copied)
        is_wanted = (position >= self.origins_from) & (position < self.origins_until)
        is_wanted &= (position >= self.filter.position_min) & (position <= self.filter.position_max)
        ms = copied.header["store_ms"]
        is_wanted &= (ms >= self.filter.ms_min) & (ms <= self.filter.ms_max)
        is_wanted[is_wanted] &= self._is_first(position[is_wanted])
        copied, position, copied_at = copied.where(is_wanted), position[is_wanted], copied_at[is_wanted]
        if self.topic is not None and len(copied):
            is_wanted = rows.is_of_topic(copied, self.topic)
            copied, position, copied_at = copied.where(is_wanted), position[is_wanted], copied_at[is_wanted]
        if len(copied):
            copied.verify()
            yield rows.message_columns(copied, position, pa.array(copied_at))

    @staticmethod
    def _is_first(position: Any) -> Any:
        is_first = np.zeros(len(position), bool)
        is_first[np.unique(position, return_index=True)[1]] = True
        return is_first


class LogReader(DataSourceReader):
    """Reads a table from the log, up to the end that the log has when Spark plans the query.

    Spark passes no columns to a Python source, so the schema says which are made.
    """

    def __init__(self, options: BatchOptions, names: Sequence[str]) -> None:
        self._options = options
        self._names = tuple(names)
        self._filter = RecordFilter()
        self._origins = (0, 0)
        self._is_decoded = options.table.name in (MESSAGES.name, RECORDS.name)
        intake = FilterIntake(self._filter.accept if self._is_decoded else lambda wanted: False)
        setattr(self, "pushFilters", intake)  # noqa: B010  (a method, for the type checker)

    def partitions(self) -> list[InputPartition]:
        """Split the log into the inputs of tasks.

        Raises:
            LogMissing: the directory holds no log.
            LogCorrupt, RecordCorrupt: the log is damaged.
        """
        log = segments.survey(self._options.path)
        start, stop = position_of(self._options.start, log.segments), position_of(self._options.stop, log.segments)
        if self._is_decoded:
            return self._decoded(log.segments, start, stop)
        if start >= stop:
            return []
        listed = tuple(each._replace(stop=min(each.stop, stop)) for each in log.segments if each.base < stop)
        # The row of `damages` for what is missing before the log has the position 0.
        return [LogRangePartition(str(log.directory.parent), listed, 0 if start == log.start else start)]

    def _decoded(self, listed: list[LogSegment], start: int, stop: int) -> list[InputPartition]:
        wanted = self._filter
        # The messages before the beginning of the log of which retention has copied the records forward.
        first = 0 if self._options.start.at_ms is not None else self._options.start.position
        if self._options.table.name == MESSAGES.name:
            self._origins = (first, listed[0].base)
        if self._origins[0] < self._origins[1]:
            return [*pieces(listed, start, stop, piece_size(listed, start, stop))]
        listed = list(self._in_time(listed))
        found = pieces(listed, start, stop, piece_size(listed, start, stop))
        return [each for each in found if each.stop > wanted.position_min and each.start <= wanted.position_max]

    def _in_time(self, listed: list[LogSegment]) -> Iterator[LogSegment]:
        """Yield the segments that can hold a wanted time. Store times never decrease along the log."""
        wanted = self._filter
        starts = [*(segments.first_ms(segment) for segment in listed), None]
        for segment, (start_ms, next_ms) in zip(listed, pairwise(starts), strict=True):
            if start_ms is not None and start_ms <= wanted.ms_max and (next_ms is None or next_ms >= wanted.ms_min):
                yield segment

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a partition. This runs on a worker."""
        options = self._options
        if isinstance(partition, LogPartition):
            reader = RowReader(options.table, self._names, options.topic, self._filter, *self._origins)
            yield from reader.read(partition)
        elif isinstance(partition, LogRangePartition):  # else a placeholder of Spark's, if `partitions` returned none
            yield from self._resolved(partition)

    def _resolved(self, partition: LogRangePartition) -> Iterator[Any]:
        """Yield the rows of a table whose rows depend on what was open before."""
        schema = rows.arrow_schema(self._options.table, self._names)
        data_dir = Path(partition.data_dir)
        with reading(data_dir / DIRECTORY):
            state = state_before(data_dir, partition.start, partition.segments[0].base)
        for segment in partition.segments:
            if segment.base < state.position:
                continue
            state, tables = segment_tables(read_segment(segment, state.anchor), state, segment)
            table = tables[self._options.table.name]
            is_wanted = pc.greater_equal(table["position"], partition.start)
            if self._options.group is not None:
                is_wanted = pc.and_(is_wanted, pc.equal(table["group_name"], self._options.group))
            yield from table.filter(is_wanted).select(self._names).cast(schema).to_batches(max_chunksize=ROWS_MAX)
