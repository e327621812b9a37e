"""Processes of `penstock` that are forked from one that has imported Penstock, which saves most of the work of a start.

What a fork runs is the entry point of the command line, with arguments, directory, environment, standard output and error of
its own, and it can be killed like any other process. `tests.chaos.launching` is the process that forks.
"""

from __future__ import annotations

import array
import functools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from tests.chaos.launching import MESSAGE_BYTES_MAX, ROOT, Descriptors, python_path

START_S_MAX = 60.0


class ForkedProcess:
    """A process that was forked. It has the methods of `subprocess.Popen` that tests need."""

    def __init__(self, arguments: Sequence[str], pid: int, stdout: IO[bytes] | None, ended: Future[int]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._arguments = arguments
        self._ended = ended

    def poll(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def wait(self, timeout: float) -> int:
        try:
            return self._ended.result(timeout)
        except TimeoutError:
            raise subprocess.TimeoutExpired(["penstock", *self._arguments], timeout) from None

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):  # it has ended, and the process that forked it has not told us yet
                os.kill(self.pid, number)


class Forks:
    """Forks processes. The process that forks them ends with this one, and kills what it has forked."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pids: queue.SimpleQueue[tuple[int, Future[int]]] = queue.SimpleQueue()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.Popen(
                [sys.executable, "-m", "tests.chaos.launching", str(theirs.fileno()), ""],
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                # A library that computes with threads of its own would start them before the fork.
                env={**os.environ, **python_path(), "OPENBLAS_NUM_THREADS": "1"},
            )
        threading.Thread(target=self._read, name="forks", daemon=True).start()

    def launch(
        self,
        arguments: Sequence[str],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int,
        directory: Path = ROOT,
        environment: Mapping[str, str],
        descriptors: Descriptors | None = None,
    ) -> ForkedProcess:
        """Fork a process.

        Args:
            arguments: of the command `penstock`.
            stdin: a descriptor of standard input; None for an empty one.
            stdout: a descriptor that gets standard output; None for a pipe that the caller reads.
            stderr: a descriptor that gets standard error.
            directory: where the process runs.
            environment: all variables of the process.
            descriptors: limits of descriptors, if not those of this process.
        """
        asked: dict[str, Any] = {
            "arguments": list(arguments),
            "directory": str(directory.absolute()),
            "environment": dict(environment),
            "descriptors": descriptors,
        }
        reading, writing = os.pipe() if stdout is None else (-1, stdout)
        try:
            with self._lock:
                handles = array.array("i", [writing, stderr, *([] if stdin is None else [stdin])])
                self._socket.sendmsg([json.dumps(asked).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
                pid, ended = self._pids.get(timeout=START_S_MAX)
        finally:
            if stdout is None:
                os.close(writing)
        return ForkedProcess(arguments, pid, os.fdopen(reading, "rb") if stdout is None else None, ended)

    def _read(self) -> None:
        """Take what the process that forks says: that it has forked a process, or that one has ended."""
        running: dict[int, Future[int]] = {}
        while data := self._socket.recv(MESSAGE_BYTES_MAX):
            said = json.loads(data)
            if "ended" in said:
                running.pop(said["ended"]).set_result(said["status"])
            else:
                running[said["forked"]] = Future()
                self._pids.put((said["forked"], running[said["forked"]]))
        for ended in running.values():
            ended.set_exception(OSError("the process that forks others has died"))


@functools.cache
def forks() -> Forks:
    """Return what forks the processes of all tests of this process."""
    return Forks()
