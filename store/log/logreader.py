"""Reads a CommitLog that another process may be writing. It maps no files and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.store import record
from penstock.store.errors import LogCorrupt, PositionUnknown, RecordCorrupt, RecordUnreadable
from penstock.store.files import SYSTEM_FILES, File, Files
from penstock.store.log.recordscan import walk
from penstock.store.log.segment import LOG_DIRECTORY, segment_bases, segment_name
from penstock.store.log.syncmark import SyncMark

BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes that are read at a time. A larger record is read whole."""


def read_log(data_dir: Path, position: int = 0, *, files: Files = SYSTEM_FILES) -> Iterator[record.Record]:
    """Yield the records of a data directory from `position` to the last whole record that is written now.

    Bytes after the last whole record are a record that is being written, or a torn tail. Only recovery can tell which.

    Args:
        data_dir: of a node, running or stopped.
        position: where a record begins. 0 means the oldest record of the log.
        files: has the data directory.

    Raises:
        PositionUnknown: there is no log, or it does not reach back to `position`.
        LogCorrupt: a sealed segment has no record where one must be.
        RecordCorrupt: a record before the tail is damaged. The error names its segment.
    """
    bases = segment_bases(files, data_dir / LOG_DIRECTORY)
    if not bases:
        raise PositionUnknown(f"{data_dir} holds no CommitLog; name the data directory of a node")
    position = position or bases[0]
    if position < bases[0]:
        raise PositionUnknown(f"position {position} is before the oldest record of the log, which is at {bases[0]}")
    for base, following in zip(bases, [*bases[1:], None], strict=True):
        if following is None or position < following:
            yield from _read_segment(files, data_dir / LOG_DIRECTORY / segment_name(base), position - base, base, following)
            position = following or position


def missing_beginning(data_dir: Path, *, files: Files = SYSTEM_FILES) -> tuple[int, int] | None:
    """Return begin and end of the positions at the beginning of a log whose segments are missing; None if all are there.

    The node may be running. Without a sync mark nobody can tell, and None is returned.
    """
    bases = segment_bases(files, data_dir / LOG_DIRECTORY)
    mark = SyncMark(data_dir, files=files).read()  # after the segments: retention writes the mark before it deletes any
    if mark is None:
        return None
    first = bases[0] if bases else mark.position
    return (mark.begin, first) if mark.begin < first else None


def _read_segment(files: Files, path: Path, offset: int, base: int, following: int | None) -> Iterator[record.Record]:
    stop = following - base if following is not None else None
    try:
        file = files.open(path)
    except FileNotFoundError:
        raise PositionUnknown(
            f"the node has dropped segment {path.name} meanwhile; read again from the oldest record that is left"
        ) from None
    try:
        while stop is None or offset < stop:
            block = _read(file, path, base, offset, BLOCK_BYTES)
            offsets, end = walk(block)
            if not offsets and len(block) >= record.HEADER_BYTES:
                size = record.size_of(block)
                if len(block) < size <= record.RECORD_BYTES_MAX:
                    block = _read(file, path, base, offset, size)
                    offsets, end = walk(block)
            for at in offsets:
                try:
                    yield record.decode(block, at, position=base + offset + at)
                except RecordCorrupt as error:
                    if stop is None:
                        return
                    raise RecordCorrupt(error.position, error.reason, path.name) from None
            if not offsets:
                if stop is not None:
                    raise LogCorrupt(f"no record is at position {base + offset} of segment {path.name}; run `penstock repair`")
                return
            offset += end
    finally:
        file.close()


def _read(file: File, path: Path, base: int, offset: int, size: int) -> bytes:
    try:
        data = file.pread(size, offset)
        while more := file.pread(size - len(data), offset + len(data)) if len(data) < size else b"":
            data += more
        return data
    except OSError as error:
        reason = f"some of the {size} bytes from byte {offset} of the file on can't be read ({error.strerror})"
        raise RecordUnreadable(base + offset, reason, path.name) from error
