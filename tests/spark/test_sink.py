"""Rows that become messages of a node."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.types import (
    BinaryType,
    DataType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from penstock.access.options import AccessControlOptions
from penstock.node.config import Config
from penstock.pop.client.outgoing import OutgoingMessage
from penstock.pop.client.syncclient import SyncClient
from penstock.pop.options import PopOptions
from penstock.pop.proto import pop_pb2 as pb
from penstock.spark import publish, sink
from penstock.spark.errors import PublishFailed, RowsInvalid, WriteOptionInvalid
from penstock.spark.sink.columns import check_schema
from penstock.spark.sink.options import OPTIONS, SinkOptions
from penstock.spark.sink.requests import BYTES_MAX, ROWS_MAX, requests_of
from penstock.spark.sink.writers import PublishedRows
from penstock.store.options import MIB, StoreOptions
from penstock.testing.nodeinprocess import NodeInProcess
from penstock.testing.nodethread import NodeInThread
from tests.gateway.certificates import Authority
from tests.pop.wiring import Node
from tests.system.processes import ROOT, NodeProcess
from tests.waiting import PROCESS_S, WAIT_S_MAX
from tests.worker.accessfile import access_file

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TARGET = "127.0.0.1:8081"
AT = datetime(2026, 11, 28, 12, 0, 0, 123_456, tzinfo=UTC)
AT_MS = 1_795_867_200_123
TOPIC_IDS_MAX = 50
"""Deduplication ids that the node of these tests remembers of a topic."""

TEXT, BINARY, INSTANT = StringType(), BinaryType(), TimestampType()


def schema(**columns: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in columns.items()])


NEEDED = {"topic": TEXT, "body": BINARY, "deduplication_id": TEXT}


@pytest.fixture(scope="module")
def node() -> Iterator[NodeInThread]:
    config = Config(
        store=StoreOptions(segment_bytes=16 * MIB),
        pop=PopOptions(deduplication_topic_ids_max=TOPIC_IDS_MAX, request_bytes_max=MIB, message_bytes_max=MIB),
    )
    with NodeInThread(NodeInProcess(config=config)) as started:
        yield started


def rows_of(topic: str, *bodies: bytes, ids: list[str] | None = None, **columns: pa.Array) -> pa.RecordBatch:
    ids = ids or [f"id {number}" for number in range(len(bodies))]
    return pa.record_batch({"topic": [topic] * len(bodies), "body": list(bodies), "deduplication_id": ids, **columns})


def written(target: str, *batches: pa.RecordBatch, **options: str) -> PublishedRows:
    """Write rows as a task does; return what it tells Spark."""
    message = sink.writer(schema(**NEEDED), {"target": target, **options}).write(iter(batches))
    assert isinstance(message, PublishedRows)
    return message


def bodies_in(target: str, topic_filter: str) -> Counter[bytes]:
    """Return how often the node has each body."""
    found: Counter[bytes] = Counter()
    with SyncClient(target) as client:
        while messages := client.pop(topic_filter, group="readers", messages_max=1_024):
            found.update(message.body for message in messages)
    return found


# --- options, columns and requests: without a node ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "target is missing"),
        ({"target": "node"}, "target is 'node': give HOST:PORT"),
        ({"target": TARGET, "tokn": "x"}, "'tokn' does not exist. Did you mean token?"),
        ({"target": TARGET, "token": "x", "token_file": "y"}, "both given"),
        ({"target": TARGET, "tls": "yes"}, "tls is 'yes', but must be true or false"),
        ({"target": TARGET, "ca_file": "x", "key_file": "y"}, "belong together"),
        ({"target": TARGET, "certificate_file": "x", "key_file": "y"}, "needs TLS"),
        ({"target": TARGET, "timeout": "0"}, "timeout is '0'"),
        ({"target": TARGET, "retry": "2000"}, "retry is '2000'.*such as"),
    ],
)
def test_a_wrong_option_is_named(options: dict[str, str], complaint: str) -> None:
    with pytest.raises(WriteOptionInvalid, match=complaint):
        SinkOptions.of(options)


def test_the_guide_lists_the_options() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "spark.md").read_text("utf-8")
    assert [name for name in OPTIONS if not re.search(rf"^\| .*`{name}`.* \|", guide, re.MULTILINE)] == []


def test_options_do_not_show_their_token() -> None:
    options = SinkOptions.of({"target": TARGET, "Token": "s3cret", "checkpointLocation": "x", "queryName": "y"})
    assert options.security().token == "s3cret"
    assert "s3cret" not in repr(options)


def test_a_write_that_would_replace_rows_is_refused() -> None:
    with pytest.raises(WriteOptionInvalid, match="a log only grows"):
        sink.writer(schema(**NEEDED), {"target": TARGET}, overwrite=True)


def test_a_file_that_an_executor_cannot_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(WriteOptionInvalid, match=r"token_file is '.*missing', which the executor can't read: No such file"):
        SinkOptions.of({"target": TARGET, "token_file": str(tmp_path / "missing")}).security()


@pytest.mark.parametrize(
    ("columns", "is_stream", "complaint"),
    [
        ({"topic": TEXT, "deduplication_id": TEXT}, False, "'body' is missing"),
        ({"topic": TEXT, "body": TEXT}, False, r"'deduplication_id' is missing.*column.*penstock\.spark\.publish\("),
        ({"topic": TEXT, "body": TEXT}, True, r"'deduplication_id' is missing.*column.*penstock\.spark\.publishing\("),
        (NEEDED, True, "'first_sent' is missing"),
        ({**NEEDED, "prperties": TEXT}, False, "'prperties' is unknown. Did you mean properties?"),
        ({**NEEDED, "properties": MapType(TEXT, LongType())}, False, "is map<string,bigint>, but must be map<string,string>"),
        ({**NEEDED, "delay_ms": DoubleType()}, False, "'delay_ms' is double, but must be a whole number"),
        ({**NEEDED, "deliver_at": LongType()}, False, "'deliver_at' is bigint, but must be timestamp"),
        ({**NEEDED, "tag": MapType(TEXT, TEXT)}, False, "must be string"),
    ],
)
def test_columns_that_cannot_be_published_are_refused(columns: dict[str, DataType], is_stream: bool, complaint: str) -> None:
    with pytest.raises(RowsInvalid, match=complaint):
        check_schema(schema(**columns), is_stream=is_stream)


def test_columns_of_messages_are_taken() -> None:
    more = {"properties": MapType(TEXT, TEXT), "delay_ms": IntegerType(), "deliver_at": INSTANT, "correlation_data": BINARY}
    check_schema(schema(**NEEDED, first_sent=INSTANT, **more), is_stream=True)


def test_rows_are_encoded_as_the_client_encodes_messages() -> None:
    fields: list[dict[str, Any]] = [
        {},
        {"tag": "ä", "message_group": "g", "properties": {"a": "1", "": "", "b": "", "ö": "x" * 300}},
        {"deliver_at_ms": AT_MS, "timer_key": "key", "content_type": "text/plain", "body": b""},
        {
            "delay_ms": 1 << 40,
            "response_topic": "r",
            "correlation_data": b"\0\xff",
            "expire_after_ms": 1,
            "body": b"x" * 70_000,
        },
    ]
    messages = [
        OutgoingMessage(
            **{
                "topic": "a/é",
                "body": b"body",
                "deduplication_id": f"{index}",
                "deduplication_age": 5.0,
                "delay": each.get("delay_ms", 0) / 1000,
                "expire_after": each.get("expire_after_ms", 0) / 1000,
                **{name: value for name, value in each.items() if name not in ("delay_ms", "expire_after_ms")},
            }
        )
        for index, each in enumerate(fields)
    ]
    rows = pa.record_batch(
        {
            "topic": [each.topic for each in messages],
            "body": [each.body for each in messages],
            "properties": pa.array([each.get("properties") for each in fields], pa.map_(pa.string(), pa.string())),
            "deliver_at": pa.array([AT if "deliver_at_ms" in each else None for each in fields], pa.timestamp("us", tz="UTC")),
            "deduplication_id": [each.deduplication_id for each in messages],
            **{
                name: pa.array([each.get(name) for each in fields])
                for name in ("tag", "message_group", "delay_ms", "timer_key", "content_type", "response_topic")
            },
            "correlation_data": pa.array([each.get("correlation_data") for each in fields], pa.binary()),
            "expire_after_ms": pa.array([each.get("expire_after_ms") for each in fields], pa.int32()),
        }
    )
    (request,) = requests_of([rows], planned_ms=AT_MS - 5_000)
    assert pb.SendRequest.FromString(request.encoded(AT_MS)) == pb.SendRequest(messages=[each.encoded() for each in messages])


def test_a_row_says_how_long_ago_it_may_have_been_sent() -> None:
    sent = pa.array([AT, None, AT + timedelta(hours=1)], pa.timestamp("us", tz="UTC"))
    (request,) = requests_of([rows_of("a", b"1", b"2", b"3", first_sent=sent)], planned_ms=AT_MS + 60)
    messages = pb.SendRequest.FromString(request.encoded(AT_MS + 100)).messages
    assert [message.extras.deduplication_age_ms for message in messages] == [100, 40, 1]


def test_requests_are_bounded_in_rows_and_bytes() -> None:
    bodies = [b"", b"x" * BYTES_MAX, b"y" * (BYTES_MAX // 2), b"z" * (BYTES_MAX // 2), *[b"small"] * ROWS_MAX]
    requests = list(requests_of([rows_of("a", *bodies)], planned_ms=0))
    assert [len(request.heads) for request in requests] == [1, 1, 1, ROWS_MAX - 3, 4]
    sent = [message.body for each in requests for message in pb.SendRequest.FromString(each.encoded(1)).messages]
    assert sent == bodies


@pytest.mark.parametrize(
    ("columns", "complaint"),
    [
        ({"topic": pa.array([None], pa.string())}, "no topic: topic=None, body=b'1', deduplication_id='a'"),
        ({"body": pa.array([None], pa.binary())}, "no body"),
        ({"deduplication_id": pa.array([""])}, "no deduplication_id"),
        ({"first_sent": pa.array([None], pa.timestamp("us", tz="UTC"))}, "no first_sent"),
        ({"topic": pa.array([b"\xff"]).view(pa.string())}, "'topic' has a value that is not valid"),
    ],
)
def test_a_row_without_a_value_that_it_needs_is_shown(columns: dict[str, pa.Array], complaint: str) -> None:
    sent = pa.array([AT], pa.timestamp("us", tz="UTC"))
    row = {"topic": pa.array(["t"]), "body": pa.array([b"1"]), "deduplication_id": pa.array(["a"]), "first_sent": sent}
    with pytest.raises(RowsInvalid, match=complaint):
        list(requests_of([pa.record_batch({**row, **columns})], planned_ms=None))


# --- tasks and a node ------------------------------------------------------------------------------------------------


def test_rows_arrive_as_they_are(node: NodeInThread) -> None:
    properties = pa.array([{"unit": "°C"}, None], pa.map_(pa.string(), pa.string()))
    rows = rows_of("given/1", b"21.5", b"later", properties=properties, tag=pa.array(["hot", None]), delay_ms=[0, 3_600_000])
    more = {"properties": MapType(TEXT, TEXT), "tag": TEXT, "delay_ms": LongType()}
    message = sink.writer(schema(**NEEDED, **more), {"target": node.target}).write(iter([rows]))
    assert message == PublishedRows(rows=2, repeated=0)
    with SyncClient(node.target) as client:
        (got,) = client.pop("given/#", group="readers")
        assert (got.topic, got.body, dict(got.properties), got.tag) == ("given/1", b"21.5", {"unit": "°C"}, "hot")
        assert [timer.topic for timer in client.timers.list("given/#").timers] == ["given/1"]


def test_a_task_that_is_executed_again_stores_nothing_twice(node: NodeInThread) -> None:
    batches = [rows_of("again/1", b"1", b"2"), rows_of("again/2", b"1", b"2")]
    assert written(node.target, *batches) == PublishedRows(rows=4, repeated=0)
    assert written(node.target, *batches) == PublishedRows(rows=4, repeated=4)
    assert bodies_in(node.target, "again/#") == {b"1": 2, b"2": 2}


def test_a_refused_row_fails_the_task_and_is_shown(node: NodeInThread) -> None:
    with pytest.raises(PublishFailed, match=r"the row with the topic 'wild/#' and the id 'id 0' with InvalidTopic"):
        written(node.target, rows_of("wild/#", b"1"))
    written(node.target, rows_of("reused/1", b"1"))
    with pytest.raises(PublishFailed, match=r"DeduplicationIdReused.*Give each row an id of its own"):
        written(node.target, rows_of("reused/1", b"2"))
    long_ago = pa.array([datetime.now(UTC) - timedelta(days=1)], pa.timestamp("us", tz="UTC"))
    with pytest.raises(PublishFailed, match=r"DeduplicationWindowPassed.*that was too long ago"):
        written(node.target, rows_of("late/1", b"1", first_sent=long_ago))


def test_a_batch_with_more_rows_than_the_node_remembers_fails_before_any_is_forgotten(node: NodeInThread) -> None:
    bodies = [b"%d" % number for number in range(TOPIC_IDS_MAX + 1)]
    with pytest.raises(PublishFailed, match=r"DeduplicationWindowPassed.*raise pop\.deduplication_ids_max"):
        written(node.target, rows_of("many/1", *bodies))
    assert written(node.target, rows_of("many/1", *bodies[:-1])).repeated == TOPIC_IDS_MAX
    assert bodies_in(node.target, "many/#").total() == TOPIC_IDS_MAX


def test_a_task_gives_up_where_no_node_is() -> None:
    with socket.socket() as unused:  # bound, so that nobody else listens there
        unused.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(PublishFailed, match=r"gives up after 0 \(retry\).*Connection refused"):
            written(target, rows_of("a", b"1"), retry="0", timeout="200ms")


def test_a_task_sends_again_what_exceeds_a_limit_and_then_gives_up(node: NodeInThread) -> None:
    with pytest.raises(PublishFailed, match=r"gives up after 100ms \(retry\).*larger than max"):
        written(node.target, rows_of("large/1", b"x" * 2 * MIB), retry="100ms")


async def test_a_task_waits_for_a_node_that_is_away(tmp_path: Path) -> None:
    node = Node(tmp_path / "data")
    await node.start()
    loop, is_begun, is_away = asyncio.get_running_loop(), asyncio.Event(), threading.Event()

    def batches() -> Iterator[pa.RecordBatch]:
        yield rows_of("away/1", b"before")
        loop.call_soon_threadsafe(is_begun.set)
        assert is_away.wait(WAIT_S_MAX)
        yield rows_of("away/2", b"while")
        yield rows_of("away/3", b"after")

    port, writer = node.port, sink.writer(schema(**NEEDED), {"target": node.target})
    writing = asyncio.create_task(asyncio.to_thread(writer.write, batches()))
    await is_begun.wait()
    await node.stop()
    is_away.set()
    node = Node(tmp_path / "data")
    await node.start(port)
    await writing
    assert await asyncio.to_thread(bodies_in, node.target, "away/#") == {b"before": 1, b"while": 1, b"after": 1}
    await node.stop()


def test_tokens_and_certificates_come_from_files(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "tls")
    pop = PopOptions(certificate_file=str(authority.certificate), key_file=str(authority.key))
    access = access_file(tmp_path / "access.toml", "s3cret", write="mine/#")
    (tmp_path / "token").write_text("s3cret\n")
    options = {"ca_file": str(authority.file), "token_file": str(tmp_path / "token")}
    config = Config(store=StoreOptions(segment_bytes=16 * MIB), pop=pop, access=AccessControlOptions(file=str(access)))
    with NodeInThread(NodeInProcess(config=config)) as node:
        target = f"localhost:{node.target.rpartition(':')[2]}"
        assert written(target, rows_of("mine/1", b"1"), **options).rows == 1
        with pytest.raises(PublishFailed, match=r"refused rows of a task, such as the row with the topic 'yours/1'.*yours"):
            written(target, rows_of("yours/1", b"1"), **options)
        with pytest.raises(PublishFailed, match=r"refused rows of a task.*token"):
            written(target, rows_of("mine/1", b"1"), ca_file=options["ca_file"], token="wrong")


# --- Spark -----------------------------------------------------------------------------------------------------------


def test_a_batch_is_stored_once_and_equal_rows_of_it_each(spark: SparkSession, node: NodeInThread) -> None:
    rows = spark.createDataFrame(
        [
            ("spark/1", "1", {"a": "1", "b": "2"}),
            ("spark/1", "1", {"b": "2", "a": "1"}),
            ("spark/1", "1", {"a": "1"}),
            ("spark/2", "1", None),
        ],
        "topic string, body string, properties map<string,string>",
    )
    for partitions in (1, 2):
        publish(rows.repartition(partitions), "readings", epoch=7, first_sent=datetime.now(UTC), target=node.target)
    with SyncClient(node.target) as client:
        messages = client.pop("spark/#", group="readers")
    assert Counter(message.topic for message in messages) == {"spark/1": 3, "spark/2": 1}
    assert sorted(message.deduplication_id.rpartition("/")[2] for message in messages) == ["0", "0", "0", "1"]
    with pytest.raises(PySparkException, match="DeduplicationWindowPassed"):
        publish(rows, "readings", epoch=8, first_sent=AT - timedelta(days=400), target=node.target)


@pytest.mark.nightly
@pytest.mark.timeout(PROCESS_S * 4)
@pytest.mark.usefixtures("java")
def test_a_stream_that_is_killed_again_and_again_publishes_each_row_once(tmp_path: Path) -> None:
    lines = [f"{number % 1_500}" for number in range(20_000)]
    source, checkpoint = tmp_path / "lines", tmp_path / "checkpoint"
    source.mkdir()
    for file in range(10):
        (source / f"{file}.txt").write_text("\n".join(lines[file * 2_000 : file * 2_000 + 2_000]))
    node = NodeProcess(tmp_path / "data").start()
    try:
        command = [sys.executable, "-m", "tests.spark.publishingstream", node.addresses["pop"], str(source), str(checkpoint)]
        for _ in range(4):
            _kill_in_a_batch(command, checkpoint)
        assert subprocess.run(command, cwd=ROOT, timeout=PROCESS_S, check=False).returncode == 0
        assert bodies_in(node.addresses["pop"], "lines/#") == Counter(line.encode() for line in lines)
    finally:
        node.close()


def _kill_in_a_batch(command: list[str], checkpoint: Path) -> None:
    """Start a stream, and kill it with its Java at a random time after it has begun a batch that was not begun before."""
    begun = len(_batches(checkpoint))
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True)
    try:
        while len(_batches(checkpoint)) <= begun and process.poll() is None:
            with suppress(subprocess.TimeoutExpired):
                process.wait(0.01)
        with suppress(subprocess.TimeoutExpired):
            process.wait(random.uniform(0, 2))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(PROCESS_S)


def _batches(checkpoint: Path) -> list[str]:
    """Return the batches that a checkpoint says were begun."""
    offsets = checkpoint / "offsets"
    return [name for name in os.listdir(offsets) if name.isdecimal()] if offsets.exists() else []
