"""A process that runs the jobs of one tree's benchmarks. `bench.trees` starts it by this file's path, in the tree's root.

The file imports nothing of Penstock, so that it serves every tree. Jobs and results are pickles, one after the other, on
standard input and standard output.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import BinaryIO


class Sections:
    """Processor time between the last two calls of `time.perf_counter`: with these a job marks the section that it measures."""

    def __init__(self) -> None:
        self._clock = time.perf_counter
        self._before_s = self._last_s = 0.0

    def perf_counter(self) -> float:
        """Take the place of `time.perf_counter`."""
        self._before_s, self._last_s = self._last_s, _processor_s()
        return self._clock()

    @property
    def processor_s(self) -> float:
        return self._last_s - self._before_s


def _processor_s() -> float:
    """Return the seconds for which this process and its children, which sync the log, had a processor."""
    children = [int(pid) for path in Path("/proc/self/task").glob("*/children") for pid in path.read_text().split()]
    # The number of a process's clock, as clock_getcpuclockid(3) makes it.
    return time.process_time() + sum(time.clock_gettime(~pid << 3 | 2) for pid in children)


def serve(jobs: BinaryIO, results: BinaryIO) -> None:
    """Run jobs until their stream ends.

    Args:
        jobs: a stream of `(module, function, arguments)`.
        results: gets `(error, value, processor_s)` for each job; `error` is the traceback, or empty.
    """
    sections = Sections()
    time.perf_counter = sections.perf_counter
    while True:
        try:
            module, function, arguments = pickle.load(jobs)
        except EOFError:
            return
        error, value = "", None
        try:
            value = getattr(import_module(module), function)(*arguments)
        except Exception:  # the other process raises it
            error = traceback.format_exc()
        # The class of a named tuple may be another one in the other tree.
        pickle.dump((error, tuple(value) if isinstance(value, tuple) else value, sections.processor_s), results)
        results.flush()


if __name__ == "__main__":
    sys.path.insert(0, str(Path.cwd()))  # ahead of another tree that is installed in this environment
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as results:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # so that a job may print
        serve(sys.stdin.buffer, results)
