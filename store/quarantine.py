"""Copies damaged bytes of the log to the folder `damaged` before they are cut or overwritten."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.store.segment import segment_base, sync_directory

QUARANTINE = "damaged"
"""Folder of a data directory that holds the copies of damaged bytes, as `<position>-<length>.bin`."""

COPY_BYTES = 4 * 1024 * 1024
"""Bytes that are copied at a time."""


def quarantine(segment: Path, position: int, length: int, name: str) -> None:
    """Copy bytes of a segment to a file in `QUARANTINE`, and make the copy durable.

    If the file exists already it stays as it is: an earlier run that was killed has copied the bytes that were there first.

    Args:
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
    if copy.exists() or length == 0:
        return
    folder.mkdir(exist_ok=True)
    partial = copy.with_suffix(".partial")
    with segment.open("rb") as source, partial.open("wb") as target:
        source.seek(position - segment_base(segment))
        while length:
            block = source.read(min(length, COPY_BYTES))
            target.write(block)
            length -= len(block)
        target.flush()
        os.fsync(target.fileno())
    partial.rename(copy)
    sync_directory(folder)
    sync_directory(data_dir)
