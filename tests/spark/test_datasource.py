"""The log read through Spark."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
)

from penstock.spark.datasource import CommitlogReader, LogPartition, ReadOptions
from penstock.spark.errors import ReadOptionInvalid
from penstock.store import record, recordscan
from penstock.store.record import Flag, Kind
from tests.spark.log_writer import LogWriter


@pytest.fixture(scope="module")
def log() -> LogWriter:
    """A hundred seconds of a log in three segments: each second two messages, a checkpoint of them and an ack."""
    log = LogWriter(start=1_000_000)
    log.group(7, "pumps", "a/#")
    for second in range(100):
        if second in (40, 80):
            log.roll()
        log.now_ms = second * 1_000
        messages = [log.message(f"a/{second}/{number}", b"x" * second, flags=Flag.RETAIN | 1) for number in range(2)]
        checkpoint = log.checkpoint(7, "pumps", messages, deadline_ms=log.now_ms + 500)
        log.ack(7, "pumps", [(checkpoint, 1)])
    return log


@pytest.fixture(scope="module")
def data_dir(log: LogWriter, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("datasource")
    half = record.encode(Kind.MESSAGE, b"a/100", b"half written", store_ms=100_000)[:30]
    log.save(path, hole_bytes=50_000, torn=half)
    return path


def load(spark: SparkSession, path: Path, **options: str | int) -> DataFrame:
    return spark.read.format("commitlog").options(**options).load(str(path))


def reader(path: Path, filters: list[Filter], **options: str) -> tuple[CommitlogReader, list[Filter]]:
    made = CommitlogReader(ReadOptions.of({"path": str(path), **options}))
    return made, list(made.pushFilters(filters))


@pytest.mark.nightly
def test_every_record_is_one_row(spark: SparkSession, log: LogWriter, data_dir: Path) -> None:
    rows = load(spark, data_dir, partition_bytes=20_000, rows_max=7).orderBy("position").collect()
    found = [(row.position, row.size, row.kind, row.store_ms, row.topic, bytes(row.body)) for row in rows]
    assert found == [
        (each.position, each.size, Kind(each.kind).name, each.store_ms, each.topic.decode(), each.body)
        for each in log.records()
    ]


@pytest.mark.nightly
def test_only_the_columns_asked_for_are_read(spark: SparkSession, data_dir: Path) -> None:
    frame = load(spark, data_dir, table="messages", columns="topic, store_ms")
    assert frame.columns == ["topic", "store_ms"]
    assert frame.orderBy("topic").first() == ("a/0/0", 0)


@pytest.mark.nightly
def test_deliveries_that_begin_and_end_are_tables(spark: SparkSession, data_dir: Path) -> None:
    begun, ended = load(spark, data_dir, table="checkpoints"), load(spark, data_dir, table="settlements")
    assert begun.count() == 200
    assert begun.where("deadline_ms - pop_ms = 500 and via = 'pop' and group = 'pumps' and group_id = 7").count() == 200
    assert ended.join(begun, "key").count() == ended.where("kind = 'POP_ACK'").count() == 100


@pytest.mark.nightly
@pytest.mark.parametrize("pushed", [True, False])
def test_filters_find_the_same_with_and_without_pushdown(
    spark: SparkSession, log: LogWriter, data_dir: Path, pushed: bool
) -> None:
    middle = [each.position for each in log.records()][200]
    frame = load(spark, data_dir)
    if not pushed:  # a filter on an expression is one that Spark keeps to itself
        frame = frame.withColumns({name: F.col(name) + 0 for name in ("position", "store_ms")})
        frame = frame.withColumn("kind", F.concat("kind", F.lit("")))
    wanted = frame.where((F.col("position") > middle) & (F.col("store_ms") < 70_000) & F.col("kind").isin("POP_ACK", "MESSAGE"))
    expected = [
        each.position
        for each in log.records()
        if each.position > middle and each.store_ms < 70_000 and each.kind in (Kind.MESSAGE, Kind.POP_ACK)
    ]
    assert [row.position for row in wanted.select("position").orderBy("position").collect()] == expected


@pytest.mark.nightly
def test_spark_leaves_the_filters_on_headers_to_the_source(spark: SparkSession, data_dir: Path) -> None:
    frame = load(spark, data_dir).where("kind = 'POP_ACK' and position >= 5 and topic = 'pumps'")
    plan = frame._jdf.queryExecution().executedPlan().toString()
    conditions = " ".join(re.findall(r"Filter (\(.*\))", plan))
    assert "topic" in conditions
    assert "position" not in conditions
    assert "kind" not in conditions


@pytest.mark.parametrize(
    ("wanted", "bounds"),
    [
        (EqualTo(("position",), 5), {"position_min": 5, "position_max": 5}),
        (GreaterThan(("position",), 5), {"position_min": 6}),
        (GreaterThanOrEqual(("store_ms",), 5), {"ms_min": 5}),
        (LessThan(("store_ms",), 5), {"ms_max": 4}),
        (LessThanOrEqual(("position",), 5), {"position_max": 5}),
        (EqualTo(("kind",), "POP_ACK"), {"kinds": {Kind.POP_ACK}}),
        (EqualTo(("kind",), "KIND_99"), {"kinds": {99}}),
        (EqualTo(("kind",), "nonsense"), {"kinds": set()}),
        (In(("kind",), ("POP_ACK", "MESSAGE")), {"kinds": {Kind.POP_ACK, Kind.MESSAGE}}),
        (IsNotNull(("kind",)), {}),
        (IsNotNull(("store_ms",)), {}),
    ],
)
def test_a_filter_on_a_header_narrows_the_scan(data_dir: Path, wanted: Filter, bounds: dict[str, object]) -> None:
    made, left = reader(data_dir, [wanted])
    assert left == []
    assert {name: getattr(made.filter, name) for name in bounds} == bounds


@pytest.mark.parametrize(
    "wanted",
    [
        EqualTo(("topic",), "a"),
        Not(EqualTo(("kind",), "POP_ACK")),
        GreaterThan(("position",), 1.5),
        GreaterThan(("kind",), "A"),
        EqualTo(("position", "deep"), 5),
        IsNotNull(("group_id",)),
    ],
)
def test_other_filters_are_left_to_spark(data_dir: Path, wanted: Filter) -> None:
    made, left = reader(data_dir, [wanted])
    assert left == [wanted]
    assert made.filter == CommitlogReader(made.options).filter


def test_segments_without_what_is_wanted_are_not_planned(data_dir: Path, log: LogWriter) -> None:
    bases = [log.start + sum(map(len, log.segments[:number])) for number in range(3)]

    def planned(*filters: Filter) -> list[int]:
        made, _ = reader(data_dir, list(filters))
        return [part.base for part in made.partitions() if isinstance(part, LogPartition)]

    assert planned() == bases
    assert planned(LessThan(("store_ms",), 40_000)) == bases[:1]
    assert planned(GreaterThanOrEqual(("store_ms",), 80_001)) == bases[2:]
    # A segment may end with records of the very ms in which the next begins.
    assert planned(GreaterThanOrEqual(("store_ms",), 80_000)) == bases[1:]
    assert planned(GreaterThanOrEqual(("position",), bases[1]), LessThan(("position",), bases[2])) == bases[1:2]
    assert planned(GreaterThan(("store_ms",), 10**9)) == bases[2:]


@pytest.mark.nightly
def test_an_end_position_holds_the_log_still(spark: SparkSession, log: LogWriter, data_dir: Path) -> None:
    end = [each.position for each in log.records()][150]
    assert load(spark, data_dir, end_position=end, columns="position").count() == 150
    assert load(spark, data_dir, end_position=log.start).count() == 0


def damaged(log: LogWriter, path: Path, number: int) -> tuple[Path, int]:
    """Save `log` with one bit flipped in the body of the given record of its second segment."""
    directory = log.save(path)
    segment = sorted(directory.iterdir())[1]
    data = bytearray(segment.read_bytes())
    offset = recordscan.walk(bytes(data))[0][number]
    data[offset + 30] ^= 1
    segment.write_bytes(data)
    return segment, int(segment.stem) + offset


@pytest.mark.nightly
def test_damage_in_the_middle_names_segment_and_position(spark: SparkSession, log: LogWriter, tmp_path: Path) -> None:
    segment, position = damaged(log, tmp_path, 20)
    with pytest.raises(PySparkException, match=rf"RecordCorrupt: record at position {position} in segment {segment.name}"):
        load(spark, tmp_path).count()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "path is missing"),
        ({"path": "s3://bucket/log"}, "is a URL"),
        ({"path": "data-*"}, "is a pattern"),
        ({"path": "x", "colunms": "position"}, "'colunms' does not exist. Did you mean columns"),
        ({"path": "x", "paths": '["a", "b"]'}, "'paths' does not exist. Did you mean path"),
        ({"path": "x", "table": "acks"}, "The table 'acks' does not exist"),
        ({"path": "x", "columns": "position,colour"}, "colour"),
        ({"path": "x", "columns": "position,position"}, "each column once"),
        ({"path": "x", "rows_max": "0"}, "rows_max is '0'"),
        ({"path": "x", "partition_bytes": "64M"}, "partition_bytes is '64M'"),
        ({"path": "x", "verify": "perhaps"}, "verify is 'perhaps'"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ReadOptionInvalid, match=complaint):
        ReadOptions.of(options)
