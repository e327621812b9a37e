"""`penstock serve` as a process that may be killed at any moment, also while it starts."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tests.chaos.launching import Anew, Descriptors, Launched, Launcher

ANEW = Anew()

READY_S_MAX = 60.0
END_S_MAX = 30.0

FAILED_STATUS = 70
"""The node ended because a write or a sync failed."""

INDEX_STATUS = 71
"""The node ended because its index turned out to be damaged. The next start rebuilds it."""


class Start(NamedTuple):
    """How a start ended."""

    is_ready: bool
    status: int
    """Exit status, negative for a signal; 0 if the node is ready."""
    said: str
    """The end of standard error, if the node is not ready."""

    @property
    def is_refusal(self) -> bool:
        """Whether the node said no in words. Anything else, such as a signal or a traceback, is a defect."""
        return not self.is_ready and self.status == 1 and "Traceback" not in self.said and "penstock serve: " in self.said


class ServeProcess:
    """A node on a data directory, on free ports.

    Parameters:
        data_dir: of the node.
        config: TOML file with its options.
        log: gets standard error.
        launcher: starts the process.
    """

    def __init__(self, data_dir: Path, config: Path, log: Path, launcher: Launcher = ANEW) -> None:
        self.data_dir = data_dir
        self.config = config
        self.log = log
        self.descriptors: Descriptors | None = None
        """Limits of descriptors of the next start; None for those of this process."""
        self.addresses: dict[str, str] = {}
        self.start_s = 1.0
        """How long the last start took."""
        self._launcher = launcher
        self._process: Launched | None = None
        self._sync_pid = 0

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def is_started(self) -> bool:
        """Whether there was a start, whatever came of it."""
        return self._process is not None

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def spawn(self) -> None:
        """Start the process, and return at once."""
        assert not self.is_running
        self.addresses, self._sync_pid = {}, 0
        listeners = [word for name in ("mqtt", "pop", "admin") for word in (f"--{name}", "127.0.0.1:0")]
        arguments = ["serve", "--config", str(self.config), *listeners, "--data-dir", str(self.data_dir)]
        with self.log.open("ab") as log:
            self._process = await self._launcher.launch(arguments, stderr=log.fileno(), descriptors=self.descriptors)

    async def ready(self) -> Start:
        """Wait until the process is ready or has ended."""
        assert self._process is not None
        assert self._process.stdout is not None
        async with asyncio.timeout(READY_S_MAX):
            line = (await self._process.stdout.readline()).decode()
        if line.startswith("ready "):
            self.addresses = dict(word.split("=", 1) for word in line.split()[1:])
            self._sync_pid = self._child()
            return Start(True, 0, "")
        status = await self.ended()
        return Start(False, status, self.log.read_text(errors="replace")[-2_000:])

    async def start(self) -> Start:
        begun_s = time.monotonic()
        await self.spawn()
        start = await self.ready()
        self.start_s = time.monotonic() - begun_s
        return start

    def _child(self) -> int:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for child in map(int, children):
            with suppress(OSError):
                if b"syncchild" in Path(f"/proc/{child}/cmdline").read_bytes():
                    return child
        return 0

    @property
    def sync_pid(self) -> int:
        """The process that syncs; 0 if there is none."""
        return self._sync_pid

    def port(self, listener: str) -> int:
        return int(self.addresses[listener].rpartition(":")[2])

    def signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(number)

    def signal_sync(self, number: int) -> None:
        if self._sync_pid:
            with suppress(ProcessLookupError):
                os.kill(self._sync_pid, number)

    async def ended(self) -> int:
        """Wait for the end of the process; return its exit status."""
        assert self._process is not None
        async with asyncio.timeout(END_S_MAX):
            return await self._process.wait()

    async def kill(self) -> None:
        if self.is_running:
            self.signal(signal.SIGKILL)
            self.signal_sync(signal.SIGCONT)  # it ends when the node has, unless it is stopped
            await self.ended()

    async def stop(self) -> int:
        """End the node with SIGTERM; return its exit status."""
        self.signal(signal.SIGTERM)
        return await self.ended()


async def run_command(*arguments: str, timeout_s: float = 100, launcher: Launcher = ANEW) -> tuple[int, str]:
    """Run a command of `penstock`; return its exit status and all that it printed."""
    process = await spawn_command(*arguments, launcher=launcher)
    async with asyncio.timeout(timeout_s):
        assert process.stdout is not None
        said = await process.stdout.read()
        status = await process.wait()
    return status, said.decode(errors="replace")


async def spawn_command(*arguments: str, launcher: Launcher = ANEW) -> Launched:
    """Start a command of `penstock` whose output can be read."""
    return await launcher.launch(arguments)
