"""One end of a connection between replicas: bytes to frames."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol, cast

from penstock.cluster.errors import StreamBroken
from penstock.cluster.frames import PAYLOAD_BYTES_MAX, Frame, FrameKind, FrameReader, encode_frame

logger = logging.getLogger(__name__)


class FrameReceiver(Protocol):
    """Who gets the frames of a connection."""

    def received(self, stream: FrameStream, frame: Frame) -> None:
        """Take a frame. Raises StreamBroken, which ends the connection."""
        ...

    def ended(self, stream: FrameStream) -> None:
        """Take that the connection has ended."""
        ...


class FrameStream(asyncio.Protocol):
    """One end of a connection.

    Parameters:
        receiver: gets its frames.
        number: names it.
        now_ms: returns the time that frames are stamped with.
    """

    def __init__(self, receiver: FrameReceiver, number: int, now_ms: Callable[[], int]) -> None:
        self.number = number
        self.made_ms = now_ms()
        """When it was made."""
        self.peer = ""
        """Address of the other end."""
        self.has_ended = False
        self.sent_ms = 0
        """When the last frame was sent."""
        self.received_ms = self.made_ms
        """When the last frame came."""
        self.stamp = 0
        """Stamp of the last frame that was received."""
        self._receiver = receiver
        self._now_ms = now_ms
        self._reader = FrameReader()
        self._transport: asyncio.Transport | None = None

    def trust(self) -> None:
        """Accept large frames from now on: both ends know each other."""
        self._reader.payload_bytes_max = PAYLOAD_BYTES_MAX

    def send(
        self, kind: FrameKind, epoch: int, position: int, committed: int = 0, *, payload: bytes = b"", stamp: int | None = None
    ) -> None:
        """Send a frame, unless the connection has ended. It is stamped with the time, or with `stamp`."""
        if self._transport is None or self.has_ended:
            return
        self.sent_ms = self._now_ms()
        head = encode_frame(kind, epoch, position, committed, self.sent_ms if stamp is None else stamp, payload)
        if payload:
            self._transport.writelines((head, payload))
        else:
            self._transport.write(head)

    def refuse(self, epoch: int, why: str) -> None:
        """Tell the other end why the connection ends, and end it. The receiver is told."""
        self.send(FrameKind.REFUSED, epoch, 0, payload=why.encode())
        if self._transport is not None:
            self._transport.close()

    def hand_over(self, protocol: asyncio.Protocol) -> bytes:
        """Give the connection to another protocol, and return the bytes after the frame that was just received.

        No frame is sent or received any more, and the receiver is not told of the end.
        """
        assert self._transport is not None
        self.has_ended = True
        self._transport.set_protocol(protocol)
        protocol.connection_made(self._transport)
        return self._reader.rest()

    def abort(self) -> None:
        """End the connection at once. The receiver is not told."""
        self.has_ended = True
        if self._transport is not None:
            self._transport.abort()

    # --- called by the loop -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self.peer = str(transport.get_extra_info("peername"))

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._reader.feed(data):
                self.stamp, self.received_ms = frame.stamp, self._now_ms()
                self._receiver.received(self, frame)
                if self.has_ended:
                    return  # what follows may be no frames: the connection was handed over
        except StreamBroken as error:
            logger.warning("the connection with %s ends: %s", self.peer, error)
            self._end()
            if self._transport is not None:
                self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        if not self.has_ended:
            self.has_ended = True
            self._receiver.ended(self)
