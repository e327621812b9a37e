"""Two connections that are one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine

import pytest
import uvloop

from penstock.cluster.splice import WAITING_BYTES_MAX, End, splice
from penstock.store.options import MIB
from tests.waiting import until

RUNS = [pytest.param(asyncio.run, id="asyncio"), pytest.param(uvloop.run, id="uvloop")]
Run = Callable[[Coroutine[None, None, None]], None]


async def halves() -> tuple[socket.socket, socket.socket, list[str]]:
    """Return the outer ends of two spliced connections, and a list that tells of their ends."""
    loop, lost = asyncio.get_running_loop(), list[str]()
    outer, ends = [], []
    for name in ("left", "right"):
        mine, theirs = socket.socketpair()
        mine.setblocking(False)
        end = End(lambda name=name: lost.append(name))  # type: ignore[misc]
        await loop.create_unix_connection(lambda end=end: end, sock=theirs)  # type: ignore[misc]
        outer.append(mine)
        ends.append(end)
    splice(*ends)
    return outer[0], outer[1], lost


@pytest.mark.parametrize("run", RUNS)
def test_bytes_pass_both_ways_and_an_end_passes_too(run: Run) -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        left, right, lost = await halves()
        with left, right:
            await loop.sock_sendall(left, b"question")
            assert await loop.sock_recv(right, 100) == b"question"
            left.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(right, 100) == b""
            await loop.sock_sendall(right, b"answer")
            assert await loop.sock_recv(left, 100) == b"answer", "one side may still speak when the other one has ended"
            right.shutdown(socket.SHUT_WR)
            assert await loop.sock_recv(left, 100) == b""
            await until(lambda: sorted(lost) == ["left", "right"])

    run(check())


@pytest.mark.parametrize("run", RUNS)
def test_who_does_not_read_makes_the_other_side_wait(run: Run) -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        left, right, lost = await halves()
        with left, right:
            data = bytes(range(256)) * 64 * 1024  # 16 MiB
            sending = loop.create_task(loop.sock_sendall(left, data))
            done, _ = await asyncio.wait([sending], timeout=0.3)
            assert not done, f"at most {WAITING_BYTES_MAX} bytes wait, and what the kernel keeps"
            got = bytearray()
            while len(got) < len(data):
                got += await loop.sock_recv(right, MIB)
            await sending
            assert got == data
            assert not lost

    run(check())


@pytest.mark.parametrize("run", RUNS)
def test_what_was_sent_before_the_end_arrives(run: Run) -> None:
    async def check() -> None:
        loop = asyncio.get_running_loop()
        left, right, lost = await halves()
        with right:
            await loop.sock_sendall(left, b"x" * 100_000)
            left.close()
            got = bytearray()
            while data := await loop.sock_recv(right, MIB):
                got += data
            assert len(got) == 100_000
        await until(lambda: sorted(lost) == ["left", "right"])

    run(check())


@pytest.mark.parametrize("run", RUNS)
def test_who_never_reads_is_given_up_after_the_other_side_has_gone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.cluster.splice.LINGER_S", 0.1)

    async def check() -> None:
        loop = asyncio.get_running_loop()
        left, right, lost = await halves()
        with right:
            sending = loop.create_task(loop.sock_sendall(left, b"x" * 4 * MIB))
            await asyncio.wait([sending], timeout=0.2)
            sending.cancel()
            await asyncio.wait([sending])
            left.close()
            # What the kernel still has of the left side is read only when the right side takes it, or is given up.
            got = bytearray()
            while data := await loop.sock_recv(right, MIB):
                got += data
        await until(lambda: sorted(lost) == ["left", "right"])

    run(check())
