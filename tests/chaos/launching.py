"""Two ways to start a process of `penstock`: anew, as a shell does, or as a fork of one that has imported everything.

Most of a start is Python importing modules, which no fault can change. A campaign has thousands of starts, so it forks:
`python -m tests.chaos.launching SOCKET` imports Penstock and then forks a process for each message on the socket. What a fork
runs is the entry point of the command line, with the same arguments. `tests.system.forks` uses the same process.
"""

from __future__ import annotations

import array
import asyncio
import importlib
import json
import os
import pkgutil
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NotRequired, Protocol, TypedDict

from penstock import cli
from tests.bounds import set_bounds

ROOT = Path(__file__).parents[2]

MESSAGE_BYTES_MAX = 65_536

Descriptors = tuple[int, int]
"""Soft and hard limit of descriptors."""


class Launched(Protocol):
    """A process of `penstock`."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None:
        """Exit status, negative for a signal; None while the process runs."""

    @property
    def stdout(self) -> asyncio.StreamReader | None: ...

    def send_signal(self, number: int, /) -> None:
        """Send a signal. Raises ProcessLookupError if the process has ended."""

    async def wait(self) -> int:
        """Wait for the end of the process; return its exit status."""


class Launcher(Protocol):
    """Starts processes of `penstock`."""

    async def launch(
        self, arguments: Sequence[str], *, stderr: int = subprocess.STDOUT, descriptors: Descriptors | None = None
    ) -> Launched:
        """Start a process whose standard output can be read.

        Args:
            arguments: of the command `penstock`.
            stderr: a descriptor that gets standard error, or STDOUT.
            descriptors: limits of descriptors, if not those of this process.
        """

    def within(self, environment: Mapping[str, str], /) -> Launcher:
        """Return a launcher whose processes have these variables besides those of this process."""

    async def close(self) -> None:
        """End what the launcher itself has started."""


# --- anew ---------------------------------------------------------------------------------------------------------------


class Anew:
    """Starts each process with an interpreter of its own.

    Parameters:
        environment: variables besides those of this process.
    """

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self._environment = environment or {}

    async def launch(
        self, arguments: Sequence[str], *, stderr: int = subprocess.STDOUT, descriptors: Descriptors | None = None
    ) -> Launched:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "penstock", *arguments),
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=ROOT,
            env={**os.environ, **python_path(), **self._environment},
        )
        if descriptors is not None:
            resource.prlimit(process.pid, resource.RLIMIT_NOFILE, descriptors)
        return process

    def within(self, environment: Mapping[str, str], /) -> Anew:
        return Anew(environment)

    async def close(self) -> None:
        """Do nothing: whoever has started a process ends it."""


def python_path() -> dict[str, str]:
    """Return the variable that lets another interpreter import this checkout."""
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}


# --- forked -------------------------------------------------------------------------------------------------------------


class Fork:
    """A process that was forked."""

    def __init__(self, pid: int, stdout: asyncio.StreamReader, ended: asyncio.Future[int]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._ended = ended

    @property
    def returncode(self) -> int | None:
        return self._ended.result() if self._ended.done() else None

    def send_signal(self, number: int, /) -> None:
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, number)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)


class Forks:
    """Starts processes as forks of one that has imported Penstock, which begins with the first `launch`.

    Parameters:
        environment: variables besides those of this process.
        mutation: a deliberate defect of all processes (`tests.chaos.mutations`), or an empty string.
    """

    def __init__(self, environment: Mapping[str, str] | None = None, *, mutation: str = "") -> None:
        self._environment = environment or {}
        self._mutation = mutation
        self._parent: asyncio.subprocess.Process | None = None
        self._socket: socket.socket | None = None
        self._pids: asyncio.Future[int] | None = None
        self._running: dict[int, asyncio.Future[int]] = {}
        self._lock = asyncio.Lock()

    async def _begin(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._parent = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.chaos.launching", str(theirs.fileno()), self._mutation),
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                # A library that computes with threads of its own would start them before the fork.
                env={**os.environ, **python_path(), "OPENBLAS_NUM_THREADS": "1", **self._environment},
            )
        ours.setblocking(False)
        asyncio.get_running_loop().add_reader(ours, self._read, ours)
        return ours

    async def launch(
        self, arguments: Sequence[str], *, stderr: int = subprocess.STDOUT, descriptors: Descriptors | None = None
    ) -> Launched:
        async with self._lock:
            self._socket = self._socket or await self._begin()
            reading, writing = os.pipe()
            self._pids = asyncio.get_running_loop().create_future()
            asked = json.dumps({"arguments": list(arguments), "descriptors": descriptors}).encode()
            handles = array.array("i", [writing, writing if stderr == subprocess.STDOUT else stderr])
            self._socket.sendmsg([asked], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, handles)])
            os.close(writing)
            stdout = asyncio.StreamReader()
            await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(stdout), os.fdopen(reading, "rb", buffering=0)
            )
            pid = await self._pids
            return Fork(pid, stdout, self._running[pid])

    def _read(self, ours: socket.socket) -> None:
        """Take what the parent says: that it has forked a process, or that one has ended."""
        data = ours.recv(MESSAGE_BYTES_MAX)
        loop = asyncio.get_running_loop()
        if not data:
            loop.remove_reader(ours)
            for each in (self._pids, *self._running.values()):
                if each is not None and not each.done():
                    each.set_exception(OSError("the process that forks nodes has died"))
            return
        said = json.loads(data)
        if "ended" in said:
            self._running.pop(said["ended"]).set_result(said["status"])
            return
        assert self._pids is not None
        self._running[said["forked"]] = loop.create_future()
        self._pids.set_result(said["forked"])

    def within(self, environment: Mapping[str, str], /) -> Forks:
        return Forks({**self._environment, **environment}, mutation=self._mutation)

    async def close(self) -> None:
        """End the parent, which kills the processes that are left."""
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
        if self._parent is not None:
            await self._parent.wait()


class Parent:
    """The process that forks."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._children: set[int] = set()

    def serve(self) -> None:
        """Fork what the socket asks for, until it is closed."""
        wake, woken = socket.socketpair()
        wake.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(woken.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        selector = selectors.DefaultSelector()
        selector.register(self._connection, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is wake:
                    wake.recv(MESSAGE_BYTES_MAX)
                    self._reap()
                    continue
                data, handles, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES_MAX, 3)
                if not data:
                    self._end()
                    return
                pid = os.fork()
                if not pid:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for each in (self._connection, wake, woken, selector):
                        each.close()
                    run(json.loads(data), handles)
                for handle in handles:
                    os.close(handle)
                self._children.add(pid)
                self._say({"forked": pid})

    def _say(self, what: dict[str, int]) -> None:
        self._connection.send(json.dumps(what).encode())

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            self._children.discard(pid)
            self._say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})

    def _end(self) -> None:
        for pid in self._children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class Asked(TypedDict):
    """What to fork."""

    arguments: list[str]
    """Arguments of the command `penstock`."""
    descriptors: NotRequired[list[int] | None]
    """Soft and hard limit of descriptors, if not those of the parent."""
    directory: NotRequired[str]
    """Working directory, if not that of the parent."""
    environment: NotRequired[dict[str, str]]
    """All variables, if not those of the parent."""


def run(asked: Asked, handles: list[int]) -> None:
    """Become a process of `penstock`: take over standard output, error and perhaps input, run the command, and exit."""
    from penstock.cli.main import main

    for number, handle in zip((1, 2, 0), handles, strict=False):
        os.dup2(handle, number)
        os.close(handle)
    if "directory" in asked:
        os.chdir(asked["directory"])
    if "environment" in asked:
        os.environ.clear()
        os.environ.update(asked["environment"])
        time.tzset()
    if limits := asked.get("descriptors"):
        soft, hard = limits
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    set_bounds()
    sys.argv = ["penstock", *asked["arguments"]]
    status = 1
    try:
        status = main(asked["arguments"])
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:  # as an interpreter does, which then exits with 1
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


RUN_BY_COMMANDS = (
    "paho.mqtt.client",
    "penstock.access.explain",
    "penstock.access.passwords",
    "penstock.backup.backup",
    "penstock.backup.restore",
    "penstock.backup.verify",
    "penstock.node.config",
    "penstock.node.controlclient",
    "penstock.node.logs",
    "penstock.node.node",
    "uvloop",
)
"""What commands import when they run, so that a fork need not."""


def main(number: str, mutation: str) -> None:
    """Import Penstock, and fork what the socket with this number asks for."""
    for name in (*(module.name for module in pkgutil.iter_modules(cli.__path__, f"{cli.__name__}.")), *RUN_BY_COMMANDS):
        importlib.import_module(name)
    if mutation:
        from tests.chaos.mutations import mutate

        mutate(mutation)
    assert len(os.listdir("/proc/self/task")) == 1, "a process with threads can't be forked safely"
    Parent(socket.socket(fileno=int(number))).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
