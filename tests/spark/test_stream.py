"""A stream over a log that grows, is trimmed and is read again: without a session, by the calls that Spark makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit

from penstock.spark import messages, segments
from penstock.spark.errors import ReadOptionInvalid, RecordsLost
from penstock.spark.source.options import StreamOptions
from penstock.spark.source.reader import LogPartition
from penstock.spark.source.stream import LogStreamReader
from penstock.store import record
from penstock.store.errors import RecordCorrupt
from penstock.store.record import COPY_FIXED, Kind
from tests.spark.log_writer import LogWriter


@dataclass
class Query:
    """A query that goes on from its last offset, as Spark has it from the checkpoint."""

    path: Path
    options: dict[str, str] = field(default_factory=dict)
    columns: tuple[str, ...] = ("position",)
    offset: dict[str, Any] | None = None
    rows: list[Any] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """Partitions of each batch."""

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.reader = LogStreamReader(StreamOptions.of({"path": str(self.path), **self.options}), self.columns)

    def batch(self, limit: ReadLimit | None = None) -> bool:
        """Read one batch, twice: as planned, and as another process plans it again. Return whether there was one."""
        if self.offset is None:
            self.offset = self.reader.initialOffset()
        start = self.offset
        end = json.loads(json.dumps(self.reader.latestOffset(start, limit or self.reader.getDefaultReadLimit())))
        if end == start:
            return False
        parts = self.reader.partitions(start, end)
        rows = self._read(self.reader, parts)
        again = LogStreamReader(StreamOptions.of({"path": str(self.path), **self.options}), self.columns)
        assert self._read(again, again.partitions(start, end)) == rows
        self.rows += rows
        self.batches.append(len(parts))
        self.offset = end
        self.reader.commit(end)
        return True

    def run(self) -> list[Any]:
        """Read all batches that there are; return all rows."""
        while self.batch():
            pass
        return self.rows

    def _read(self, reader: LogStreamReader, parts: Any) -> list[Any]:
        batches = [batch for part in parts for batch in reader.read(part)]
        return [row if len(row) > 1 else row[0] for batch in batches for row in zip(*batch.to_pydict().values(), strict=True)]


@dataclass
class Growing:
    """A log on disk that is written a little at a time. `written` is its end."""

    log: LogWriter
    data_dir: Path
    written: int = 0

    def __post_init__(self) -> None:
        self.directory = self.data_dir / "commitlog"
        self.directory.mkdir(parents=True)
        self.written = self.log.start
        self.write(0)

    def write(self, until: int) -> None:
        """Write the log up to a position, which may be in the middle of a record."""
        base = self.log.start
        for segment in self.log.segments:
            if base <= until:
                (self.directory / f"{base:020d}.log").write_bytes(segment[: until - base] + bytes(1_000))
            base += len(segment)
        self.written = until


def a_log(messages: int = 60, start: int = 0) -> LogWriter:
    log = LogWriter(start=start)
    log.group(1, "g", "#")
    for number in range(messages):
        log.now_ms += 1_000
        if number in (20, 40):
            log.roll()
        log.message(f"a/{number % 3}", b"x" * (number * 7 % 50))
    return log


def messages_of(log: LogWriter, until: int | None = None) -> list[int]:
    return [
        each.position
        for each in log.records()
        if each.kind == Kind.MESSAGE and (until is None or each.position + each.size <= until)
    ]


@pytest.mark.parametrize("options", [{}, {"maxBytesPerTrigger": "1"}, {"maxBytesPerTrigger": "300"}, {"minPartitions": "3"}])
def test_each_message_is_read_once_while_the_log_grows(tmp_path: Path, options: dict[str, str]) -> None:
    log = a_log()
    growing, query = Growing(log, tmp_path), Query(tmp_path, options)
    for until in range(log.start + 1, log.end + 1, 97):
        growing.write(until)
        assert query.run() == messages_of(log, until)
        if until % 5 == 0:
            query.restart()
    growing.write(log.end)
    assert query.run() == messages_of(log)


def test_a_batch_is_bounded_and_split_between_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.spark.source.stream.PIECE_BYTES_MIN", 10)
    log = a_log()
    log.save(tmp_path)
    query = Query(tmp_path, {"maxBytesPerTrigger": "800", "minPartitions": "4"})
    before = log.start
    while query.batch():
        assert query.offset is not None
        assert query.offset["position"] - before <= 800
        before = query.offset["position"]
    assert max(query.batches) >= 4
    assert query.rows == messages_of(log)
    everything = Query(tmp_path, {"maxBytesPerTrigger": "800"})
    everything.batch(ReadAllAvailable())
    assert everything.rows == messages_of(log)


def test_a_stream_reads_nothing_before_its_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = a_log()
    growing, query = Growing(log, tmp_path), Query(tmp_path)
    growing.write(log.end - 500)
    query.run()
    assert query.offset is not None
    read_from: list[int] = []
    blocks = segments.blocks

    def noted(path: str, base: int, start: int, *more: Any, **named: Any) -> Iterator[Any]:
        read_from.append(start)
        return blocks(path, base, start, *more, **named)

    monkeypatch.setattr(segments, "blocks", noted)
    growing.write(log.end)
    before = query.offset["position"]
    query.reader.partitions(query.offset, query.reader.latestOffset(query.offset, ReadAllAvailable()))
    assert read_from
    assert min(read_from) >= before


def test_a_query_of_what_is_available_now_ends_there(tmp_path: Path) -> None:
    log = a_log()
    growing, query = Growing(log, tmp_path), Query(tmp_path, {"maxBytesPerTrigger": "400"})
    until = messages_of(log)[30]
    growing.write(until)
    query.reader.prepareForTriggerAvailableNow()
    query.batch()
    growing.write(log.end)
    assert query.run() == messages_of(log, until)
    assert len(query.batches) > 2
    query.restart()
    assert query.run() == messages_of(log)


@pytest.mark.parametrize(
    ("start", "first"),
    [("earliest", 0), ("latest", 60), ("1970-01-01T00:00:12", 10), ("position", 25), ("in a record", 26)],
)
def test_a_stream_begins_where_it_is_told(tmp_path: Path, start: str, first: int) -> None:
    log = a_log(start=5_000)
    log.save(tmp_path)
    positions = messages_of(log)
    text = {"position": str(positions[25]), "in a record": str(positions[25] + 1)}.get(start, start)
    query = Query(tmp_path, {"startingOffsets": text})
    assert query.run() == positions[first:]


@pytest.mark.parametrize(
    ("start", "complaint"),
    [
        ("1000000", "is 1000000, but the log ends at position 3130"),
        ("2999-01-01", "is 2999-01-01T00:00:00[+]00:00, which is in the future"),
    ],
)
def test_a_stream_can_not_begin_later_than_now(tmp_path: Path, start: str, complaint: str) -> None:
    a_log().save(tmp_path)
    with pytest.raises(ReadOptionInvalid, match=complaint):
        Query(tmp_path, {"startingOffsets": start}).batch()


def test_a_stream_begins_at_one_place_although_the_log_grows(tmp_path: Path) -> None:
    """Spark asks for the beginning before each step of the first batch, and again when that is repeated after a kill."""
    log = a_log()
    growing, query = Growing(log, tmp_path), Query(tmp_path, {"startingOffsets": "latest"})
    first, second, third = (messages_of(log)[number] for number in (10, 20, 30))
    growing.write(first)
    start = query.reader.initialOffset()
    growing.write(second)
    end = query.reader.latestOffset(start, ReadAllAvailable())
    growing.write(third)
    assert query.reader.initialOffset() == start == {"position": first, "skipped_bytes": 0}
    assert [part.stop for part in query.reader.partitions(start, end) if isinstance(part, LogPartition)] == [second]
    query.restart()
    again = query.reader.initialOffset()
    assert again["position"] == third
    assert query.reader.partitions(again, end) == []


def test_a_topic_filter_chooses_messages_and_columns_come_with_them(tmp_path: Path) -> None:
    log = a_log(9)
    log.save(tmp_path)
    query = Query(tmp_path, {"topic": "a/1"}, ("topic", "body"))
    assert query.run() == [("a/1", b"x" * (number * 7 % 50)) for number in (1, 4, 7)]
    records = Query(tmp_path, {"table": "records"}, ("kind",))
    assert records.run() == ["GROUP_CREATED", *["MESSAGE"] * 9]


def test_what_retention_has_copied_forward_is_not_read_again(tmp_path: Path) -> None:
    log = a_log(3, start=1_000)
    old = record.encode(Kind.MESSAGE, b"a", b"old", store_ms=1)
    log.add(Kind.COPIED, body=old, fixed=COPY_FIXED.pack(10))
    log.message("a/new")
    log.save(tmp_path)
    assert Query(tmp_path).run() == messages_of(log)


def test_a_gap_that_retention_has_left_is_an_error_or_is_counted(tmp_path: Path) -> None:
    log = a_log()
    directory = log.save(tmp_path)
    query, lenient = Query(tmp_path), Query(tmp_path, {"failOnDataLoss": "false", "maxBytesPerTrigger": "200"})
    query.batch(ReadAllAvailable())
    lenient.batch()
    first, second, _ = sorted(int(path.stem) for path in directory.iterdir())
    (directory / f"{first:020d}.log").unlink()
    assert lenient.offset is not None
    at = lenient.offset["position"]
    strict = Query(tmp_path, offset=dict(lenient.offset))
    with pytest.raises(RecordsLost, match=rf"from position {at} to {second} before the stream read it. Set failOnDataLoss"):
        strict.batch()
    seen = list(lenient.rows)
    lenient.restart()
    assert lenient.run() == seen + [position for position in messages_of(log) if position >= second]
    assert lenient.offset == {"position": log.end, "skipped_bytes": second - at}


def test_a_segment_that_is_deleted_before_a_worker_reads_it_is_an_error_or_is_left_out(tmp_path: Path) -> None:
    log = a_log()
    directory = log.save(tmp_path)
    for options, complaint in (({}, "while the stream read it"), ({"failOnDataLoss": "false"}, None)):
        query = Query(tmp_path, options)
        start = query.reader.initialOffset()
        part, *_ = query.reader.partitions(start, query.reader.latestOffset(start, ReadAllAvailable()))
        path = directory / f"{log.start:020d}.log"
        content = path.read_bytes()
        path.unlink()
        if complaint:
            with pytest.raises(RecordsLost, match=complaint):
                list(query.reader.read(part))
        else:
            assert list(query.reader.read(part)) == []
        path.write_bytes(content)


@pytest.mark.parametrize("step", ["listed", "planned"])
def test_a_segment_that_is_deleted_while_a_batch_is_planned_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    log = a_log()
    directory = log.save(tmp_path)
    first, second, _ = sorted(int(path.stem) for path in directory.iterdir())
    survey, blocks = segments.survey_until, segments.blocks

    def delete() -> None:
        (directory / f"{first:020d}.log").unlink(missing_ok=True)

    def listed(*arguments: Any) -> Any:
        delete()
        return survey(*arguments)

    def planned(path: str, *more: Any, **named: Any) -> Any:
        if path == str(directory / f"{first:020d}.log"):
            delete()
        return blocks(path, *more, **named)

    for options in ({}, {"failOnDataLoss": "false"}):
        query = Query(tmp_path, {"maxBytesPerTrigger": "200", **options})
        query.offset = query.reader.initialOffset()
        path = directory / f"{first:020d}.log"
        content = path.read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(segments, *(("survey_until", listed) if step == "listed" else ("blocks", planned)))
            if options:
                query.batch()
                assert query.offset["skipped_bytes"] == second - first
            else:
                with pytest.raises(RecordsLost, match=f"from position {first} to {second}"):
                    query.batch()
        path.write_bytes(content)


def test_records_that_a_start_of_the_node_writes_anew_are_read_where_they_are_then(tmp_path: Path) -> None:
    """A start after a kill copies the end of the last segment into a new one, and cuts the old one there."""
    log = a_log()
    directory = log.save(tmp_path)
    reader = Query(tmp_path).reader
    start = reader.initialOffset()
    *_, part = reader.partitions(start, reader.latestOffset(start, ReadAllAvailable()))
    assert isinstance(part, LogPartition)
    old = max(directory.iterdir())
    content = old.read_bytes()
    for cut in (messages_of(log)[50], messages_of(log)[45]):
        (directory / f"{cut:020d}.log").write_bytes(content[cut - int(old.stem) :])
        old.write_bytes(content[: cut - int(old.stem)])
        for begin in (part.start, cut, messages_of(log)[55]):
            rows = [row for batch in reader.read(replace(part, start=begin)) for row in batch["position"].to_pylist()]
            assert rows == [position for position in messages_of(log) if position >= begin]


@pytest.mark.parametrize("is_available_now", [False, True])
def test_a_log_that_has_lost_its_end_is_an_error(tmp_path: Path, is_available_now: bool) -> None:
    log = a_log()
    growing, query = Growing(log, tmp_path), Query(tmp_path)
    growing.write(log.end)
    query.run()
    growing.write(messages_of(log)[50])
    query.restart()
    if is_available_now:
        query.reader.prepareForTriggerAvailableNow()
    with pytest.raises(RecordsLost, match=rf"read up to position {log.end}, but the log ends at position {growing.written}"):
        query.batch()


def test_the_checkpoint_of_another_log_is_an_error(tmp_path: Path) -> None:
    log = a_log()
    log.save(tmp_path)
    position = messages_of(log)[30] + 1
    with pytest.raises(RecordsLost, match=f"read up to position {position}, but no record of the log begins there"):
        Query(tmp_path, offset={"position": position, "skipped_bytes": 0}).batch()


def test_damage_is_an_error_and_no_end_of_the_log(tmp_path: Path) -> None:
    log = a_log()
    directory = log.save(tmp_path)
    position = messages_of(log)[51]
    last = max(directory.iterdir())
    data = bytearray(last.read_bytes())
    data[position - int(last.stem) + 30] ^= 1
    last.write_bytes(data)
    with pytest.raises(RecordCorrupt, match=f"position {position}"):
        Query(tmp_path).run()


def test_spark_runs_a_stream_and_goes_on_from_its_checkpoint(spark: SparkSession, tmp_path: Path) -> None:
    log = a_log()
    growing = Growing(log, tmp_path / "data")
    found: list[tuple[str, bytes]] = []

    def keep(rows: Any, _: int) -> None:
        found.extend((row.topic, bytes(row.body)) for row in rows.collect())

    middle = messages_of(log)[30]
    for until in (middle, log.end):
        growing.write(until)
        stream = spark.readStream.format("penstock").schema("topic string, body binary").option("topic", "a/+")
        writer = stream.load(str(tmp_path / "data")).writeStream.foreachBatch(keep).trigger(availableNow=True)
        query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start()
        query.awaitTermination()
        progress = query.lastProgress
        assert progress is not None
        assert json.loads(progress.sources[0].endOffset) == {"position": until, "skipped_bytes": 0}
    assert found == [(each.topic.decode(), each.body) for each in log.records() if each.kind == Kind.MESSAGE]


def test_the_messages_of_a_folder_of_segments_are_read_whatever_its_name_is(spark: SparkSession, tmp_path: Path) -> None:
    directory = a_log().save(tmp_path / "data")
    (tmp_path / "segments").symlink_to(directory)
    assert messages(spark, tmp_path / "segments").count() == 60
