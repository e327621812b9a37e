"""A stream of Spark has each message of a running node once, whatever is killed, and says so where it can't."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

from pyspark.errors import StreamingQueryException

from penstock import Client, OutgoingMessage
from penstock.store.options import KIB, MIB
from tests.bounds import write_bounds
from tests.spark.streamcopy import copying
from tests.system.processes import ROOT, NodeProcess
from tests.waiting import until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("java")]

STREAM_KILLS = int(os.environ.get("PENSTOCK_STREAM_KILLS", "20"))
"""Number of kills of the stream. Each takes a start of Spark: 12 s of processor time."""

NODE_KILLS = 5

MESSAGES_PER_CALL = 100
BODY_BYTES = 200
PAUSE_S = 0.2
"""Pause of the publisher between two calls. A stream that is killed all the time must not fall behind without end."""

AFTER_S_MAX = 0.3
"""A process is killed up to this time after what the test has waited for: about the length of a batch."""

CONFIG = f"""
[store]
segment_bytes = {MIB}
retention_bytes = %d

[tables]
enabled = "off"
"""


@dataclass
class Publisher:
    """Publishes numbered messages all the time, also while the node is away."""

    node: NodeProcess
    acked: dict[int, int] = field(default_factory=dict)
    """Position of each message that the node has acknowledged."""
    sent: int = 0
    pause_s: float = PAUSE_S

    async def run(self, stop: asyncio.Event) -> None:
        async with Client(self.node.addresses["pop"]) as client, client.producer(buffer_max=2 * MESSAGES_PER_CALL) as producer:
            while not stop.is_set():
                numbers = range(self.sent, self.sent + MESSAGES_PER_CALL)
                self.sent = numbers.stop
                bodies = (b"%0*d" % (BODY_BYTES, number) for number in numbers)
                answers = [await producer.post(OutgoingMessage(topic="numbers", body=body)) for body in bodies]
                for number, answer in zip(numbers, answers, strict=True):
                    self.acked[number] = int((await answer).message_id, 16)
                with suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self.pause_s)

    @asynccontextmanager
    async def publishing(self) -> AsyncIterator[None]:
        """Publish until the block ends. Afterwards all messages are acknowledged."""
        stop = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.run(stop))
            try:
                yield
            finally:
                stop.set()


def start_node(node: NodeProcess, tmp_path: Path, retention_bytes: int = 0) -> None:
    config = tmp_path / "penstock.toml"
    config.write_text(CONFIG % retention_bytes)
    write_bounds(config, store__index_flush_ms=100)
    pop = ["--pop", node.addresses["pop"]] if node.addresses else []
    node.start("--config", str(config), *pop)


def rows_of(spark: SparkSession, rows: Path) -> list[tuple[int, int]]:
    """Return number and position of each row that a stream has written, in order."""
    copied = spark.read.schema("position bigint, body binary").parquet(str(rows)).collect()
    return sorted((int(row.body), row.position) for row in copied)


class StreamProcess:
    """A stream that copies a log, in a process that a test kills with all that it has started."""

    def __init__(self, log: Path, directory: Path) -> None:
        self.rows, self.checkpoint = directory / "rows", directory / "checkpoint"
        self._arguments = [str(log), str(self.rows), str(self.checkpoint)]
        self._output = directory / "stream.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self._output.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.streamcopy", *self._arguments],
                cwd=ROOT,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

    async def wait_for(self, condition: Callable[[], object]) -> None:
        def holds() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, self._output.read_text()
            return bool(condition())

        await until(holds)

    def kill(self) -> None:
        assert self._process is not None
        assert self._process.poll() is None, self._output.read_text()
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def close(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.kill()

    # --- what a kill waits for --------------------------------------------------------------------------------------

    def has_a_session(self) -> bool:
        return "open" in self._output.read_text()

    def planned(self) -> int:
        """Return how many batches were planned."""
        return _batches(self.checkpoint / "offsets")

    def committed(self) -> int:
        return _batches(self.checkpoint / "commits")

    def files(self) -> int:
        return sum(1 for _ in self.rows.glob("part-*"))

    async def reach(self, moment: str, batches: int) -> None:
        """Wait until so many batches more are planned or committed, or so many files more are begun."""
        if moment == "started":
            return
        await self.wait_for(self.has_a_session)
        if moment == "open":
            return
        reached: Callable[[], int] = {"planned": self.planned, "written": self.files, "committed": self.committed}[moment]
        target = reached() + batches
        await self.wait_for(lambda: reached() >= target)


MOMENTS = ("started", "open", "planned", "written", "committed")


def _batches(directory: Path) -> int:
    return sum(1 for path in directory.glob("*") if path.name.isdigit())


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    process = NodeProcess(tmp_path / "data")
    yield process
    process.close()


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[StreamProcess]:
    process = StreamProcess(tmp_path / "data", tmp_path)
    yield process
    process.close()


@pytest.mark.timeout(240 + 120 * STREAM_KILLS)
async def test_a_stream_that_is_killed_copies_each_message_once(
    node: NodeProcess, stream: StreamProcess, spark: SparkSession, tmp_path: Path
) -> None:
    seed = int(os.environ.get("PENSTOCK_STREAM_SEED", Random().randrange(1_000_000)))
    print(f"PENSTOCK_STREAM_SEED={seed} PENSTOCK_STREAM_KILLS={STREAM_KILLS}")  # pytest shows it if the test fails
    random = Random(seed)
    start_node(node, tmp_path)
    publisher = Publisher(node)
    async with publisher.publishing():
        for _ in range(STREAM_KILLS):
            moment = random.choices(MOMENTS, (2, 2, 6, 6, 4))[0]
            stream.start()
            await stream.reach(moment, random.randrange(1, 6))
            await asyncio.sleep(random.uniform(0, AFTER_S_MAX))
            stream.kill()
            print(f"killed {moment}: planned {stream.planned()}, committed {stream.committed()}, files {stream.files()}")
    query = copying(spark, str(tmp_path / "data"), str(stream.rows), str(stream.checkpoint), maxBytesPerTrigger=4 * MIB)
    await asyncio.to_thread(query.trigger(availableNow=True).start().awaitTermination)
    assert len(publisher.acked) == publisher.sent
    assert rows_of(spark, stream.rows) == sorted(publisher.acked.items())


@pytest.mark.timeout(600)
async def test_a_node_that_is_killed_and_starts_again_does_not_disturb_a_stream(
    node: NodeProcess, spark: SparkSession, tmp_path: Path
) -> None:
    start_node(node, tmp_path)
    publisher = Publisher(node)
    rows = tmp_path / "rows"
    query = copying(spark, str(tmp_path / "data"), str(rows), str(tmp_path / "checkpoint"), maxBytesPerTrigger=64 * KIB).start()

    def has_read(position: int) -> bool:
        assert query.isActive, query.exception()
        progress = query.lastProgress
        return progress is not None and json.loads(progress.sources[0].endOffset or "{}").get("position", 0) > position

    try:
        async with publisher.publishing():
            for _ in range(NODE_KILLS):
                await until(partial(has_read, max(publisher.acked.values(), default=0)))
                await asyncio.to_thread(node.kill)
                await asyncio.to_thread(start_node, node, tmp_path)
        await until(lambda: has_read(max(publisher.acked.values())))
    finally:
        await asyncio.to_thread(query.stop)
    assert len(publisher.acked) == publisher.sent
    assert rows_of(spark, rows) == sorted(publisher.acked.items())


@pytest.mark.timeout(600)
async def test_a_stopped_stream_that_retention_overtakes_fails_or_counts_what_it_has_skipped(
    node: NodeProcess, spark: SparkSession, tmp_path: Path
) -> None:
    start_node(node, tmp_path, retention_bytes=MIB)
    publisher = Publisher(node, pause_s=0)
    log, rows, checkpoint = tmp_path / "data", tmp_path / "rows", tmp_path / "checkpoint"

    async def run(**options: object) -> dict[str, int]:
        """Read what there is; return the offset."""
        query = copying(spark, str(log), str(rows), str(checkpoint), **options).trigger(availableNow=True).start()
        await asyncio.to_thread(query.awaitTermination)
        assert query.lastProgress is not None
        offset: dict[str, int] = json.loads(query.lastProgress.sources[0].endOffset)
        return offset

    def begin() -> int:
        return min(int(path.stem) for path in (log / "commitlog").glob("*.log"))

    async with publisher.publishing():
        await until(lambda: len(publisher.acked) >= MESSAGES_PER_CALL)
    before = await run()
    copied = rows_of(spark, rows)
    async with publisher.publishing():
        await until(lambda: begin() > before["position"])
    await asyncio.to_thread(node.stop)
    lost = f"from position {before['position']} to {begin()} before the stream read it. Set failOnDataLoss to false"
    with pytest.raises(StreamingQueryException, match=f"RecordsLost: Retention has deleted the log {lost}"):
        await run()
    after = await run(failOnDataLoss="false")
    assert after["skipped_bytes"] == begin() - before["position"]
    left = sorted((number, position) for number, position in publisher.acked.items() if position >= begin())
    assert rows_of(spark, rows) == copied + left
