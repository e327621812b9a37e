"""Reads the files of snapshots, which `store.snapshots.snapshotwriter` writes and explains."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from struct import error as StructError

import orjson

from penstock.store.errors import RecordCorrupt, SnapshotInvalid
from penstock.store.files import SYSTEM_FILES, File, Files
from penstock.store.index.rowformats import FORMAT, FORMATS_READ
from penstock.store.log.segment import NAME_DIGITS
from penstock.store.record import HEADER_BYTES, RECORD_BYTES_MAX, decode, size_of

DIRECTORY = "snapshots"
"""Folder of a data directory that holds the snapshots."""

SUFFIX = ".snap"

LENGTHS = Struct("<II")
"""What precedes a row: lengths of its key and of its value."""


def snapshot_path(data_dir: Path, position: int) -> Path:
    """Return the path of the snapshot at a position."""
    return data_dir / DIRECTORY / f"{position:0{NAME_DIGITS}d}{SUFFIX}"


class SnapshotReader:
    """Reads a snapshot.

    Parameters:
        data_dir: of a node.
        position: of the snapshot.
        files: has the directory.

    Raises:
        SnapshotInvalid: the snapshot is of another format, or was made at another position.
    """

    def __init__(self, data_dir: Path, position: int, files: Files = SYSTEM_FILES) -> None:
        self._path = snapshot_path(data_dir, position)
        self._records = snapshot_records(files, self._path)
        try:
            first = orjson.loads(next(self._records, (b"", b""))[0] or b"{}")
            version = first.get("format")
            made_at, store_ms = (int(first["position"]), int(first["store_ms"])) if version in FORMATS_READ else (0, 0)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise SnapshotInvalid(f"the head of the snapshot {self._path} can't be read: {error!r}") from error
        if version not in FORMATS_READ:
            read = " and ".join(map(str, FORMATS_READ))
            raise SnapshotInvalid(f"the snapshot {self._path} has format {version}, but this version reads {read}")
        if made_at != position:
            raise SnapshotInvalid(f"the snapshot {self._path} was made at position {made_at}, so it is in a wrong place")
        self.is_earlier = version != FORMAT
        """Whether the rows have the format of the version before."""
        self.store_ms = store_ms
        """When the last record before the snapshot was stored, in ms since 1970."""

    def blocks(self) -> Iterator[list[tuple[bytes, bytes]]]:
        """Yield all rows, some at a time, in the order of their keys. Raises SnapshotInvalid where it is damaged."""
        count, expected = 0, -1
        for properties, body in self._records:
            try:
                rows = list(_rows_in(body))
                expected = orjson.loads(properties)["rows"] if properties else expected
            except (StructError, ValueError, KeyError) as error:
                raise SnapshotInvalid(f"the snapshot {self._path} has a record that can't be read: {error!r}") from error
            yield rows
            count += len(rows)
        if count != expected:
            raise SnapshotInvalid(f"the snapshot {self._path} has {count} rows but should have {expected}; it is incomplete")


def _rows_in(body: bytes) -> Iterator[tuple[bytes, bytes]]:
    at = 0
    while at < len(body):
        key_len, value_len = LENGTHS.unpack_from(body, at)
        stop = at + LENGTHS.size + key_len
        yield body[at + LENGTHS.size : stop], body[stop : stop + value_len]
        at = stop + value_len


def snapshot_records(files: Files, path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield properties and body of each record of a snapshot."""
    position = 0
    file = files.open(path)
    try:
        while head := _read(file, path, HEADER_BYTES, position):
            size = size_of(head) if len(head) == HEADER_BYTES else 0
            if not HEADER_BYTES <= size <= RECORD_BYTES_MAX:
                raise SnapshotInvalid(f"the snapshot {path} is damaged at byte {position}")
            try:
                found = decode(_read(file, path, size, position), position=position)
            except RecordCorrupt as error:
                raise SnapshotInvalid(f"the snapshot {path} is damaged at byte {position}: {error.reason}") from error
            yield found.properties, found.body
            position += size
    finally:
        file.close()


def _read(file: File, path: Path, size: int, position: int) -> bytes:
    try:
        return file.pread(size, position)
    except OSError as error:
        raise SnapshotInvalid(f"the disk can't read the snapshot {path} at byte {position}: {error.strerror}") from error
