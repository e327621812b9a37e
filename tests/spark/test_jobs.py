"""The jobs to copy: each on a few messages with known answers, and as a script."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.jobs import deviations, retention, silences, traffic
from tests.spark.log_writer import LogWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DAY_MS = 24 * 3_600_000


def messages_of(spark: SparkSession, rows: Iterable[tuple[str, int, bytes]]) -> DataFrame:
    """Return messages with a topic, a time and a body each, a thousand bytes of the log apart."""
    numbered = [(number * 1_000, *row) for number, row in enumerate(sorted(rows, key=lambda row: row[1]))]
    return spark.createDataFrame(numbered, "position bigint, topic string, at_ms bigint, body binary")


def test_a_device_is_silent_after_some_usual_intervals(spark: SparkSession) -> None:
    """The pump sends each second, the hall in bursts of three, and both have paused for an hour. The lamp is too new."""
    seconds = [*range(20), *range(3_620, 3_640)]
    rows = [("a/pump/t", second * 1_000, b"") for second in seconds]
    rows += [
        (f"a/hall/{topic}", second * 1_000 + topic, b"") for second in [*seconds, 3_640, 3_641, 3_642] for topic in range(3)
    ]
    rows += [("a/lamp/t", at_ms, b"") for at_ms in (0, 1_000)] + [("short", 5, b"")]
    found = silences.silences(messages_of(spark, rows), device_level=2).collect()
    assert {row.device: (row.usual_ms, row.silent_ms, row.is_silent) for row in found} == {
        "pump": (1_000, 3_002, True),
        "hall": (998, 0, False),
        "lamp": (1_000, 3_641_002, None),
    }


def test_a_reading_is_unusual_far_from_the_mean_of_those_before(spark: SparkSession) -> None:
    """The values of b never change, so that only rounding makes them differ from their mean. The bodies of c are no numbers."""
    values = [20, 21, 20, 21, 20.5, 23, 21]
    rows = [("a", number, b'{"t": %r}' % value) for number, value in enumerate(values)]
    rows += [("b", number, b'{"t": 0.1}') for number in range(7)]
    rows += [("c", number, body) for number, body in enumerate([b"21.5", b'{"t": "NaN"}', b"\xff", b'{"t": []}'])]
    rows += [("a", 3, b"no JSON")]
    found = deviations.deviations(messages_of(spark, rows), value_path="$.t", last=4, sigmas=4).orderBy("position").collect()
    by_topic = {topic: [row for row in found if row.topic == topic] for topic in "abc"}
    judged = [(row.value, row.mean, row.is_unusual) for row in by_topic["a"] if row.is_unusual is not None]
    assert judged == [(20.5, 20.5, False), (23, 20.625, True), (21, 21.125, False)]
    assert [row.is_unusual for row in by_topic["b"]] == [None] * 4 + [False] * 3
    assert {(row.value, row.mean, row.is_unusual) for row in by_topic["c"]} == {(None, None, None)}
    assert len(found) == len(rows)


def test_traffic_grows_from_one_day_to_the_next(spark: SparkSession) -> None:
    sizes = {0: 69, 1: 169, 3: 269}
    rows = [("a/b/c", day * DAY_MS + 5, b"x" * (size // 2)) for day, size in sizes.items() for _ in range(2)] + [("a", 7, b"")]
    found = traffic.traffic(messages_of(spark, rows), levels=2).orderBy("prefix", "day").collect()
    assert [(row.prefix, row.day.isoformat()[-2:], row.messages, row.bytes, row.growth) for row in found] == [
        ("a", "01", 1, 25, None),
        ("a/b", "01", 2, 2 * (24 + 5 + 34), None),
        ("a/b", "02", 2, 2 * (24 + 5 + 84), pytest.approx(100 / 126)),
        ("a/b", "04", 2, 2 * (24 + 5 + 134), None),
    ]


def test_a_plan_says_what_fits_on_the_disk(spark: SparkSession) -> None:
    """In two days the log has grown by 8,000 bytes, and a quarter of the bytes of messages is of b."""
    rows = [("ab"[number % 4 == 2], number * DAY_MS // 4, b"x" * 75) for number in range(8)] + [("c", 2 * DAY_MS, b"x" * 175)]
    plan = retention.retention_plan(messages_of(spark, rows), disk_bytes=12_000, days=10).orderBy("prefix").collect()
    assert [(row.prefix, row.share, row.bytes_per_day, row.days, row.retention_ms, row.retention_bytes) for row in plan] == [
        ("#", 1.0, 4_000, 3, 3 * DAY_MS, 40_000),
        ("a", 0.6, 2_400, 5, 5 * DAY_MS, 24_000),
        ("b", 0.2, 800, 15, 15 * DAY_MS, 8_000),
        ("c", 0.2, 800, 15, 15 * DAY_MS, 8_000),
    ]


@pytest.mark.parametrize(
    ("job", "parameters", "message"),
    [
        (silences.silences, {"device_level": 0}, "device_level is 0, but must be at least 1."),
        (silences.silences, {"times": -1}, "times is -1, but must be at least 0."),
        (deviations.deviations, {"last": 1}, "last is 1, but must be at least 2."),
        (deviations.deviations, {"sigmas": float("nan")}, "sigmas is nan, but must be at least 0."),
        (traffic.traffic, {"levels": 0}, "levels is 0, but must be at least 1."),
        (retention.retention_plan, {"disk_bytes": 0, "days": 1}, "disk_bytes is 0, but must be at least 1."),
        (retention.retention_plan, {"disk_bytes": 1, "days": 0}, "days is 0, but must be at least 0.001."),
    ],
)
def test_a_parameter_out_of_bounds_is_refused(job: Callable[..., Any], parameters: dict[str, float], message: str) -> None:
    with pytest.raises(ReadOptionInvalid, match=f"^{message}$"):
        job(None, **parameters)


def test_a_directory_without_a_log_is_refused_before_spark_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert traffic.main([str(tmp_path)]) == 3
    assert capsys.readouterr().err.startswith("penstock.spark.jobs.traffic: ")


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        silences.main(["penstock-data", "--at", "noon"])
    assert "'noon' is no time. Give one such as 2026-11-28T12:00:00+01:00." in capsys.readouterr().err


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    log = LogWriter()
    for number in range(100):
        log.now_ms = number * 1_000
        log.message(f"plant/pump-{number // 50}", b"80" if number == 30 else b"%d" % (20 + number % 2))
    log.save(tmp_path)
    return tmp_path


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("main", "options", "printed"),
    [
        (silences.main, ["--device-level", "2"], "pump-0"),
        (silences.main, ["--device-level", "2", "--at", "1970-01-01T00:00:49Z"], "|false    |1    |"),
        (deviations.main, [], "|80.0 |"),
        (retention.main, [], "|#     |"),
    ],
)
def test_a_script_prints_what_it_finds(
    data_dir: Path,
    spark: SparkSession,
    capsys: pytest.CaptureFixture[str],
    main: Callable[[Sequence[str]], int],
    options: list[str],
    printed: str,
) -> None:
    assert main([str(data_dir), *options]) == 0
    assert printed.replace(" ", "") in capsys.readouterr().out.replace(" ", "")


@pytest.mark.nightly
def test_a_damaged_log_is_named_in_one_sentence(
    data_dir: Path, spark: SparkSession, capsys: pytest.CaptureFixture[str]
) -> None:
    (segment,) = (data_dir / "commitlog").iterdir()
    content = bytearray(segment.read_bytes())
    content[-1] ^= 1
    segment.write_bytes(content + content)
    assert traffic.main([str(data_dir)]) == 4
    error = capsys.readouterr().err
    assert error.startswith("penstock.spark.jobs.traffic: ")
    assert error.count("\n") == 1


@pytest.mark.nightly
def test_a_job_runs_as_a_module(data_dir: Path) -> None:
    command = [sys.executable, "-m", "penstock.spark.jobs.traffic", str(data_dir)]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "|plant |1970-01-01|100     |" in printed
