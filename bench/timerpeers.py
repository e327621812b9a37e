"""Delayed messages of other brokers, for `bench.timer`: a sorted set of Redis with a poller, and the schedules of nats-server.

Redis holds messages in a sorted set, and a poller moves those that are due to a list, a thousand at a time, as schedulers on
Redis do. It looks every 10 ms for messages that are due, where others look every second. A message has come when it is in the
list. Redis syncs its file once a second.

nats-server holds each delayed message under a subject of its own, and publishes it to another one when it is due
(`Nats-Schedule: @at ...`, since 2.12). It syncs every two minutes. The benchmark speaks its protocol itself: a client of Python
would be slower than the server.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, closing
from datetime import UTC, datetime
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import orjson

from bench.peers import BrokerProcess, NotInstalled, memory_of, nats_server, path_of, paths_of, redis_server
from bench.rows import Figures, RowFailed
from bench.timerload import BODY, NUMBER, Arrivals, Chat, Deliveries, Talk, read_due

REDIS, NATS = "Redis", "nats-server"

BATCH = 256
POLLED = 1_000
"""Messages that the poller of Redis moves at once."""
POLL_S = 0.01

NATS_VERSION_MIN = (2, 12)
"""Since this version nats-server has schedules."""

READY_S_MAX = 120.0


class Peer(Protocol):
    """A broker that holds delayed messages. Its methods but `run` are called in other processes."""

    def run(self, data_dir: Path) -> AbstractContextManager[BrokerProcess]:
        """Run it. It may be killed."""
        ...

    def find(self) -> None:
        """Raise NotInstalled if it is missing."""
        ...

    def wait_ready(self, address: str) -> None:
        """Return when it answers, after a start with messages."""
        ...

    def delay(self, address: str, dues_ms: list[int]) -> float:
        """Delay a message for each due time. Return the seconds that it took until all were acknowledged."""
        ...

    def cancel(self, address: str, numbers: list[int]) -> float:
        """Cancel messages, by their index among the delayed ones. Return the seconds that it took."""
        ...

    def read(self, address: str, first_ms: int, count: int, is_read: Path) -> Deliveries:
        """Wait until so many messages have come; make a file as `read_due` does."""
        ...

    def publisher(self) -> Chat:
        """Return how other publishers publish messages that are not delayed."""
        ...

    def address_of(self, process: BrokerProcess) -> str:
        """Return where these methods find it."""
        ...


def pending(peer: Peer, data_dir: Path, dues_ms: list[int], in_process: Callable[..., Any]) -> Figures:
    """Delay messages, kill the broker, and start it again. `in_process` calls a function in another process."""
    with peer.run(data_dir) as process:
        before = memory_of(process.pid).anonymous
        seconds = in_process(peer.delay, peer.address_of(process), dues_ms)
        memory = memory_of(process.pid).anonymous - before
        os.kill(process.pid, signal.SIGKILL)
    disk = sum(path.stat().st_size for path in data_dir.rglob("*") if path.is_file())
    began = time.perf_counter()
    with peer.run(data_dir) as process:
        in_process(peer.wait_ready, peer.address_of(process))
        start = time.perf_counter() - began
    count = len(dues_ms)
    return {"rate": count / seconds, "memory_each": memory * 1024 / count, "disk_each": disk / count, "start": start}


def _batches(dues_ms: Iterable[int]) -> Iterator[list[int]]:
    rest = iter(dues_ms)
    while batch := list(islice(rest, BATCH)):
        yield batch


# --- Redis ------------------------------------------------------------------------------------------------------------


class RedisTimers:
    """A sorted set of Redis with a poller."""

    def run(self, data_dir: Path) -> AbstractContextManager[BrokerProcess]:
        return redis_server(data_dir)

    def find(self) -> None:
        path_of("redis-server")
        if find_spec("redis") is None or find_spec("hiredis") is None:
            raise NotInstalled("Its client is not installed (pip install 'redis[hiredis]').")

    def address_of(self, process: BrokerProcess) -> str:
        return f"{process.host}:{process.port}"

    def wait_ready(self, address: str) -> None:
        import redis  # it need not be installed

        client, end_s = _redis(address), time.monotonic() + READY_S_MAX
        while True:
            try:
                client.zcard("delayed")
            except redis.BusyLoadingError:
                if time.monotonic() > end_s:
                    raise RowFailed(f"Redis was not ready within {READY_S_MAX:.0f} s.") from None
                time.sleep(0.01)
            else:
                return

    def delay(self, address: str, dues_ms: list[int]) -> float:
        client, number = _redis(address), 0
        began = time.perf_counter()
        for batch in _batches(dues_ms):
            client.zadd("delayed", {_member(number + at, due_ms): due_ms for at, due_ms in enumerate(batch)})
            number += len(batch)
        return time.perf_counter() - began

    def cancel(self, address: str, numbers: list[int]) -> float:
        client = _redis(address)
        members = [client.zrange("delayed", number, number)[0] for number in numbers]
        began = time.perf_counter()
        for start in range(0, len(members), BATCH):
            with client.pipeline(transaction=False) as pipeline:
                for member in members[start : start + BATCH]:
                    pipeline.zrem("delayed", member)
                pipeline.execute()
        return time.perf_counter() - began

    def read(self, address: str, first_ms: int, count: int, is_read: Path) -> Deliveries:
        client, arrivals = _redis(address), Arrivals(first_ms)
        is_read.touch()
        while arrivals.count < count:
            due = client.zrangebyscore("delayed", 0, int(time.time() * 1000), 0, POLLED, withscores=True)
            if due:
                with client.pipeline() as pipeline:
                    members = [member for member, _ in due]
                    pipeline.zrem("delayed", *members)
                    pipeline.rpush("fired", *members)
                    pipeline.execute()
                arrivals.add([int(score) for _, score in due])
            else:
                time.sleep(POLL_S)
        return arrivals.found()

    def publisher(self) -> Chat:
        message = b"*3\r\n$5\r\nRPUSH\r\n$5\r\nother\r\n$64\r\n" + bytes(64) + b"\r\n"
        return Chat(Talk(b"PING\r\n", b"+PONG\r\n"), message, b"\r\n")


def _redis(address: str) -> Any:
    import redis

    host, _, port = address.rpartition(":")
    return redis.Redis(host, int(port))


def _member(number: int, due_ms: int) -> bytes:
    return b"%016d " % number + BODY % due_ms


# --- nats-server ------------------------------------------------------------------------------------------------------

STREAM = "bench"


class NatsTimers:
    """The message schedules of nats-server."""

    def run(self, data_dir: Path) -> AbstractContextManager[BrokerProcess]:
        return nats_server(data_dir, _nats_program())

    def find(self) -> None:
        _nats_program()

    def address_of(self, process: BrokerProcess) -> str:
        return process.addresses["nats"]

    def wait_ready(self, address: str) -> None:
        with closing(_Nats(address)) as client:
            client.request("STREAM.INFO." + STREAM, {})

    def delay(self, address: str, dues_ms: list[int]) -> float:
        with closing(_Nats(address)) as client:
            stream = {"name": STREAM, "subjects": ["delayed.*", "fired.*"], "storage": "file", "allow_msg_schedules": True}
            client.request("STREAM.CREATE." + STREAM, {**stream, "allow_msg_ttl": True})
            number = 0
            began = time.perf_counter()
            for batch in _batches(dues_ms):
                client.ask([_scheduled(number + at, due_ms) for at, due_ms in enumerate(batch)])
                number += len(batch)
            return time.perf_counter() - began

    def cancel(self, address: str, numbers: list[int]) -> float:
        with closing(_Nats(address)) as client:
            began = time.perf_counter()
            for start in range(0, len(numbers), BATCH):
                client.ask(
                    [
                        _published(f"$JS.API.STREAM.MSG.DELETE.{STREAM}", b'{"seq":%d,"no_erase":true}' % (number + 1))
                        for number in numbers[start : start + BATCH]
                    ]
                )
            return time.perf_counter() - began

    def read(self, address: str, first_ms: int, count: int, is_read: Path) -> Deliveries:
        with closing(_Nats(address)) as client:
            consumer = {
                "deliver_subject": "arrived",
                "ack_policy": "none",
                "filter_subject": "fired.*",
                "deliver_policy": "all",
            }
            client.request(f"CONSUMER.CREATE.{STREAM}", {"stream_name": STREAM, "config": consumer})
        host, _, port = address.rpartition(":")
        talk = Talk(_HELLO + b"SUB arrived 1\r\nPING\r\n", b"PONG\r\n")
        return read_due(host, int(port), talk, first_ms, count, is_read)

    def publisher(self) -> Chat:
        answers = b"publisher." + NUMBER
        talk = Talk(_HELLO + b"SUB %b 1\r\nPING\r\n" % answers, b"PONG\r\n")
        return Chat(talk, _published("fired.other", bytes(64), answers), b"}\r\n")


def _nats_program() -> str:
    """Return the path of a nats-server that has schedules."""
    found = ""
    for path in paths_of(NATS):
        version = subprocess.run([path, "--version"], capture_output=True, text=True, check=True, timeout=30).stdout
        numbers = re.search(r"(\d+)\.(\d+)", version)
        if numbers is not None and tuple(map(int, numbers.groups())) >= NATS_VERSION_MIN:
            return path
        found = f"{version.strip()} has no schedules. "
    raise NotInstalled(f"{found}Install one that has: go install github.com/nats-io/nats-server/v2@latest")


_HELLO = b'CONNECT {"verbose":false,"headers":true,"lang":"bench","version":"1"}\r\n'


class _Nats:
    """A connection to nats-server that awaits the answers of a batch together."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._connection = socket.create_connection((host, int(port)), READY_S_MAX)
        self._connection.sendall(_HELLO + b"SUB %b 1\r\nPING\r\n" % ANSWERS)
        self._received = b""
        self._await(b"PONG\r\n", 1)

    def close(self) -> None:
        self._connection.close()

    def ask(self, messages: list[bytes]) -> None:
        """Send messages, and wait for an answer to each. Raises RowFailed if one is an error."""
        self._connection.sendall(b"".join(messages))
        answers = self._await(b"}\r\n", len(messages))
        if b'"error"' in answers:
            refusal = answers[answers.index(b'"error"') :][:200]
            raise RowFailed(f"nats-server refused a request: {refusal!r}")

    def request(self, api: str, about: dict[str, object]) -> None:
        """Send a request of JetStream's API, and wait for the answer."""
        self.ask([_published(f"$JS.API.{api}", orjson.dumps(about))])

    def _await(self, end: bytes, count: int) -> bytes:
        """Return what is received until `end` has come so often."""
        parts: list[bytes] = []
        seen, tail = 0, b""
        while seen < count:
            part = self._connection.recv(1 << 20)
            if not part:
                raise RowFailed("nats-server has closed the connection.")
            if b"PING\r\n" in part:
                self._connection.sendall(b"PONG\r\n")
            seen += (tail + part).count(end)
            tail = part[-len(end) + 1 :]
            parts.append(part)
        return b"".join(parts)


ANSWERS = b"answers"
"""Subject of the answers to the one client that delays or cancels messages at a time."""


def _published(subject: str, body: bytes, answers: bytes = ANSWERS) -> bytes:
    return b"PUB %b %b %d\r\n%b\r\n" % (subject.encode(), answers, len(body), body)


def _scheduled(number: int, due_ms: int) -> bytes:
    at = datetime.fromtimestamp(due_ms / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    head = f"NATS/1.0\r\nNats-Schedule: @at {at}\r\nNats-Schedule-Target: fired.{number % 1_000}\r\n\r\n".encode()
    body = BODY % due_ms
    return b"HPUB delayed.%d %b %d %d\r\n%b%b\r\n" % (number, ANSWERS, len(head), len(head) + len(body), head, body)


PEERS: dict[str, Peer] = {REDIS: RedisTimers(), NATS: NatsTimers()}
