"""What a node tells the supervisor of its process, such as systemd: that it is ready, reloads, stops, and is alive.

The protocol is sd_notify(3): assignments in a datagram to the socket that NOTIFY_SOCKET names. Without that variable nobody is
told anything.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Mapping
from typing import Final

import structlog

logger = structlog.get_logger("node")

ABSTRACT: Final = "@"
"""Begins the name of a socket that has no file. The kernel has a zero byte there."""

PINGS_PER_TIMEOUT: Final = 2
"""Pings within the time after which systemd takes the process for hung, as sd_watchdog_enabled(3) recommends."""

NO_WATCHDOG: Final = "WATCHDOG_USEC=0"


class Supervisor:
    """The supervisor of this process.

    The pings come from the event loop, so a loop that hangs sends none, and systemd ends the process and starts it again.

    Parameters:
        environment: the variables of this process.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._socket = _connect(environment.get("NOTIFY_SOCKET", ""))
        self._watchdog_us = _watchdog_us(environment)
        self._timer: asyncio.TimerHandle | None = None

    def starting(self) -> None:
        """Say that the node recovers its state, which takes long if it must rebuild the index."""
        self._tell("STATUS=recovers log and index")

    def ready(self, status: str = "") -> None:
        """Say that the node has started, or has reloaded its files. An empty status leaves the one before."""
        # `begins_anew` has turned off the watchdog if this process is a replica that has begun anew.
        watchdog = [f"WATCHDOG_USEC={self._watchdog_us}"] if self._watchdog_us else []
        self._tell("READY=1", *([f"STATUS={status}"] if status else []), *watchdog)

    def reloading(self) -> None:
        """Say that the node reads its files again. `ready` must follow."""
        self._tell("RELOADING=1", f"MONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self, status: str) -> None:
        """Say that the node has begun to stop, or to drain before that."""
        self._tell("STOPPING=1", f"STATUS={status}")

    def begins_anew(self) -> None:
        """Say that another program takes this process over, and that no ping comes until it has started."""
        self._tell("STATUS=begins anew", NO_WATCHDOG)

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ping the supervisor from the event loop, if it asks for that, until `close`."""
        if self._watchdog_us:
            self._tell("WATCHDOG=1")
            self._timer = loop.call_later(self._watchdog_us / 1e6 / PINGS_PER_TIMEOUT, self.watch, loop)

    def close(self) -> None:
        """Tell nothing more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, *assignments: str) -> None:
        if self._socket is None:
            return
        try:
            self._socket.send("\n".join(assignments).encode())
        except OSError as error:  # a supervisor that reads nothing must not stop the node
            logger.warning("supervisor.not_told", what=assignments[0], why=str(error))


def _connect(address: str) -> socket.socket | None:
    """Return a socket that leads to the supervisor; None if there is none, or it can't be reached, which is logged."""
    if not address:
        return None
    if not address.startswith(("/", ABSTRACT)):
        why = "NOTIFY_SOCKET must be a path, or a name after @"
        logger.warning("supervisor.unreachable", address=address, why=why)
        return None
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    try:
        connected.connect("\0" + address[1:] if address.startswith(ABSTRACT) else address)
    except OSError as error:
        logger.warning("supervisor.unreachable", address=address, why=str(error))
        connected.close()
        return None
    return connected


def _watchdog_us(environment: Mapping[str, str]) -> int:
    """Return the microseconds after which the supervisor takes this process for hung without a ping; 0 if it never does."""
    if environment.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return 0  # the variables are for a parent of this process
    text = environment.get("WATCHDOG_USEC", "0")
    if not text.isdecimal():
        logger.warning("supervisor.no_watchdog", watchdog_usec=text, why="WATCHDOG_USEC must be a whole number")
        return 0
    return int(text)
