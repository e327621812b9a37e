"""The process in front of the gRPC listener, for TLS and plain text on one port.

It accepts connections, looks at the first byte of each, and forwards all bytes to one of two Unix sockets of the node: `tls` if
the client begins a TLS handshake, `plain` otherwise. `pop.front` starts it and explains why. The process ends, and deletes the
directory of the sockets, when the node has ended, which it learns from the control socket. A byte on that socket means that it
must accept no more connections. It ignores SIGINT, SIGTERM and SIGHUP, because an operator may send those to all processes of
the node while the node still answers calls.

It imports nothing of Penstock, so that it starts quickly and takes little memory.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress

HANDSHAKE_BYTE = b"\x16"
"""First byte of a TLS handshake (RFC 8446, 5.1). HTTP/2 begins with the letter P."""

IPV4_MAPPED = "::ffff:"
"""Prefix of an IPv4 address on a socket that accepts both kinds."""

CHUNK_BYTES = 256 * 1024
"""Maximum number of bytes that are read at once, and that wait in one direction of a connection."""

ACCEPTED_MAX = 64
"""Maximum number of connections accepted in a row."""

PAUSE_S = 0.1
"""How long the process accepts nothing when it has no descriptor left."""

READ, WRITE = select.EPOLLIN, select.EPOLLOUT


class Half:
    """One socket of a forwarded connection. `other` is the socket to which the bytes that arrive here go."""

    __slots__ = ("end", "ended", "events", "other", "waiting")

    def __init__(self, end: socket.socket) -> None:
        self.end = end
        self.other: Half | None = None
        self.waiting = b""
        """Bytes that could not be written to this socket yet. While there are any, `other` is not read."""
        self.ended = False
        """Whether the peer of this socket sends nothing more."""
        self.events = 0


class Forwarder:
    """Accepts and forwards connections until the node has ended."""

    def __init__(
        self, listener: socket.socket, control: socket.socket, directory: str, token: str, connections_max: int, idle_s: float
    ) -> None:
        self._listener, self._control = listener, control
        self._directory, self._token = directory, token
        self._connections_max, self._idle_s = connections_max, idle_s
        self._poll = select.epoll()
        self._halves: dict[int, Half] = {}
        self._silent: dict[int, float] = {}
        """When each connection that has sent nothing is closed, by descriptor, the earliest first."""
        self._connections = 0
        self._resumes_s = 0.0

    def run(self) -> None:
        listener, control = self._listener.fileno(), self._control.fileno()
        self._listener.setblocking(False)
        self._poll.register(listener, READ)
        self._poll.register(control, READ)
        while True:
            for descriptor, events in self._poll.poll(self._wait_s()):
                if descriptor == listener:
                    self._accept()
                elif descriptor == control:
                    if not self._control.recv(1):
                        return
                    self._poll.unregister(listener)
                    self._listener.close()
                elif (half := self._halves.get(descriptor)) is not None:
                    self._serve(half, events)
            self._close_silent()

    def _wait_s(self) -> float:
        """Return how long to wait for events; -1 for as long as it takes."""
        waits = [next(iter(self._silent.values()))] if self._silent else []
        if self._resumes_s:
            waits.append(self._resumes_s)
        return max(min(waits) - time.monotonic(), 0) + 0.001 if waits else -1

    def _close_silent(self) -> None:
        now_s = time.monotonic()
        while self._silent:
            descriptor, ends_s = next(iter(self._silent.items()))
            if ends_s > now_s:
                break
            self._close(self._halves[descriptor])
        if 0 < self._resumes_s <= now_s:
            self._resumes_s = 0.0
            self._poll.modify(self._listener, READ)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_MAX):
            try:
                end, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:  # There is no descriptor, or no memory, left.
                self._poll.modify(self._listener, 0)
                self._resumes_s = time.monotonic() + PAUSE_S
                return
            if self._connections >= self._connections_max:
                end.close()
                continue
            end.setblocking(False)
            with suppress(OSError):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self._connections += 1
            half = self._halves[end.fileno()] = Half(end)
            self._silent[end.fileno()] = time.monotonic() + self._idle_s
            self._watch(half, READ)

    def _connect(self, half: Half, first: bytes) -> bool:
        """Connect a new connection to the node, by what its first byte says. Return whether that worked."""
        inner = socket.socket(socket.AF_UNIX)
        inner.setblocking(False)
        try:
            host, port = half.end.getpeername()[:2]
            address = f"{host.removeprefix(IPV4_MAPPED)}:{port}"
            inner.bind(f"\0penstock-{self._token}:{address}")  # The node reads the address of the client there.
            inner.connect(os.path.join(self._directory, "tls" if first == HANDSHAKE_BYTE else "plain"))
        except OSError:
            inner.close()
            return False
        del self._silent[half.end.fileno()]
        other = self._halves[inner.fileno()] = Half(inner)
        half.other, other.other = other, half
        self._watch(other, READ)
        return True

    def _serve(self, half: Half, events: int) -> None:
        try:
            if half.other is None:
                first = half.end.recv(1, socket.MSG_PEEK)
                if not first or not self._connect(half, first):
                    self._close(half)
                    return
            other = half.other
            assert other is not None
            if events & WRITE:
                half.waiting = half.waiting[half.end.send(half.waiting) :]
                if not half.waiting:
                    self._settle(half, other)
            if events & ~WRITE and not half.ended and not other.waiting:
                data = half.end.recv(CHUNK_BYTES)
                if data:
                    sent = 0
                    with suppress(BlockingIOError):
                        sent = other.end.send(data)
                    if sent < len(data):
                        other.waiting = data[sent:]
                else:
                    half.ended = True
                if other.waiting or half.ended:
                    self._settle(other, half)
            if half.ended and other.ended and not half.waiting and not other.waiting:
                self._close(half)
        except BlockingIOError:
            return
        except OSError:
            self._close(half)

    def _settle(self, written: Half, read: Half) -> None:
        """Watch what the two sockets wait for now, one of which is written what the other one reads."""
        if read.ended and not written.waiting:
            with suppress(OSError):
                written.end.shutdown(socket.SHUT_WR)
        for each, other in ((written, read), (read, written)):
            wanted = (WRITE if each.waiting else 0) | (READ if not other.waiting and not each.ended else 0)
            self._watch(each, wanted)

    def _watch(self, half: Half, events: int) -> None:
        if events == half.events:
            return
        if not half.events:
            self._poll.register(half.end, events)
        elif events:
            self._poll.modify(half.end, events)
        else:  # A socket without wishes would still report that its peer has gone.
            self._poll.unregister(half.end)
        half.events = events

    def _close(self, half: Half) -> None:
        """Close a connection and its socket to the node."""
        self._connections -= 1
        self._silent.pop(half.end.fileno(), None)
        for each in (half, half.other):
            if each is not None:
                self._watch(each, 0)
                del self._halves[each.end.fileno()]
                each.end.close()


def main(listener: str, control: str, directory: str, token: str, connections_max: str, idle_s: str) -> None:
    """Serve one node until it has ended."""
    forwarder = Forwarder(
        socket.socket(fileno=int(listener)),
        socket.socket(fileno=int(control)),
        directory,
        token,
        int(connections_max),
        float(idle_s),
    )
    with suppress(ConnectionError):  # the node was killed
        forwarder.run()
    shutil.rmtree(directory, ignore_errors=True)  # not after a defect: the node starts the process again


if __name__ == "__main__":
    for asked in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(asked, signal.SIG_IGN)
    main(*sys.argv[1:])
