"""Trees of the project: where a checkout is, how its node is started, and how jobs of its own benchmarks are run."""

from __future__ import annotations

import os
import pickle
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
JOB_SCRIPT = Path(__file__).with_name("job.py")


class JobFailed(Exception):
    """Raised when a job raised an error. The message is the traceback."""


@dataclass(frozen=True, slots=True)
class Tree:
    """A checkout of the project.

    Parameters:
        name: of its column in a table.
        root: its directory, which comes first on the path of its processes.
        command: words that run its command line, such as `python -m penstock`. A first word `python` is this Python.
    """

    name: str
    root: Path
    command: tuple[str, ...]

    @classmethod
    def of(cls, name: str, root: Path, command: str) -> Tree:
        first, *others = shlex.split(command)
        return cls(name, root.resolve(), (sys.executable if first == "python" else first, *others))

    @property
    def environment(self) -> dict[str, str]:
        """The environment of a process of this tree."""
        return {**os.environ, "PYTHONPATH": str(self.root)}


THIS = Tree.of("this tree", ROOT, "python -m penstock")


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job returned, and the processor time of the section that it measured, in seconds."""

    value: Any
    processor_s: float


class JobProcess:
    """A process that runs jobs of a tree, one at a time. `job_processes` starts it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        """Number of the process."""
        return self._process.pid

    def begin(self, job: str, *arguments: object) -> None:
        """Begin `module.function(*arguments)`, with the tree's own module. The arguments must be of the standard library."""
        assert self._process.stdin is not None
        module, _, function = job.rpartition(".")
        pickle.dump((module, function, arguments), self._process.stdin)
        self._process.stdin.flush()

    def result(self) -> JobResult:
        """Wait for the job that was begun.

        Raises:
            JobFailed
        """
        assert self._process.stdout is not None
        try:
            error, value, processor_s = pickle.load(self._process.stdout)
        except EOFError:
            raise JobFailed(f"a process for jobs ended with status {self._process.wait()}") from None
        if error:
            raise JobFailed(error)
        return JobResult(value, processor_s)


@contextmanager
def job_processes(tree: Tree, count: int) -> Iterator[Sequence[JobProcess]]:
    """Start processes that run jobs of a tree; at the end of the context they end."""
    with ExitStack() as stack:
        yield [stack.enter_context(_job_process(tree)) for _ in range(count)]


@contextmanager
def _job_process(tree: Tree) -> Iterator[JobProcess]:
    # With -P the script's own directory stays off the path: it holds modules that are called like packages of a tree.
    command = [sys.executable, "-P", str(JOB_SCRIPT)]
    with subprocess.Popen(
        command, cwd=tree.root, env=tree.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        try:
            yield JobProcess(process)
        except BaseException:
            process.kill()
            raise
