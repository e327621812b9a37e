"""Two connections that are one: the bytes of each go to the other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from penstock.store.options import KIB

WAITING_BYTES_MAX = 256 * KIB
"""About how many bytes wait in each direction. Beyond that the side that they come from is not read."""
LINGER_S = 5.0
"""After this time, what could not be sent to one side after the other one has ended is given up."""


class End(asyncio.Protocol):
    """One of the two connections. `splice` joins them.

    Parameters:
        on_lost: called when the connection has ended.
    """

    def __init__(self, on_lost: Callable[[], None] = lambda: None) -> None:
        self._on_lost = on_lost
        self._transport: asyncio.Transport
        self._other: End | None = None
        self._unsent = b""
        """What came before there was another one."""
        self._has_said_all = False
        self._is_lost = False

    def write(self, data: bytes) -> None:
        """Send bytes."""
        if not self._is_lost:
            self._transport.write(data)

    def abort(self) -> None:
        """End the connection at once, and so the other one."""
        self._transport.abort()

    def _end(self) -> None:
        """Send what waits, and end the connection."""
        if not self._is_lost:
            self._transport.close()
            asyncio.get_running_loop().call_later(LINGER_S, self._transport.abort)

    def _join(self, other: End) -> None:
        self._other = other
        if self._unsent:
            other.write(self._unsent)
            self._unsent = b""
        if self._is_lost:
            other._end()
        elif self._has_said_all:
            self._pass_on_end(other)
        elif not self._transport.is_closing():
            self._transport.resume_reading()

    def _pass_on_end(self, other: End) -> None:
        """Tell the other side that this one sends nothing more. TLS can't say that, so the connection ends with it."""
        if other._is_lost:
            return
        if self._transport.can_write_eof() and other._transport.can_write_eof() and not other._has_said_all:
            other._transport.write_eof()
        else:
            other._end()
            self._end()

    # --- called by the loop -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport.set_write_buffer_limits(high=WAITING_BYTES_MAX)
        if self._other is None:
            self._transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._unsent += data
        else:
            self._other.write(data)

    def eof_received(self) -> bool:
        self._has_said_all = True
        if self._other is not None:
            self._pass_on_end(self._other)
        return self._transport.can_write_eof()

    def pause_writing(self) -> None:
        if self._other is not None and not self._other._transport.is_closing():
            self._other._transport.pause_reading()

    def resume_writing(self) -> None:
        if self._other is not None and not self._other._transport.is_closing():
            self._other._transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost = True
        if self._other is not None:
            self._other._end()
        self._on_lost()


def splice(one: End, other: End) -> None:
    """Join two connections. When one of them ends, the other one ends as well, once it has got what was sent before."""
    one._join(other)
    other._join(one)
