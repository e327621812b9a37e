"""MQTT over WebSocket (MQTT 5.0 and 3.1.1, chapter 6): binary frames carry the packets.

The library `websockets` does the framing, without its sockets. It is well maintained, covers what RFC 6455 demands (masking,
fragments, ping, pong, close, bounds), and amqtt needs it anyway. To the event loop a `WebSocket` is a protocol. To the MQTT
connection it is a transport, so that one class of connections serves all transports.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import urlsplit

from websockets.frames import OP_BINARY, OP_CONT, OP_TEXT, CloseCode, Frame
from websockets.http11 import Request
from websockets.protocol import SEND_EOF, State
from websockets.server import ServerProtocol
from websockets.typing import Origin, Subprotocol

from penstock.gateway.options import ListenerOptions
from penstock.gateway.transport.overtime import Overtime
from penstock.store.options import KIB
from penstock.store.space.causer import is_loopback_name

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection

SUBPROTOCOL: Final = Subprotocol("mqtt")
"""The subprotocol that a client must offer [MQTT-6.0.0-3] and that the server selects [MQTT-6.0.0-4]."""

SILENT = logging.getLogger("penstock.websocket")
"""The logger for the library. It is silent because the gateway logs connections and refusals itself."""
SILENT.setLevel(logging.CRITICAL)


ANY_ORIGIN: Final = "*"
"""The origin that stands for all origins."""

PIECE_BYTES: Final = 2 * KIB
"""Bytes of a read that the library gets at once. A read may hold 40,000 frames of six bytes."""


class WebSocket(asyncio.Transport, asyncio.Protocol):
    """One WebSocket connection.

    Parameters:
        connection: gets the contents of the binary frames.
        options: the path and the origins that are served.
        message_bytes_max: the maximum size of one WebSocket message with all its frames; a larger one closes the connection
            (1009).
        first_bytes_max: the same for the messages of a client that is not known yet.
        overtime: bounds what is handled in one turn of the loop.
        is_listener_local: whether only this machine reaches the listener.
    """

    def __init__(
        self,
        connection: Connection,
        options: ListenerOptions,
        message_bytes_max: int,
        first_bytes_max: int,
        overtime: Overtime,
        *,
        is_listener_local: bool = False,
    ) -> None:
        super().__init__()
        self._connection = connection
        self._overtime = overtime
        self._message_bytes_max = message_bytes_max
        self._path = options.websocket_path
        self._takes_any = ANY_ORIGIN in options.origins
        self._takes_own = not options.origins
        self._is_listener_local = is_listener_local
        self._frames = ServerProtocol(
            origins=[*map(Origin, options.origins), None] if options.origins and not self._takes_any else None,
            subprotocols=[SUBPROTOCOL],
            max_size=first_bytes_max,
            logger=SILENT,
        )
        self._transport: asyncio.Transport
        self._closing = False
        self._reads = True
        """Whether the connection reads."""
        self._late = b""
        """What was received and is still to be given to the library, in a later turn or when the connection reads again."""
        self._is_put_off = False
        """Whether the socket is not read because of `_late`."""

    # --- a protocol, to the loop ------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connection.connection_made(self)  # The time for the CONNECT runs from here on, and includes the handshake.

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def eof_received(self) -> bool | None:
        return self._connection.eof_received()

    def data_received(self, data: bytes) -> None:
        self._late += data
        if not self._is_put_off:
            self._receive()

    def _receive(self) -> None:
        """Handle what was received, piece by piece, as long as the turn has time and the connection reads."""
        late, at = self._late, 0
        while at < len(late) and not self.is_closing():
            if at and (not self._reads or self._overtime.is_over()):
                break
            self._receive_piece(late[at : at + PIECE_BYTES])
            at += PIECE_BYTES
        self._late = b"" if self.is_closing() else late[at:]
        if self._late:
            self._is_put_off = True
            self._transport.pause_reading()
            if self._reads:
                self._overtime.add(self._receive_late)

    def _receive_late(self) -> None:
        if self._is_put_off and self._reads:
            self._is_put_off = False
            self._receive()
            if not self._is_put_off and self._reads:
                self._transport.resume_reading()

    def _receive_piece(self, data: bytes) -> None:
        self._frames.receive_data(data)
        payloads: list[bytes] = []
        for event in self._frames.events_received():
            if isinstance(event, Request):
                if not self._answer(event):
                    self._transport.abort()
                    return
            elif isinstance(event, Frame):
                if event.opcode is OP_BINARY or event.opcode is OP_CONT:
                    payloads.append(bytes(event.data))
                elif event.opcode is OP_TEXT:  # [MQTT-6.0.0-1]
                    self._frames.fail(CloseCode.UNSUPPORTED_DATA, "MQTT is sent in binary frames")
                    break
        has_ended, answered = self._send()
        if answered:
            self._connection.note_answer(answered)
        # A close frame often follows the client's DISCONNECT in the same read.
        if payloads:
            self._connection.data_received(payloads[0] if len(payloads) == 1 else b"".join(payloads))
            if self._connection.connected:
                self._frames.max_size = self._message_bytes_max
        if has_ended:
            self._closing = True
            self._transport.close()

    def _answer(self, request: Request) -> bool:
        """Answer the handshake; return False if it can't be answered."""
        if self._frames.eof_sent:
            return False  # Invalid frames came with the request, before the answer. The library can't continue.
        try:
            if self._path and request.path.partition("?")[0] != self._path:
                response = self._frames.reject(404, f"MQTT is at {self._path}.\n")
            elif self._takes_own and not self._is_own_page(request):
                response = self._frames.reject(403, "Pages of this origin may not connect: see origins of the listener.\n")
            else:
                response = self._frames.accept(request)
        except ValueError:
            return False  # The library quotes the request in its answer, and not all bytes are text.
        self._frames.send_response(response)
        return True

    def _is_own_page(self, request: Request) -> bool:
        """Return whether a request comes from no page, or from one that has the address of the listener itself.

        A page can make a name of its own mean this machine. So on loopback the name must be one of loopback, too.
        """
        origins, hosts = request.headers.get_all("Origin"), request.headers.get_all("Host")
        if not origins:
            return True
        if len(origins) > 1 or len(hosts) != 1:
            return False
        try:
            page, own = urlsplit(origins[0]), urlsplit(f"//{hosts[0]}")
        except ValueError:
            return False
        return page.netloc.lower() == own.netloc.lower() and (
            not self._is_listener_local or is_loopback_name((own.hostname or "").removesuffix("."))
        )

    def _send(self) -> tuple[bool, int]:
        """Write the bytes that the library has to send; return whether it says that nothing follows, and how many they are."""
        chunks = self._frames.data_to_send()
        has_ended = bool(chunks) and chunks[-1] == SEND_EOF
        data = b"".join(chunks)
        if data:
            self._transport.write(data)
        return has_ended, len(data)

    # --- a transport, to the connection -----------------------------------------------------------------------------

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._frames.state is State.OPEN:
            self._frames.send_binary(bytes(data))
            self._send()

    def close(self) -> None:
        """Send a close frame, and close. The client's own close frame comes while the socket lingers."""
        if not self._closing and self._frames.state is State.OPEN:
            self._frames.send_close(CloseCode.NORMAL_CLOSURE)
            self._send()
        self._closing = True
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._closing or self._transport.is_closing()

    def pause_reading(self) -> None:
        self._reads = False
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._reads = True
        if self._is_put_off:
            self._overtime.add(self._receive_late)
        else:
            self._transport.resume_reading()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._transport.set_write_buffer_limits(high, low)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)
