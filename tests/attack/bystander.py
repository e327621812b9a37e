"""A bystander of the disk: a process that syncs a file of its own, beside the node's, whenever the honest publisher publishes.

What it waits for is what anybody waits for who shares the disk. It has no part in the node, so it is late only if the disk is.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections import deque
from contextlib import suppress
from pathlib import Path
from struct import Struct

BLOCK = bytes(4096)
"""Is written for each tick, at the end of the file: the file system must find room for it, as it must for a log that grows."""

TICKS_MAX = 64

ANSWER = Struct("dH")
"""When a sync ended, in monotonic seconds, and how many ticks it served."""


class Bystander:
    """The bystander's process, as the honest clients see it.

    Parameters:
        path: of its file. It must be on the file system of the node's data.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: deque[tuple[float, list[float]]] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._end, self._other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def start(self) -> None:
        """Start the process."""
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(self._path), str(self._other.fileno())], pass_fds=[self._other.fileno()]
        )
        self._other.close()
        self._end.setblocking(False)
        asyncio.get_running_loop().add_reader(self._end.fileno(), self._receive)

    def tick(self, waits_s: list[float]) -> None:
        """Let it write and sync. Its wait, in seconds, is appended to `waits_s` when it is over."""
        with suppress(BlockingIOError):
            self._end.send(b"\0")
            self._waiting.append((time.monotonic(), waits_s))

    def _receive(self) -> None:
        with suppress(BlockingIOError):
            answer = self._end.recv(ANSWER.size)
            if not answer:
                asyncio.get_running_loop().remove_reader(self._end.fileno())
                return
            ended_s, served = ANSWER.unpack(answer)
            for _ in range(served):
                begun_s, waits_s = self._waiting.popleft()
                waits_s.append(ended_s - begun_s)

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            asyncio.get_running_loop().remove_reader(self._end.fileno())
            self._end.close()
            self._process.wait()
            self._path.unlink(missing_ok=True)
            self._process = None


def serve(path: str, end: socket.socket) -> None:
    """Write and sync for each tick that comes; those that come during a sync share the next one."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    while end.recv(1):
        ticks = 1
        with suppress(BlockingIOError):
            while ticks < TICKS_MAX and end.recv(1, socket.MSG_DONTWAIT):
                ticks += 1
        os.write(file, BLOCK * ticks)
        os.fdatasync(file)
        end.send(ANSWER.pack(time.monotonic(), ticks))


if __name__ == "__main__":
    with suppress(BrokenPipeError, ConnectionResetError):
        serve(sys.argv[1], socket.socket(fileno=int(sys.argv[2])))
