"""The transport of one stream socket without TLS."""

from __future__ import annotations

import asyncio
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.store.options import KIB

if TYPE_CHECKING:
    from penstock.gateway.transport.sockets import Sockets

READ_BYTES: Final = 256 * KIB
"""The maximum number of bytes read from one socket in a turn."""

READ_BYTES_MIN: Final = 16 * KIB
"""The least number of bytes to which `SocketTransport.limit_reads` reduces `READ_BYTES`."""

SENT_AT_ONCE_MAX: Final = 64
"""The maximum number of pieces given to the kernel with one call. Every system accepts at least 16; Linux accepts 1,024."""

_READ: Final = getattr(select, "EPOLLIN", 0)
_WRITE: Final = getattr(select, "EPOLLOUT", 0)


PIECE_OVERHEAD_BYTES: Final = 256
"""Memory that a piece which waits for room in the kernel takes besides its bytes. Many small answers are mostly this."""


class SocketTransport(asyncio.Transport):
    """The transport of one socket. Written bytes go out at once, or wait in memory for room in the kernel."""

    __slots__ = (
        "_end",
        "_has_ended",
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
        """The maximum number of bytes read in a turn."""
        self._send = end.send
        self._unsent: list[memoryview] = []
        self._unsent_bytes = 0
        self.reads = True
        self._has_ended = False
        """The other end sends nothing more."""
        self._is_closing = False
        self._is_lost = False
        self._is_full = False
        self._watched = 0
        self._high, self._low = 64 * KIB, 16 * KIB

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._end if name == "socket" else default

    def begin(self, buffer: memoryview) -> None:
        """Give the protocol the bytes that came before it existed."""

    # --- reading ----------------------------------------------------------------------------------------------------

    def is_reading(self) -> bool:
        return self.reads

    def limit_reads(self, size: int) -> None:
        """Read at most about `size` bytes in a turn, from the next turn on. Bounds: `READ_BYTES_MIN` and `READ_BYTES`."""
        self.read_bytes = min(max(size, READ_BYTES_MIN), READ_BYTES)

    def pause_reading(self) -> None:
        self.reads = False
        self.watch()

    def resume_reading(self) -> None:
        self.reads = not self._is_closing
        self.watch()

    def watch(self) -> None:
        """Update the events for which the socket is watched."""
        events = 0 if self._is_lost else _READ * self.reads | _WRITE * bool(self._unsent)
        if events != self._watched:
            self._sockets.watch(self._number, events, self._watched)
            self._watched = events

    def end_of_stream(self) -> None:
        """Handle that the other end sends nothing more."""
        self._has_ended = True
        self.pause_reading()
        if not self._is_closing and not self._protocol.eof_received():
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
        if self._unsent_bytes + PIECE_OVERHEAD_BYTES * len(self._unsent) > self._high and not self._is_full:
            self._is_full = True
            self._protocol.pause_writing()

    def send_unsent(self) -> None:
        """Send waiting bytes, as many as the kernel has room for."""
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
                self._leave()
                return
        if self._is_full and self._unsent_bytes + PIECE_OVERHEAD_BYTES * len(unsent) <= self._low:
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
        """Send what was written, then close. What the other end sends from now on is discarded."""
        if self._is_closing:
            return
        self._is_closing = True
        if not self._unsent:
            self._leave()
            return
        # The other end may not read before it has sent everything, so the server discards that while it sends.
        self.receive_into = self._end.recv_into
        self.data_received = _discard
        self.reads = not self._has_ended
        self.watch()

    def abort(self) -> None:
        """Close without sending what was written. The kernel may tell the other end with a reset."""
        self.lose(None)

    def break_off(self, error: Exception) -> None:
        """End the connection because its protocol raised an error. This is a defect; other connections go on."""
        context = {"message": "A protocol raised an error.", "exception": error, "transport": self, "protocol": self._protocol}
        self._loop.call_exception_handler(context)
        self.lose(error)

    def lose(self, error: Exception | None) -> None:
        """Close the socket at once, and tell the protocol in the next turn of the loop."""
        if self._is_lost:
            return
        self._release()
        self._end.close()
        self._loop.call_soon(self._protocol.connection_lost, error)

    def _leave(self) -> None:
        """End a connection on which everything was sent, and tell the protocol in the next turn of the loop."""
        if self._has_ended:
            self.lose(None)
            return
        self._release()
        self._sockets.linger(self._end)
        self._loop.call_soon(self._protocol.connection_lost, None)

    def _release(self) -> None:
        """Have nothing more to do with the socket."""
        self._is_lost = self._is_closing = True
        self.reads = False
        self._unsent.clear()
        self._unsent_bytes = 0
        self.watch()
        self._sockets.forget(self._number)


def _discard(data: bytes) -> None:
    """Receive data of a connection that the server is closing."""
