"""A node as a process, for tests that kill it, and commands as processes.

Both are forked from a process that has imported Penstock (`tests.system.forks`). `anew` stands for an interpreter of their own,
as a shell starts it: for tests of the start itself, and where something must happen before the interpreter runs.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.system.forks import ForkedProcess, forks

ROOT = Path(__file__).parents[2]


STOP_S = 30

ANEW = frozenset(("demo", "reconcile", "worker"))
"""Commands that start processes of their own with this interpreter, or a Spark."""


class NodeProcess:
    """`penstock serve` on a data directory, on free ports. `start` may be called again after its end.

    Parameters:
        data_dir: of the node.
        descriptors: soft and hard limit of file descriptors; None for those of this process.
        listener: socket that the node gets for its gRPC listener, as a supervisor passes it.
        listener_name: name of that socket.
        anew: start it with an interpreter of its own.
    """

    def __init__(
        self,
        data_dir: Path,
        *,
        descriptors: tuple[int, int] | None = None,
        listener: socket.socket | None = None,
        listener_name: str = "pop",
        anew: bool = False,
    ) -> None:
        self.listener, self.listener_name = listener, listener_name
        self.data_dir = data_dir
        self.log = data_dir.with_suffix(".log")
        self.descriptors = descriptors
        self.addresses: dict[str, str] = {}
        self._is_anew = anew or listener is not None
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None

    def start(self, *options: str, directory: Path = ROOT) -> NodeProcess:
        """Start the node in a directory, and return when it is ready."""
        listeners = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "127.0.0.1:0")]
        arguments = ["serve", "--data-dir", str(self.data_dir), *listeners, *options]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, "PYTHONPATH": path}
        with self.log.open("ab") as log:
            if self._is_anew or "LD_PRELOAD" in environment:
                self._process = self._start_anew(arguments, log.fileno(), directory, environment)
            else:
                self._process = forks().launch(
                    arguments,
                    stderr=log.fileno(),
                    directory=directory,
                    environment=environment,
                    descriptors=self.descriptors,
                )
        assert self._process.stdout is not None
        line = self._process.stdout.readline().decode()
        assert line.startswith("ready "), f"{line!r}\n{self.log.read_text()}"
        self.addresses = dict(word.split("=", 1) for word in line.split()[1:])
        return self

    def _start_anew(
        self, arguments: list[str], stderr: int, directory: Path, environment: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "penstock", *arguments]
        if self.listener is not None:
            passed = f"LISTEN_PID=$$ LISTEN_FDS=1 LISTEN_FDNAMES={self.listener_name}"
            command = ["bash", "-c", f'exec 3<&{self.listener.fileno()} && {passed} exec "$@"', "bash", *command]
        return subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=directory,
            env=environment,
            preexec_fn=self._limit if self.descriptors is not None else None,
            pass_fds=(self.listener.fileno(),) if self.listener is not None else (),
        )

    def _limit(self) -> None:
        if self.descriptors is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, self.descriptors)

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def port(self, listener: str) -> int:
        return int(self.addresses[listener].rpartition(":")[2])

    def kill(self) -> None:
        """End the node with SIGKILL."""
        assert self._process is not None
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(STOP_S)

    def signal(self, number: int) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self) -> int:
        """End the node with SIGTERM, and return its exit status."""
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)

    def close(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGKILL)
            self._process.wait(STOP_S)
            assert self._process.stdout is not None
            self._process.stdout.close()


def run_penstock(
    *arguments: str, text: str = "", timeout_s: float = 100, anew: bool = False, directory: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run a command of the command line in a directory with `text` as its input, and return its result."""
    if anew or ANEW.intersection(arguments[:1]) or "LD_PRELOAD" in os.environ:
        command = [sys.executable, "-m", "penstock", *arguments]
        return subprocess.run(
            command, cwd=directory, input=text, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    with ExitStack() as files:
        stdin, stdout, stderr = (files.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3))
        stdin.write(text)
        stdin.seek(0)
        process = forks().launch(
            arguments,
            stdin=stdin.fileno(),
            stdout=stdout.fileno(),
            stderr=stderr.fileno(),
            directory=directory,
            environment=os.environ,
        )
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            raise
        stdout.seek(0)
        stderr.seek(0)
        return subprocess.CompletedProcess(["penstock", *arguments], status, stdout.read(), stderr.read())
