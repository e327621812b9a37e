"""The clients of `bench.pop`: jobs for Penstock, Redis and beanstalkd that run in processes of their own.

The first arguments of a job are its number among the processes, the instant at which all jobs begin (`time.monotonic`, which
all processes share), and the broker's address. By that instant the job is connected and has prepared its messages. It returns
what it did, and when. The time of a consumer ends with its last message, not when it finds the queue empty.

Jobs with large batches use the gRPC stubs, because `penstock.Client` has costs of its own; jobs with small batches use that
client. The other brokers have the fastest clients in Python: redis-py with hiredis and one round trip a batch, and for
beanstalkd raw commands, one write a batch. Penstock and Redis get the acknowledgements of a batch with the request for the
next one.

`bench.compare` runs these jobs of two trees by name, so names and arguments must stay the same.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import socket
import time
from collections.abc import Awaitable, Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import grpc.aio
import uvloop

from penstock import Client, Worker
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import GroupServiceStub, PopServiceStub
from penstock.worker.application import spare_collector

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import GroupServiceAsyncStub, PopServiceAsyncStub

PROCESSES = 2
BEGIN_AFTER_S = 0.5
"""Seconds in which clients connect and prepare their messages. A late client counts as if it had begun in time."""

BODY = b"x" * 64
TOPICS = 16
QUIET_S = 0.5
"""Seconds without a message after which a stream is complete."""

CREDITS = 16_384
"""Maximum number of unacknowledged messages on a stream. A message takes a credit for two syncs, of its delivery and its ack,
so a stream delivers at most its credits in that time. This is the most that a node grants."""

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


class Span(NamedTuple):
    """Work of one client."""

    messages: int
    began_s: float
    ended_s: float


class Tick(NamedTuple):
    """Messages that became durable at an instant."""

    at_s: float
    messages: int


def rate_of(spans: Sequence[Span]) -> float:
    """Return the messages per second of all clients, from the first beginning to the last end."""
    return sum(span.messages for span in spans) / (max(span.ended_s for span in spans) - min(span.began_s for span in spans))


P = ParamSpec("P")
R = TypeVar("R")


class Clients:
    """The client processes. They live as long as the benchmark, because Python takes a second to start."""

    def __init__(self, begin_after_s: float = BEGIN_AFTER_S) -> None:
        self._begin_after_s = begin_after_s
        self._pool = ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn"))
        self.run(_nothing)

    def run(self, job: Callable[Concatenate[int, float, P], R], *arguments: P.args, **named: P.kwargs) -> list[R]:
        """Run a job in all processes at the same time, and return their results."""
        begin_s = time.monotonic() + self._begin_after_s
        running = [self._pool.submit(job, number, begin_s, *arguments, **named) for number in range(PROCESSES)]
        return [each.result() for each in running]

    def close(self) -> None:
        self._pool.shutdown()


def _nothing(number: int, begin_s: float) -> None:
    """Keep a process busy until the others have started."""
    time.sleep(max(begin_s - time.monotonic(), 0))


def share(total: int, number: int) -> int:
    """Return the share of `total` for the process with this number."""
    return total // PROCESSES + (number < total % PROCESSES)


def check(statuses: Sequence[pb.Status]) -> None:
    """Raise RuntimeError if the node refused a message of a batch."""
    for status in statuses:
        if status.code:
            raise RuntimeError(f"The node refused a message of a batch: {pb.Code.Name(status.code)}, {status.detail}")


# --- Penstock ---------------------------------------------------------------------------------------------------------


class Stubs:
    """Stubs of the node's services on one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.pop: PopServiceAsyncStub = PopServiceStub(channel)
        self.groups: GroupServiceAsyncStub = GroupServiceStub(channel)


def connected(address: str, work: Callable[[Stubs], Awaitable[R]]) -> R:
    """Run `work` on an event loop with a channel to the node, and return its result."""

    async def run() -> R:
        async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
            await channel.channel_ready()
            return await work(Stubs(channel))

    return uvloop.run(run())


async def _until(begin_s: float) -> None:
    await asyncio.sleep(max(begin_s - time.monotonic(), 0))


def _requests(first_level: str, batch: int, count: int) -> list[pb.SendRequest]:
    messages = [pb.Message(topic=f"{first_level}/t{at % TOPICS}", body=BODY) for at in range(batch)]
    whole = [pb.SendRequest(messages=messages)] * (count // batch)
    return whole if not count % batch else [*whole, pb.SendRequest(messages=messages[: count % batch])]


def send(number: int, begin_s: float, address: str, first_level: str, batch: int, count: int, parallel: int) -> Span:
    """Send `count` messages with all clients together, `batch` a call and `parallel` calls at a time."""

    async def work(stubs: Stubs) -> Span:
        own = share(count, number)
        requests = iter(_requests(first_level, batch, own))

        async def sender() -> None:
            for request in requests:
                check([result.status for result in (await stubs.pop.Send(request)).results])

        await _until(begin_s)
        began_s = time.monotonic()
        await asyncio.gather(*(sender() for _ in range(share(parallel, number))))
        return Span(own, began_s, time.monotonic())

    return connected(address, work)


def send_until(number: int, begin_s: float, address: str, first_level: str, batch: int, end_s: float) -> list[Tick]:
    """Send batches until an instant, and return when each batch became durable."""

    async def work(stubs: Stubs) -> list[Tick]:
        (request,) = _requests(first_level, batch, batch)
        ticks = []
        while time.monotonic() < end_s:
            check([result.status for result in (await stubs.pop.Send(request)).results])
            ticks.append(Tick(time.monotonic(), batch))
        return ticks

    return connected(address, work)


def pop_and_ack(
    number: int, begin_s: float, address: str, group: str, filter: str, batch: int, consumers: int, *, is_acked: bool = True
) -> Span:
    """Pop all messages, `batch` a call. Each call acknowledges the batch of the call before."""

    async def work(stubs: Stubs) -> Span:
        done = Span(0, begin_s, begin_s)

        async def consume() -> None:
            nonlocal done
            request = pb.PopRequest(group=group, filter=filter, messages_max=batch, invisible_ms=3_600_000)
            while True:
                answer = await stubs.pop.Pop(request)
                check(answer.ack_statuses)
                count = len(request.acks) if is_acked else len(answer.messages)
                done = Span(done.messages + count, begin_s, time.monotonic() if count else done.ended_s)
                if not answer.messages:
                    return
                if is_acked:
                    request.acks[:] = [message.handle for message in answer.messages]

        await _until(begin_s)
        await asyncio.gather(*(consume() for _ in range(share(consumers, number))))
        return done

    return connected(address, work)


def shared(address: str, work: Callable[[Client], Awaitable[R]]) -> R:
    """Run `work` on an event loop with a `penstock.Client`, and return its result."""

    async def run() -> R:
        async with Client(address) as client:
            await client.send("warm/up")
            return await work(client)

    return uvloop.run(run())


def send_singly(number: int, begin_s: float, address: str, first_level: str, count: int, tasks: int) -> Span:
    """Send `count` messages with all clients together, each with a call of `Client.send`, which returns when it is durable."""

    async def work(client: Client) -> Span:
        own = share(count, number)
        left = iter(range(own))

        async def sender() -> None:
            for at in left:
                await client.send(f"{first_level}/t{at % TOPICS}", BODY)

        await _until(begin_s)
        began_s = time.monotonic()
        await asyncio.gather(*(sender() for _ in range(share(tasks, number))))
        return Span(own, began_s, time.monotonic())

    return shared(address, work)


def pop_with_client(number: int, begin_s: float, address: str, group: str, filter: str, batch: int, consumers: int) -> Span:
    """Do the same as `pop_and_ack` with `penstock.Client`."""

    async def work(client: Client) -> Span:
        done = Span(0, begin_s, begin_s)

        async def consume() -> None:
            nonlocal done
            handles: list[str] = []
            while True:
                messages = await client.pop(filter, group=group, messages_max=batch, invisible=3_600.0, acks=handles)
                if messages.refused:
                    raise RuntimeError(f"An ack failed: {next(iter(messages.refused.values()))}")
                done = Span(done.messages + len(handles), begin_s, time.monotonic() if handles else done.ended_s)
                if not messages:
                    return
                handles = [message.handle for message in messages]

        await _until(begin_s)
        await asyncio.gather(*(consume() for _ in range(share(consumers, number))))
        return done

    return shared(address, work)


def work(number: int, begin_s: float, address: str, group: str, filter: str, batch: int, count: int) -> Span:
    """Handle `count` messages with one `penstock.Worker` of 32 handlers that do nothing, `batch` a call; 0 for one message."""
    if number:
        return Span(0, begin_s, begin_s)  # One process works.
    worker = Worker(address)
    handled, ended_s = 0, begin_s

    async def one(body: bytes) -> None:
        nonlocal handled, ended_s
        handled += 1
        if handled == count:
            ended_s = time.monotonic()
            worker.stop()

    async def many(bodies: list[bytes]) -> None:
        nonlocal handled, ended_s
        handled += len(bodies)
        if handled >= count:
            ended_s = time.monotonic()
            worker.stop()

    worker.consumer(filter, group=group, concurrency=32, batch=batch)(many if batch else one)

    async def run() -> None:
        spare_collector()  # as `penstock worker` does
        await _until(begin_s)
        await worker.run(handle_signals=False)

    uvloop.run(run())
    return Span(handled, begin_s, ended_s)


def create_in_order(address: str, group: str) -> None:
    """Create a group in FIFO order on the topic of its name."""

    async def creating(stubs: Stubs) -> None:
        settings = pb.GroupSettings(fifo=True)
        await stubs.groups.CreateGroup(pb.CreateGroupRequest(group=group, filter=group, settings=settings))

    connected(address, creating)


def send_in_order(address: str, topic: str, count: int, batch: int) -> None:
    """Send messages of one message group to one topic."""

    async def sending(stubs: Stubs) -> None:
        message = pb.Message(topic=topic, body=BODY, message_group="one")
        for at in range(0, count, batch):
            request = pb.SendRequest(messages=[message] * min(batch, count - at))
            check([result.status for result in (await stubs.pop.Send(request)).results])

    connected(address, sending)


def drain_in_order(number: int, begin_s: float, address: str, group: str, topic: str, batch: int) -> Span:
    """Pop all messages of one message group with one consumer, `batch` a call, which acknowledges the batch before."""

    async def draining(stubs: Stubs) -> Span:
        if number:
            return Span(0, begin_s, begin_s)
        request = pb.PopRequest(group=group, filter=topic, messages_max=batch, in_order_max=batch, invisible_ms=3_600_000)
        done, ended_s = 0, begin_s
        await _until(begin_s)
        while True:
            answer = await stubs.pop.Pop(request)
            check(answer.ack_statuses)
            done += len(request.acks)
            if request.acks:
                ended_s = time.monotonic()
            if not answer.messages:
                return Span(done, begin_s, ended_s)
            request.acks[:] = [message.handle for message in answer.messages]

    return connected(address, draining)


def consume(number: int, begin_s: float, address: str, group: str, filter: str, batch: int, streams: int) -> Span:
    """Consume all messages with streams, `batch` a response, and acknowledge each response as it arrives."""

    async def work(stubs: Stubs) -> Span:
        opening = pb.ConsumeOpen(group=group, filter=filter, credits=CREDITS, batch_max=batch)
        done = Span(0, begin_s, begin_s)
        heard_s = begin_s
        calls: list[Any] = []

        async def take() -> None:
            nonlocal done, heard_s
            call: Any = stubs.pop.Consume()  # type: ignore[call-arg]  # without an iterator, requests are written
            calls.append(call)
            await call.write(pb.ConsumeRequest(open=opening))
            acked = 0
            while (answer := await call.read()) is not grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs of grpcio lack it
                heard_s = time.monotonic()
                if answer.refused:
                    raise RuntimeError(f"An ack failed: {answer.refused[0]}")
                if answer.messages:
                    await call.write(pb.ConsumeRequest(acks=[message.handle for message in answer.messages]))
                if answer.acked > acked:
                    done = Span(done.messages + answer.acked - acked, begin_s, time.monotonic())
                    acked = answer.acked

        async def end_when_quiet() -> None:
            while (left_s := heard_s + QUIET_S - time.monotonic()) > 0:  # noqa: ASYNC110  # a quiet stream sets no event
                await asyncio.sleep(left_s)
            for call in calls:
                await call.done_writing()

        await _until(begin_s)
        await asyncio.gather(end_when_quiet(), *(take() for _ in range(share(streams, number))))
        return done

    return connected(address, work)


# --- Redis ------------------------------------------------------------------------------------------------------------


def _redis(address: str) -> Any:
    import redis

    host, _, port = address.rpartition(":")
    return redis.Redis(host=host, port=int(port))


def redis_send(number: int, begin_s: float, address: str, stream: str, batch: int, count: int) -> Span:
    """Send messages with XADD, one pipeline a batch."""
    own = share(count, number)
    with _redis(address) as client:
        client.ping()
        time.sleep(max(begin_s - time.monotonic(), 0))
        began_s = time.monotonic()
        for at in range(0, own, batch):
            pipeline = client.pipeline(transaction=False)
            for _ in range(min(batch, own - at)):
                pipeline.xadd(stream, {"b": BODY})
            pipeline.execute()
        return Span(own, began_s, time.monotonic())


def redis_drain(number: int, begin_s: float, address: str, stream: str, batch: int) -> Span:
    """Drain with XREADGROUP and XACK. The XACK of a batch shares a round trip with the next XREADGROUP."""
    group, consumer, count, ended_s = "bench", f"client{number}", 0, begin_s
    with _redis(address) as client:
        client.ping()
        time.sleep(max(begin_s - time.monotonic(), 0))
        ids: list[bytes] = []
        while True:
            pipeline = client.pipeline(transaction=False)
            if ids:
                pipeline.xack(stream, group, *ids)
            pipeline.xreadgroup(group, consumer, {stream: ">"}, count=batch)
            answers = pipeline.execute()
            if ids:
                count, ended_s = count + len(ids), time.monotonic()
            # RESP2 answers with a list of [stream, entries], RESP3 with a dict of stream to [entries].
            read = answers[-1]
            entries = [] if not read else read[0][1] if isinstance(read, list) else next(iter(read.values()))[0]
            if not entries:
                return Span(count, begin_s, ended_s)
            ids = [entry[0] for entry in entries]


def redis_work(number: int, begin_s: float, address: str, stream: str, batch: int) -> Span:
    """Drain with one process. `batch` is how many messages it takes and acknowledges a round trip."""
    return Span(0, begin_s, begin_s) if number else redis_drain(number, begin_s, address, stream, batch)


def redis_group(address: str, stream: str) -> None:
    """Create the group that `redis_drain` uses."""
    with _redis(address) as client:
        client.xgroup_create(stream, "bench", id="0", mkstream=True)


# --- NATS -------------------------------------------------------------------------------------------------------------


def _with_jetstream(address: str, work: Callable[[Any], Awaitable[R]]) -> R:
    """Run `work` on an event loop with JetStream, and return its result."""

    async def run() -> R:
        import nats

        connection = await nats.connect(f"nats://{address}")
        try:
            return await work(connection.jetstream())
        finally:
            await connection.flush()
            await connection.close()

    return uvloop.run(run())


def nats_fill(address: str, stream: str, batch: int, count: int) -> None:
    """Create a stream with `count` messages, of which `batch` are under way at a time."""

    async def filling(jetstream: Any) -> None:
        await jetstream.add_stream(name=stream, subjects=[stream])
        for at in range(0, count, batch):
            await asyncio.gather(*(jetstream.publish(stream, BODY) for _ in range(min(batch, count - at))))

    _with_jetstream(address, filling)


def nats_work(number: int, begin_s: float, address: str, stream: str, batch: int) -> Span:
    """Drain with one pull consumer in one process. It does not wait for the answers to its acknowledgements."""

    async def working(jetstream: Any) -> Span:
        puller = await jetstream.pull_subscribe(stream, durable="bench")
        count, ended_s = 0, begin_s
        await _until(begin_s)
        while True:
            try:
                messages = await puller.fetch(batch, timeout=QUIET_S)
            except TimeoutError:  # of nats or of asyncio: which one depends on what has arrived by then
                return Span(count, begin_s, ended_s)
            for message in messages:
                await message.ack()
            count, ended_s = count + len(messages), time.monotonic()

    return Span(0, begin_s, begin_s) if number else _with_jetstream(address, working)


# --- beanstalkd -------------------------------------------------------------------------------------------------------


@contextmanager
def _beanstalk(address: str, tube: str) -> Generator[tuple[socket.socket, Any]]:
    """Connect, and use and watch only one tube."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as answers:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"use %b\r\nwatch %b\r\nignore default\r\n" % (tube.encode(), tube.encode()))
        for _ in range(3):
            answers.readline()
        yield connection, answers


def beanstalk_send(number: int, begin_s: float, address: str, tube: str, batch: int, count: int) -> Span:
    """Put jobs, one write a batch."""
    own = share(count, number)
    put = b"put 0 0 3600 %d\r\n%b\r\n" % (len(BODY), BODY)
    with _beanstalk(address, tube) as (connection, answers):
        time.sleep(max(begin_s - time.monotonic(), 0))
        began_s = time.monotonic()
        for at in range(0, own, batch):
            jobs = min(batch, own - at)
            connection.sendall(put * jobs)
            for answer in (answers.readline() for _ in range(jobs)):
                if not answer.startswith(b"INSERTED"):
                    raise RuntimeError(f"beanstalkd answered {answer!r} to put")
        return Span(own, began_s, time.monotonic())


def beanstalk_drain(number: int, begin_s: float, address: str, tube: str, batch: int) -> Span:
    """Reserve and delete jobs. The deletions of a batch share a write with the next reservations."""
    reserve = b"reserve-with-timeout 0\r\n" * batch
    count, ended_s = 0, begin_s
    with _beanstalk(address, tube) as (connection, answers):
        time.sleep(max(begin_s - time.monotonic(), 0))
        ids: list[bytes] = []
        while True:
            connection.sendall(b"".join(chain((b"delete %b\r\n" % each for each in ids), (reserve,))))
            for answer in (answers.readline() for _ in ids):
                if answer != b"DELETED\r\n":
                    raise RuntimeError(f"beanstalkd answered {answer!r} to delete")
            if ids:
                count, ended_s = count + len(ids), time.monotonic()
            ids = []
            for answer in (answers.readline() for _ in range(batch)):
                word, *fields = answer.split()
                if word == b"RESERVED":
                    ids.append(fields[0])
                    answers.read(int(fields[1]) + 2)
            if not ids:
                return Span(count, begin_s, ended_s)


# --- one message at a time --------------------------------------------------------------------------------------------


class Publisher:
    """An MQTT 3.1.1 client that publishes with QoS 1, one message at a time. `connect` creates it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int) -> Publisher:
        publisher = cls(*await asyncio.open_connection(host, port))
        publisher._writer.write(b"\x10\x11\x00\x04MQTT\x04\x02\x00\x3c\x00\x05bench")
        answer = await publisher._reader.readexactly(4)
        if answer != b"\x20\x02\x00\x00":
            raise RuntimeError(f"The node answered CONNECT with {answer!r}.")
        return publisher

    async def publish(self, topic: bytes, body: bytes) -> None:
        """Publish a message of at most 100 bytes in all, and return when its PUBACK arrives."""
        packet = b"\x32%c\x00%c%b\x00\x01%b" % (4 + len(topic) + len(body), len(topic), topic, body)
        self._writer.write(packet)
        answer = await self._reader.readexactly(4)
        if answer != b"\x40\x02\x00\x01":
            raise RuntimeError(f"The node answered PUBLISH with {answer!r}.")

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
