"""Rates: who sends more than it may is read later. Token buckets in integers, and one ticker for all who wait.

A read is handled whole, however much it holds, and paid for afterwards: the bucket may be in debt, and the connection isn't
read until that is paid. So nothing is cut into pieces, nothing is dropped, and a client exceeds its rate by one read at most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.timer.ticker import Ticker

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.transport.peer import Peer

TICK_MS: Final = 10
"""Grain of the waits. A shorter one isn't worth the two calls that stop and start a socket's reading: it is a debt."""

WAIT_MS_MAX: Final = 60_000
"""The longest wait at a time: so long may a connection that has ended stay in memory. What is still owed then is waited for
behind the next read."""

RESUMED_MAX: Final = 1000
"""Connections read again in one turn of the loop."""


class Bucket:
    """A token bucket that holds the tokens of one second. Its level is in thousandths of a token, so that it stays an integer.

    Parameters:
        per_s: tokens a second; 0 for no limit.
    """

    __slots__ = ("_at_ms", "_level", "_most", "per_s")

    def __init__(self, per_s: int) -> None:
        self.per_s = per_s
        self._most = per_s * 1000
        self._level = self._most
        self._at_ms = 0

    def wait_ms(self, tokens: int, now_ms: int) -> int:
        """Return in how many ms the bucket has so many tokens; 0 where it has them now."""
        if not self.per_s:
            return 0
        if now_ms > self._at_ms:
            self._level = min(self._most, self._level + (now_ms - self._at_ms) * self.per_s)
            self._at_ms = now_ms
        missing = tokens * 1000 - self._level
        return -(-missing // self.per_s) if missing > 0 else 0

    def spend(self, tokens: int) -> None:
        """Take tokens, on credit if need be."""
        if self.per_s:
            self._level -= tokens * 1000


class Meter:
    """What one client may send.

    Parameters:
        messages, size: the client's own buckets of messages and of bytes.
        peer: its listener has buckets for all its clients.
    """

    __slots__ = ("_listeners", "_own")

    def __init__(self, messages: Bucket, size: Bucket, peer: Peer) -> None:
        self._own = (messages, size)
        self._listeners = (peer.listener.messages, peer.listener.bytes)

    def settle(self, messages: int, size: int, now_ms: int) -> tuple[int, str]:
        """Pay for a read; return how many ms the next one has to wait, and whose limit that is: "client" or "listener"."""
        waits = []
        for buckets in (self._own, self._listeners):
            wait_ms = 0
            for bucket, tokens in zip(buckets, (messages, size), strict=True):
                bucket.wait_ms(0, now_ms)
                bucket.spend(tokens)
                wait_ms = max(wait_ms, bucket.wait_ms(0, now_ms))
            waits.append(wait_ms)
        own, listeners = waits
        return (own, "client") if own >= listeners else (listeners, "listener")


class Throttle:
    """The connections that wait until they may be read again.

    Parameters:
        now_ms: a clock that only goes forward.
    """

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self._now_ms = now_ms
        self.ticker: Ticker[Connection] = Ticker(now_ms, self._resume, fire_max=RESUMED_MAX, tick_ms=TICK_MS)
        self.throttled = {"client": 0, "listener": 0}
        """How often somebody had to wait, by whose limit."""

    def __len__(self) -> int:
        """How many wait."""
        return len(self.ticker)

    def settle(self, connection: Connection, messages: int, size: int) -> None:
        """Pay for a read of a connection with a meter; stop reading it where it has to wait."""
        assert connection.meter is not None
        now_ms = self._now_ms()
        wait_ms, whose = connection.meter.settle(messages, size, now_ms)
        if wait_ms >= TICK_MS:
            self.throttled[whose] += 1
            connection.hold_reading(THROTTLED)
            self.ticker.schedule(now_ms + min(wait_ms, WAIT_MS_MAX), connection)

    def _resume(self, connections: list[Connection]) -> None:
        for connection in connections:
            connection.release_reading(THROTTLED)


# Why a connection isn't read: bits, since there may be several reasons at a time.
ANSWERS: Final = 1
"""Its client doesn't take the answers that pile up for it."""
THROTTLED: Final = 2
"""It has sent more than it may."""
PRESSURE: Final = 4
"""The disk is behind."""
UNDECIDED: Final = 8
"""The plugins haven't answered what it may do."""
DISK_FULL: Final = 16
"""It has published more than is kept while the disk has no room."""
