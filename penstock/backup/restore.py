"""Restores a backup into an empty directory, which a node can then start on."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import NamedTuple

from penstock.backup.backup import SYSTEM_COPY_FILES, lock_backup, refuse_file
from penstock.backup.copying import Copier, CopyFiles, CopyMeter, Pace
from penstock.backup.errors import BackupFailed, BackupInvalid
from penstock.backup.manifest import Manifest, StoredFile, is_backup, load_manifest
from penstock.backup.room import Wanted, require_room
from penstock.node.lock import LOCK_NAME, RESTORING, DataDirLock
from penstock.store.files import LOST_FOUND, make_directory, replace_file, unlink_if_there
from penstock.store.index import index
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.log.syncmark import Ending, SyncMark


class Restored(NamedTuple):
    """What a restore has done."""

    start: int
    """Position of the oldest record."""
    durable: int
    """Position after the last record."""
    files: int
    bytes: int
    problems: tuple[str, ...]
    """What is wrong with the backup; empty unless it was salvaged."""
    seconds: float


def restore_backup(
    directory: Path,
    data_dir: Path,
    *,
    meter: CopyMeter,
    pace: Pace | None = None,
    may_be_damaged: bool = False,
    files: CopyFiles = SYSTEM_COPY_FILES,
) -> Restored:
    """Copy a backup into a data directory, and check all of it meanwhile.

    A file `restoring` in the data directory keeps nodes from starting on it before everything is there. If a restore is killed,
    another one on the same directory begins anew.

    Args:
        directory: of the backup.
        data_dir: to restore. It must not exist, be empty, or be left over from a restore that was killed.
        meter: is told of each piece that is read.
        pace: bounds the rate of copying.
        may_be_damaged: whether to salvage what a damaged backup has. Damaged segments are copied as they are, up to the first
            block that the disk can't read. Other damaged files are left out, since a start can do without them.
        files: have both directories.

    Raises:
        BackupInvalid: the backup is of another version, or a file of it is missing or was changed.
        BackupFailed: the data directory is not empty, or in the directory of the backup, or its disk has too little room.
        DataDirLocked: a node has the data directory open.
        OSError: a file can't be read or written.
    """
    began_s = time.monotonic()
    refuse_file(data_dir, files)
    if is_backup(directory, files) and data_dir.resolve().is_relative_to(directory.resolve()):
        raise BackupFailed(f"{data_dir} is in the backup {directory}; name a directory elsewhere")
    with lock_backup(directory, is_shared=True):
        manifest = load_manifest(directory, files)
        if not may_be_damaged:
            for file in manifest.files:
                if problem := absence_of(directory, file, files):
                    raise BackupInvalid(f"{problem}; {MEND}")
        if not is_restorable(data_dir, files):
            raise BackupFailed(f"{data_dir} is not empty; name a new directory, or move the files away")
        make_directory(files, data_dir)
        with DataDirLock(data_dir, may_be_incomplete=True):
            replace_file(files, data_dir / RESTORING, f"{directory.resolve()}\n".encode())
            _clear(data_dir, files)
            wanted = [Wanted(directory / file.stored, file.size, False) for file in manifest.files]
            _require_room(wanted, data_dir, files)
            meter.expect(manifest.bytes, "Restoring")
            copier = Copier(files, meter, pace or Pace())
            problems = _Restoring(directory, data_dir, copier, files, may_be_damaged=may_be_damaged).run(manifest)
            write_mark(data_dir, manifest.start, manifest.durable, files)
            files.sync_directory(data_dir)
            files.unlink(data_dir / RESTORING)
            files.sync_directory(data_dir)
    seconds = round(time.monotonic() - began_s, 3)
    return Restored(manifest.start, manifest.durable, len(manifest.files), manifest.bytes, tuple(problems), seconds)


def _require_room(wanted: list[Wanted], data_dir: Path, files: CopyFiles) -> None:
    """Check that the copies have room; if not, leave the data directory empty, and raise BackupFailed."""
    try:
        require_room(wanted, data_dir, files, advice="name a data directory on another disk")
    except BackupFailed:
        files.unlink(data_dir / RESTORING)
        raise


def write_mark(data_dir: Path, start: int, durable: int, files: CopyFiles) -> None:
    """Write the sync mark of a log that has everything between two positions, as at an orderly end. Raises OSError."""
    mark = SyncMark(data_dir, files=files)
    try:
        if not mark.write(durable, begin=start, ending=Ending.ORDERLY):
            raise BackupFailed(f"{mark.path} can't be written, because the disk is full; free space, and restore again")
    finally:
        mark.close()


def is_restorable(data_dir: Path, files: CopyFiles) -> bool:
    """Return whether a restore may use a directory: it is missing, empty, or left over from a restore that was killed."""
    names = set(files.names(data_dir)) - {LOCK_NAME, LOST_FOUND}
    return not names or RESTORING in names or names == {f"{RESTORING}.new"}


MEND = (
    "delete that file and back up again if the node still has its data; otherwise use another backup, or `penstock restore "
    "--salvage`"
)
"""What to do about a damaged file of a backup."""


def absence_of(directory: Path, file: StoredFile, files: CopyFiles) -> str:
    """Return what is wrong with the size of a file of a backup; empty if nothing is. Raises OSError."""
    path = directory / file.stored
    size = files.size(path) if files.exists(path) else None
    if size is not None and size >= file.size:
        return ""
    found = "is missing" if size is None else f"has {size} bytes in place of {file.size}"
    return f"the file {path} of the backup {found}"


def damage_of(directory: Path, file: StoredFile, found: int) -> str:
    """Return what is wrong with the content of a file whose checksum is `found`; empty if nothing is."""
    if found == file.crc32:
        return ""
    path = directory / file.stored
    return f"the file {path} of the backup was changed: its checksum is {found:08x} in place of {file.crc32:08x}"


def _clear(data_dir: Path, files: CopyFiles) -> None:
    """Delete what a killed restore has left."""
    for name in files.names(data_dir):
        if name in (RESTORING, LOCK_NAME, LOST_FOUND):
            continue
        if files.is_directory(data_dir / name):
            files.rmtree(data_dir / name)
        else:
            files.unlink(data_dir / name)


class _Restoring:
    """Copies the files of a backup.

    Parameters:
        directory, data_dir, may_be_damaged, files: as in `restore_backup`.
        copier: copies one file.
    """

    def __init__(self, directory: Path, data_dir: Path, copier: Copier, files: CopyFiles, *, may_be_damaged: bool) -> None:
        self._directory = directory
        self._data_dir = data_dir
        self._copier = copier
        self._files = files
        self._may_be_damaged = may_be_damaged

    def run(self, manifest: Manifest) -> list[str]:
        """Copy all files, and return what is wrong with them.

        Raises:
            BackupInvalid: something is wrong, and it must not be.
            OSError: a file can't be read or written.
        """
        folders = sorted({(self._data_dir / file.path).parent for file in manifest.files} - {self._data_dir})
        for folder in folders:
            self._files.mkdir(folder)
        problems: dict[str, str] = {}
        for file in manifest.files:
            problem = self._copy(file)
            if problem and not self._may_be_damaged:
                raise BackupInvalid(f"{problem}; {MEND}")
            if problem:
                problems[file.path] = problem
        self._leave_out(set(problems))
        for folder in folders:
            self._files.sync_directory(folder)
        return list(problems.values())

    def _copy(self, file: StoredFile) -> str:
        """Copy a file as far as it goes, and return what is wrong with it; empty if nothing is."""
        stored, files = self._directory / file.stored, self._files
        absence = absence_of(self._directory, file, files)
        if absence and not files.exists(stored):
            return absence
        try:
            size = min(file.size, files.size(stored))
            found = self._copier.copy(stored, self._data_dir / file.path, size)
        except OSError as error:
            if error.errno != errno.EIO or not self._may_be_damaged:
                raise
            return f"the file {stored} of the backup can't be read ({error.strerror})"
        return absence or damage_of(self._directory, file, found)

    def _leave_out(self, damaged: set[str]) -> None:
        """Delete the copies of damaged files, except those of the log, and the index if anything of index or log is damaged.

        Without its index, a start reads the whole log, and so finds what is damaged there.
        """
        files, folder = self._files, self._data_dir / index.DIRECTORY
        of_log = {path for path in damaged if path.startswith(f"{LOG_DIRECTORY}/")}
        for path in damaged - of_log:
            unlink_if_there(files, self._data_dir / path)
        if of_log or any(path.startswith(f"{index.DIRECTORY}/") for path in damaged):
            for name in files.names(folder):
                files.unlink(folder / name)
