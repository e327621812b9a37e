"""What a backup copies: the files of a data directory at one moment, of a node that runs or that has stopped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.access import bans
from penstock.backup.copying import CopyFiles
from penstock.backup.errors import BackupFailed
from penstock.node.controladdress import HOLD
from penstock.node.controlclient import Request
from penstock.node.errors import ControlRefused, NodeNotRunning
from penstock.node.lock import DataDirLock
from penstock.pop.core.handle import SECRET
from penstock.store.errors import DataDirLocked
from penstock.store.files import LOST_FOUND, read_file
from penstock.store.index import index
from penstock.store.index.index import CHECKPOINT, Index
from penstock.store.log.segment import LOG_DIRECTORY, segment_bases, segment_name
from penstock.store.log.syncmark import Ending, SyncMark
from penstock.store.snapshots import snapshotreader
from penstock.store.snapshots.snapshotreader import snapshot_path
from penstock.store.snapshots.snapshotwriter import snapshots
from penstock.store.space import ballast

_OF_A_PROCESS = ("LOCK", "LOG")
"""Beginnings of the names of RocksDB's files that an index doesn't need: its lock, and its diary."""

_BESIDE = (ballast.FILE, index.ROOM, LOST_FOUND, bans.FILE)
"""Names that may be in the folder of an index, or of its copy, and don't belong to it."""

_SIZE_BYTES = 4
"""Bytes of the size of a record. They are 0 where the data of a segment ends."""

PRIVATE = (SECRET, bans.FILE)
"""Files that only the node's user may read."""


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A file to copy."""

    path: str
    """Its path in a data directory."""
    actual: Path
    """Where it is."""
    size: int
    """Bytes to copy, from its beginning."""
    is_immutable: bool
    """Whether nobody ever writes to it, so that it may be linked."""


@dataclass(frozen=True, slots=True)
class Source:
    """A state of a data directory that stays as it is."""

    data_dir: Path
    start: int
    """Position of the oldest record."""
    durable: int
    """Position after the last record."""
    segments: list[tuple[int, int]]
    """Begin and end position of each segment in order."""
    snapshots: list[int]
    """Positions of the snapshots."""
    index_dir: Path
    """Folder with an index that nobody writes to."""
    bans: Path
    """File with the bans that nobody writes to. It does not exist if there never was a ban."""
    reach: CopyFiles
    """Have the data directory."""
    confirm: Callable[[], None]
    """Raises BackupFailed unless the state has stayed all the time."""

    @property
    def identity(self) -> str:
        """Tells the data directory from others. Raises OSError."""
        return identity_of(self.data_dir, self.reach)

    def files(self) -> Iterator[SourceFile]:
        """Yield the files.

        Raises:
            BackupFailed: there is no index.
            OSError: a file or folder can't be read.
        """
        reach = self.reach
        names = index_files(self.index_dir, reach)
        if not names:
            raise BackupFailed(f"{self.index_dir} has no index; look at the log of the node, and try again")
        for name in names:
            actual = self.index_dir / name
            yield SourceFile(f"{index.DIRECTORY}/{name}", actual, reach.size(actual), name.endswith(".sst"))
        for position in self.snapshots:
            actual = snapshot_path(self.data_dir, position)
            yield SourceFile(f"{snapshotreader.DIRECTORY}/{actual.name}", actual, reach.size(actual), True)
        for base, end in self.segments:
            name = segment_name(base)
            is_sealed = base != self.segments[-1][0]
            yield SourceFile(f"{LOG_DIRECTORY}/{name}", self.data_dir / LOG_DIRECTORY / name, end - base, is_sealed)
        secret = self.data_dir / SECRET
        yield SourceFile(SECRET, secret, reach.size(secret), False)
        if reach.exists(self.bans):
            yield SourceFile(bans.FILE, self.bans, reach.size(self.bans), False)


def index_files(index_dir: Path, files: CopyFiles) -> list[str]:
    """Return the names of the files of which an index consists. Raises OSError."""
    return [name for name in files.names(index_dir) if name not in _BESIDE and not name.startswith(_OF_A_PROCESS)]


def identity_of(data_dir: Path, files: CopyFiles) -> str:
    """Return what tells a data directory from others: a hash of its secret. Raises OSError."""
    return sha256(b"identity" + read_file(files, data_dir / SECRET)).hexdigest()[:32]


@contextmanager
def open_source(data_dir: Path, files: CopyFiles) -> Iterator[Source]:
    """Return the state of a data directory, which stays within the context: the node holds it, or its lock is taken.

    Raises:
        BackupFailed: the node has not stopped in order, or is of another version, or no data directory is there.
        ControlRefused: the node refuses, for example because another backup is running.
        OSError: a file can't be read.
    """
    if not files.exists(data_dir / LOG_DIRECTORY):
        raise BackupFailed(f"{data_dir} holds no CommitLog; name the data directory of a node on this machine")
    try:
        request = Request(data_dir, "POST", HOLD)
    except NodeNotRunning as error:
        try:
            lock = DataDirLock(data_dir)
        except DataDirLocked as locked:
            raise BackupFailed(
                f"the process with pid {locked.pid} uses {data_dir}, but does not listen for commands; if it is the "
                "node, it is starting or ending, so try again when it is ready; otherwise wait for the end of the command"
            ) from error
        with lock:
            yield _stopped(data_dir, files)
        return
    with request:
        hold = request.line()
        if "ended" in hold:
            raise BackupFailed(f"the node ended the backup: {hold['ended']}")
        yield held_source(data_dir, hold, files, lambda: _confirm(data_dir, hold["id"]))


def held_source(data_dir: Path, hold: Mapping[str, Any], files: CopyFiles, confirm: Callable[[], None]) -> Source:
    """Return the state that a running node holds.

    Args:
        data_dir: of the node.
        hold: the fields of `penstock.node.holding.Hold`.
        files, confirm: see `Source`.
    """
    return Source(
        data_dir,
        hold["start"],
        hold["durable"],
        [(base, end) for base, end in hold["segments"]],
        hold["snapshots"],
        data_dir / CHECKPOINT,
        data_dir / CHECKPOINT / bans.FILE,
        files,
        confirm,
    )


def _confirm(data_dir: Path, hold_id: str) -> None:
    """Raise BackupFailed unless a node still has a hold, and so has had it all the time."""
    try:
        Request(data_dir, "GET", f"{HOLD}?id={hold_id}").close()
    except (ControlRefused, NodeNotRunning) as error:
        raise BackupFailed(f"the backup is not complete, because {error}; run it again") from error


def _stopped(data_dir: Path, files: CopyFiles) -> Source:
    """Return the state of a node that has stopped in order. Anything else would need a recovery, which is a start's."""
    bases = segment_bases(files, data_dir / LOG_DIRECTORY)
    mark = SyncMark(data_dir, files=files).read()
    if mark is not None and mark.ending is not Ending.ORDERLY:
        raise _not_in_order(data_dir, f"it failed: {mark.reason}" if mark.reason else "it was killed, or the machine failed")
    if mark is None or not bases or Index.damage_of(data_dir, files):
        raise _not_in_order(data_dir, "its sync mark, its log or its index is missing or damaged")
    if mark.ending is not Ending.ORDERLY:
        raise _not_in_order(data_dir, f"its sync mark says that it was {mark.ending.name.lower()}")
    end = mark.position
    stored = Index(data_dir, read_only=True)
    try:
        covered = stored.covered()
    finally:
        stored.close()
    if covered is None or covered.position != end:
        raise _not_in_order(data_dir, f"its log goes up to {end}, but its index covers {covered.position if covered else 0}")
    if (
        mark.begin != bases[0]
        or end < bases[-1]
        or not _ends_at(data_dir / LOG_DIRECTORY / segment_name(bases[-1]), end - bases[-1], files)
    ):
        raise _not_in_order(data_dir, f"the log doesn't go from {mark.begin} to {end}, as its sync mark says")
    ends = [*bases[1:], end]
    return Source(
        data_dir,
        bases[0],
        end,
        list(zip(bases, ends, strict=True)),
        [position for position in snapshots(data_dir, files) if bases[0] <= position <= end],
        data_dir / index.DIRECTORY,
        data_dir / bans.FILE,
        files,
        lambda: None,
    )


def _ends_at(path: Path, offset: int, files: CopyFiles) -> bool:
    """Return whether the data of a segment ends at an offset. (Whether it is whole is seen when it is copied.)"""
    file = files.open(path)
    try:
        return file.size() >= offset and not any(file.pread(_SIZE_BYTES, offset))
    finally:
        file.close()


def _not_in_order(data_dir: Path, why: str) -> BackupFailed:
    return BackupFailed(
        f"the node on {data_dir} has not stopped in order: {why}. Start it, and run the backup while it runs or after it was "
        "stopped with SIGTERM"
    )
