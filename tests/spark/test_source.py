"""The log read once by the source `penstock`, without a session: what Spark calls is called here."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

from pyspark.sql.datasource import (
    DataSourceReader,
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

from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.parquet.schema import DELIVERIES, ENDS, MESSAGES, SOURCE_TABLES
from penstock.spark.parquet.writer import backfill
from penstock.spark.source import reader
from penstock.spark.source.filters import RecordFilter
from penstock.spark.source.options import BatchOptions, Place, StreamOptions, chosen_columns, place
from penstock.spark.source.reader import LogPartition, LogReader
from penstock.store import record
from penstock.store.errors import RecordCorrupt
from penstock.store.log import recordscan
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import COPY_FIXED, Flag, Kind
from tests.parquet.sealing import rows_of
from tests.spark.log_writer import LogWriter
from tests.spark.logs import every_outcome, random_log


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
    path = tmp_path_factory.mktemp("source")
    half = record.encode(Kind.MESSAGE, b"a/100", b"half written", store_ms=100_000)[:30]
    log.save(path, hole_bytes=50_000, torn=half)
    return path


def source(
    path: Path, *columns: str, filters: list[Filter] | None = None, start: object = None, stop: object = None, **options: str
) -> tuple[LogReader, list[Filter]]:
    """Return a reader, and the filters that it leaves to Spark. `start` and `stop` are the options `from` and `until`."""
    within = {name: str(value) for name, value in (("from", start), ("until", stop)) if value is not None}
    given = BatchOptions.of({"path": str(path), **within, **options})
    made = LogReader(given, columns or [column.name for column in given.table.columns])
    return made, list(made.pushFilters(filters or []))


def read(path: Path, *columns: str, **more: Any) -> list[dict[str, Any]]:
    """Return the rows of all partitions."""
    made, _ = source(path, *columns, **more)
    return [row for part in made.partitions() for batch in made.read(part) for row in batch.to_pylist()]


def test_every_message_is_one_row_in_pieces_of_any_size(
    log: LogWriter, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = [(each.position, each.topic.decode(), each.body) for each in log.records() if each.kind == Kind.MESSAGE]
    for piece_bytes in (1, 7_000, 10**9):
        monkeypatch.setattr(reader, "PARTITION_BYTES", piece_bytes)
        monkeypatch.setattr(reader, "ROWS_MAX", 7)
        rows = read(data_dir, "position", "topic", "body")
        assert [tuple(row.values()) for row in rows] == expected


@pytest.mark.parametrize("table", sorted(SOURCE_TABLES.keys() - {"records"}))
@pytest.mark.parametrize("log", [every_outcome(), random_log(3, 2_000)], ids=["every", "random"])
def test_a_table_of_the_log_has_the_rows_of_the_files(log: LogWriter, table: str, tmp_path: Path) -> None:
    """Both for the whole log, and for what is after the files, whose rows depend on what was open before."""
    directory = log.save(tmp_path)
    last = max(directory.iterdir())
    content, cut = last.read_bytes(), int(last.stem)
    last.write_bytes(b"")
    list(backfill(tmp_path))
    last.write_bytes(content)
    found = rows_of(tmp_path, table) + read(tmp_path, table=table, start=cut)
    (directory / f"{log.end:020d}.log").write_bytes(b"")
    list(backfill(tmp_path))

    def ordered(rows: list[dict[str, Any]]) -> list[str]:
        return sorted(str([row[column.name] for column in SOURCE_TABLES[table].columns]) for row in rows)

    assert ordered(found) == ordered(rows_of(tmp_path, table))
    assert ordered(found) == ordered(read(tmp_path, table=table))


def test_rows_of_a_group_are_of_that_group_only(tmp_path: Path) -> None:
    log = random_log(5, 500)
    log.save(tmp_path)
    for table in (DELIVERIES.name, ENDS.name):
        of_all = read(tmp_path, "key", "group_name", table=table)
        assert read(tmp_path, "key", "group_name", table=table, group="g2") == [
            row for row in of_all if row["group_name"] == "g2"
        ]


def test_a_topic_filter_is_one_of_mqtt(tmp_path: Path) -> None:
    log = LogWriter()
    topics = ["a", "a/b", "a/b/c", "b/a", "$SYS/a", "/a", "a/ü"]
    for topic in topics:
        log.message(topic)
    log.save(tmp_path)
    for wanted, matching in (
        ("#", [0, 1, 2, 3, 5, 6]),
        ("a/#", [0, 1, 2, 6]),
        ("+/+", [1, 3, 5, 6]),
        ("$SYS/#", [4]),
        ("x", []),
    ):
        assert [row["topic"] for row in read(tmp_path, "topic", topic=wanted)] == [topics[number] for number in matching]


def test_what_became_of_a_delayed_message_is_not_known(tmp_path: Path) -> None:
    log = LogWriter()
    for flags in (0, Flag.DELAYED, Flag.HALF, Flag.HALF | Flag.DELAYED):
        log.message("a", flags=flags)
    log.save(tmp_path)
    rows = read(tmp_path, "delayed", "recalled", "half", "rolled_back")
    assert [tuple(row.values()) for row in rows] == [
        (False, False, False, False),
        (True, None, False, False),
        (False, False, True, None),
        (True, False, True, None),
    ]


def test_properties_are_columns(tmp_path: Path) -> None:
    log = LogWriter()
    properties = Properties(tag="t", keys=["k"], user=[("n", "v")], content_type="text/plain")
    log.add(Kind.MESSAGE, "a", b"x", properties=encode_properties(properties))
    log.message("b")
    log.save(tmp_path)
    rows = read(tmp_path, "topic", "tag", "keys", "content_type", "user_names", "user_values")
    assert [tuple(row.values()) for row in rows] == [
        ("a", "t", ["k"], "text/plain", ["n"], ["v"]),
        ("b", None, None, None, None, None),
    ]


def test_a_copy_stands_for_a_message_that_the_log_has_lost_and_for_no_other(tmp_path: Path) -> None:
    log = LogWriter(start=1_000)
    kept = log.message("a/kept")

    def copy(topic: str, origin: int) -> int:
        return log.add(
            Kind.COPIED, body=record.encode(Kind.MESSAGE, topic.encode(), b"old", store_ms=1), fixed=COPY_FIXED.pack(origin)
        )

    first = copy("a/lost", 10)
    copy("a/lost", 10)
    copy("a/kept", kept)
    copy("b/lost", 20)
    log.save(tmp_path)
    columns = ("position", "topic", "copied_at")
    found = [tuple(row.values()) for row in read(tmp_path, *columns, topic="a/#")]
    assert found == [(kept, "a/kept", None), (10, "a/lost", first)]
    assert [row["topic"] for row in read(tmp_path, *columns, start=15)] == ["a/kept", "b/lost"]
    assert [row["topic"] for row in read(tmp_path, *columns, start=1_000)] == ["a/kept"]


def test_a_range_begins_and_ends_at_positions_and_at_times(log: LogWriter, data_dir: Path) -> None:
    positions = [each.position for each in log.records()]

    def found(start: object = "earliest", stop: object = "latest") -> list[int]:
        rows = read(data_dir, "position", table="records", start=start, stop=stop)
        return [row["position"] for row in rows]

    assert found() == positions
    assert found(positions[10], positions[200]) == positions[10:200]
    assert found(positions[10] + 1, positions[200] - 1) == positions[11:200]
    second = "1970-01-01T00:00:50"
    of_second = [each.position for each in log.records() if each.store_ms == 50_000]
    assert found(second, f"{second}.001") == of_second
    assert found("1970-01-01 01:00:50+01:00", "1970-01-01 00:00:50.001Z") == of_second
    assert found("1970-01-02") == found("latest") == found(10**15) == []
    assert found(stop="1969-01-01") == found(stop="earliest") == []


@pytest.mark.parametrize(
    ("wanted", "bounds"),
    [
        (EqualTo(("position",), 5), {"position_min": 5, "position_max": 5}),
        (GreaterThan(("position",), 5), {"position_min": 6}),
        (GreaterThanOrEqual(("at_ms",), 5), {"ms_min": 5}),
        (LessThan(("at_ms",), 5), {"ms_max": 4}),
        (LessThanOrEqual(("position",), 5), {"position_max": 5}),
        (GreaterThan(("time",), datetime.fromtimestamp(5, UTC)), {"ms_min": 5_001}),
        (GreaterThanOrEqual(("time",), datetime.fromtimestamp(5, UTC)), {"ms_min": 5_000}),
        (GreaterThanOrEqual(("time",), datetime.fromtimestamp(5, UTC) + timedelta(microseconds=1)), {"ms_min": 5_001}),
        (LessThan(("time",), datetime.fromtimestamp(5, UTC)), {"ms_max": 4_999}),
        (LessThan(("time",), datetime.fromtimestamp(5, UTC) + timedelta(microseconds=1)), {"ms_max": 5_000}),
        (LessThanOrEqual(("time",), datetime.fromtimestamp(5, UTC)), {"ms_max": 5_000}),
        (EqualTo(("kind",), "POP_ACK"), {"kinds": {Kind.POP_ACK}}),
        (EqualTo(("kind",), "KIND_99"), {"kinds": {99}}),
        (EqualTo(("kind",), "nonsense"), {"kinds": set()}),
        (In(("kind",), ("POP_ACK", "MESSAGE")), {"kinds": {Kind.POP_ACK, Kind.MESSAGE}}),
        (IsNotNull(("kind",)), {}),
        (IsNotNull(("time",)), {}),
    ],
)
def test_a_filter_on_a_header_narrows_what_is_read(wanted: Filter, bounds: dict[str, object]) -> None:
    narrowed = RecordFilter()
    assert narrowed.accept(wanted)
    assert {name: getattr(narrowed, name) for name in bounds} == bounds


@pytest.mark.parametrize(
    "wanted",
    [
        EqualTo(("topic",), "a"),
        Not(EqualTo(("kind",), "POP_ACK")),
        GreaterThan(("position",), 1.5),
        GreaterThan(("time",), 5),
        GreaterThan(("kind",), "A"),
        EqualTo(("position", "deep"), 5),
        IsNotNull(("group_id",)),
    ],
)
def test_other_filters_are_left_to_spark(data_dir: Path, wanted: Filter) -> None:
    _, left = source(data_dir, filters=[wanted])
    assert left == [wanted]
    narrowed = RecordFilter()
    assert not narrowed.accept(wanted)
    assert narrowed == RecordFilter()


def test_filters_find_what_they_say(log: LogWriter, data_dir: Path) -> None:
    middle = [each.position for each in log.records()][200]
    filters: list[Filter] = [
        GreaterThan(("position",), middle),
        LessThan(("at_ms",), 70_000),
        In(("kind",), ("POP_ACK", "MESSAGE")),
    ]
    assert [row["position"] for row in read(data_dir, "position", table="records", filters=filters)] == [
        each.position
        for each in log.records()
        if each.position > middle and each.store_ms < 70_000 and each.kind in (Kind.MESSAGE, Kind.POP_ACK)
    ]


def test_a_table_that_depends_on_what_was_open_leaves_all_filters_to_spark(data_dir: Path) -> None:
    filters: list[Filter] = [GreaterThan(("position",), 5)]
    _, left = source(data_dir, filters=filters, table="ends")
    assert left == filters


def test_a_session_that_passes_no_filters_accepts_the_reader(data_dir: Path) -> None:
    """Spark finds out in this way whether a reader takes filters, and refuses one that does."""
    made, _ = source(data_dir)
    assert getattr(made.pushFilters, "__func__", None) is DataSourceReader.pushFilters


def test_segments_without_what_is_wanted_are_not_planned(data_dir: Path, log: LogWriter) -> None:
    bases = [log.start + sum(map(len, log.segments[:number])) for number in range(3)]

    def planned(*filters: Filter) -> list[int]:
        made, _ = source(data_dir, filters=list(filters), start=log.start)
        return [part.base for part in made.partitions() if isinstance(part, LogPartition)]

    assert planned() == bases
    assert planned(LessThan(("at_ms",), 40_000)) == bases[:1]
    assert planned(GreaterThanOrEqual(("at_ms",), 80_001)) == bases[2:]
    # A segment may end with records of the very ms in which the next begins.
    assert planned(GreaterThanOrEqual(("at_ms",), 80_000)) == bases[1:]
    assert planned(GreaterThanOrEqual(("position",), bases[1] + 1), LessThan(("position",), bases[2])) == bases[1:2]
    assert planned(GreaterThan(("at_ms",), 10**9)) == bases[2:]


def test_damage_names_segment_and_position(log: LogWriter, tmp_path: Path) -> None:
    segment = sorted(log.save(tmp_path).iterdir())[1]
    data = bytearray(segment.read_bytes())
    offset = recordscan.walk(bytes(data))[0][20]
    data[offset + 30] ^= 1
    segment.write_bytes(data)
    position = int(segment.stem) + offset
    with pytest.raises(RecordCorrupt, match=rf"record at position {position} in segment {segment.name}"):
        read(tmp_path, table="records")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "path is missing"),
        ({"path": "s3://bucket/log"}, "is a URL"),
        ({"path": "file:/data"}, "is a URL"),
        ({"path": "data-*"}, "is a pattern"),
        ({"path": "x", "tabel": "messages"}, "'tabel' does not exist for read. Did you mean table"),
        ({"path": "x", "startingoffsets": "latest"}, "A stream has it"),
        ({"path": "x", "paths": '["a", "b"]'}, "several paths"),
        ({"path": "x", "table": "acks"}, "The table 'acks' does not exist"),
        ({"path": "x", "topic": "a/#/b"}, "topic is no filter of MQTT"),
        ({"path": "x", "table": "ends", "topic": "a"}, "The table ends has no topics"),
        ({"path": "x", "group": "g"}, "The table messages has no groups"),
        ({"path": "x", "from": "yesterday"}, "from is 'yesterday', but must be"),
        ({"path": "x", "until": "-5"}, "until is '-5', but must be"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ReadOptionInvalid, match=complaint):
        BatchOptions.of(options)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"from": "5"}, "A read that is no stream has it"),
        ({"table": "ends"}, "A stream reads messages or records, but table is 'ends'"),
        ({"maxbytespertrigger": "64 MB"}, "maxBytesPerTrigger is '64 MB'"),
        ({"minpartitions": "0"}, "minPartitions is '0'"),
        ({"failondataloss": "maybe"}, "failOnDataLoss is 'maybe'"),
        ({"startingoffsets": "first"}, "startingOffsets is 'first'"),
    ],
)
def test_a_wrong_option_of_a_stream_is_named(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ReadOptionInvalid, match=complaint):
        StreamOptions.of({"path": "x", **options})


def test_options_have_values_of_their_kinds() -> None:
    given = StreamOptions.of({"path": "x", "maxbytespertrigger": "2m", "minpartitions": "3", "failondataloss": "FALSE"})
    assert (given.bytes_per_trigger, given.partitions_min, given.fails_on_data_loss) == (2 << 20, 3, False)
    assert place("from", "EARLIEST") == Place(0)
    assert place("from", "1970-01-01T00:00:01+00:00") == Place(at_ms=1_000)


@pytest.mark.parametrize(
    ("schema", "complaint"),
    [
        ([("colour", "string")], "has the column 'colour', but the columns of messages are position"),
        ([("topic", "int")], "has the column topic as int, but it is string"),
        ([], "has no columns. Name at least one of position"),
    ],
)
def test_a_schema_chooses_columns_of_the_table(schema: list[tuple[str, str]], complaint: str) -> None:
    assert chosen_columns(MESSAGES, [("body", "binary"), ("keys", "array<string>")]) == ["body", "keys"]
    with pytest.raises(ReadOptionInvalid, match=complaint):
        chosen_columns(MESSAGES, schema)
