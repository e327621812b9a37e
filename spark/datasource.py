"""The CommitLog as a Spark data source: `spark.read.format("commitlog").load(data_dir)`.

Spark 4.1 to 4.3 pass filters to a Python data source, but not the columns that a query needs. The option `columns` names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from penstock.spark import segments
from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.records import Array, Records
from penstock.spark.segments import LogSegment
from penstock.spark.tables import KIND_NAMES, TABLES, Table

PARTITION_BYTES = 64 * 1024 * 1024
"""Bytes of the log that one task reads: enough that the start of a task costs little beside its work."""

ROWS_MAX = 100_000
"""Maximum number of rows in an Arrow batch. It bounds the memory of the worker and of the JVM."""

INT64_MAX = 2**63 - 1

OPTIONS = ("path", "table", "columns", "partition_bytes", "rows_max", "end_position", "verify")
"""The options of the data source: see `CommitlogSource`."""


@dataclass(frozen=True)
class LogPartition(InputPartition):
    """The input of one task: whole records of a segment, from position `start` to `stop`."""

    path: str
    base: int
    start: int
    stop: int


@dataclass
class RecordFilter:
    """The filters of a query that record headers answer. Limits are inclusive. None for `kinds` means all kinds."""

    position_min: int = 0
    position_max: int = INT64_MAX
    ms_min: int = -INT64_MAX
    ms_max: int = INT64_MAX
    kinds: frozenset[int] | None = None

    def mask(self, records: Records) -> Array:
        """Return a mask of the records that pass the filter."""
        ms = records.header["store_ms"]
        mask = (ms >= self.ms_min) & (ms <= self.ms_max)
        mask &= (records.position >= self.position_min) & (records.position <= self.position_max)
        if self.kinds is not None:
            mask &= np.isin(records.header["kind"], list(self.kinds))
        return np.asarray(mask)

    def narrow(self, name: str, low: int, high: int) -> None:
        """Also require that `name`, which is "position" or "ms", is from `low` to `high`."""
        setattr(self, f"{name}_min", max(getattr(self, f"{name}_min"), low))
        setattr(self, f"{name}_max", min(getattr(self, f"{name}_max"), high))

    def keep(self, kinds: Iterable[int]) -> None:
        """Also require one of these kinds."""
        self.kinds = frozenset(kinds) if self.kinds is None else self.kinds & frozenset(kinds)


@dataclass
class ReadOptions:
    """The checked options of the data source. `CommitlogSource` explains them."""

    path: str
    table_name: str = "records"
    columns: list[str] = field(default_factory=list)
    partition_bytes: int = PARTITION_BYTES
    rows_max: int = ROWS_MAX
    end_position: int | None = None
    verify: bool = True

    @property
    def table(self) -> Table:
        return TABLES[self.table_name]

    @classmethod
    def of(cls, options: MutableMapping[str, str]) -> ReadOptions:
        """Return the options that Spark passes as strings. Raises ReadOptionInvalid."""
        for name in options:
            if name.lower() not in OPTIONS:
                likely = get_close_matches(name.lower(), OPTIONS, 1)
                meant = f" Did you mean {likely[0]}?" if likely else ""
                raise ReadOptionInvalid(f"The option {name!r} does not exist.{meant} The options are {', '.join(OPTIONS)}.")
        _check_path(options.get("path", ""))
        table_name = options.get("table", "records")
        if table_name not in TABLES:
            raise ReadOptionInvalid(f"The table {table_name!r} does not exist. The tables are {', '.join(TABLES)}.")
        table = TABLES[table_name]
        columns = [name.strip() for name in options.get("columns", ",".join(table.columns)).split(",")]
        unknown = [name for name in columns if name not in table.columns]
        if unknown or len(set(columns)) < len(columns):
            raise ReadOptionInvalid(
                f"columns is {','.join(columns)!r}, but must name each column once, of {', '.join(table.columns)}."
            )
        verify = options.get("verify", "true").lower()
        if verify not in ("true", "false"):
            raise ReadOptionInvalid(f"verify is {verify!r}, but must be true or false.")
        return cls(
            path=options["path"],
            table_name=table_name,
            columns=columns,
            partition_bytes=_number(options, "partition_bytes", 0, PARTITION_BYTES),
            rows_max=_number(options, "rows_max", 1, ROWS_MAX),
            end_position=_number(options, "end_position", 0, 0) if "end_position" in options else None,
            verify=verify == "true",
        )


def _check_path(path: str) -> None:
    """Check that a path may name a directory. Raises ReadOptionInvalid."""
    remedy = "Call load(path) with one data directory, or its folder `commitlog`."
    if not path:
        raise ReadOptionInvalid(f"The path is missing. {remedy}")
    if "://" in path:
        raise ReadOptionInvalid(
            f"The path {path!r} is a URL, but a log is read from a directory that all workers see. {remedy}"
        )
    if any(sign in path for sign in "*?[{") and not Path(path).exists():
        raise ReadOptionInvalid(f"The path {path!r} is a pattern, but a log has one directory. {remedy}")


def _number(options: MutableMapping[str, str], name: str, low: int, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) < low:
        raise ReadOptionInvalid(f"{name} is {text!r}, but must be a whole number of at least {low}.")
    return int(text)


class CommitlogSource(DataSource):
    """A CommitLog of a stopped or running node, or a copy of it that all workers can read.

    Rows of different partitions are in no order. Times are in ms since 1970 UTC.

    Options:
        path: a data directory, or its folder `commitlog`. `load(path)` sets it.
        table: meaning of a row. `records` (the default): any record; `messages`: a message; `checkpoints`: the beginning of a
            delivery; `settlements`: the end of a delivery; `events`: both of these, as numbers only, for one `groupBy` on
            `key`; `groups`: id, name and filter of a POP group, with repetitions.
        columns: names of columns, separated by commas; all by default. Other columns are not decoded.
        partition_bytes: bytes of the log that one task reads, 64 MiB by default. With 0 each segment is one task, and
            planning reads only the last segment; otherwise planning follows the size fields of all segments.
        rows_max: maximum number of rows in an Arrow batch, 100,000 by default.
        end_position: position at which the log ends for this query; it must be the end of a record. The default is the end
            of the log when Spark plans the query. Several queries see the same log only if they name the same end.
        verify: false skips the checksums of records.

    Filters on `position`, `kind` and the table's time (`store_ms`, `pop_ms` or `at_ms`) apply before a record is decoded, and
    skip whole segments. This needs `spark.sql.python.filterPushdown.enabled`, which `register` sets.

    Raises (as a Spark exception that names the error):
        ReadOptionInvalid: an option is invalid.
        LogMissing: the directory holds no log.
        RecordCorrupt, LogCorrupt: the log is damaged, other than by a torn tail.
    """

    @classmethod
    def name(cls) -> str:
        return "commitlog"

    def schema(self) -> str:
        options = ReadOptions.of(self.options)
        return ", ".join(f"`{name}` {options.table.columns[name]}" for name in options.columns)

    def reader(self, schema: StructType) -> CommitlogReader:
        return CommitlogReader(ReadOptions.of(self.options))


class CommitlogReader(DataSourceReader):
    """Plans the partitions of a log, and reads one of them on a worker."""

    def __init__(self, options: ReadOptions) -> None:
        self.options = options
        self.filter = RecordFilter()
        if options.table.kinds:
            self.filter.keep(options.table.kinds)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Accept the filters that record headers answer, and return the others."""
        return [each for each in filters if not self._accept(each)]

    def _accept(self, wanted: Filter) -> bool:
        """Add a filter to ours. Return False, with nothing changed, if ours can't express all of it."""
        attribute: tuple[str, ...] = getattr(wanted, "attribute", ())
        if attribute == ("kind",):
            return self._accept_kinds(wanted)
        names: dict[tuple[str, ...], str] = {("position",): "position", (self.options.table.time_column,): "ms"}
        name = names.get(attribute)
        if name is None:
            return False
        if isinstance(wanted, IsNotNull):
            return True
        value: Any = getattr(wanted, "value", None)
        if type(value) is not int:
            return False
        match wanted:
            case EqualTo():
                self.filter.narrow(name, value, value)
            case GreaterThan():
                self.filter.narrow(name, value + 1, INT64_MAX)
            case GreaterThanOrEqual():
                self.filter.narrow(name, value, INT64_MAX)
            case LessThan():
                self.filter.narrow(name, -INT64_MAX, value - 1)
            case LessThanOrEqual():
                self.filter.narrow(name, -INT64_MAX, value)
            case _:
                return False
        return True

    def _accept_kinds(self, wanted: Filter) -> bool:
        match wanted:
            case IsNotNull():
                pass
            case EqualTo(value=str(name)):
                self.filter.keep(number for number, known in enumerate(KIND_NAMES) if known == name)
            case In(value=names):
                self.filter.keep(number for number, known in enumerate(KIND_NAMES) if known in names)
            case _:
                return False
        return True

    def partitions(self) -> list[InputPartition]:
        """Split the log into partitions, without the segments in which no record can pass the filters."""
        options, wanted = self.options, self.filter
        if options.end_position is None:
            listed = segments.survey(options.path).segments
        else:
            listed = segments.survey_until(options.path, options.end_position)
        planned: list[InputPartition] = []
        for segment in self._in_time(listed):
            cuts = iter([segment[1:]]) if not 0 < options.partition_bytes < segment.stop - segment.base else None
            for start, stop in cuts or segments.split(segment, options.partition_bytes):
                if start < stop and stop > wanted.position_min and start <= wanted.position_max:
                    planned.append(LogPartition(segment.path, segment.base, start, stop))
        return planned

    def _in_time(self, listed: list[LogSegment]) -> Iterator[LogSegment]:
        """Yield the segments that can hold a wanted time. Store times never decrease along the log."""
        wanted = self.filter
        if wanted.ms_min == -INT64_MAX and wanted.ms_max == INT64_MAX:
            yield from listed
            return
        starts = [*(segments.first_ms(segment) for segment in listed), None]
        for segment, (start_ms, next_ms) in zip(listed, pairwise(starts), strict=True):
            if start_ms is None or start_ms > wanted.ms_max or (next_ms is not None and next_ms < wanted.ms_min):
                continue
            yield segment

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the Arrow batches of a partition. This runs on a worker."""
        if not isinstance(partition, LogPartition):  # Spark passes a placeholder if `partitions` returned none
            return
        table, names, rows_max = self.options.table, self.options.columns, self.options.rows_max
        for block in segments.blocks(partition.path, partition.base, partition.start, partition.stop):
            records = Records.of(block)
            records = records.where(self.filter.mask(records))
            if not len(records):
                continue
            if self.options.verify:
                segments.verify(block, records.offsets)
            batch = table.batch(records, names)
            for start in range(0, batch.num_rows, rows_max):
                yield batch.slice(start, rows_max)


def register(spark: SparkSession) -> None:
    """Register the format `commitlog` in a session, and let Spark pass filters to it."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(CommitlogSource)
