"""The transport of one stream socket with TLS."""

from __future__ import annotations

import asyncio
import socket
import ssl
from typing import TYPE_CHECKING, Any, Final

from penstock.gateway.transport.socket_transport import READ_BYTES, SocketTransport
from penstock.gateway.transport.tls import Tls
from penstock.store.options import KIB

if TYPE_CHECKING:
    from penstock.gateway.transport.sockets import Sockets

TLS_READ_BYTES: Final = READ_BYTES - 32 * KIB
"""The maximum number of TLS bytes read from one socket in a turn. The buffer also has to hold the rest of an earlier record."""

TLS_DUE_BYTES_MAX: Final = 16 * KIB
"""The maximum number of bytes that TLS itself may owe a client that doesn't read, for example answers to changes of keys."""


class TlsTransport(SocketTransport):
    """The transport of one socket with TLS. Bytes that wait in memory are encrypted already."""

    __slots__ = ("_due_bytes", "_tls")

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sockets: Sockets, end: socket.socket, protocol: asyncio.Protocol, tls: Tls
    ) -> None:
        super().__init__(loop, sockets, end, protocol)
        self._tls = tls
        self._due_bytes = 0
        """Bytes of TLS's own answers that wait for room in the kernel."""
        self.receive_into = self._receive_into

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._tls.ssl_object if name == "ssl_object" else super().get_extra_info(name, default)

    def begin(self, buffer: memoryview) -> None:
        if not self._tls.waiting:  # Bytes may have come with the end of the handshake.
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
            raise BlockingIOError  # Only a part of a record has come.
        return found

    def _decrypt(self, data: memoryview | bytes, buffer: memoryview) -> int:
        tls = self._tls
        found = tls.decrypt(data, buffer)
        if due := tls.due():
            super().write(due)
            self._due_bytes = self._due_bytes + len(due) if self._unsent else 0
            if self._due_bytes > TLS_DUE_BYTES_MAX:
                raise ssl.SSLError("the client demands answers from TLS but does not read them")
        if tls.has_ended and found:
            self._loop.call_soon(self._end_late)
        return found

    def _end_late(self) -> None:
        if self.reads:
            self.end_of_stream()

    def resume_reading(self) -> None:
        super().resume_reading()
        if self._tls.has_ended:  # The end came while the protocol was not reading.
            self._loop.call_soon(self._end_late)

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._is_closing:  # We have said that nothing more follows.
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

    def _release(self) -> None:
        super()._release()
        # This breaks a reference circle, so that the buffers of TLS, tens of KB, are freed at once.
        self.receive_into = self._end.recv_into
