"""Snapshots: files with the content of the index at the beginning of a segment.

While the log has everything, the index can be rebuilt from it. Once old segments are dropped, the index is rebuilt from a
snapshot at the position where the log begins now, and from the log. So a segment may be dropped when a snapshot at its end
is durable.

A snapshot has all rows of the index except the entries of message queues, of which it has only the number. A replay brings back
those entries that the log still has, at their old offsets. The file `snapshots/<position, 20 digits>.snap` is a sequence of
records of kind SNAPSHOT (`store.record`). The first has the properties `format`, `position` and `store_ms`, the last has
`rows`, and the bodies of the others hold rows: key length u32, value length u32, key, value. `store.snapshots.snapshotreader`
reads it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from struct import error as StructError

import orjson
import structlog

from penstock.store.errors import SnapshotInvalid
from penstock.store.files import SYSTEM_FILES, Files, Mode, replace_file, unlink_if_there, write_all
from penstock.store.index.index import OWN_KEYS, Covered, Index, IndexView, KeySpace, Upgrade, after
from penstock.store.index.rowformats import FORMAT
from penstock.store.log.placing import MARKER, exchange
from penstock.store.log.quarantine import set_aside
from penstock.store.options import KIB
from penstock.store.queues.catalogue import without_entries
from penstock.store.queues.lightqueue import name_of, pinned_prefix, queue_prefix
from penstock.store.record import HEADER_BYTES, Kind, encode, store_ms_of
from penstock.store.snapshots.snapshotreader import DIRECTORY, LENGTHS, SUFFIX, SnapshotReader, snapshot_path, snapshot_records

PARTIAL_SUFFIX = ".partial"

BODY_BYTES = 256 * KIB
"""Approximate number of bytes of rows in one record."""

ROWS_PER_STEP = 64
"""Rows that one step writes."""

logger = structlog.get_logger("store")


def snapshots(data_dir: Path, files: Files = SYSTEM_FILES) -> dict[int, int]:
    """Return the snapshots of a data directory by position, in order, with the store time of the last record before each.

    The time is in ms since 1970; in a damaged snapshot it may be anything. Files that were left half written, or that the disk
    can't read, are left out.
    """
    found = {}
    for name in files.names(data_dir / DIRECTORY):
        if name.endswith(SUFFIX):
            file = files.open(data_dir / DIRECTORY / name)
            try:
                head = file.pread(HEADER_BYTES, 0)
            except OSError as error:
                logger.error("snapshot.unreadable", file=name, error=str(error))
                head = b""
            finally:
                file.close()
            if len(head) == HEADER_BYTES:
                found[int(name.removesuffix(SUFFIX))] = store_ms_of(head)
    return found


def remove_other_snapshots(data_dir: Path, positions: Collection[int], files: Files = SYSTEM_FILES) -> None:
    """Delete the snapshots that are not at one of `positions`, and files that were left half written. Raises OSError."""
    for name in files.names(data_dir / DIRECTORY):
        is_other = name.endswith(SUFFIX) and int(name.removesuffix(SUFFIX)) not in positions
        if is_other or name.endswith(PARTIAL_SUFFIX):
            files.unlink(data_dir / DIRECTORY / name)


def misnamed(data_dir: Path, files: Files = SYSTEM_FILES) -> dict[str, str]:
    """Return the own name of each snapshot that has another one, by its present name.

    A snapshot states in its first record where it was made. A copy of a snapshot that is also under its own name is left out.

    Raises:
        OSError: a folder can't be listed.
    """
    directory = data_dir / DIRECTORY
    owns = {}
    for name in files.names(directory):
        position = _stated_position(files, directory / name) if name.endswith(SUFFIX) else None
        if position is not None:
            owns[name] = snapshot_path(data_dir, position).name
    owners = Counter(owns.values())
    return {name: own for name, own in owns.items() if name != own and owners[own] == 1}


def give_own_names(data_dir: Path, files: Files = SYSTEM_FILES) -> dict[str, str]:
    """Rename the snapshots that `misnamed` finds, durably, and return what it returns.

    A file that can't be read and has the own name of another is set aside. A later call completes one that was killed anywhere.
    Raises OSError.
    """
    directory = data_dir / DIRECTORY
    if files.exists(directory / MARKER):
        exchange(files, directory, {})
    moves = misnamed(data_dir, files)
    left = dict(moves)
    while free := [name for name, own in left.items() if own not in left]:
        for name in free:
            own = directory / left.pop(name)
            if files.exists(own):
                set_aside(files, data_dir, own)
            files.rename(directory / name, own)
        files.sync_directory(directory)
    exchange(files, directory, left)
    return moves


def _stated_position(files: Files, path: Path) -> int | None:
    """Return the position at which a snapshot was made; None if its first record can't be read."""
    try:
        properties, _ = next(snapshot_records(files, path))
        return int(orjson.loads(properties)["position"])
    except (KeyError, OSError, SnapshotInvalid, StopIteration, TypeError, ValueError):
        return None  # whoever reads the snapshot reports this


# --- writing --------------------------------------------------------------------------------------------------------


class SnapshotWriter:
    """Writes a snapshot, in steps, of the index as it was when the writer was created.

    Parameters:
        data_dir: of the node.
        index: everything before `position` is applied and saved in it, and nothing else.
        position: where a segment begins.
        store_ms: when the last record before `position` was stored, in ms since 1970.
        files: has the data directory.

    Raises:
        OSError: the file can't be created.
    """

    def __init__(self, data_dir: Path, index: Index, position: int, store_ms: int, *, files: Files = SYSTEM_FILES) -> None:
        self.position = position
        self.bytes = 0
        self._view: IndexView | None = index.view()
        self._store_ms = store_ms
        self._path = snapshot_path(data_dir, position)
        self._files = files
        files.mkdir(self._path.parent)
        self._partial = self._path.with_suffix(PARTIAL_SUFFIX)
        self._file = files.open(self._partial, Mode.NEW)
        self._is_finished = False
        self._rows = bytearray()

    def slices(self) -> Iterator[None]:
        """Write all rows in steps. `finish` then completes the snapshot. Raises OSError."""
        view = self._view
        assert view is not None, "closed"
        self._record(properties={"format": FORMAT, "position": self.position, "store_ms": self._store_ms})
        count = 0
        for key, value in _rows(view):
            self._rows += LENGTHS.pack(len(key), len(value)) + key + value
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
        write_all(self._file, encoded, self.bytes)
        self.bytes += len(encoded)

    def finish(self) -> None:
        """Make the file durable and give it its name as a snapshot. This waits for the disk. Raises OSError."""
        self._file.fdatasync()
        self._file.close()
        self._files.rename(self._partial, self._path)
        self._is_finished = True
        self._files.sync_directory(self._path.parent)
        self._files.sync_directory(self._path.parent.parent)

    def close(self) -> None:
        """Release the view of the index, and delete the file if the snapshot is not complete."""
        self._view = None
        self._file.close()
        if not self._is_finished:
            unlink_if_there(self._files, self._partial)


def write_empty(data_dir: Path, position: int, store_ms: int, files: Files = SYSTEM_FILES) -> None:
    """Write a snapshot without rows, durably: at `position`, nothing is known of what was before. Raises OSError."""
    path = snapshot_path(data_dir, position)
    files.mkdir(path.parent)
    first = orjson.dumps({"format": FORMAT, "position": position, "store_ms": store_ms})
    records = (encode(Kind.SNAPSHOT, properties=each, store_ms=store_ms) for each in (first, orjson.dumps({"rows": 0})))
    replace_file(files, path, b"".join(records))
    files.sync_directory(data_dir)


def _rows(view: IndexView) -> Iterator[tuple[bytes, bytes]]:
    """Yield the rows of a snapshot: all except the entries of message queues. Internal queues keep their entries."""
    pinned, entries = bytes(KeySpace.PINNED), bytes(KeySpace.ENTRIES)
    for key, value in chain(view.rows(b"", until=pinned), view.rows(after(pinned), until=entries), view.rows(after(entries))):
        if key in OWN_KEYS:
            continue
        space, name = key[:1], key[1:]
        has_entries = space in (KeySpace.NAME, KeySpace.WILDCARD) and not name.startswith(b"$")
        yield key, without_entries(value) if has_entries else value
        if space == KeySpace.QUEUE and name_of(value)[0].startswith("$"):
            queue_id = int.from_bytes(name, "big")
            yield from view.rows_of(pinned_prefix(queue_id))
            yield from view.rows_of(queue_prefix(queue_id))


# --- reading --------------------------------------------------------------------------------------------------------


def restore(data_dir: Path, position: int, index: Index, upgrade: Upgrade, files: Files = SYSTEM_FILES) -> Covered:
    """Put the rows of a snapshot into an empty index. Return how far the index covers the log then.

    Args:
        data_dir: of the node.
        position: of the snapshot.
        index: has no rows.
        upgrade: brings rows of the format before to the present one.
        files: has the directory.

    Raises:
        SnapshotInvalid: the snapshot is damaged, incomplete, in a wrong place, or of another format.
    """
    reading = SnapshotReader(data_dir, position, files)
    for rows in reading.blocks():
        batch = index.batch()
        for key, value in rows:
            batch.put(key, value)
        index.write(batch)
    if reading.is_earlier:
        try:
            upgrade(index)
        except (ValueError, StructError) as error:
            raise SnapshotInvalid(f"the snapshot at {position} has rows that can't be upgraded: {error}") from error
    covered = Covered(position, position, reading.store_ms)
    batch = index.batch()
    batch.put_covered(covered)
    index.write(batch)
    index.flush()
    return covered
