"""Makes a backup of a data directory, in a directory that may have earlier backups of it.

    backup.json                                        what the present backup has (`penstock.backup.manifest`)
    00000001/commitlog.00000000000000000000.log, ...   files of the first backup that still belong to the present one
    00000002/index.000012.sst, ...                     files that the second one has added
    lock                                               held while somebody works on the directory

A backup copies what the backup before does not have into a folder of its own, makes that durable, and only then replaces the
manifest. Files that the new manifest does not name are deleted last. So a backup that is killed, at any point, leaves the one
before or is complete.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypedDict

from penstock import __version__
from penstock.backup.copying import Copier, CopyFiles, CopyMeter, Identity, Pace, SystemCopyFiles
from penstock.backup.errors import BackupFailed, BackupInvalid
from penstock.backup.manifest import FILE, Manifest, StoredFile, is_backup, load_manifest, save_manifest
from penstock.backup.room import Wanted, require_room
from penstock.backup.source import Source, SourceFile, open_source
from penstock.node.lock import LOCK_NAME
from penstock.pop.core.handle import SECRET
from penstock.store.files import LOST_FOUND, Files, make_directory, unlink_if_there

ROUND_DIGITS = 8

_OWN = (FILE, f"{FILE}.new", LOCK_NAME, LOST_FOUND)
"""Names that the directory of a backup may have besides the folders of its rounds."""

SYSTEM_COPY_FILES = SystemCopyFiles()


class BackupSummary(NamedTuple):
    """What a backup has done."""

    round: int
    """Number of the backup in its directory, from 1."""
    start: int
    """Position of the oldest record."""
    durable: int
    """Position after the last record."""
    files: int
    """Number of files that belong to the backup, and their bytes."""
    bytes: int
    copied_files: int
    """Of those, the files that this run has copied or linked, and their bytes. The others were there."""
    copied_bytes: int
    deleted_files: int
    """Files of earlier backups that were deleted."""
    seconds: float


def back_up(
    data_dir: Path,
    directory: Path,
    *,
    meter: CopyMeter,
    pace: Pace | None = None,
    may_link: bool = False,
    files: CopyFiles = SYSTEM_COPY_FILES,
    source_of: Callable[[Path, CopyFiles], AbstractContextManager[Source]] = open_source,
) -> BackupSummary:
    """Make a backup of a data directory, and return what was done.

    Args:
        data_dir: of a node that runs, or has stopped in order, on this machine.
        directory: of the backup, created if need be. It may have an earlier backup of the same data directory.
        meter: is told of each piece that is read. What it raises ends the backup.
        pace: bounds the rate of copying.
        may_link: whether to link files that never change, where the backup is on the same file system.
        files: have both directories.
        source_of: opens the state of the data directory, which must stay as it is within the context.

    Raises:
        BackupFailed: the backup can't be made. The earlier one is as it was.
        BackupInvalid: the manifest of the earlier backup can't be read.
        ControlRefused: the node refuses, for example because another backup is running.
        OSError: a file can't be read or written. The earlier backup is as it was.
    """
    began_s = time.monotonic()
    if directory.resolve().is_relative_to(data_dir.resolve()):
        raise BackupFailed(f"{directory} is in the data directory {data_dir}; name a directory elsewhere, best on another disk")
    refuse_file(directory, files)
    make_directory(files, directory)
    _refuse_others(directory, files)
    with lock_backup(directory):
        before = load_manifest(directory, files) if is_backup(directory, files) else None
        kept = {file.stored for file in before.files} if before is not None else set()
        number = before.round + 1 if before is not None else 1
        _delete_others(directory, number, kept, files)
        with source_of(data_dir, files) as source:
            if before is not None:
                _check_succession(directory, before, source)
            folder = directory / _folder_of(number)
            run = _Round(
                folder, before.by_path() if before is not None else {}, files, meter, pace or Pace(), may_link=may_link
            )
            try:
                stored = run.store(list(source.files()))
                source.confirm()
                manifest = _manifest(data_dir, number, source, stored)
                save_manifest(directory, manifest, files)
            except BaseException:
                with suppress(OSError, BackupInvalid):  # the next backup deletes what is left
                    _discard(directory, folder, files)
                raise
        deleted = _delete_others(directory, number, {file.stored for file in stored}, files)
    seconds = time.monotonic() - began_s
    return BackupSummary(
        number,
        manifest.start,
        manifest.durable,
        len(stored),
        manifest.bytes,
        run.copied_files,
        run.copied_bytes,
        deleted,
        round(seconds, 3),
    )


@contextmanager
def lock_backup(directory: Path, *, is_shared: bool = False) -> Iterator[None]:
    """Keep others off the directory of a backup within the context.

    With `is_shared`, others may read it too, and a directory that can't be locked, such as one on a disk that is mounted
    read-only, is used without a lock.

    Raises:
        BackupFailed: another process has it.
        OSError: the lock can't be taken.
    """
    flags = os.O_RDONLY if is_shared else os.O_RDWR | os.O_CREAT
    try:
        handle = os.open(directory / LOCK_NAME, flags | os.O_CLOEXEC, 0o600)
    except OSError:
        if not is_shared:
            raise
        yield
        return
    try:
        try:
            fcntl.flock(handle, (fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BackupFailed(f"another command works on the backup {directory}; wait for its end, and try again") from error
        yield
    finally:
        os.close(handle)


def refuse_file(path: Path, files: CopyFiles) -> None:
    """Raise BackupFailed if there is something at a path that is not a directory."""
    if files.exists(path) and not files.is_directory(path.resolve()):
        raise BackupFailed(f"{path} is not a directory; name a directory, or move the file away")


def _refuse_others(directory: Path, files: Files) -> None:
    """Raise BackupFailed if a directory without a backup has what no backup has left there.

    A first backup that was killed leaves the folder of its round beside its lock. The caller must not have made that lock.
    """
    if is_backup(directory, files):
        return
    names = files.names(directory)
    own = {*_OWN, _folder_of(1)} if LOCK_NAME in names else set(_OWN)
    if foreign := sorted(set(names) - own):
        raise BackupFailed(
            f"{directory} is not empty and not a backup: it holds {foreign[0]}; name an empty or a new directory"
        )


def _check_succession(directory: Path, before: Manifest, source: Source) -> None:
    """Raise BackupFailed unless a state may replace the backup before: it must be a later one of the same data directory."""
    if before.identity != source.identity:
        if before.data_dir == str(source.data_dir.resolve()):
            raise BackupFailed(
                f"{directory} has a backup of {before.data_dir} from before its file {SECRET} was made anew, so it may be of "
                "another node; name another directory, and delete the old backup when you need it no more"
            )
        raise BackupFailed(f"{directory} has a backup of another data directory, {before.data_dir}; name another directory")
    if before.durable > source.durable:
        raise BackupFailed(
            f"{directory} has a backup of this node up to position {before.durable}, but the log of {source.data_dir} ends at "
            f"{source.durable}, so the data directory is older than its backup, for example restored from an earlier one; name "
            "another directory, or restore this backup"
        )


def _discard(directory: Path, folder: Path, files: Files) -> None:
    """Delete the folder of a round that has failed, unless the manifest names it: not even a failed sync undoes a rename."""
    unlink_if_there(files, directory / f"{FILE}.new")
    if not is_backup(directory, files) or load_manifest(directory, files).round != int(folder.name):
        files.rmtree(folder)


def _is_round(name: str, last: int) -> bool:
    return len(name) == ROUND_DIGITS and name.isascii() and name.isdecimal() and 1 <= int(name) <= last


def _folder_of(number: int) -> str:
    return f"{number:0{ROUND_DIGITS}d}"


def _manifest(data_dir: Path, number: int, source: Source, stored: list[StoredFile]) -> Manifest:
    return Manifest(
        node_version=__version__,
        created_ms=time.time_ns() // 1_000_000,
        data_dir=str(data_dir.resolve()),
        identity=source.identity,
        round=number,
        start=source.start,
        durable=source.durable,
        files=tuple(stored),
    )


def _delete_others(directory: Path, last: int, kept: set[str], files: Files) -> int:
    """Delete the files of rounds up to `last` that are not to be kept, and the folders that get empty; return how many files.

    The manifest that names the others is made durable first. Folders of later numbers, such as 20261130, are of somebody else.
    """
    files.sync_directory(directory)
    deleted = 0
    for name in filter(partial(_is_round, last=last), files.names(directory)):
        stored = files.names(directory / name)
        others = [each for each in stored if f"{name}/{each}" not in kept]
        deleted += len(others)
        if len(others) == len(stored):
            files.rmtree(directory / name)
            continue
        for each in others:
            files.unlink(directory / name / each)
    return deleted


class _Round:
    """The files that one backup adds.

    Parameters:
        folder: for the files.
        before: files of the backup before, by their paths in the data directory.
        files, meter, pace, may_link: as in `back_up`.
    """

    def __init__(
        self,
        folder: Path,
        before: dict[str, StoredFile],
        files: CopyFiles,
        meter: CopyMeter,
        pace: Pace,
        *,
        may_link: bool,
    ) -> None:
        self._folder = folder
        self._before = before
        self._files = files
        self._meter = meter
        self._copier = Copier(files, meter, pace)
        self._may_link = may_link
        self.copied_files = 0
        self.copied_bytes = 0

    def store(self, sources: list[SourceFile]) -> list[StoredFile]:
        """Store all files that the backup before does not have, make them durable, and return the files of this backup.

        Raises:
            BackupFailed: there is too little room, or a file was changed meanwhile.
            OSError: a file can't be read or written.
        """
        files, folder = self._files, self._folder
        self._meter.expect(sum(source.size for source in sources), "Copying")
        files.mkdir(folder)
        kept = {source.path: found for source in sources if (found := self._keep(source)) is not None}
        others = [source for source in sources if source.path not in kept]
        require_room(
            [Wanted(each.actual, each.size, self._may_link and each.is_immutable) for each in others],
            folder,
            files,
            advice="name a directory on another disk; the backup before needs its room until the new one is complete",
        )
        stored = [kept.get(source.path) or self._copy(source) for source in sources]
        files.sync_directory(folder)
        files.sync_directory(folder.parent)
        return stored

    def _keep(self, source: SourceFile) -> StoredFile | None:
        """Return the file of the backup before if it has the content of `source`; else None."""
        kept = self._before.get(source.path)
        if kept is None or kept.size != source.size or not self._is_there(kept):
            return None
        identity = self._files.identity(source.actual)
        if identity == Identity(kept.size, kept.inode, kept.mtime_ns):
            self._meter.advance(kept.size)
            return kept
        if self._copier.checksum_of(source.actual, source.size) != kept.crc32:
            return None
        return replace(kept, **_known_by(source, identity))  # the data directory was moved or restored

    def _is_there(self, kept: StoredFile) -> bool:
        path = self._folder.parent / kept.stored
        return self._files.exists(path) and self._files.size(path) >= kept.size

    def _copy(self, source: SourceFile) -> StoredFile:
        identity = self._files.identity(source.actual)
        name = source.path.replace("/", ".")
        found = self._copier.copy(
            source.actual,
            self._folder / name,
            source.size,
            may_link=self._may_link and source.is_immutable,
        )
        self.copied_files += 1
        self.copied_bytes += source.size
        return StoredFile(source.path, f"{self._folder.name}/{name}", source.size, found, **_known_by(source, identity))


class _KnownBy(TypedDict):
    inode: int
    mtime_ns: int


def _known_by(source: SourceFile, identity: Identity) -> _KnownBy:
    """Return how the next backup tells that a file was not changed: only of a file that nobody writes to."""
    if source.is_immutable and identity.size == source.size:
        return {"inode": identity.inode, "mtime_ns": identity.mtime_ns}
    return {"inode": 0, "mtime_ns": 0}
