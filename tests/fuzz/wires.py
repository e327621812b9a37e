"""One blocking connection to a node, packet by packet, over TCP, TLS or WebSocket."""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import Mapping
from contextlib import suppress

from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.fixed_header import FROM_SERVER, FROM_SERVER_5
from penstock.gateway.protocol.packets import MALFORMED, Packet
from penstock.store.options import KIB, MIB
from tests.fuzz.inputs import HANDSHAKE, frame

TRANSPORTS = ("mqtt", "tls", "ws", "wss")
"""The names of the listeners over which sequences go."""

RESET = b"\1\0\0\0\0\0\0\0"
"""SO_LINGER: close with RST."""

BINARY, CLOSE = 2, 8
"""Opcodes of WebSocket frames."""


class Wire:
    """A connection.

    Parameters:
        ports: of the node, by the name of the listener.
        transport: one of `TRANSPORTS`.
        context: trusts the node's certificate.
        is_v5: whether the node's packets are of MQTT 5.0.
    """

    def __init__(self, ports: Mapping[str, int], transport: str, context: ssl.SSLContext, *, is_v5: bool) -> None:
        end = socket.create_connection(("127.0.0.1", ports[transport]))
        self._socket: socket.socket = (
            context.wrap_socket(end, server_hostname="localhost") if transport in ("tls", "wss") else end
        )
        self._side = FROM_SERVER_5 if is_v5 else FROM_SERVER
        self._has_frames = transport in ("ws", "wss")
        self._raw = b""
        self._rest = b""
        self._packets: deque[Packet] = deque()
        self.is_open = True
        if self._has_frames:
            self._socket.sendall(HANDSHAKE)
            while b"\r\n\r\n" not in self._raw:
                data = self._socket.recv(4 * KIB)
                assert data, "the node refused the WebSocket"
                self._raw += data
            answer, _, self._raw = self._raw.partition(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 101"), answer

    def send(self, data: bytes) -> None:
        """Send bytes. The node may have closed the connection before."""
        with suppress(OSError):
            self._socket.sendall(frame(0x80 | BINARY, data) if self._has_frames else data)

    def receive(self) -> Packet:
        """Return the next packet, or `()` at the end of the connection."""
        while not self._packets:
            data = self._read()
            if not data:
                self.is_open = False
                return ()
            packets, used = decode(self._rest + data, 64 * MIB, self._side)
            self._rest = (self._rest + data)[used:]
            assert not packets or packets[-1][0] != MALFORMED, f"the node sent {self._rest!r}: {packets[-1][1]}"
            self._packets.extend(packets)
        return self._packets.popleft()

    def _read(self) -> bytes:
        """Return the next bytes of MQTT; nothing at the end."""
        while True:
            if self._has_frames and len(self._raw) >= 2:
                size, at = self._raw[1], 2
                if size >= 126:
                    more = 2 if size == 126 else 8
                    size, at = int.from_bytes(self._raw[2 : 2 + more], "big"), 2 + more
                if len(self._raw) >= at + size:
                    kind, payload = self._raw[0] & 15, self._raw[at : at + size]
                    self._raw = self._raw[at + size :]
                    if kind == CLOSE:
                        return b""
                    if payload and kind in (0, BINARY):
                        return payload
                    continue
            try:
                data = self._socket.recv(64 * KIB)
            except OSError:
                return b""
            if not data or not self._has_frames:
                return data
            self._raw += data

    def stop_sending(self) -> None:
        """Close our side; what the node sends can still be read. TLS knows no such state: the node closes in its own time."""
        with suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_WR)  # SSLSocket.shutdown would end the decryption, too.

    def reset(self) -> None:
        """End the connection with RST."""
        with suppress(OSError):
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self.close()

    def close(self) -> None:
        self.is_open = False
        self._socket.close()
