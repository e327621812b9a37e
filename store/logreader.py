"""Reads a CommitLog that another process may be writing. It maps no files and changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from penstock.store import record
from penstock.store.commitlog import DIRECTORY
from penstock.store.errors import LogCorrupt, PositionUnknown, RecordCorrupt
from penstock.store.recordscan import walk
from penstock.store.segment import SUFFIX, segment_base

BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes that are read at a time. A larger record is read whole."""


def read_log(data_dir: Path, position: int = 0) -> Iterator[record.Record]:
    """Yield the records of a data directory from `position` to the last whole record that is written now.

    Bytes after the last whole record are a record that is being written, or a torn tail. Only recovery can tell which.

    Args:
        data_dir: of a node, running or stopped.
        position: where a record begins. 0 means the oldest record of the log.

    Raises:
        PositionUnknown: there is no log, or it does not reach back to `position`.
        LogCorrupt: a sealed segment has no record where one must be.
        RecordCorrupt: a record before the tail is damaged. The error names its segment.
    """
    paths = sorted((data_dir / DIRECTORY).glob(f"*{SUFFIX}"))
    if not paths:
        raise PositionUnknown(f"{data_dir} holds no CommitLog; name the data directory of a node")
    bases = [segment_base(path) for path in paths]
    position = position or bases[0]
    if position < bases[0]:
        raise PositionUnknown(f"position {position} is before the oldest record of the log, which is at {bases[0]}")
    for path, base, following in zip(paths, bases, [*bases[1:], None], strict=True):
        if following is None or position < following:
            yield from _read_segment(path, position - base, base, following)
            position = following or position


def _read_segment(path: Path, offset: int, base: int, following: int | None) -> Iterator[record.Record]:
    stop = following - base if following is not None else None
    try:
        file = path.open("rb")
    except FileNotFoundError:
        raise PositionUnknown(
            f"the node has dropped segment {path.name} meanwhile; read again from the oldest record that is left"
        ) from None
    with file:
        while stop is None or offset < stop:
            file.seek(offset)
            block = file.read(BLOCK_BYTES)
            offsets, end = walk(block)
            if not offsets and len(block) >= record.HEADER_BYTES:
                size = record.size_of(block)
                if len(block) < size <= record.RECORD_BYTES_MAX:
                    block += file.read(size - len(block))
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
