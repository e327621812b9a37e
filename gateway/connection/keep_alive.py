"""Keep alive (3.1.2.10): one timing wheel finds all connections that have been silent for too long.

The heartbeat turns the wheel, and does everything else that is done once a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from penstock.gateway.protocol.reasons import ReasonCode

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection

SILENCE_FACTOR: Final = 1.5
"""How many times its keep alive a client may be silent [MQTT-3.1.2-22] 3.1.1:[MQTT-3.1.2-24]."""

STEP_S: Final = 1
"""Seconds of one slot of the wheel. A connection is closed at most this long after 1.5 times its keep alive."""


class KeepAliveWheel:
    """Closes connections that send no CONNECT in time, or nothing for 1.5 times their keep alive [MQTT-3.1.2-22].

    In MQTT 3.1.1 the clause is 3.1.1:[MQTT-3.1.2-24]. The wheel has a slot for each second, and each connection is in one slot:
    the one of the earliest second in which it may have to be closed. `turn` looks only at connections whose second has come.
    """

    def __init__(self) -> None:
        self._slots: dict[int, set[Connection]] = {}
        self._next_slot = 0

    def __len__(self) -> int:
        """Return how many connections are watched."""
        return sum(map(len, self._slots.values()))

    def start(self, now_s: float) -> None:
        """Begin at a monotonic time in seconds."""
        self._next_slot = int(now_s)

    def watch(self, connection: Connection) -> None:
        """Watch a client's connection, if it has a keep alive."""
        if connection.keep_alive_s:
            self.watch_until(connection, connection.received_s + connection.keep_alive_s)

    def watch_until(self, connection: Connection, deadline_s: float) -> None:
        """Look at a connection at a monotonic time in seconds, in place of the time noted before."""
        self.forget(connection)
        connection.wheel_slot = int(deadline_s) + STEP_S
        self._slots.setdefault(connection.wheel_slot, set()).add(connection)

    def forget(self, connection: Connection) -> None:
        """Watch a connection no longer. Its slot may be a day away, and would keep the connection in memory until then."""
        slot = self._slots.get(connection.wheel_slot)
        if slot is not None:
            slot.discard(connection)
            if not slot:
                del self._slots[connection.wheel_slot]

    def turn(self, now_s: float) -> None:
        """Look at all connections whose time has come; `now_s` is the monotonic time in seconds."""
        while self._next_slot <= now_s:
            for connection in self._slots.pop(self._next_slot, ()):
                self.check(connection, now_s)
            self._next_slot += STEP_S

    def check(self, connection: Connection, now_s: float) -> None:
        """Close a connection if it has been silent for too long; else watch it on."""
        if connection.is_unread:  # the client may have sent something: the server did not look
            self.watch_until(connection, now_s + STEP_S)
        elif not connection.connected:
            connection.close("no CONNECT came within the time that mqtt.connect_timeout allows", ReasonCode.KEEP_ALIVE_TIMEOUT)
        elif connection.keep_alive_s:
            if now_s >= connection.received_s + connection.keep_alive_s:
                connection.close("the client sent nothing for 1.5 times its keep alive", ReasonCode.KEEP_ALIVE_TIMEOUT)
            else:
                self.watch(connection)


BEAT_S: Final = 1
"""Seconds between two beats. A keep alive that is over is noticed at most this long after its time."""


class Heartbeat:
    """Calls jobs once a second, in order, by one timer.

    Parameters:
        now_s: returns the monotonic time in seconds.
        jobs: each is called with that time.
    """

    def __init__(self, now_s: Callable[[], float], jobs: Sequence[Callable[[float], None]]) -> None:
        self._now_s = now_s
        self._jobs = jobs
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Beat from now on, the first time at once."""
        self._loop = loop
        self._timer = None
        self._beat_on()

    def stop(self) -> None:
        """Beat no longer."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def beat(self) -> None:
        """Call all jobs now."""
        now_s = self._now_s()
        for job in self._jobs:
            job(now_s)

    def _beat_on(self) -> None:
        self._timer = self._loop.call_later(BEAT_S - self._now_s() % BEAT_S, self._beat_on)
        self.beat()
