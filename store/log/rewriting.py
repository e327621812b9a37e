"""Writes parts of segments to new files, so that they lie in other blocks of the disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.store.files import File, Files, Mode, unlink_if_there, write_all
from penstock.store.log.segment import SCAN_BYTES, Segment

FRESH_SUFFIX = ".fresh"
"""Suffix of a file that is not yet complete. A start deletes such files."""


@contextmanager
def written_anew(files: Files, path: Path) -> Iterator[File]:
    """Give the block an empty file to write. Afterwards the file is durable, and has the name `path` in place of any other.

    Killed at any point, `path` is what it was, or the whole new file. If the block raises, the new file is deleted.

    Raises:
        OSError: the file can't be written.
    """
    fresh = path.with_suffix(FRESH_SUFFIX)
    file = files.open(fresh, Mode.NEW)
    try:
        yield file
        file.fdatasync()
        files.rename(fresh, path)
    except BaseException:
        unlink_if_there(files, fresh)
        raise
    finally:
        file.close()
    files.sync_directory(path.parent)


def copy_range(source: Segment, target: File, start: int, stop: int, to: int) -> None:
    """Copy the bytes from `start` to `stop` of a segment to the same offsets, less `to`, of another file.

    Raises:
        RecordUnreadable: the disk can't read them.
        OSError: the other file can't be written.
    """
    for at in range(start, stop, SCAN_BYTES):
        write_all(target, source.read(at, min(SCAN_BYTES, stop - at)), at - to)


def remove_fresh(files: Files, directory: Path) -> None:
    """Delete the files that `written_anew` had not completed when the process was killed. Raises OSError."""
    for name in files.names(directory):
        if name.endswith(FRESH_SUFFIX):
            files.unlink(directory / name)
