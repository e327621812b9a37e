"""The CommitLog as a Spark data source: `spark.read.format("commitlog").load(data_dir)`.

Spark 4.1 to 4.3 hand filters to a Python data source, but not the columns that a query needs: the option `columns` says them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass, field
from itertools import pairwise
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
from penstock.spark.errors import OptionInvalid
from penstock.spark.explode import Array, Records
from penstock.spark.segments import Segment
from penstock.spark.tables import KIND_NAMES, TABLES, Table

PART_BYTES = 64 * 1024 * 1024
"""Bytes of the log that one task reads: enough to outweigh a task's start, about a second of work."""

ROWS_MAX = 100_000
"""Rows of one Arrow batch, so that neither the worker nor the JVM holds much more than a block of the log at once."""

INT64_MAX = 2**63 - 1


@dataclass(frozen=True)
class Part(InputPartition):
    """A run of whole records in one segment, from position `start` to `stop`: what one task reads."""

    path: str
    base: int
    start: int
    stop: int


@dataclass
class Bounds:
    """Which records a query wants. Limits are inclusive; `kinds` None means all."""

    position_min: int = 0
    position_max: int = INT64_MAX
    ms_min: int = -INT64_MAX
    ms_max: int = INT64_MAX
    kinds: frozenset[int] | None = None

    def mask(self, records: Records) -> Array:
        """Return which of the records are wanted."""
        ms = records.header["store_ms"]
        mask = (ms >= self.ms_min) & (ms <= self.ms_max)
        mask &= (records.position >= self.position_min) & (records.position <= self.position_max)
        if self.kinds is not None:
            mask &= np.isin(records.header["kind"], list(self.kinds))
        return np.asarray(mask)

    def narrow(self, name: str, low: int, high: int) -> None:
        """Keep what lies in `low` to `high` too. `name` is "position" or "ms"."""
        setattr(self, f"{name}_min", max(getattr(self, f"{name}_min"), low))
        setattr(self, f"{name}_max", min(getattr(self, f"{name}_max"), high))

    def keep(self, kinds: Iterable[int]) -> None:
        """Keep only these kinds."""
        self.kinds = frozenset(kinds) if self.kinds is None else self.kinds & frozenset(kinds)


@dataclass
class Options:
    """Options of the data source, checked. See `CommitlogSource`."""

    path: str
    table_name: str = "records"
    columns: list[str] = field(default_factory=list)
    part_bytes: int = PART_BYTES
    rows_max: int = ROWS_MAX
    end_position: int | None = None
    verify: bool = True

    @property
    def table(self) -> Table:
        return TABLES[self.table_name]

    @classmethod
    def of(cls, options: MutableMapping[str, str]) -> Options:
        """Read the options as Spark hands them over. Raises OptionInvalid."""
        if not options.get("path"):
            raise OptionInvalid("the path is missing: load(path) with a data directory, or its folder `commitlog`")
        table_name = options.get("table", "records")
        if table_name not in TABLES:
            raise OptionInvalid(f"there is no table {table_name!r}; there are {', '.join(TABLES)}")
        table = TABLES[table_name]
        columns = [name.strip() for name in options.get("columns", ",".join(table.columns)).split(",")]
        unknown = [name for name in columns if name not in table.columns]
        if unknown or len(set(columns)) < len(columns):
            raise OptionInvalid(f"columns={','.join(columns)!r}: give each once, of {', '.join(table.columns)}")
        verify = options.get("verify", "true").lower()
        if verify not in ("true", "false"):
            raise OptionInvalid(f"verify={verify!r} must be true or false")
        return cls(
            path=options["path"],
            table_name=table_name,
            columns=columns,
            part_bytes=_number(options, "part_bytes", 0, PART_BYTES),
            rows_max=_number(options, "max_rows", 1, ROWS_MAX),
            end_position=_number(options, "end_position", 0, 0) if "end_position" in options else None,
            verify=verify == "true",
        )


def _number(options: MutableMapping[str, str], name: str, low: int, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdecimal() or int(text) < low:
        raise OptionInvalid(f"{name}={text!r} must be a whole number from {low} on")
    return int(text)


class CommitlogSource(DataSource):
    """A CommitLog, of a stopped node, of a running one, or copied anywhere that all workers can read.

    Rows are in no order across partitions. Times are ms since 1970 UTC.

    Options:
        path: a data directory, or its folder `commitlog`. `load(path)` sets it.
        table: what a row is. `records` (default): any record; `messages`; `checkpoints`: a delivery that begins;
            `settlements`: a delivery that ends; `events`: both of these in one, numbers only, for one `groupBy` on `key`;
            `groups`: id, name and filter of a POP group, repeated.
        columns: names of the columns wanted, separated by commas, default all. What isn't named isn't decoded.
        part_bytes: what one task reads, default 64 MiB; 0 makes a task of each segment, and planning reads nothing but
            the last one. Else planning follows the size fields of all segments, 0.1 us a record.
        max_rows: bound of an Arrow batch, default 100,000.
        end_position: read the log up to this position, which must be the end of a record. The default is the end that the
            log has when the query is planned; several queries see the same log only when they name the same end.
        verify: false skips the checksums of records, 0.3 us each.

    Filters on `position`, `kind` and the table's time (`store_ms`, `pop_ms`, `at_ms`) are applied before a record is
    decoded, and whole segments are skipped; that needs `spark.sql.python.filterPushdown.enabled`, which `register` sets.

    Raises (as a Spark exception that names it):
        OptionInvalid, LogMissing: see there.
        RecordCorrupt, LogCorrupt: the log is damaged anywhere but in its torn tail.
    """

    @classmethod
    def name(cls) -> str:
        return "commitlog"

    def schema(self) -> str:
        options = Options.of(self.options)
        return ", ".join(f"`{name}` {options.table.columns[name]}" for name in options.columns)

    def reader(self, schema: StructType) -> CommitlogReader:
        return CommitlogReader(Options.of(self.options))


class CommitlogReader(DataSourceReader):
    """Plans the parts of a log, and reads one on a worker."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.bounds = Bounds()
        if options.table.kinds:
            self.bounds.keep(options.table.kinds)

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        """Take the filters that headers answer; return the others."""
        return [each for each in filters if not self._take(each)]

    def _take(self, wanted: Filter) -> bool:
        """Narrow the bounds by a filter. Return False, with nothing changed, where that can't express all of it."""
        attribute: tuple[str, ...] = getattr(wanted, "attribute", ())
        if attribute == ("kind",):
            return self._take_kinds(wanted)
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
                self.bounds.narrow(name, value, value)
            case GreaterThan():
                self.bounds.narrow(name, value + 1, INT64_MAX)
            case GreaterThanOrEqual():
                self.bounds.narrow(name, value, INT64_MAX)
            case LessThan():
                self.bounds.narrow(name, -INT64_MAX, value - 1)
            case LessThanOrEqual():
                self.bounds.narrow(name, -INT64_MAX, value)
            case _:
                return False
        return True

    def _take_kinds(self, wanted: Filter) -> bool:
        match wanted:
            case IsNotNull():
                pass
            case EqualTo(value=str(name)):
                self.bounds.keep(number for number, known in enumerate(KIND_NAMES) if known == name)
            case In(value=names):
                self.bounds.keep(number for number, known in enumerate(KIND_NAMES) if known in names)
            case _:
                return False
        return True

    def partitions(self) -> list[InputPartition]:
        """Cut the log into parts, leaving out the segments in which the filters can't find anything."""
        options, bounds = self.options, self.bounds
        if options.end_position is None:
            listed = segments.survey(options.path).segments
        else:
            listed = segments.survey_until(options.path, options.end_position)
        parts: list[InputPartition] = []
        for segment in self._in_time(listed):
            cuts = iter([segment[1:]]) if not 0 < options.part_bytes < segment.stop - segment.base else None
            for start, stop in cuts or segments.split(segment, options.part_bytes):
                if start < stop and stop > bounds.position_min and start <= bounds.position_max:
                    parts.append(Part(segment.path, segment.base, start, stop))
        return parts

    def _in_time(self, listed: list[Segment]) -> Iterator[Segment]:
        """Yield the segments that can hold a time wanted: store times never decrease along the log."""
        bounds = self.bounds
        if bounds.ms_min == -INT64_MAX and bounds.ms_max == INT64_MAX:
            yield from listed
            return
        starts = [*(segments.first_ms(segment) for segment in listed), None]
        for segment, (start_ms, next_ms) in zip(listed, pairwise(starts), strict=True):
            if start_ms is None or start_ms > bounds.ms_max or (next_ms is not None and next_ms < bounds.ms_min):
                continue
            yield segment

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the Arrow batches of a part. Runs on a worker."""
        if not isinstance(partition, Part):  # Spark's stand-in where `partitions` found none
            return
        table, names, rows_max = self.options.table, self.options.columns, self.options.rows_max
        for block in segments.blocks(partition.path, partition.base, partition.start, partition.stop):
            records = Records.of(block)
            records = records.where(self.bounds.mask(records))
            if not len(records):
                continue
            if self.options.verify:
                segments.verify(block, records.offsets)
            batch = table.batch(records, names)
            for start in range(0, batch.num_rows, rows_max):
                yield batch.slice(start, rows_max)


def register(spark: SparkSession) -> None:
    """Make the format `commitlog` known to a session, and let Spark hand filters to it."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    spark.dataSource.register(CommitlogSource)
