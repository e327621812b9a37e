"""Where bytes of the log go that are about to be cut or overwritten: to the folder `damaged`, before anything else happens."""

from __future__ import annotations

import os
from pathlib import Path

from penstock.store.segment import segment_base, sync_directory

QUARANTINE = "damaged"
"""Folder of a data directory with what was damaged: `<position>-<length>.bin`."""

COPY_BYTES = 4 * 1024 * 1024
"""Bytes copied at a time."""


def quarantine(segment: Path, position: int, length: int, name: str) -> None:
    """Copy `length` bytes of a segment's file, which are there, to a file of `QUARANTINE`, and make that durable.

    A copy of that name stays as it is: it is of what was there before an earlier run, which was killed.

    Raises:
        OSError: it can't be written.
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
