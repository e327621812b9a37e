"""Copies damaged bytes of the log to the folder `damaged` before they are cut or overwritten."""

from __future__ import annotations

from pathlib import Path

from penstock.store.files import Files, Mode, write_all
from penstock.store.log.segment import Segment

QUARANTINE = "damaged"
"""Folder of a data directory that holds the copies of damaged bytes, as `<position>-<length>.bin`."""


def set_aside(files: Files, data_dir: Path, path: Path) -> Path:
    """Move a file of a data directory to `QUARANTINE`, durably. Return where it is now. Raises OSError."""
    aside = free_name(files, data_dir, path.name)
    files.rename(path, aside)
    files.sync_directory(path.parent)
    files.sync_directory(aside.parent)
    files.sync_directory(data_dir)
    return aside


def free_name(files: Files, data_dir: Path, name: str) -> Path:
    """Return a path in `QUARANTINE`, which is created if need be, that no file has."""
    folder = data_dir / QUARANTINE
    files.mkdir(folder)
    number = 1
    while files.exists(path := folder / f"{name}-{number}"):
        number += 1
    return path


def quarantine(files: Files, segment: Path, position: int, length: int, name: str) -> None:
    """Copy bytes of a segment to a file in `QUARANTINE`, and make the copy durable. Bytes that can't be read are zeros in it.

    If the file exists already it stays as it is: an earlier run that was killed has copied the bytes that were there first.

    Args:
        files: has the data directory.
        segment: path of the segment's file.
        position: of the first byte, in the log.
        length: bytes to copy. The file has that many from `position` on.
        name: of the copy.

    Raises:
        OSError: the copy can't be written.
    """
    data_dir = segment.parent.parent
    folder = data_dir / QUARANTINE
    copy = folder / name
    if files.exists(copy) or length == 0:
        return
    files.mkdir(folder)
    partial = copy.with_suffix(".partial")
    source, target = Segment(files, segment, files.size(segment), writable=False), files.open(partial, Mode.NEW)
    try:
        offset = position - source.base
        for at, _, data in source.pieces(offset, offset + length):
            if data is not None:
                write_all(target, data, at - offset)
        target.truncate(length)
        target.fdatasync()
    finally:
        source.close()
        target.close()
    files.rename(partial, copy)
    files.sync_directory(folder)
    files.sync_directory(data_dir)
