"""Lingering sockets: the server has sent its last byte on them, and their clients have not closed their side yet.

When a socket is closed that has unread bytes, or gets bytes afterwards, the kernel sends a reset (RFC 9293, 3.6.1). A reset
destroys what is still on its way to the client, for example deliveries and the DISCONNECT that says why. So the server shuts
down its sending side only, and reads and discards until the client closes too. Time, bytes and the number of sockets are
bounded. The connection itself has ended by then: nothing of it is held but the socket.
"""

from __future__ import annotations

import asyncio
import select
import socket
import sys
from contextlib import suppress
from typing import Final

from penstock.store.options import KIB, MIB

LINGER_S: Final = 5.0
"""Seconds that a client has to close its side of a connection that the server has ended. A client that reads closes within a
round trip. The kernel repeats a lost packet several times within this time."""

DISCARDED_BYTES_MAX: Final = 8 * MIB
"""Maximum number of bytes that the server reads and discards from one socket. This is more than the kernel buffers on its way
(`net.ipv4.tcp_rmem`), so a client that stops when it is told has sent fewer."""

LINGERING_MAX: Final = 1024
"""Maximum number of lingering sockets. A further one closes the oldest."""

READ_BYTES: Final = 256 * KIB
"""Maximum number of bytes that the server discards of one socket in a turn of the loop."""

UNCOPIED: Final = getattr(socket, "MSG_TRUNC", 0) if sys.platform == "linux" else 0
"""Lets Linux discard what TCP has received without copying it, tcp(7). Elsewhere, the buffer takes it."""

READY_MAX: Final = 32
"""Maximum number of lingering sockets handled in a turn of the loop."""


class _Lingerer:
    """One lingering socket, until when it may linger, and how many bytes were discarded."""

    __slots__ = ("discarded_bytes", "end", "until_s")

    def __init__(self, end: socket.socket, until_s: float) -> None:
        self.end = end
        self.until_s = until_s
        self.discarded_bytes = 0


class Lingering:
    """The lingering sockets of a node.

    Parameters:
        loop: the event loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll()
        self._lingerers: dict[int, _Lingerer] = {}
        """The sockets by descriptor. The one that has lingered longest comes first."""
        self._buffer = bytearray(READ_BYTES)
        self._timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None
        self.cut_short = 0
        """Number of sockets that were closed before their clients had closed, because a bound was reached."""
        loop.add_reader(self._epoll.fileno(), self._discard)

    def __len__(self) -> int:
        return len(self._lingerers)

    def add(self, end: socket.socket) -> None:
        """Take over a non-blocking socket on which everything was sent: tell the client so, and close once it has closed."""
        try:
            end.shutdown(socket.SHUT_WR)
            if not end.recv_into(self._buffer, 0, UNCOPIED):
                end.close()
                return
        except BlockingIOError:
            pass
        except OSError:  # The client has gone.
            end.close()
            return
        if len(self._lingerers) >= LINGERING_MAX:
            self.shed()
        number = end.fileno()
        self._lingerers[number] = _Lingerer(end, self._loop.time() + LINGER_S)
        self._epoll.register(number, select.EPOLLIN)
        if self._timer is None:
            self._timer = self._loop.call_later(LINGER_S, self._expire)

    def shed(self) -> bool:
        """Close the socket that has lingered longest, to make room; return whether there is one."""
        for number in self._lingerers:
            self._close(number, is_cut_short=True)
            return True
        return False

    def close(self) -> None:
        """Close all sockets, and take no further one."""
        while self.shed():
            pass
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    async def wait_closed(self, timeout_s: float) -> None:
        """Return when no socket lingers, or after `timeout_s` seconds."""
        if self._lingerers:
            self._emptied = self._loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._emptied

    def _discard(self) -> None:
        for number, _ in self._epoll.poll(0, READY_MAX):
            lingerer = self._lingerers[number]
            try:
                received = lingerer.end.recv_into(self._buffer, 0, UNCOPIED)
            except (BlockingIOError, InterruptedError):
                continue
            except OSError:  # The client has gone.
                received = 0
            lingerer.discarded_bytes += received
            if not received:
                self._close(number)
            elif lingerer.discarded_bytes > DISCARDED_BYTES_MAX:
                self._close(number, is_cut_short=True)

    def _expire(self) -> None:
        """Close the sockets whose time is over."""
        self._timer = None
        now_s = self._loop.time()
        for number, lingerer in tuple(self._lingerers.items()):
            if lingerer.until_s > now_s:
                self._timer = self._loop.call_at(lingerer.until_s, self._expire)
                break
            self._close(number, is_cut_short=True)

    def _close(self, number: int, *, is_cut_short: bool = False) -> None:
        lingerer = self._lingerers.pop(number)
        self._epoll.unregister(number)
        lingerer.end.close()
        self.cut_short += is_cut_short
        if not self._lingerers:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            if self._emptied is not None and not self._emptied.done():
                self._emptied.set_result(None)
