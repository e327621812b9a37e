"""Several processes of one worker, and their restart when they die or the code changes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from penstock.pop.client.retrydelays import RetryDelays

logger = logging.getLogger("penstock.worker")

CHECK_S = 0.2
"""Interval in which the processes and, with `reload`, the files are looked at."""

STARTED_S = 5.0
"""A process that runs for so long has started well: after its death the delays begin anew."""

REFUSED = (1, 2)
"""Exit statuses of a process that could not start: an error that `penstock` told, or wrong usage."""

IGNORED = {"__pycache__", "node_modules", "venv", "build", "dist"}


class WorkerProcesses:
    """Runs a worker as several processes. It starts those again that die, and stops all at SIGTERM or SIGINT.

    Parameters:
        name: Names the worker, as for `penstock.worker.application.load`.
        number: Number of processes, at least 1.
        reload: Start the processes again when a Python file below the current directory changes.
        health: Host and port of the first process's health endpoint. Each further process has the next port.
    """

    def __init__(self, name: str, number: int, *, reload: bool, health: tuple[str, int] | None) -> None:
        self._name = name
        self._number = number
        self._reload = reload
        self._health = health
        self._processes: list[subprocess.Popen[bytes] | None] = [None] * number
        self._began_s = [0.0] * number
        self._due_s = [0.0] * number
        self._delays = [RetryDelays() for _ in range(number)]
        self._stopping = False

    def run(self) -> int:
        """Run until a signal; return the exit status: 0, or that of a process that could not start at first."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)
        files = dict(_files()) if self._reload else {}
        first = True
        while not self._stopping:
            for index in range(self._number):
                status = self._tend(index)
                if status and first and not self._reload:
                    self._end()
                    return status
            if all(time.monotonic() - began_s > STARTED_S for began_s in self._began_s):
                first = False
            if self._reload and (found := dict(_files())) != files:
                changed = sorted({path for path, _ in set(files.items()) ^ set(found.items())})
                files = found
                logger.warning("%s changed: the worker starts again", ", ".join(changed[:3]))
                self._end()
                self._due_s = [0.0] * self._number
            time.sleep(CHECK_S)
        self._end()
        return 0

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    def _tend(self, index: int) -> int:
        """Start a process if it is due; return the exit status of one that failed soon after its start, else 0."""
        process, now_s = self._processes[index], time.monotonic()
        if process is None:
            if now_s >= self._due_s[index]:
                self._start(index)
            return 0
        status = process.poll()
        if status is None:
            return 0
        lived_s = now_s - self._began_s[index]
        if lived_s > STARTED_S:
            self._delays[index].reset()
        wait_s = self._delays[index].next_s()
        logger.error("process %d ended with status %d: it starts again in %.2f s", index, status, wait_s)
        self._processes[index] = None
        self._due_s[index] = now_s + wait_s
        return status if status in REFUSED and lived_s < STARTED_S else 0

    def _start(self, index: int) -> None:
        command = [sys.executable, "-m", "penstock", "worker", self._name]
        if self._health is not None:
            host, port = self._health
            command += ["--health", f"{host}:{port + index if port else 0}"]
        self._processes[index] = subprocess.Popen(command, env={**os.environ, "PENSTOCK_WORKER_PROCESS": str(index)})
        self._began_s[index] = time.monotonic()

    def _end(self) -> None:
        """Stop all processes, and wait for them. Each has its grace."""
        running = [process for process in self._processes if process is not None]
        for process in running:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in running:
            process.wait()
        self._processes = [None] * self._number


def _files() -> Iterator[tuple[str, int]]:
    """Yield the Python files below the current directory, each with the time of its last change."""
    for directory, folders, names in os.walk("."):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in IGNORED]
        for name in names:
            if name.endswith(".py"):
                path = Path(directory, name)
                try:
                    yield str(path), path.stat().st_mtime_ns
                except FileNotFoundError:
                    continue  # An editor has just replaced it.
