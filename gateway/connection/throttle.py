"""Rate limits for what clients send: a client that exceeds its rate is read later.

The server handles a read whole, however much it holds, and charges it afterwards. The bucket may then be in debt, and the
connection is not read until the debt is paid. So no read is cut into pieces, no message is dropped, and a client exceeds its
rate by one read at most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.options import LimitOptions
from penstock.gateway.transport.token_bucket import TokenBucket
from penstock.timer.ticker import Ticker

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection

TICK_MS: Final = 10
"""Resolution of the waits. A shorter wait is not worth the two calls that pause and resume a socket: it stays a debt."""

WAIT_MS_MAX: Final = 60_000
"""The longest wait at a time, which bounds how long a connection that has ended stays in memory. If debt remains after it, the
connection waits again after its next read."""

RESUMED_MAX: Final = 1000
"""Connections that are read again in one turn of the loop."""


class Meter:
    """The rate limits that apply to one client.

    Parameters:
        messages, size: the client's own buckets of messages and bytes.
        listener_messages, listener_size: the buckets that all clients of its listener share.
    """

    __slots__ = ("_listener", "_own")

    def __init__(
        self, messages: TokenBucket, size: TokenBucket, listener_messages: TokenBucket, listener_size: TokenBucket
    ) -> None:
        self._own = (messages, size)
        self._listener = (listener_messages, listener_size)

    def charge(self, messages: int, size: int, now_ms: int) -> tuple[int, str]:
        """Charge a read of `messages` messages and `size` bytes.

        Returns:
            How many ms the next read has to wait, and whose limit demands it: "client" or "listener".
        """
        waits = []
        for buckets in (self._own, self._listener):
            wait_ms = 0
            for bucket, tokens in zip(buckets, (messages, size), strict=True):
                bucket.wait_ms(0, now_ms)
                bucket.spend(tokens)
                wait_ms = max(wait_ms, bucket.wait_ms(0, now_ms))
            waits.append(wait_ms)
        own, listener = waits
        return (own, "client") if own >= listener else (listener, "listener")


class Throttle:
    """Pauses connections that have exceeded their rate, and resumes them.

    Parameters:
        now_ms: returns a monotonic time in ms.
        limits: the rates of each client.
    """

    def __init__(self, now_ms: Callable[[], int], limits: LimitOptions) -> None:
        self._now_ms = now_ms
        self._limits = limits
        self._ticker: Ticker[Connection] = Ticker(now_ms, self._resume, fire_max=RESUMED_MAX, tick_ms=TICK_MS)
        self.throttled = {"client": 0, "listener": 0}
        """How often a connection had to wait, by whose limit it was."""

    def __len__(self) -> int:
        """Return how many connections wait."""
        return len(self._ticker)

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Resume connections by itself from now on. Until then `resume_due` does."""
        self._ticker.start(loop)

    def stop(self) -> None:
        """Resume connections no longer."""
        self._ticker.stop()

    def meter(self, listener_messages: TokenBucket, listener_size: TokenBucket) -> Meter | None:
        """Return a meter for a new client of a listener with these buckets; None if there is no limit."""
        messages_per_s, bytes_per_s = self._limits.client_messages_per_s, self._limits.client_bytes_per_s
        if not (messages_per_s or bytes_per_s or listener_messages.per_s or listener_size.per_s):
            return None
        return Meter(TokenBucket(messages_per_s), TokenBucket(bytes_per_s), listener_messages, listener_size)

    def charge(self, connection: Connection, meter: Meter, messages: int, size: int) -> None:
        """Charge a read of a connection to its meter; pause the connection if it has to wait."""
        now_ms = self._now_ms()
        wait_ms, whose = meter.charge(messages, size, now_ms)
        if wait_ms >= TICK_MS:
            self.throttled[whose] += 1
            connection.pause_reading(PauseReason.THROTTLED)
            self._ticker.schedule(now_ms + min(wait_ms, WAIT_MS_MAX), connection)

    def resume_due(self) -> None:
        """Resume the connections whose wait is over."""
        while self._ticker.fire_due():
            pass

    def _resume(self, connections: list[Connection]) -> None:
        for connection in connections:
            connection.resume_reading(PauseReason.THROTTLED)
