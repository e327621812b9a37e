"""The hold of a node: log and index stay as they are on disk while a backup copies them.

`penstock backup` asks for the hold on the control socket, copies the files itself, and asks at the end whether the node has
held them all the time. The hold ends with the command's connection, so a killed command holds nothing. A backup that the node
makes itself (`penstock.node.backups`) takes the same hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, TypeVar

import orjson
import structlog
from aiohttp import web

from penstock.access import bans
from penstock.node.controladdress import HOLD
from penstock.node.errors import ControlRefused
from penstock.node.lastbackup import read_last_backup, write_last_backup
from penstock.store.errors import IndexDamaged
from penstock.store.files import SYSTEM_FILES, Files, read_file, replace_file
from penstock.store.index.index import CHECKPOINT, Index
from penstock.store.retention.retention import Blocker
from penstock.store.space.space import Level
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.node.control import Routes

logger = structlog.get_logger("node")

T = TypeVar("T")

HOLD_S_MAX = 24 * 3600.0
"""Seconds that a hold lasts at most. Retention deletes nothing meanwhile, so a command that hangs must not hold for ever."""

CHECK_S = 1.0
"""Seconds between two looks at the disk while the hold lasts."""

DURABLE_POLL_S = 0.005
"""Seconds between two looks whether the log is durable."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A state of log and index that stays on disk.

    The copy of the index is in the folder `index.checkpoint` of the data directory. There are no paths here, because node and
    command may know that directory by different ones.
    """

    id: str
    """Names the hold."""
    start: int
    """Position of the oldest record of the log."""
    durable: int
    """Everything before this position is on disk. The index covers no more."""
    segments: list[tuple[int, int]]
    """Begin and end position of each segment in order. The last one may have more data after its end, which is `durable`."""
    snapshots: list[int]
    """Positions of the snapshots."""


class Grant:
    """The hold that one backup has, or had."""

    __slots__ = ("ended", "id", "why")

    def __init__(self) -> None:
        self.id = token_hex(8)
        self.ended = asyncio.Event()
        self.why = ""
        """Why the node has ended the hold."""


class Holding:
    """Gives one backup at a time a hold of a store.

    Parameters:
        store: of the node. It must have started before a hold is taken.
        data_dir: of the node.
        files: has that directory.
        executor: runs one piece of work at a time, so that a copy of the index is complete before it is deleted; a thread if it
            is None.
    """

    def __init__(self, store: Store, data_dir: Path, *, files: Files = SYSTEM_FILES, executor: Executor | None = None) -> None:
        self._store = store
        self._data_dir = data_dir
        self._files = files
        self._thread = executor or ThreadPoolExecutor(1, "penstock-hold")
        self._grant: Grant | None = None
        self._last_why = "it was started anew"
        """Why the last hold has ended early."""
        self.last_backup_ms = self._read_last_backup()
        """When the last backup was complete, in ms since 1970; 0 if none is known."""

    def routes(self) -> Routes:
        """Return the routes for the control socket."""
        return {("POST", HOLD): self._serve, ("GET", HOLD): self._confirm}

    async def stop(self) -> None:
        """End the hold, and wait for what the thread does. The store may be closed afterwards."""
        if self._grant is not None:
            self.end(self._grant, "the node was stopped")
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        grant = self.begin()
        try:
            hold = await self.take(grant)
            response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
            await response.prepare(request)
            await response.write(orjson.dumps(asdict(hold)) + b"\n")
            await self.watch(grant)
            with suppress(OSError):  # the command has ended too
                await response.write(orjson.dumps({"ended": grant.why}) + b"\n")
            return response
        finally:
            self.release(grant)

    async def _confirm(self, request: web.Request) -> web.Response:
        self.confirm(request.query.get("id", ""))
        await self.note_backup()
        return web.Response(body=b"{}", content_type="application/json")

    def begin(self) -> Grant:
        """Let retention delete nothing from now on, for one backup. Raises ControlRefused if another one has the hold."""
        if self._grant is not None:
            raise ControlRefused("another backup of this node is running; wait for its end, or end it, and try again")
        self._grant = Grant()
        self._store.retention.holds.add(Blocker.BACKUP)
        logger.info("backup.begun", id=self._grant.id)
        return self._grant

    @property
    def is_held(self) -> bool:
        """Whether a backup has the hold."""
        return self._grant is not None

    def confirm(self, grant_id: str) -> None:
        """Raise ControlRefused unless the hold of this id has lasted until now."""
        if self._grant is None or grant_id != self._grant.id:
            raise ControlRefused(f"the node did not hold its files all the time: {self._last_why}")

    async def note_backup(self) -> None:
        """Note that a backup is complete now: everything is copied, and the hold has lasted."""
        completed_ms = self.last_backup_ms = self._store.now_ms()
        loop = asyncio.get_running_loop()
        try:
            await loop.run_in_executor(self._thread, write_last_backup, self._data_dir, completed_ms, self._files)
        except OSError as error:  # the backup is good all the same
            logger.warning("backup.not_noted", why=str(error))

    def _read_last_backup(self) -> int:
        try:
            return read_last_backup(self._data_dir, self._files)
        except (OSError, ValueError) as error:  # the next backup replaces the file
            logger.warning("backup.last_unknown", why=str(error))
            return 0

    async def take(self, grant: Grant) -> Hold:
        """Copy the index and the bans, and return what is held once that is durable. Raises ControlRefused."""
        store = self._store
        await self._run(grant, store.index.flush)  # without the interpreter, so that little is left to do for the checkpoint
        await self._run(grant, store.index.checkpoint)
        await self._run(grant, self._copy_bans)
        needed = store.log.written  # the copy of the index covers no more
        while not grant.ended.is_set() and not store.is_committed(needed):  # noqa: ASYNC110 - with `flush = "async"` no callback tells of it
            await asyncio.sleep(DURABLE_POLL_S)
        _check(grant)
        durable = store.committed_position
        return Hold(
            id=grant.id,
            start=store.log.start,
            durable=durable,
            segments=[(base, min(end, durable)) for base, end in store.log.segments() if base <= durable],
            snapshots=[position for position in store.retention.snapshots if position <= durable],
        )

    def _copy_bans(self) -> None:
        """Copy the bans, if there are any, beside the copy of the index: the next ban replaces the file."""
        source = self._data_dir / bans.FILE
        if self._files.exists(source):
            target = self._data_dir / CHECKPOINT / bans.FILE
            replace_file(self._files, target, read_file(self._files, source), permissions=0o600)

    async def _run(self, grant: Grant, work: Callable[[], T]) -> T:
        """Run work on the thread."""
        _check(grant)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except IndexDamaged as error:
            self._store.fail_if_damaged(error)
            raise ControlRefused(str(error)) from error
        except OSError as error:
            raise ControlRefused(f"index or bans can't be copied: {error}; look at the disk, and try again") from error

    async def watch(self, grant: Grant) -> None:
        """Return when the node has ended the hold."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + HOLD_S_MAX
        while not grant.ended.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await grant.ended.wait()
            if self._store.space.level is not Level.OPEN and self._store.retention.is_held_back:
                why = "the disk is nearly full, and retention must delete segments; free or add space, and try again"
                self.end(grant, why)
            elif loop.time() > until_s:
                self.end(grant, f"it took longer than {HOLD_S_MAX / 3600:.0f} hours, and retention must delete segments")

    def end(self, grant: Grant, why: str) -> None:
        """End a hold early, unless it has ended; `why` follows the words "the node ended the backup:"."""
        if not grant.ended.is_set():
            logger.warning("backup.refused", id=grant.id, why=why)
            grant.why = self._last_why = why
            self.release(grant)

    def release(self, grant: Grant) -> None:
        """End the hold, unless it has ended."""
        if not grant.ended.is_set():
            logger.info("backup.ended", id=grant.id)
            grant.ended.set()
            self._grant = None
            self._store.retention.holds.discard(Blocker.BACKUP)
            self._thread.submit(self._remove)

    def _remove(self) -> None:
        try:
            Index.remove_checkpoint(self._data_dir, self._files)
        except OSError as error:  # the next backup or the next start tries again
            logger.error("backup.left_over", error=str(error))


def _check(grant: Grant) -> None:
    if grant.ended.is_set():
        raise ControlRefused(f"the node ended the backup: {grant.why}")
