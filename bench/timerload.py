"""What `bench.timer` does to brokers: it reads delayed messages as they come, and publishes others meanwhile.

The body of a delayed message names its due time, and the reader searches what it receives for these bodies. So one reader keeps
up with any broker, whatever its protocol, and takes little of the processors that it shares with the broker.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.rows import RowFailed

BODY = b"due=%013d"
"""The body of a delayed message: its due time in ms since 1970."""

_FOUND = re.compile(rb"due=(\d{13})")
_TAIL = len(BODY % 0) - 1
"""Bytes of a body that may be at the end of what was received when its last byte is not there yet."""

READ_BYTES = 1 << 20
LATE_S_MAX = 60.0
"""Seconds without a message after which the reader gives up."""

PUBLISHERS = 10
PERIOD_S = 0.02
"""Each of the other publishers sends one message and waits for its acknowledgement, and sends the next one after this time."""


NUMBER = b"NUMBER"


@dataclass(frozen=True, slots=True)
class Talk:
    """What a connection to a broker says first.

    Parameters:
        hello: is sent first.
        welcome: the broker's answer to it ends with this.
    """

    hello: bytes
    welcome: bytes


@dataclass(frozen=True, slots=True)
class Chat:
    """How another publisher talks to a broker.

    Parameters:
        talk: begins the connection.
        message: is sent again and again.
        answer: the acknowledgement ends with this.
    """

    talk: Talk
    message: bytes
    answer: bytes

    def of(self, number: int) -> Chat:
        """Return how one of several publishers talks: `NUMBER` is replaced by its number."""
        own = b"%d" % number
        talk = Talk(self.talk.hello.replace(NUMBER, own), self.talk.welcome)
        return Chat(talk, self.message.replace(NUMBER, own), self.answer)


@dataclass(slots=True)
class Deliveries:
    """Delayed messages that have come."""

    late_ms: list[int]
    """How many messages came so many ms late, by ms."""
    arrivals: list[tuple[float, int]]
    """How many messages had come so many seconds after the first one was due."""

    @property
    def seconds(self) -> float:
        """When the last message had come, in seconds after the first one was due."""
        return self.arrivals[-1][0]

    def late_ms_of(self, share: float) -> int:
        """Return how late a share of the messages was at most, such as 0.99 of them."""
        counts = np.cumsum(self.late_ms)
        return int(counts.searchsorted(share * counts[-1]))


class Arrivals:
    """Adds up deliveries.

    Parameters:
        first_ms: when the first one is due, in ms since 1970.
    """

    def __init__(self, first_ms: int) -> None:
        self._first_ms = first_ms
        self._late_ms = np.zeros(1, dtype=np.int64)
        self._arrivals: list[tuple[float, int]] = []
        self.count = 0

    def add(self, dues_ms: list[int]) -> None:
        """Note that messages have come now."""
        now_ms = time.time() * 1000
        late = np.maximum(now_ms - np.array(dues_ms), 0).astype(np.int64)
        counts = np.bincount(late, minlength=len(self._late_ms))
        counts[: len(self._late_ms)] += self._late_ms
        self._late_ms = counts
        self.count += len(dues_ms)
        at_s = (now_ms - self._first_ms) / 1000
        if self._arrivals and at_s - self._arrivals[-1][0] < 0.01:  # a point for each 10 ms is enough for a plot
            self._arrivals.pop()
        self._arrivals.append((at_s, self.count))

    def found(self) -> Deliveries:
        return Deliveries(self._late_ms.tolist(), self._arrivals)


def read_due(host: str, port: int, talk: Talk, first_ms: int, count: int, is_read: Path) -> Deliveries:
    """Read delayed messages until `count` have come, or the broker closes the connection.

    Args:
        host, port: of the broker.
        talk: asks for the messages.
        first_ms: when the first one is due.
        count: of the messages.
        is_read: is made when the broker has answered.

    Raises:
        RowFailed: no more come.
    """
    arrivals = Arrivals(first_ms)
    with closing(socket.create_connection((host, port))) as connection:
        connection.sendall(talk.hello)
        received = b""
        while talk.welcome not in received:
            received += _receive(connection, arrivals, count)
        connection.settimeout(max(first_ms / 1000 - time.time(), 0) + LATE_S_MAX)
        is_read.touch()
        received = received.rpartition(talk.welcome)[2]
        while arrivals.count < count:
            received += _receive(connection, arrivals, count)
            if b"PING\r\n" in received:
                connection.sendall(b"PONG\r\n")  # nats-server asks for it
            dues = _FOUND.findall(received)
            if dues:
                arrivals.add(list(map(int, dues)))
                connection.settimeout(LATE_S_MAX)
            read = received.rfind(dues[-1]) + len(dues[-1]) if dues else 0
            received = received[max(read, len(received) - _TAIL) :]
    return arrivals.found()


def _receive(connection: socket.socket, arrivals: Arrivals, count: int) -> bytes:
    try:
        received = connection.recv(READ_BYTES)
    except TimeoutError:
        received = b""
    if not received:
        raise RowFailed(f"{arrivals.count:,} of {count:,} messages came, and then no more.")
    return received


# --- other publishers -------------------------------------------------------------------------------------------------


def publish_steadily(host: str, port: int, chat: Chat, until: Path) -> list[tuple[float, float]]:
    """Publish from several connections until a file exists; return when each was sent (s since 1970), and ms to its answer."""
    return asyncio.run(_publish_all(host, port, chat, until.exists))


async def _publish_all(host: str, port: int, chat: Chat, is_done: Callable[[], bool]) -> list[tuple[float, float]]:
    found: list[tuple[float, float]] = []

    async def publisher(number: int) -> None:
        own = chat.of(number)
        reader, writer = await asyncio.open_connection(host, port)
        writer.write(own.talk.hello)
        await reader.readuntil(own.talk.welcome)
        await asyncio.sleep(PERIOD_S * number / PUBLISHERS)
        while not is_done():
            sent_s = time.time()
            writer.write(own.message)
            await reader.readuntil(own.answer)
            found.append((sent_s, (time.time() - sent_s) * 1000))
            await asyncio.sleep(max(sent_s + PERIOD_S - time.time(), 0))
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()

    await asyncio.gather(*map(publisher, range(PUBLISHERS)))
    return found


# --- MQTT -------------------------------------------------------------------------------------------------------------


def mqtt_reader(topic_filter: bytes) -> Talk:
    """Return what a subscriber says that gets messages at QoS 0."""
    subscribe = b"\0\1" + len(topic_filter).to_bytes(2) + topic_filter + b"\0"
    return Talk(_CONNECT + b"\x82" + bytes((len(subscribe),)) + subscribe, b"\x90\3\0\1\0")


def mqtt_publisher(topic: bytes) -> Chat:
    """Return how a client publishes at QoS 1."""
    publish = len(topic).to_bytes(2) + topic + b"\0\1" + bytes(64)
    return Chat(Talk(_CONNECT, b"\x20\2\0\0"), b"\x32" + bytes((len(publish),)) + publish, b"\x40\2\0\1")


_CONNECT = b"\x10\x0c\0\4MQTT\4\2\0\0\0\0"
"""A clean session without a keep alive, under a client id that the server chooses."""


# --- the due times of a rate ------------------------------------------------------------------------------------------


def dues_at(first_ms: int, per_s: int, count: int) -> Iterator[int]:
    """Yield due times so that so many messages are due in each second."""
    for number in range(count):
        yield first_ms + number * 1000 // per_s
