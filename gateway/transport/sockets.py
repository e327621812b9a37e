"""Stream sockets: all that can be read in a turn of the loop is read in one loop, and what follows is shared.

The sockets are in one epoll, whose descriptor is a reader of the event loop like any other. A message that comes alone in its
read costs little more than its system calls then: a loop that calls each connection from outside takes as long again. Where
there is no epoll (not Linux) the loop's own transports serve.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

from penstock.gateway.transport.tls import Tls
from penstock.store.options import KIB

READ_BYTES: Final = 256 * KIB
"""Bytes read of one socket in a turn, at most."""

READ_BYTES_MIN: Final = 16 * KIB
"""The least that `SocketTransport.limit_reads` leaves of it."""

READY_MAX: Final = 256
"""Sockets handled in a turn, at most. The others come in the next one."""

TLS_READ_BYTES: Final = READ_BYTES - 32 * KIB
"""Bytes of TLS read of one socket in a turn, at most: the buffer has to hold what was left of a record besides."""

TLS_DUE_BYTES_MAX: Final = 16 * KIB
"""Bytes of answers that TLS itself gives (to a change of keys) which may wait for a client that doesn't read."""

LOOK_EACH: Final = 16
"""Sockets after which the course of a turn is interrupted for what else has come. A hundred clients with twenty messages each
get a tenth more through than if their acks waited for the turn's end (measured)."""

SENT_AT_ONCE_MAX: Final = 64
"""Pieces given to the kernel with one call. No system takes fewer than 16; Linux takes 1,024."""

HAS_TURNS: Final = hasattr(select, "epoll")
"""Whether this system has what `Sockets` needs."""

_READ: Final = getattr(select, "EPOLLIN", 0)
_WRITE: Final = getattr(select, "EPOLLOUT", 0)


class Sockets:
    """The sockets of a node that are read in turns.

    Parameters:
        loop: what turns.
        look: called in the course of a turn, each time when some of what came was given to the protocols.
        end_turn: called when all of it was.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, look: Callable[[], None], end_turn: Callable[[], None]) -> None:
        self._loop = loop
        self._look = look
        self._end_turn = end_turn
        self._epoll = select.epoll()
        self._transports: dict[int, SocketTransport] = {}
        self._buffer = memoryview(bytearray(READ_BYTES))
        loop.add_reader(self._epoll.fileno(), self._turn)

    def add(self, end: socket.socket, protocol: asyncio.Protocol, tls: Tls | None = None) -> None:
        """Begin with a socket that is connected and doesn't block. Calls `connection_made` at once.

        The protocol gets what any protocol of asyncio gets, and `data_received` at most once in a turn. With `tls`, whose
        handshake is done, it gets what that decrypts.

        Raises:
            OSError: the other end has gone, or the system can't watch so many. The caller closes the socket.
        """
        transport = (
            SocketTransport(self._loop, self, end, protocol)
            if tls is None
            else TlsTransport(self._loop, self, end, protocol, tls)
        )
        transport.watch()
        self._transports[end.fileno()] = transport
        protocol.connection_made(transport)
        transport.begin(self._buffer)

    def close(self) -> None:
        """End. The connections have to be closed before."""
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def watch(self, number: int, events: int, before: int) -> None:
        """Let a socket, by its descriptor, be watched for `events` in place of those before; for none it isn't in the epoll."""
        if not before:
            self._epoll.register(number, events)
        elif events:
            self._epoll.modify(number, events)
        else:
            self._epoll.unregister(number)

    def forget(self, number: int) -> None:
        """Forget a socket that is to be closed and isn't watched any more."""
        del self._transports[number]

    def _turn(self) -> None:
        try:
            self._read()
        finally:
            self._end_turn()

    def _read(self) -> None:
        buffer, transports = self._buffer, self._transports
        for at, (number, events) in enumerate(self._epoll.poll(0, READY_MAX), 1):
            if not at % LOOK_EACH:
                self._look()
            transport = transports.get(number)
            if transport is None:  # one handled before it in this turn has ended it
                continue
            try:
                if events != _READ:
                    transport.send_unsent()
                if not transport.reads:
                    continue
                try:
                    received = transport.receive_into(buffer, transport.read_bytes)
                except (BlockingIOError, InterruptedError):
                    continue
                except OSError as error:
                    transport.lose(error)
                    continue
                if received:
                    transport.data_received(buffer[:received].tobytes())
                else:
                    transport.end_of_stream()
            except Exception as error:
                transport.break_off(error)


class SocketTransport(asyncio.Transport):
    """The transport of one socket in `Sockets`. What is written goes out at once, or waits in memory for room in the kernel."""

    __slots__ = (
        "_end",
        "_high",
        "_is_closing",
        "_is_full",
        "_is_lost",
        "_loop",
        "_low",
        "_number",
        "_protocol",
        "_send",
        "_sockets",
        "_unsent",
        "_unsent_bytes",
        "_watched",
        "data_received",
        "read_bytes",
        "reads",
        "receive_into",
    )

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sockets: Sockets, end: socket.socket, protocol: asyncio.Protocol
    ) -> None:
        super().__init__()
        self._loop = loop
        self._sockets = sockets
        self._end = end
        self._number = end.fileno()
        self._protocol = protocol
        self.data_received = protocol.data_received
        self.receive_into: Callable[[memoryview, int], int] = end.recv_into
        self.read_bytes = READ_BYTES
        """Bytes that are read in a turn, at most."""
        self._send = end.send
        self._unsent: list[memoryview] = []
        self._unsent_bytes = 0
        self.reads = True
        self._is_closing = False
        self._is_lost = False
        self._is_full = False
        self._watched = 0
        self._high, self._low = 64 * KIB, 16 * KIB

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._end if name == "socket" else default

    def begin(self, buffer: memoryview) -> None:
        """Give the protocol what came before it was there."""

    # --- reading ----------------------------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return self.reads

    def limit_reads(self, size: int) -> None:
        """Read about `size` bytes in a turn at most, from the next one on; within `READ_BYTES_MIN` and `READ_BYTES`."""
        self.read_bytes = min(max(size, READ_BYTES_MIN), READ_BYTES)

    def pause_reading(self) -> None:
        self.reads = False
        self.watch()

    def resume_reading(self) -> None:
        self.reads = not self._is_closing
        self.watch()

    def watch(self) -> None:
        """Have the epoll look at what there is to wait for."""
        events = 0 if self._is_lost else _READ * self.reads | _WRITE * bool(self._unsent)
        if events != self._watched:
            self._sockets.watch(self._number, events, self._watched)
            self._watched = events

    def end_of_stream(self) -> None:
        """The other end has sent all that it will."""
        self.pause_reading()
        if not self._protocol.eof_received():
            self.close()

    # --- writing ----------------------------------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._unsent or self._is_lost:
            if not self._is_lost:
                self._keep(memoryview(data))
            return
        try:
            sent = self._send(data)
        except (BlockingIOError, InterruptedError):
            sent = 0
        except OSError as error:
            self.lose(error)
            return
        if sent < len(data):
            self._keep(memoryview(data)[sent:])

    def _keep(self, data: memoryview) -> None:
        self._unsent.append(data)
        self._unsent_bytes += len(data)
        if len(self._unsent) == 1:
            self.watch()
        if self._unsent_bytes > self._high and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def send_unsent(self) -> None:
        """Send what waits for room in the kernel, as far as that has any."""
        unsent = self._unsent
        if not unsent:
            return
        try:
            sent = self._end.sendmsg(unsent[:SENT_AT_ONCE_MAX])
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self.lose(error)
            return
        self._unsent_bytes -= sent
        whole = 0
        while whole < len(unsent) and sent >= len(unsent[whole]):
            sent -= len(unsent[whole])
            whole += 1
        del unsent[:whole]
        if sent:
            unsent[0] = unsent[0][sent:]
        if not unsent:
            self.watch()
            if self._is_closing:
                self.lose(None)
                return
        if self._is_full and self._unsent_bytes <= self._low:
            self._is_full = False
            self._protocol.resume_writing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 * KIB if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    # --- the end ----------------------------------------------------------------------------------------------------

    def is_closing(self) -> bool:
        return self._is_closing

    def close(self) -> None:
        """Read nothing more, send what was written, and close."""
        if self._is_closing:
            return
        self._is_closing = True
        self.pause_reading()
        if not self._unsent:
            self.lose(None)

    def abort(self) -> None:
        self.lose(None)

    def break_off(self, error: Exception) -> None:
        """End since the protocol has failed. That is a defect, and must not end the others' turn."""
        context = {"message": "a protocol has failed", "exception": error, "transport": self, "protocol": self._protocol}
        self._loop.call_exception_handler(context)
        self.lose(error)

    def lose(self, error: Exception | None) -> None:
        """Close the socket, and tell the protocol in the next turn."""
        if self._is_lost:
            return
        self._is_lost = self._is_closing = True
        self.reads = False
        self._unsent.clear()
        self._unsent_bytes = 0
        self.watch()
        self._sockets.forget(self._number)
        self._end.close()
        self._loop.call_soon(self._protocol.connection_lost, error)


class TlsTransport(SocketTransport):
    """The transport of one socket that speaks TLS. What waits in memory is encrypted already."""

    __slots__ = ("_due_bytes", "_tls")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sockets: Sockets, end: socket.socket, protocol: asyncio.Protocol, tls: Tls
    ) -> None:
        super().__init__(loop, sockets, end, protocol)
        self._tls = tls
        self._due_bytes = 0
        """Answers of TLS itself that wait for room in the kernel."""
        self.receive_into = self._receive_into

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.ssl_object if name == "ssl_object" else super().get_extra_info(name, default)

    def begin(self, buffer: memoryview) -> None:
        if not self._tls.waiting:  # what came with the end of the handshake
            return
        try:
            if received := self._decrypt(b"", buffer):
                self.data_received(buffer[:received].tobytes())
            elif self._tls.has_ended:
                self.end_of_stream()
        except ssl.SSLError as error:
            self.lose(error)
        except Exception as error:
            self.break_off(error)

    def _receive_into(self, buffer: memoryview, size: int) -> int:
        received = self._end.recv_into(buffer, min(size, TLS_READ_BYTES))
        if not received:
            return 0
        found = self._decrypt(buffer[:received], buffer)
        if not found and not self._tls.has_ended:
            raise BlockingIOError  # a part of a record
        return found

    def _decrypt(self, data: memoryview | bytes, buffer: memoryview) -> int:
        tls = self._tls
        found = tls.decrypt(data, buffer)
        if due := tls.due():
            super().write(due)
            self._due_bytes = self._due_bytes + len(due) if self._unsent else 0
            if self._due_bytes > TLS_DUE_BYTES_MAX:
                raise ssl.SSLError("the client has TLS answer, and takes no answers")
        if tls.has_ended and found:
            self._loop.call_soon(self._end_late)
        return found

    def _end_late(self) -> None:
        if not self._is_closing:
            self.end_of_stream()

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:  # it has said that nothing more comes
            return
        try:
            encrypted = self._tls.encrypt(data)
        except ssl.SSLError as error:
            self.lose(error)
            return
        super().write(encrypted)

    def close(self) -> None:
        if not self._is_closing:
            super().write(self._tls.end())
        super().close()

    def lose(self, error: Exception | None) -> None:
        super().lose(error)
        self.receive_into = self._end.recv_into  # no circle: what TLS holds, tens of KB, goes with the connection
