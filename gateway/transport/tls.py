"""TLS: of a listener, its certificate and what it asks of clients, read from files that may be replaced while it runs; of a
connection, the bytes that are encrypted and those that aren't, without a socket.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.gateway.options import ListenerOptions
from penstock.store.options import KIB

HANDSHAKE_READ_BYTES: Final = 16 * KIB
"""Bytes read at once in a handshake, at most."""

VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}
VERIFY = {"none": ssl.CERT_NONE, "optional": ssl.CERT_OPTIONAL, "required": ssl.CERT_REQUIRED}

Signature = tuple[tuple[int, int, int], ...]
"""Inode, size and time of change of each file."""


class Certificates:
    """The TLS context of a listener, renewed with its files.

    Each connection keeps the context that it began with, so a renewal disturbs nobody, and takes back an authority as well
    as it adds one.

    Parameters:
        options: of a listener that speaks TLS.

    Raises:
        OSError: a file can't be read, or isn't what it should be.
    """

    def __init__(self, options: ListenerOptions) -> None:
        self._options = options
        self._signature = self._sign()
        self.context = self._load()

    def reload(self) -> None:
        """Read the files again. Raises OSError, and goes on with what was read before."""
        self._signature = self._sign()
        self.context = self._load()

    def changed(self) -> bool:
        """Return whether a file was replaced since it was read. A file that is missing is one that is about to come."""
        try:
            return self._sign() != self._signature
        except OSError:
            return False

    def _paths(self) -> list[str]:
        options = self._options
        return [options.certificate, options.key, *([options.client_ca] if options.client_certificates != "none" else [])]

    def _sign(self) -> Signature:
        stats = [Path(path).stat() for path in self._paths()]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)

    def _load(self) -> ssl.SSLContext:
        options = self._options
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = VERSIONS[options.tls_version_min]
        context.options |= ssl.OP_NO_RENEGOTIATION  # or a client makes the server do handshakes at no cost of its own
        context.set_alpn_protocols(["http/1.1"] if options.is_websocket else ["mqtt"])
        path = f"{options.certificate} with {options.key}"
        try:
            # With a password, or OpenSSL asks for the one of an encrypted key on the terminal.
            context.load_cert_chain(options.certificate, options.key, password="")
            if options.client_certificates != "none":
                path = options.client_ca
                context.load_verify_locations(options.client_ca)
        except ssl.SSLError as error:
            raise OSError(f"{path} can't be used for TLS: {error.reason or error}") from error
        context.verify_mode = VERIFY[options.client_certificates]
        return context


class Tls:
    """The server's end of one TLS connection, between what a socket carries and what it means.

    Parameters:
        context: of the listener, at this moment.
    """

    __slots__ = ("_incoming", "_object", "_outgoing", "has_ended")

    def __init__(self, context: ssl.SSLContext) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._object = context.wrap_bio(self._incoming, self._outgoing, server_side=True)
        self.has_ended = False
        """The client has said that it sends nothing more."""

    @property
    def ssl_object(self) -> ssl.SSLObject:
        """What the handshake has found: versions, certificates."""
        return self._object

    @property
    def waiting(self) -> int:
        """Bytes that have come and aren't decrypted."""
        return self._incoming.pending

    async def shake_hands(self, loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
        """Do the handshake, over a socket that doesn't block.

        Raises:
            ssl.SSLError: what came is no TLS, or none that the listener takes. The client was told, as far as TLS has words.
            OSError: the client has gone.
        """
        while True:
            try:
                self._object.do_handshake()
            except ssl.SSLWantReadError:
                await loop.sock_sendall(end, self._outgoing.read())
                data = await loop.sock_recv(end, HANDSHAKE_READ_BYTES)
                if not data:
                    raise ConnectionResetError("the client ended in its handshake") from None
                self._incoming.write(data)
            except ssl.SSLError:
                with suppress(OSError):
                    await loop.sock_sendall(end, self._outgoing.read())
                raise
            else:
                await loop.sock_sendall(end, self._outgoing.read())
                return

    def decrypt(self, data: memoryview | bytes, into: memoryview) -> int:
        """Take what has come; write what it means into a buffer, from its beginning, and return how many bytes that is.

        The buffer must hold a record (16 KiB) more than `data`: a part of one may lie here from before.

        Raises:
            ssl.SSLError: it is damaged.
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
        except ssl.SSLWantReadError:  # the rest of a record is still to come
            pass
        return size

    def encrypt(self, data: bytes | bytearray | memoryview) -> bytes:
        """Return what is to be sent for some bytes."""
        view, at = memoryview(data), 0
        while at < len(view):
            at += self._object.write(view[at:])
        return self._outgoing.read()

    def due(self) -> bytes:
        """Return what is to be sent though nobody wrote anything: answers to what TLS itself asked for."""
        return self._outgoing.read() if self._outgoing.pending else b""

    def end(self) -> bytes:
        """Return what says that nothing more will be sent."""
        with suppress(ssl.SSLError):  # it would have the client say so too
            self._object.unwrap()
        return self._outgoing.read()
