"""The clients of `bench.pop`: jobs that run in processes of their own, for Penstock, Redis and beanstalkd.

Each job takes its number among the processes, the instant at which all begin (`time.monotonic`, the same clock in all of
them) and the broker's address; by that instant it is connected and has made what it will send. It returns what it did, and
when. Whoever takes messages off ends with the last of them, not when it finds that no more come.

The native stubs are used bare for large batches, where the rates with `penstock.Client` are lower by what its conveniences
cost; for small ones it is that client. The others are driven as fast as a client of theirs in Python goes: redis-py with
hiredis, a batch a round trip; beanstalkd with its commands written a batch at a time. Penstock and Redis get the
acknowledgements of a batch with the request for the next one.
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

from penstock import Client
from penstock.pop.proto import pop_pb2 as pb
from penstock.pop.proto.pop_pb2_grpc import GroupServiceStub, PopServiceStub

if TYPE_CHECKING:
    from penstock.pop.proto.pop_pb2_grpc import GroupServiceAsyncStub, PopServiceAsyncStub

PROCESSES = 2
BEGIN_AFTER_S = 0.5
"""Seconds that clients have for connecting, and for making what they send. Who is late counts as if it had begun then."""

BODY = b"x" * 64
TOPICS = 16
QUIET_S = 0.5
"""A stream on which nothing came for so long has had everything."""

CREDITS = 16_384
"""Messages that may be out on a stream. A message is out for two syncs, that of its delivery and that of its ack: a stream
brings no more than its credits in that time. This is the most that a node grants."""

CHANNEL_OPTIONS = [("grpc.max_receive_message_length", -1)]


class Span(NamedTuple):
    """What one client did."""

    messages: int
    began_s: float
    ended_s: float


class Tick(NamedTuple):
    """Messages that were durable at an instant."""

    at_s: float
    messages: int


def rate_of(spans: Sequence[Span]) -> float:
    """Return messages per second of all clients together: from the first one's beginning to the last one's end."""
    return sum(span.messages for span in spans) / (max(span.ended_s for span in spans) - min(span.began_s for span in spans))


P = ParamSpec("P")
R = TypeVar("R")


class Clients:
    """The client processes. They live as long as the benchmark, since Python takes a second to start."""

    def __init__(self, begin_after_s: float = BEGIN_AFTER_S) -> None:
        self._begin_after_s = begin_after_s
        self._pool = ProcessPoolExecutor(PROCESSES, mp_context=multiprocessing.get_context("spawn"))
        self.run(_nothing)

    def run(self, job: Callable[Concatenate[int, float, P], R], *arguments: P.args, **named: P.kwargs) -> list[R]:
        """Run a job in each process at once; return what each returned."""
        begin_s = time.monotonic() + self._begin_after_s
        running = [self._pool.submit(job, number, begin_s, *arguments, **named) for number in range(PROCESSES)]
        return [each.result() for each in running]

    def close(self) -> None:
        self._pool.shutdown()


def _nothing(number: int, begin_s: float) -> None:
    """Keep a process busy until the other has started, too."""
    time.sleep(max(begin_s - time.monotonic(), 0))


def share(total: int, number: int) -> int:
    """Return how many of `total` things the process of this number has."""
    return total // PROCESSES + (number < total % PROCESSES)


def check(statuses: Sequence[pb.Status]) -> None:
    """Raises RuntimeError where the node refused one of a batch."""
    for status in statuses:
        if status.code:
            raise RuntimeError(f"the node refused one of a batch: {pb.Code.Name(status.code)}, {status.detail}")


# --- Penstock ---------------------------------------------------------------------------------------------------------


class Stubs:
    """The node's services, of one channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.pop: PopServiceAsyncStub = PopServiceStub(channel)
        self.groups: GroupServiceAsyncStub = GroupServiceStub(channel)


def connected(address: str, work: Callable[[Stubs], Awaitable[R]]) -> R:
    """Run `work` on an event loop with a channel to the node; return what it returns."""

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
    """Send `count` messages among all clients, `batch` a call, `parallel` calls at a time."""

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
    """Send from now on until an instant, and return when each batch was durable."""

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
    """Pop what is there, `batch` a call, until nothing is left; the call that pops a batch acknowledges the one before."""

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
    """Run `work` on an event loop with the client that users have; return what it returns."""

    async def run() -> R:
        async with Client(address) as client:
            await client.send("warm/up")
            return await work(client)

    return uvloop.run(run())


def send_singly(number: int, begin_s: float, address: str, first_level: str, count: int, tasks: int) -> Span:
    """Send `count` messages among all clients, each with a call of `Client.send` that returns when it is durable."""

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
    """As `pop_and_ack`, with the client that users have."""

    async def work(client: Client) -> Span:
        done = Span(0, begin_s, begin_s)

        async def consume() -> None:
            nonlocal done
            handles: list[str] = []
            while True:
                messages = await client.pop(filter, group=group, messages_max=batch, invisible_ms=3_600_000, acks=handles)
                if messages.refused:
                    raise RuntimeError(f"an ack failed: {next(iter(messages.refused.values()))}")
                done = Span(done.messages + len(handles), begin_s, time.monotonic() if handles else done.ended_s)
                if not messages:
                    return
                handles = [message.handle for message in messages]

        await _until(begin_s)
        await asyncio.gather(*(consume() for _ in range(share(consumers, number))))
        return done

    return shared(address, work)


def consume(number: int, begin_s: float, address: str, group: str, filter: str, batch: int, streams: int) -> Span:
    """Take all messages from streams, `batch` a response, and acknowledge each response as it comes."""

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
                    raise RuntimeError(f"an ack failed: {answer.refused[0]}")
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
    """XADD, a batch a pipeline."""
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
    """XREADGROUP and XACK, each batch's XACK in one round trip with the next XREADGROUP."""
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


def redis_group(address: str, stream: str) -> None:
    """Make the group that `redis_drain` reads with."""
    with _redis(address) as client:
        client.xgroup_create(stream, "bench", id="0", mkstream=True)


# --- beanstalkd -------------------------------------------------------------------------------------------------------


@contextmanager
def _beanstalk(address: str, tube: str) -> Generator[tuple[socket.socket, Any]]:
    """Connect, and use one tube alone, which `beanstalk_send` and `beanstalk_drain` do."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as connection, connection.makefile("rb") as answers:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"use %b\r\nwatch %b\r\nignore default\r\n" % (tube.encode(), tube.encode()))
        for _ in range(3):
            answers.readline()
        yield connection, answers


def beanstalk_send(number: int, begin_s: float, address: str, tube: str, batch: int, count: int) -> Span:
    """Put jobs, a batch a write."""
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
    """Reserve and delete jobs, the deletions of a batch in one write with the next reservations."""
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
    """An MQTT 3.1.1 client that publishes with QoS 1, one message at a time. `connect` makes it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def connect(cls, host: str, port: int) -> Publisher:
        publisher = cls(*await asyncio.open_connection(host, port))
        publisher._writer.write(b"\x10\x11\x00\x04MQTT\x04\x02\x00\x3c\x00\x05bench")
        answer = await publisher._reader.readexactly(4)
        if answer != b"\x20\x02\x00\x00":
            raise RuntimeError(f"the node answered {answer!r} to CONNECT")
        return publisher

    async def publish(self, topic: bytes, body: bytes) -> None:
        """Publish a message of at most 100 bytes in all; return with its PUBACK."""
        packet = b"\x32%c\x00%c%b\x00\x01%b" % (4 + len(topic) + len(body), len(topic), topic, body)
        self._writer.write(packet)
        answer = await self._reader.readexactly(4)
        if answer != b"\x40\x02\x00\x01":
            raise RuntimeError(f"the node answered {answer!r} to PUBLISH")

    async def close(self) -> None:
        self._writer.close()
        await self._writer.wait_closed()
