"""How a replica begins anew: with a snapshot of the leader, at the position where the leader's log begins.

It is for a replica whose log ends before that: a new one, or one that was away for long. The snapshot comes over the connection
to the leader, into the folder `bootstrap` of the data directory, where nobody but this module looks. When it is whole, the
process starts again, and `install_snapshot` puts it in the place of everything that the directory had before. The log then has
an empty segment at the position of the snapshot, and gets the rest as that of any follower does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.cluster.errors import StreamBroken
from penstock.cluster.frames import HELLO_BYTES_MAX, FrameKind
from penstock.cluster.framestream import FrameStream
from penstock.cluster.shardkey import ReplicaId
from penstock.store.files import SYSTEM_FILES, Files, Mode, make_directory, unlink_if_there, write_all
from penstock.store.index.index import Index
from penstock.store.log import syncmark
from penstock.store.log.segment import LOG_DIRECTORY, segment_name
from penstock.store.options import MIB
from penstock.store.snapshots.snapshotreader import DIRECTORY as SNAPSHOTS
from penstock.store.snapshots.snapshotreader import SUFFIX, SnapshotReader, snapshot_path

DIRECTORY = "bootstrap"
"""Folder of a data directory with a snapshot that came from the leader."""

PARTIAL = "partial"

WINDOW_BYTES = 8 * MIB
"""Bytes of a snapshot that are sent before the follower has acknowledged any of them."""
BLOCK_BYTES = MIB
"""Bytes that are sent at once. Other work runs after each block."""
SILENCE_MS = 30_000
"""After this time without an acknowledgement the leader gives up."""


class SnapshotSending:
    """A snapshot that goes to one follower.

    Parameters:
        replica: the follower.
        stream: the connection with it.
        data_dir: of the leader.
        position: of the snapshot.
        epoch: that the leader leads.
        call_soon: runs something in the next turn of the loop.
        files: has the data directory.

    Raises:
        OSError: the snapshot can't be read.
    """

    def __init__(
        self,
        replica: ReplicaId,
        stream: FrameStream,
        data_dir: Path,
        position: int,
        epoch: int,
        call_soon: Callable[[Callable[[], None]], object],
        files: Files = SYSTEM_FILES,
    ) -> None:
        self.replica: Final = replica
        self.stream: Final = stream
        self._file = files.open(snapshot_path(data_dir, position))
        self._bytes = self._file.size()
        self._position = position
        self._epoch = epoch
        self._call_soon = call_soon
        self._sent = self._acked = 0
        self._is_scheduled = False

    def acknowledged(self, count: int) -> None:
        """Take how many bytes the follower has got."""
        self._acked = max(self._acked, count)
        self.go_on()

    def go_on(self) -> None:
        """Send a block, if the window has room, and go on in the next turn of the loop. Raises OSError."""
        if self._is_scheduled or self.stream.has_ended:
            return
        block_end = min(self._sent + BLOCK_BYTES, self._acked + WINDOW_BYTES, self._bytes)
        while self._sent < block_end:
            data = self._file.pread(min(HELLO_BYTES_MAX, block_end - self._sent), self._sent)
            if not data:
                raise OSError(f"the snapshot at {self._position} has become shorter while it was sent")
            self.stream.send(FrameKind.SNAPSHOT, self._epoch, self._position, self._bytes, payload=data)
            self._sent += len(data)
            self._is_scheduled = True
        if self._is_scheduled:
            self._call_soon(self._next)

    def _next(self) -> None:
        self._is_scheduled = False
        try:
            self.go_on()
        except OSError as error:
            self.stream.refuse(self._epoch, f"the snapshot at {self._position} can't be read: {error}")

    def is_silent(self, now_ms: int) -> bool:
        """Return whether the follower has not acknowledged anything for long."""
        return now_ms - self.stream.received_ms >= SILENCE_MS

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class SnapshotReceiving:
    """A snapshot that comes from the leader.

    Parameters:
        data_dir: of the follower.
        position: of the snapshot.
        size: its bytes.
        files: has the data directory.

    Raises:
        OSError: the file can't be made.
    """

    def __init__(self, data_dir: Path, position: int, size: int, files: Files = SYSTEM_FILES) -> None:
        self.position: Final = position
        self._size = size
        self._files = files
        self._data_dir = data_dir / DIRECTORY
        self._got = 0
        if files.exists(self._data_dir):
            files.rmtree(self._data_dir)
        make_directory(files, self._data_dir / SNAPSHOTS)
        self._partial = self._data_dir / SNAPSHOTS / PARTIAL
        self._file = files.open(self._partial, Mode.NEW)

    def add(self, position: int, data: bytes) -> int:
        """Take the next bytes of the snapshot at a position, and return how many there are.

        Raises:
            StreamBroken: they belong to another snapshot, or are more than it has.
            OSError: the disk fails.
        """
        if position != self.position or self._got + len(data) > self._size:
            raise StreamBroken(f"a part of the snapshot at {position} came, which does not follow that at {self.position}")
        write_all(self._file, data, self._got)
        self._got += len(data)
        return self._got

    @property
    def is_whole(self) -> bool:
        """Whether everything has come."""
        return self._got == self._size

    def finish(self) -> None:
        """Make the snapshot durable, and give it its name: the next start installs it. This waits for the disk.

        Raises:
            SnapshotInvalid: this version can't read it.
            OSError: the disk fails.
        """
        files, path = self._files, snapshot_path(self._data_dir, self.position)
        self._file.fdatasync()
        self._file.close()
        files.rename(self._partial, path)
        try:
            SnapshotReader(self._data_dir, self.position, files)
        except BaseException:
            files.unlink(path)
            raise
        files.sync_directory(path.parent)
        files.sync_directory(self._data_dir)
        files.sync_directory(self._data_dir.parent)

    def close(self) -> None:
        """Give up what has come."""
        self._file.close()


def install_snapshot(data_dir: Path, files: Files = SYSTEM_FILES) -> int | None:
    """Put a snapshot that came from the leader in the place of the log, the index and the snapshots of a data directory.

    The caller calls it before anything else opens the directory. Killed anywhere, the next start does it again. Return the
    position of the snapshot; None if there is none. Raises OSError.
    """
    folder = data_dir / DIRECTORY
    if not files.exists(folder):
        return None
    names = files.names(folder / SNAPSHOTS) if files.exists(folder / SNAPSHOTS) else []
    came = [name for name in names if name.endswith(SUFFIX)]
    position = None
    if came:
        position = int(came[0].removesuffix(SUFFIX))
        Index.destroy(data_dir, files)
        unlink_if_there(files, data_dir / syncmark.FILE)
        for directory in (data_dir / SNAPSHOTS, data_dir / LOG_DIRECTORY):
            if files.exists(directory):
                files.rmtree(directory)
            make_directory(files, directory)
        files.open(data_dir / LOG_DIRECTORY / segment_name(position), Mode.NEW).close()
        files.sync_directory(data_dir / LOG_DIRECTORY)
        files.sync_directory(data_dir)
        files.rename(folder / SNAPSHOTS / came[0], snapshot_path(data_dir, position))
        files.sync_directory(data_dir / SNAPSHOTS)
        files.sync_directory(folder / SNAPSHOTS)
    files.rmtree(folder)
    files.sync_directory(data_dir)
    return position
