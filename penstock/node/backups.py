"""Backups that the node makes itself, one at a time, for callers of the admin API on other machines.

A backup has the same hold as one of `penstock backup`. Whatever ends the hold early ends the backup: an operator who cancels
it, the stop of the node, a drain, or a disk that is nearly full. A thread copies the files. It waits for disks most of the
time, and leaves the interpreter to the event loop while it computes a checksum.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Final, NamedTuple

import structlog

from penstock.backup.backup import SYSTEM_COPY_FILES, BackupSummary, back_up, refuse_file
from penstock.backup.copying import CopyFiles, Pace
from penstock.backup.errors import BackupFailed
from penstock.backup.source import Source, held_source
from penstock.node.errors import ControlRefused
from penstock.node.holding import Grant, Holding
from penstock.store.errors import StoreError
from penstock.store.options import MIB

logger = structlog.get_logger("node")

STOP_S: Final = 10.0
"""Seconds that the stop of the node waits for the thread. A cancelled backup ends with the system call that it is in, and a
disk of backups that hangs must not keep the node from stopping in order."""

PREPARING: Final = "Preparing"
"""The step before the first file is copied: the node flushes and copies its index, which takes seconds at most."""


class BackupState(StrEnum):
    """How far a backup is."""

    IDLE = "idle"
    """None has begun since the node was started."""
    RUNNING = "running"
    CANCELLING = "cancelling"
    """It ends as soon as the thread notices."""
    COMPLETE = "complete"
    FAILED = "failed"
    CANCELLED = "cancelled"


class CopyStep(NamedTuple):
    """How far a step of a backup is."""

    what: str
    done_bytes: int
    expected_bytes: int
    """Bytes of the whole step; 0 if nobody knows."""


class BackupRun:
    """One backup. It is the meter that the thread tells of each piece, and that ends the backup when its hold has ended.

    Parameters:
        name: of its directory below that of all backups.
        directory: where it is stored.
        grant: its hold.
        begun_ms: when it began, in ms since 1970.
    """

    def __init__(self, name: str, directory: Path, grant: Grant, begun_ms: int) -> None:
        self.name = name
        self.directory = directory
        self.grant = grant
        self.begun_ms = begun_ms
        self.state = BackupState.RUNNING
        self.step = CopyStep(PREPARING, 0, 0)
        """Replaced as a whole, because the thread writes it and the loop reads it."""
        self.why = ""
        """Why the backup has failed or was cancelled."""
        self.ended_ms = 0
        """When it ended; 0 before."""
        self.summary: BackupSummary | None = None
        """What it has done, once it is complete."""
        self.has_lost_hold = Event()
        """Set when its hold has ended early. The thread waits for it where the pace lets it wait."""

    @property
    def is_over(self) -> bool:
        """Whether it has ended in one way or another."""
        return self.ended_ms != 0

    def expect(self, size: int, what: str) -> None:
        """Begin a step that processes `size` bytes. Raises BackupFailed if the hold has ended."""
        self.check()
        self.step = CopyStep(what, 0, size)

    def advance(self, size: int) -> None:
        """Note that `size` more bytes are processed. Raises BackupFailed if the hold has ended."""
        self.check()
        self.step = self.step._replace(done_bytes=self.step.done_bytes + size)

    def check(self) -> None:
        """Raise BackupFailed if the hold has ended."""
        if self.grant.ended.is_set():  # only the loop waits for this event, but any thread may look at it
            raise BackupFailed(self.grant.why)


class Backups:
    """Makes the backups of a running node.

    Parameters:
        data_dir: of the node.
        directory: has a directory for each backup; None if the node makes none.
        holding: of the node.
        now_ms: returns the node's time.
        files: have the data directory and the backups.
    """

    def __init__(
        self,
        data_dir: Path,
        directory: Path | None,
        holding: Holding,
        now_ms: Callable[[], int],
        *,
        files: CopyFiles = SYSTEM_COPY_FILES,
    ) -> None:
        self._data_dir = data_dir
        self._directory = directory
        self._holding = holding
        self._now_ms = now_ms
        self._files = files
        self._task: asyncio.Task[None] | None = None
        self._closed = ""
        """Why no backup may begin any more."""
        self.run: BackupRun | None = None
        """The present backup, or the last one."""
        self.last_complete: BackupRun | None = None
        """The last one that is complete."""

    # --- what operators ask for -------------------------------------------------------------------------------------

    @property
    def is_held(self) -> bool:
        """Whether any backup has the hold, also one of `penstock backup`."""
        return self._holding.is_held

    @property
    def last_backup_ms(self) -> int:
        """When the last backup of any kind was complete, in ms since 1970; 0 if none is known."""
        return self._holding.last_backup_ms

    def begin(self, name: str, *, may_link: bool, mib_per_s: int) -> BackupRun:
        """Begin a backup.

        Args:
            name: of its directory, one component of a path. If there is a backup of the node, only what is new is copied.
            may_link: as in `back_up`.
            mib_per_s: bound of the rate in MiB per second; 0 for none.

        Raises:
            ControlRefused: the node makes no backups, does not make any now, or another one is running.
        """
        if self._directory is None:
            raise ControlRefused(
                "the node stores no backups by itself, because admin.backup_dir is empty; set it to a directory outside of the "
                "data directory, and start the node anew"
            )
        if self._closed:
            raise ControlRefused(f"no backup can begin, because {self._closed}")
        if self.run is not None and not self.run.is_over:
            raise ControlRefused(f"the backup {self.run.name!r} is {self.run.state}; wait for its end, or cancel it")
        run = self.run = BackupRun(name, self._directory / name, self._holding.begin(), self._now_ms())
        pace = Pace(mib_per_s * MIB, sleep=run.has_lost_hold.wait)
        self._task = asyncio.get_running_loop().create_task(self._make(run, pace, may_link=may_link))
        return run

    def cancel(self, run: BackupRun, why: str) -> None:
        """Let a backup end, unless it has ended. The earlier backup in its directory stays as it was."""
        if not run.grant.ended.is_set():
            run.state = BackupState.CANCELLING
            self._holding.end(run.grant, why)

    def close(self, why: str) -> None:
        """Let no backup begin any more, and cancel the one that is running; `why` follows the word "because"."""
        self._closed = why
        if self.run is not None:
            self.cancel(self.run, why)

    async def stop(self) -> None:
        """Cancel the backup that is running, and wait for its end. The hold may be stopped afterwards."""
        self.close("the node stops")
        if self._task is not None:
            _, running = await asyncio.wait((self._task,), timeout=STOP_S)
            if running and self.run is not None:
                logger.error("backup.abandoned", name=self.run.name, why=f"its disk did not answer for {STOP_S:g} s")
                self._task.cancel()

    # --- the work ---------------------------------------------------------------------------------------------------

    async def _make(self, run: BackupRun, pace: Pace, *, may_link: bool) -> None:
        watching = asyncio.get_running_loop().create_task(self._watch(run))
        state, why = BackupState.FAILED, ""
        try:
            run.summary = await _in_thread(partial(self._back_up, run, pace, asyncio.get_running_loop(), may_link=may_link))
            await self._holding.note_backup()
            state = BackupState.COMPLETE
        except (StoreError, ControlRefused, OSError) as error:
            why = run.grant.why or _text_of(error)  # what the end of the hold breaks is no reason of its own
            if run.state is BackupState.CANCELLING:
                state = BackupState.CANCELLED
        except Exception:
            logger.exception("backup.failed", name=run.name)
            why = "the node has failed to make it, which is a defect of Penstock; its log has the details"
        finally:
            watching.cancel()
            self._holding.release(run.grant)
        self._end(run, state, why)

    def _end(self, run: BackupRun, state: BackupState, why: str) -> None:
        run.state, run.why, run.ended_ms = state, why, self._now_ms()
        if run.summary is not None:
            self.last_complete = run
            logger.info("backup.complete", directory=str(run.directory), **run.summary._asdict())
        else:
            logger.warning(f"backup.{state}", directory=str(run.directory), why=why)

    async def _watch(self, run: BackupRun) -> None:
        await self._holding.watch(run.grant)
        run.has_lost_hold.set()

    def _back_up(self, run: BackupRun, pace: Pace, loop: asyncio.AbstractEventLoop, *, may_link: bool) -> BackupSummary:
        """Make a backup on the thread. Raises as `back_up`."""
        parent, files = run.directory.parent, self._files
        if not files.exists(parent):
            raise BackupFailed(
                f"admin.backup_dir is {parent}, which does not exist; mount its disk, or create it for the node's user"
            )
        refuse_file(parent, files)

        @contextmanager
        def held(data_dir: Path, files: CopyFiles) -> Iterator[Source]:
            hold = asyncio.run_coroutine_threadsafe(self._holding.take(run.grant), loop).result()
            yield held_source(data_dir, asdict(hold), files, run.check)

        return back_up(self._data_dir, run.directory, meter=run, pace=pace, may_link=may_link, files=files, source_of=held)


async def _in_thread(work: Callable[[], BackupSummary]) -> BackupSummary:
    """Return what work returns on a thread of its own, which does not keep the process from ending."""
    done: Future[BackupSummary] = Future()
    done.set_running_or_notify_cancel()  # nobody can cancel a thread

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:  # whoever awaits the result gets it
            done.set_exception(error)

    Thread(target=run, name="penstock-backup", daemon=True).start()
    return await asyncio.wrap_future(done)


def _text_of(error: Exception) -> str:
    """Return the text of an error. One of the system begins with its number otherwise."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror if error.filename is None else f"{error.filename} can't be used: {error.strerror}"
    return str(error)
