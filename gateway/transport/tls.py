"""TLS of one connection: the conversion between encrypted and plain bytes, without a socket."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from typing import Final

from penstock.gateway.transport.turns import Turns
from penstock.store.options import KIB

HANDSHAKE_READ_BYTES: Final = 16 * KIB
"""The maximum number of bytes read at once in a handshake."""


class Tls:
    """The server's end of one TLS connection.

    Parameters:
        context: the TLS context of the listener at this moment.
    """

    __slots__ = ("_incoming", "_object", "_outgoing", "has_ended")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.has_ended = False
        """Whether the client has said that it sends nothing more."""

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """The result of the handshake: versions and certificates."""
        return self._object

    @property
    def waiting(self) -> int:
        """The number of received bytes that are not decrypted yet."""
        return self._incoming.pending

    async def shake_hands(self, loop: asyncio.AbstractEventLoop, end: socket.socket, turns: Turns) -> None:
        """Do the handshake over a non-blocking socket, each step when it is its turn.

        Raises:
            ssl.SSLError: the client speaks no TLS, or none that the listener accepts. The client got a TLS alert.
            OSError: the client has gone.
        """
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(end, self._outgoing.read())
                data = await loop.sock_recv(end, HANDSHAKE_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the client closed the connection in its handshake") from None
                self._incoming.write(data)
                await turns.wait()
            except ssl.SSLError:
                with suppress(OSError):
                    await loop.sock_sendall(end, self._outgoing.read())
                raise
            else:
                await loop.sock_sendall(end, self._outgoing.read())
                return

    def decrypt(self, data: memoryview | bytes, into: memoryview) -> int:
        """Decrypt received bytes into the beginning of a buffer, and return the number of plain bytes.

        Args:
            data: the bytes as they came from the socket.
            into: the buffer. It must hold one record (16 KiB) more than `data`, because a part of a record may be kept from
                before.

        Raises:
            ssl.SSLError: the bytes are damaged.
        """
        incoming, read = self._incoming, self._object.read
        incoming.write(data)
        size = 0
        try:
            while incoming.pending:
                found = int(read(len(into) - size, into[size:]))
                if not found:
                    self.has_ended = True
                    break
                size += found
        except ssl.SSLWantReadError:  # The rest of a record is still to come.
            pass
        return size

    def encrypt(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return the encrypted bytes to send for `data`."""
        view, at = memoryview(data), 0
        while at < len(view):
            at += self._object.write(view[at:])
        return self._outgoing.read()

    def due(self) -> bytes:
        """Return the bytes that TLS itself has to send, for example answers to changes of keys."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def end(self) -> bytes:
        """Return the bytes that tell the client that nothing more follows."""
        with suppress(ssl.SSLError):  # `unwrap` also expects the client's answer, for which nobody waits.
            self._object.unwrap()
        return self._outgoing.read()
