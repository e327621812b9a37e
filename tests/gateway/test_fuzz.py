"""Whatever bytes come, the node lives, closes who sent them, and serves the others."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
import uvloop
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.gateway import packet_cases_5
from tests.gateway.packet_cases import INVALID, VALID, connect, field, packet
from tests.gateway.test_connection import pass_time
from tests.gateway.wire import CLEAN, Broker, Client, Message, until

SECONDS_MAX = 10.0
"""How long each search goes on at most. Hypothesis has no such bound: after that, examples end at once."""

PACKETS = [case.data for case in VALID] + [case.data for case in INVALID]
PACKETS += [case.data for case in packet_cases_5.VALID] + [case.data for case in packet_cases_5.INVALID]
HELLO = connect(CLEAN, b"fuzz")
HELLO_5 = packet_cases_5.connect_5(CLEAN, b"fuzz")
both_versions = pytest.mark.parametrize("head", [HELLO, HELLO_5], ids=["3.1.1", "5.0"])


class Target:
    """A node that lives as long as the test, and a client that behaves."""

    def __init__(self, data_dir: Path) -> None:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self.run = self._runner.run
        self.failures: list[object] = []
        self._runner.get_loop().set_exception_handler(lambda _, context: self.failures.append(context))
        self._until_s = time.monotonic() + SECONDS_MAX
        self.broker, self.good = self.run(self._start(data_dir))

    async def _start(self, data_dir: Path) -> tuple[Broker, Client]:
        broker = await Broker(data_dir, {"queues_max": 2000}).start()
        good = await broker.connect("good")
        await good.subscribe(("good/#", 1))
        return broker, good

    def attack(self, pieces: list[bytes]) -> None:
        """Send bytes over a connection of their own, piece by piece; then the client that behaves must be served."""
        if time.monotonic() < self._until_s:
            self.run(self._attack(pieces))
        assert self.failures == []

    async def _attack(self, pieces: list[bytes]) -> None:
        bad = await self.broker.dial()
        try:
            for piece in pieces:
                await bad.send(piece)
                await asyncio.sleep(0)
        except ConnectionError:
            pass  # the node has closed it already, as it should
        await self.good.publish("good/x", b"y", 1)
        assert await self.good.message() == Message("good/x", b"y", 1)
        bad.reset()
        self.broker.clients.remove(bad)

    def stop(self) -> None:
        """Stop the node; nothing of those who attacked it may be left."""
        self.run(self._stop())
        self._runner.close()
        assert self.failures == []

    async def _stop(self) -> None:
        gateway = self.broker.node.gateway
        await until(lambda: len(gateway.connections) == 1)
        self.good.reset()
        await until(lambda: not gateway.connections)
        pass_time(gateway, gateway.options.session_expiry_s_max + 1)  # some of those packets ask for sessions that last
        await until(lambda: not gateway.lifetimes.sessions)
        self.broker.node.store.commit()
        assert set(self.broker.held_resources().values()) == {0}
        await self.broker.stop()


@contextmanager
def attacked(data_dir: Path) -> Iterator[Target]:
    target = Target(data_dir)
    try:
        yield target
    finally:
        target.stop()


def cut(data: bytes, at: list[int]) -> list[bytes]:
    """Cut bytes at some places; the places are taken modulo their length."""
    places = sorted({0, len(data), *(place % (len(data) + 1) for place in at)})
    return [data[start:stop] for start, stop in pairwise(places)]


def search(strategy: st.SearchStrategy[bytes], attack: Callable[[list[bytes]], None], examples: int) -> None:
    @settings(max_examples=examples, database=None, suppress_health_check=list(HealthCheck))
    @given(strategy, st.lists(st.integers(0, 10_000), max_size=4))
    def run(data: bytes, places: list[int]) -> None:
        attack(cut(data, places))

    run()


def mutated() -> st.SearchStrategy[bytes]:
    """Streams of packets of which some bytes were changed, removed or put in."""
    change = st.tuples(st.sampled_from("scid"), st.integers(0, 5000), st.integers(0, 255))

    def apply(packets: list[bytes], changes: list[tuple[str, int, int]]) -> bytes:
        data = bytearray(b"".join(packets))
        for what, place, value in changes:
            at = place % (len(data) + 1)
            if what == "i":
                data.insert(at, value)
            elif what == "d":
                del data[at : at + 1 + value % 8]
            elif at < len(data):
                data[at] = value if what == "s" else data[at] ^ 1 << value % 8
        return bytes(data)

    return st.builds(apply, st.lists(st.sampled_from(PACKETS), max_size=8), st.lists(change, max_size=5))


def fields() -> st.SearchStrategy[bytes]:
    """Packets whose framing holds and whose contents are anything."""
    body = st.binary(max_size=40) | st.builds(
        lambda name, rest: field(name) + rest, st.binary(max_size=20), st.binary(max_size=20)
    )
    return st.lists(st.builds(packet, st.integers(0, 255), body), max_size=10).map(b"".join)


@pytest.mark.parametrize("head", [b"", HELLO, HELLO_5], ids=["before the CONNECT", "after it", "after it in 5.0"])
def test_random_bytes_disturb_nobody(tmp_path: Path, head: bytes) -> None:
    with attacked(tmp_path) as target:
        search(st.binary(max_size=300).map(head.__add__), target.attack, 150)


@both_versions
def test_streams_that_were_damaged_disturb_nobody(tmp_path: Path, head: bytes) -> None:
    with attacked(tmp_path) as target:
        search(mutated().map(head.__add__), target.attack, 400)


@both_versions
def test_packets_of_any_content_disturb_nobody(tmp_path: Path, head: bytes) -> None:
    with attacked(tmp_path) as target:
        search(fields().map(head.__add__), target.attack, 300)


def test_many_bad_clients_at_once_disturb_nobody(tmp_path: Path) -> None:
    """Streams of all known packets in random order, from dozens of connections that go on side by side."""
    chance = random.Random(20_240_229)

    async def storm(target: Target) -> None:
        async def bad(number: int) -> None:
            client = await target.broker.dial()
            hello = packet_cases_5.connect_5 if number % 2 else connect
            stream = hello(CLEAN, b"fuzz-%d" % (number % 7)) + b"".join(chance.choices(PACKETS, k=20))
            try:
                for piece in cut(stream, [chance.randrange(10_000) for _ in range(5)]):
                    await client.send(piece)
                    await asyncio.sleep(0)
            except ConnectionError:
                pass  # closed for what it sent
            client.reset()

        for _ in range(5):
            await asyncio.gather(*(bad(number) for number in range(40)))
            await target.good.publish("good/x", b"y", 2)
            while (await target.good.message()).topic != "good/x":
                pass

    with attacked(tmp_path) as target:
        target.run(storm(target))
