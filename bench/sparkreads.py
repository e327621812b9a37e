"""What Spark reads of a log, follows and publishes: the second part of `python -m bench spark`.

Everything runs in one process with one session, which has run a query before. Rates are rows a second of wall time.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from bench.peers import penstock, processor_s
from bench.sparkload import write_log
from penstock import OutgoingMessage, SyncClient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TAIL = 2_000_000
"""Messages of the log that has no tables."""

SINK_ROWS = 1_000_000

LIVE_S = 15.0
LIVE_BATCH = 100
LIVE_BATCHES_PER_S = 10

Row = dict[str, Any]


def measure(data_dir: Path, runs: int) -> list[Row]:
    """Measure what can be read of a log with tables, and streams and the sink on other logs; return the rows of the report."""
    from penstock.spark import messages
    from penstock.spark.session import open_session

    spark = open_session("local[2]", "penstock bench")
    spark.sql("SELECT 1").collect()
    history = messages(spark, data_dir, tail=False)
    count = history.count()
    rows = [
        _rate("sealed history, three columns", count, runs, lambda: _drain(history.select("position", "at_ms", "topic"))),
        _rate("sealed history, count", count, runs, history.count),
        _newest(spark, data_dir, history),
    ]
    tail = data_dir.parent / "tail"
    write_log(tail, TAIL, segment_bytes=1 << 30)
    _mark(tail)
    source = spark.read.format("penstock").option("table", "records").schema("position bigint, at_ms bigint, topic string")
    records = source.load(str(tail))
    rows.append(_rate("live tail by the source, records", records.count(), runs, lambda: _drain(records)))
    rows += [_available_now(spark, data_dir, count), _live(spark, data_dir.parent), _published(spark, data_dir.parent)]
    spark.stop()
    return rows


def _rate(what: str, count: int, runs: int, work: Callable[[], Any]) -> Row:
    work()  # the JVM has compiled it then
    walls, cpus = [], []
    for _ in range(max(runs, 3)):
        before_s, began_s = processor_s(os.getpid()), time.monotonic()
        work()
        walls.append(time.monotonic() - began_s)
        cpus.append(processor_s(os.getpid()) - before_s)
    took_s = median(walls)
    return {"what": f"{what}: {count / took_s:,.0f}/s", "s": round(took_s, 2), "cpu_s": round(median(cpus), 1), "mib": ""}


def _drain(rows: DataFrame) -> None:
    rows.write.format("noop").mode("overwrite").save()


def _mark(data_dir: Path) -> None:
    """Let the log be known to be durable, as that of a node is."""
    from penstock.store.log.syncmark import SyncMark

    path = max((data_dir / "commitlog").iterdir())
    SyncMark(data_dir).write(int(path.stem) + path.stat().st_size, begin=0)


def _newest(spark: SparkSession, data_dir: Path, history: DataFrame) -> Row:
    """Read the last 1 % by time, and tell how much of the files Spark has read for it."""
    from pyspark.sql import functions as F

    first, last = history.agg(F.min("at_ms"), F.max("at_ms")).first() or (0, 0)
    since = F.timestamp_millis(F.lit(last - (last - first) // 100))
    size = sum(path.stat().st_size for path in (data_dir / "tables" / "messages").rglob("*.parquet"))
    before, began_s = _input_bytes(spark), time.monotonic()
    _drain(history.where(F.col("time") >= since))
    took_s, read = time.monotonic() - began_s, _input_bytes(spark) - before
    return {
        "what": f"the last 1 % by time: {read / size:.1%} of {size / 2**20:,.0f} MiB",
        "s": round(took_s, 2),
        "cpu_s": "",
        "mib": "",
    }


def _input_bytes(spark: SparkSession) -> int:
    """Return the bytes that all stages have read, as Spark counts them."""
    context: Any = spark.sparkContext
    gateway = context._gateway
    quantiles = gateway.new_array(gateway.jvm.double, 0)
    stages = context._jsc.sc().statusStore().stageList(None, False, False, quantiles, None)
    return sum(stages.apply(number).inputBytes() for number in range(stages.size()))


def _available_now(spark: SparkSession, data_dir: Path, count: int) -> Row:
    """Copy all messages to Parquet by a stream that ends where the log ends. The second time counts."""
    copied = data_dir.parent / "copied"
    for _ in range(2):
        before_s, began_s = processor_s(os.getpid()), time.monotonic()
        stream = spark.readStream.format("penstock").load(str(data_dir)).writeStream.format("parquet")
        stream = stream.option("path", str(copied)).option("checkpointLocation", str(copied / "checkpoint"))
        stream.trigger(availableNow=True).start().awaitTermination()
        took_s, cpu_s = time.monotonic() - began_s, processor_s(os.getpid()) - before_s
        found = spark.read.parquet(str(copied)).count()
        assert found >= count, (found, count)
        shutil.rmtree(copied)
    return {
        "what": f"stream of what is available, {found:,} messages to Parquet: {found / took_s:,.0f}/s",
        "s": round(took_s, 1),
        "cpu_s": round(cpu_s, 1),
        "mib": "",
    }


@contextmanager
def _publishing(target: str) -> Iterator[None]:
    """Publish `LIVE_BATCH` messages, `LIVE_BATCHES_PER_S` times a second."""
    ended = threading.Event()

    def publish() -> None:
        with SyncClient(target) as client:
            while not ended.wait(1 / LIVE_BATCHES_PER_S):
                client.send_batch([OutgoingMessage(topic="live/1", body=b"x" * 120)] * LIVE_BATCH)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _live(spark: SparkSession, directory: Path) -> Row:
    """Follow a node, and tell how old the newest row is when the batch that has it begins to be handled."""
    ages: list[float] = []

    def note(rows: DataFrame, _: int) -> None:
        from pyspark.sql import functions as F

        (newest,) = rows.agg(F.max("at_ms")).first() or (None,)
        if newest is not None:
            ages.append(time.time() - newest / 1000)

    data_dir = directory / "live"
    with penstock(data_dir) as node, _publishing(node.addresses["pop"]):
        while not any((data_dir / "commitlog").glob("*.log")):
            time.sleep(0.05)
        source = spark.readStream.format("penstock").schema("at_ms bigint").option("startingOffsets", "latest")
        stream = source.load(str(data_dir)).writeStream.foreachBatch(note)
        query = stream.option("checkpointLocation", str(directory / "live-checkpoint")).start()
        time.sleep(LIVE_S)
        query.stop()
    later = ages[len(ages) // 4 :]  # the first batches include what the JVM compiles
    return {
        "what": f"live, 1,000 messages/s: newest row {median(later):.2f} s old, {max(later):.2f} s at most",
        "s": LIVE_S,
        "cpu_s": "",
        "mib": "",
    }


def _published(spark: SparkSession, directory: Path) -> Row:
    """Publish rows to a node, twice, as after a kill; and tell how many the node has."""
    from pyspark.sql import functions as F

    from penstock.spark import messages

    data_dir, config = directory / "sunk", directory / "sunk.toml"
    config.write_text(f"[pop]\ndeduplication_ids_max = {10 * SINK_ROWS}\n")
    with penstock(data_dir, "--config", str(config)) as node:
        numbers = spark.range(0, SINK_ROWS, 1, 4)
        rows = numbers.select(
            F.concat(F.lit("sunk/"), F.col("id") % 100).alias("topic"),
            F.repeat(F.lit("x"), F.lit(120)).cast("binary").alias("body"),
            F.col("id").cast("string").alias("deduplication_id"),
        )
        before_s, began_s = processor_s(os.getpid()), time.monotonic()
        rows.write.format("penstock").option("target", node.addresses["pop"]).mode("append").save()
        took_s, cpu_s = time.monotonic() - began_s, processor_s(os.getpid()) - before_s
        rows.where("id % 10 = 0").write.format("penstock").option("target", node.addresses["pop"]).mode("append").save()
        found = messages(spark, data_dir).where("topic LIKE 'sunk/%'").count()
    assert found == SINK_ROWS, found
    return {
        "what": f"sink, {SINK_ROWS:,} rows: {SINK_ROWS / took_s:,.0f}/s, {found - SINK_ROWS} twice",
        "s": round(took_s, 1),
        "cpu_s": round(cpu_s, 1),
        "mib": "",
    }
