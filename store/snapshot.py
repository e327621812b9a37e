"""Snapshots: files with the content of the index at the beginning of a segment.

While the log has everything, the index can be rebuilt from it. Once old segments are dropped, the index is rebuilt from a
snapshot at the position where the log begins now, and from the log. So a segment may be dropped when a snapshot at its end
is durable.

A snapshot has all rows of the index except the entries of message queues, of which it has only the number. A replay brings back
those entries that the log still has, at their old offsets. The file `snapshots/<position, 20 digits>.snap` is a sequence of
records of kind SNAPSHOT (`store.record`). The first has the properties `format` and `store_ms`, the last has `rows`, and
the bodies of the others hold rows: key length u32, value length u32, key, value.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from struct import Struct

import orjson

from penstock.store.catalogue import without_entries
from penstock.store.errors import RecordCorrupt, SnapshotInvalid
from penstock.store.index import FORMAT, META_KEY, Batch, Covered, Index, IndexView, KeySpace, after
from penstock.store.lightqueue import name_of, queue_prefix
from penstock.store.options import KIB
from penstock.store.record import HEADER_BYTES, RECORD_BYTES_MAX, Kind, decode, encode, size_of, store_ms_of
from penstock.store.segment import NAME_DIGITS, sync_directory

DIRECTORY = "snapshots"
"""Folder of a data directory that holds the snapshots."""

SUFFIX = ".snap"

BODY_BYTES = 256 * KIB
"""Approximate number of bytes of rows in one record."""

ROWS_PER_STEP = 64
"""Rows that one step writes."""

_LENGTHS = Struct("<II")


def snapshot_path(data_dir: Path, position: int) -> Path:
    """Return the path of the snapshot at a position."""
    return data_dir / DIRECTORY / f"{position:0{NAME_DIGITS}d}{SUFFIX}"


def snapshots(data_dir: Path) -> dict[int, int]:
    """Return the snapshots of a data directory by position, in order, with the store time of the last record before each.

    The time is in ms since 1970; in a damaged snapshot it may be anything. Files that were left half written are left out.
    """
    found = {}
    for path in sorted((data_dir / DIRECTORY).glob(f"*{SUFFIX}")):
        with path.open("rb") as file:
            head = file.read(HEADER_BYTES)
        if len(head) == HEADER_BYTES:
            found[int(path.stem)] = store_ms_of(head)
    return found


def remove_other_snapshots(data_dir: Path, positions: Collection[int]) -> None:
    """Delete the snapshots that are not at one of `positions`, and files that were left half written. Raises OSError."""
    for path in (data_dir / DIRECTORY).glob("*"):
        if path.suffix != SUFFIX or int(path.stem) not in positions:
            path.unlink()


# --- writing --------------------------------------------------------------------------------------------------------


class SnapshotWriter:
    """Writes a snapshot, in steps, of the index as it was when the writer was created.

    Parameters:
        data_dir: of the node.
        index: everything before `position` is applied and saved in it, and nothing else.
        position: where a segment begins.
        store_ms: when the last record before `position` was stored, in ms since 1970.

    Raises:
        OSError: the file can't be created.
    """

    def __init__(self, data_dir: Path, index: Index, position: int, store_ms: int) -> None:
        self.position = position
        self.bytes = 0
        self._view: IndexView | None = index.view()
        self._store_ms = store_ms
        self._path = snapshot_path(data_dir, position)
        self._path.parent.mkdir(exist_ok=True)
        self._partial = self._path.with_suffix(".partial")
        self._file = self._partial.open("wb")
        self._rows = bytearray()

    def slices(self) -> Iterator[None]:
        """Write all rows in steps. `finish` then completes the snapshot. Raises OSError."""
        view = self._view
        assert view is not None, "closed"
        self._record(properties={"format": FORMAT, "store_ms": self._store_ms})
        count = 0
        for key, value in _rows(view):
            self._rows += _LENGTHS.pack(len(key), len(value)) + key + value
            count += 1
            if len(self._rows) >= BODY_BYTES:
                self._record()
            if count % ROWS_PER_STEP == 0:
                yield
        self._record()
        self._record(properties={"rows": count})

    def _record(self, properties: dict[str, int] | None = None) -> None:
        data = orjson.dumps(properties) if properties else b""
        encoded = encode(Kind.SNAPSHOT, body=bytes(self._rows), properties=data, store_ms=self._store_ms)
        self._rows.clear()
        self._file.write(encoded)
        self.bytes += len(encoded)

    def finish(self) -> None:
        """Make the file durable and give it its name as a snapshot. This waits for the disk. Raises OSError."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._partial.rename(self._path)
        sync_directory(self._path.parent)
        sync_directory(self._path.parent.parent)

    def close(self) -> None:
        """Release the view of the index, and delete the file if the snapshot is not complete."""
        self._view = None
        if not self._file.closed:
            self._file.close()
            self._partial.unlink()


def _rows(view: IndexView) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of a snapshot: all except the entries of message queues. Internal queues keep their entries."""
    entries = bytes(KeySpace.ENTRIES)
    for key, value in chain(view.rows(b"", until=entries), view.rows(after(entries))):
        if key == META_KEY:
            continue
        space, name = key[:1], key[1:]
        has_entries = space in (KeySpace.NAME, KeySpace.WILDCARD) and not name.startswith(b"$")
        yield key, without_entries(value) if has_entries else value
        if space == KeySpace.QUEUE and name_of(value)[0].startswith("$"):
            yield from view.rows_of(queue_prefix(int.from_bytes(name, "big")))


# --- reading --------------------------------------------------------------------------------------------------------


def restore(data_dir: Path, position: int, index: Index) -> Covered:
    """Put the rows of a snapshot into an empty index. Return how far the index covers the log then.

    Raises:
        SnapshotInvalid: the snapshot is damaged, incomplete, or of another format.
    """
    path = snapshot_path(data_dir, position)
    records = _records(path)
    first = orjson.loads(next(records, (b"", b""))[0] or b"{}")
    if first.get("format") != FORMAT:
        raise SnapshotInvalid(f"the snapshot {path} has format {first.get('format')}, but this version reads {FORMAT}")
    count, expected = 0, -1
    for properties, body in records:
        batch = Batch()
        at = 0
        while at < len(body):
            key_len, value_len = _LENGTHS.unpack_from(body, at)
            stop = at + _LENGTHS.size + key_len
            batch.put(body[at + _LENGTHS.size : stop], body[stop : stop + value_len])
            at = stop + value_len
            count += 1
        index.write(batch)
        if properties:
            expected = orjson.loads(properties)["rows"]
    if count != expected:
        raise SnapshotInvalid(f"the snapshot {path} has {count} rows but should have {expected}; it is incomplete")
    covered = Covered(position, position, int(first["store_ms"]))
    batch = Batch()
    batch.put_covered(covered)
    index.write(batch)
    index.flush()
    return covered


def _records(path: Path) -> Iterator[tuple[bytes, bytes]]:
    """Yield properties and body of each record of a snapshot."""
    position = 0
    with path.open("rb") as file:
        while head := file.read(HEADER_BYTES):
            size = size_of(head) if len(head) == HEADER_BYTES else 0
            if not HEADER_BYTES <= size <= RECORD_BYTES_MAX:
                raise SnapshotInvalid(f"the snapshot {path} is damaged at byte {position}")
            try:
                found = decode(head + file.read(size - HEADER_BYTES), position=position)
            except RecordCorrupt as error:
                raise SnapshotInvalid(f"the snapshot {path} is damaged at byte {position}: {error.reason}") from error
            yield found.properties, found.body
            position += size
