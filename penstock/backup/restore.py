"""Restores a backup into an empty directory, which a node can then start on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from penstock.backup.backup import SYSTEM_COPY_FILES, lock_backup, refuse_file
from penstock.backup.copying import Copier, CopyFiles, CopyMeter, Pace
from penstock.backup.errors import BackupFailed, BackupInvalid
from penstock.backup.manifest import Manifest, StoredFile, is_backup, load_manifest
from penstock.node.lock import LOCK_NAME, RESTORING, DataDirLock
from penstock.pop.core.handle import SECRET
from penstock.store.files import LOST_FOUND, make_directory, replace_file
from penstock.store.syncmark import Ending, SyncMark


class Restored(NamedTuple):
    """What a restore has done."""

    start: int
    """Position of the oldest record."""
    durable: int
    """Position after the last record."""
    files: int
    bytes: int
    seconds: float


def restore_backup(
    directory: Path, data_dir: Path, *, meter: CopyMeter, pace: Pace | None = None, files: CopyFiles = SYSTEM_COPY_FILES
) -> Restored:
    """Copy a backup into a data directory, and check all of it meanwhile.

    A file `restoring` in the data directory keeps nodes from starting on it before everything is there. If a restore is killed,
    another one on the same directory begins anew.

    Args:
        directory: of the backup.
        data_dir: to restore. It must not exist, be empty, or be left over from a restore that was killed.
        meter: is told of each piece that is read.
        pace: bounds the rate of copying.
        files: have both directories.

    Raises:
        BackupInvalid: the backup is of another version, or a file of it is missing or was changed.
        BackupFailed: the data directory is not empty, or in the directory of the backup.
        DataDirLocked: a node has the data directory open.
        OSError: a file can't be read or written.
    """
    began_s = time.monotonic()
    refuse_file(data_dir, files)
    if is_backup(directory, files) and data_dir.resolve().is_relative_to(directory.resolve()):
        raise BackupFailed(f"{data_dir} is in the backup {directory}; name a directory elsewhere")
    with lock_backup(directory, is_shared=True):
        manifest = load_manifest(directory, files)
        check_files(directory, manifest, files)
        if not is_restorable(data_dir, files):
            raise BackupFailed(f"{data_dir} is not empty; name a new directory, or move the files away")
        make_directory(files, data_dir)
        with DataDirLock(data_dir, may_be_incomplete=True):
            replace_file(files, data_dir / RESTORING, f"{directory.resolve()}\n".encode())
            _clear(data_dir, files)
            _copy(directory, data_dir, manifest, Copier(files, meter, pace or Pace()), files, meter)
            write_mark(data_dir, manifest.start, manifest.durable, files)
            files.sync_directory(data_dir)
            files.unlink(data_dir / RESTORING)
            files.sync_directory(data_dir)
    return Restored(manifest.start, manifest.durable, len(manifest.files), manifest.bytes, round(time.monotonic() - began_s, 3))


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


def check_files(directory: Path, manifest: Manifest, files: CopyFiles) -> None:
    """Raise BackupInvalid if a file of a backup is missing or too short. Their content is not read."""
    for file in manifest.files:
        path = directory / file.stored
        size = files.size(path) if files.exists(path) else None
        if size is None or size < file.size:
            found = "is missing" if size is None else f"has {size} bytes in place of {file.size}"
            raise BackupInvalid(f"the file {path} of the backup {found}; use another backup")


def damage_of(directory: Path, file: StoredFile, found: int) -> BackupInvalid | None:
    """Return the error for a file whose checksum is `found`; None if that is right."""
    if found == file.crc32:
        return None
    return BackupInvalid(
        f"the file {directory / file.stored} of the backup was changed: its checksum is {found:08x} in place of "
        f"{file.crc32:08x}; use another backup"
    )


def _clear(data_dir: Path, files: CopyFiles) -> None:
    """Delete what a killed restore has left."""
    for name in files.names(data_dir):
        if name in (RESTORING, LOCK_NAME, LOST_FOUND):
            continue
        if files.is_directory(data_dir / name):
            files.rmtree(data_dir / name)
        else:
            files.unlink(data_dir / name)


def _copy(directory: Path, data_dir: Path, manifest: Manifest, copier: Copier, files: CopyFiles, meter: CopyMeter) -> None:
    meter.expect(manifest.bytes, "Restoring")
    folders = {data_dir / file.path for file in manifest.files}
    folders = {path.parent for path in folders} - {data_dir}
    for folder in sorted(folders):
        files.mkdir(folder)
    for file in manifest.files:
        permissions = 0o600 if file.path == SECRET else 0o640
        found = copier.copy(directory / file.stored, data_dir / file.path, file.size, permissions=permissions)
        damage = damage_of(directory, file, found)
        if damage is not None:
            raise damage
    for folder in sorted(folders):
        files.sync_directory(folder)
