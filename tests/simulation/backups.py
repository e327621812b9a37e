"""Backups of a simulated node: the real code of `penstock backup` and `penstock restore`, on the simulated disk.

The command is a process of its own. While it copies, the node goes on, may be killed, and the machine may lose power, which
ends the command too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

from penstock.backup import backup, restore, source
from penstock.backup.backup import back_up
from penstock.backup.errors import BackupFailed
from penstock.backup.manifest import is_backup, load_manifest
from penstock.backup.restore import restore_backup
from penstock.node.config import Config
from penstock.node.errors import ControlRefused
from penstock.node.holding import Grant
from penstock.store.errors import DiskFull
from penstock.store.index.index import DIRECTORY
from penstock.store.log.commitlog import CommitLog
from tests.simulation.disk import ProcessDead, SimulatedFiles
from tests.simulation.oracle import Oracle
from tests.simulation.process import Machine, Process
from tests.simulation.sent import Sent, Violation
from tests.simulation.verifying import index_differences

BACKUP = Path("/backup")
RESTORED = Path("/restored")

HOLD_S = 30.0
"""Virtual seconds within which a node must grant a hold."""


class SimulatedRequest:
    """A request on the control socket: a `penstock.node.controlclient.Request`.

    Parameters:
        process: the node.
        now_s: returns the virtual time.
        data_dir, method, path: as of a real request.
    """

    def __init__(self, process: Process, now_s: Callable[[], float], data_dir: Path, method: str, path: str) -> None:
        self._grant: Grant | None = None
        self._task: asyncio.Task[Any] | None = None
        self._process = process
        self._now_s = now_s
        self._hold: dict[str, Any] = {}
        if process.status is not None:
            raise ControlRefused("the node has ended")
        if method == "GET":
            process.holding.confirm(path.partition("?id=")[2])
            return
        self._task = process.loop.create_task(self._serve())
        until_s = now_s() + HOLD_S
        while not self._task.done() and not self._hold and now_s() < until_s:
            if not process.run_until(now_s() + 0.05):
                raise ControlRefused("the node ended before it answered")
        if self._task.done():
            error = self._task.exception()
            assert error is not None
            raise error
        if not self._hold:
            raise Violation(f"the node did not grant a hold in {HOLD_S} s")

    async def _serve(self) -> None:
        holding = self._process.holding
        grant = holding.begin()
        try:
            self._hold = asdict(await holding.take(grant))
            await holding.watch(grant)
        finally:
            holding.release(grant)

    def line(self) -> dict[str, Any]:
        """Return the hold."""
        return self._hold

    def close(self) -> None:
        """Close the connection, so that the node ends the hold."""
        if self._task is not None and self._process.status is None:
            self._task.cancel()
            self._process.run_until(self._now_s())

    def __enter__(self) -> SimulatedRequest:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Meter:
    """Lets the node go on while a command copies: a `penstock.backup.copying.CopyMeter`."""

    def __init__(self, go_on: Callable[[], None]) -> None:
        self._go_on = go_on

    def expect(self, size: int, what: str) -> None:
        """Do nothing."""

    def advance(self, size: int) -> None:
        """Let the node go on."""
        self._go_on()


class Backups:
    """The backups of one machine, all in one directory.

    Parameters:
        machine: has the disk.
        oracle: knows what was acknowledged.
        note: adds a line to the trace.
    """

    def __init__(self, machine: Machine, oracle: Oracle, note: Callable[[str], None]) -> None:
        self._machine = machine
        self._oracle = oracle
        self._note = note
        self._rounds: dict[int, list[Sent]] = {}
        """Messages that each round must have, as far as the log has not dropped them."""
        self._made = 0
        """Last round that the command has reported as made."""

    @property
    def are_begun(self) -> bool:
        """Whether there may be a backup."""
        return bool(self._rounds)

    def make(self, process: Process, go_on: Callable[[], None], fuse: int | None) -> None:
        """Make a backup. It may fail, or be killed by its fuse or a power cut, but then the one before must be whole."""
        machine = self._machine
        boots, steps = machine.disk.boots, 0

        def step(name: str) -> None:
            nonlocal steps
            steps += 1
            if machine.disk.boots != boots or (fuse is not None and steps > fuse):
                raise ProcessDead

        files = SimulatedFiles(machine.disk, step)
        try:
            number = load_manifest(BACKUP, files).round + 1 if is_backup(BACKUP, files) else 1
            self._rounds[number] = [message for message in self._oracle.sent.values() if message.acked_at and message.qos]
            with _commands(process, machine):
                done = back_up(process.config.data_dir, BACKUP, meter=Meter(go_on), files=files)
        except ProcessDead:
            self._note(f"the backup was killed at step {steps}")
        except (BackupFailed, ControlRefused, OSError, DiskFull) as error:
            self._note(f"the backup failed: {error}")
        else:
            self._made = done.round
            self._note(f"backup {done.round} has the log from {done.start} to {done.durable}")

    def check(self, config: Config) -> None:
        """Restore the backup, if there is one, and check that it has what it must have. Raises Violation."""
        machine = self._machine
        files = SimulatedFiles(machine.disk, lambda name: None)
        if not is_backup(BACKUP, files):
            if self._made:
                raise Violation(f"backup {self._made} was made and is gone")
            return
        manifest = load_manifest(BACKUP, files)
        if manifest.round < self._made:
            raise Violation(f"backup {self._made} was made, but the directory has backup {manifest.round}")
        with _restoring():
            restore_backup(BACKUP, RESTORED, meter=Meter(lambda: None), files=files)
        machine.databases.detach(files, RESTORED / DIRECTORY)
        try:
            self._check_log(manifest.round, manifest.durable, config, files)
            differences = index_differences(machine, replace(config, data_dir=RESTORED), RESTORED)
            if differences:
                raise Violation(f"in the index of backup {manifest.round}, {differences[0]}")
        finally:
            machine.disk.remove_tree(RESTORED)
        self._note(f"backup {manifest.round} is whole")

    def _check_log(self, number: int, durable: int, config: Config, files: SimulatedFiles) -> None:
        log = CommitLog(RESTORED, segment_bytes=config.store.segment_bytes, files=files)
        try:
            log.recover()
            if log.written != durable:
                raise Violation(f"the log of backup {number} ends at {log.written} and not at {durable}")
            found = self._oracle.found_in(log)
        finally:
            log.abandon()
        for message in self._rounds[number]:
            is_dropped = min(message.positions, default=0) < log.start
            if message.number not in found and not is_dropped and not message.is_exempt:
                raise Violation(f"{message} was acknowledged before backup {number} began, and is not in it")


@contextmanager
def _commands(process: Process, machine: Machine) -> Iterator[None]:
    """Let a command reach the node."""
    request = partial(SimulatedRequest, process, lambda: machine.time.now_s)
    with patch.object(source, "Request", request), patch.object(backup, "lock_backup", _unlocked):
        yield


@contextmanager
def _restoring() -> Iterator[None]:
    with patch.object(restore, "lock_backup", _unlocked), patch.object(restore, "DataDirLock", _unlocked):
        yield


def _unlocked(*_: object, **__: object) -> nullcontext[None]:
    """Lock nothing: one command runs at a time."""
    return nullcontext()
