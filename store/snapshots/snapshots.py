"""Takes snapshots of the index where segments begin, so that the log before them may be dropped."""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path

import structlog

from penstock.store.errors import SnapshotInvalid
from penstock.store.files import SYSTEM_FILES, Files
from penstock.store.index.index import Index
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.quarantine import set_aside
from penstock.store.sliced import Steps
from penstock.store.snapshots.snapshotreader import SnapshotReader, snapshot_path
from penstock.store.snapshots.snapshotwriter import SnapshotWriter, remove_other_snapshots, snapshots

logger = structlog.get_logger("store")

SNAPSHOT_SPACING = 4
"""Bytes of log between two snapshots, per byte of a snapshot: snapshots take at most a quarter of what the log takes."""


class Snapshots:
    """The snapshots of a store: those that are complete, and the one that is being written.

    Parameters:
        data_dir: of the node. Snapshots that don't belong to a segment of the log are deleted.
        log, index: of the store.
        files: has the data directory.
        executor: makes snapshots durable, outside of the loop; a thread if it is None.
    """

    def __init__(
        self,
        data_dir: Path,
        log: CommitLog,
        index: Index,
        *,
        files: Files = SYSTEM_FILES,
        executor: Executor | None = None,
    ) -> None:
        self._data_dir = data_dir
        self._files = files
        self._index = index
        self._writer: SnapshotWriter | None = None
        self._thread = executor or ThreadPoolExecutor(1, "penstock-snapshot")
        remove_other_snapshots(data_dir, {base for base, _ in log.segments()}, files)
        self.complete = snapshots(data_dir, files)
        """Position of each complete snapshot, and when the last record before it was stored, in ms since 1970."""
        self._unread = set(self.complete)
        """Snapshots that an earlier process has written, and that nobody has read since."""
        self._log_start = log.start
        self._last = max(self.complete, default=log.start)
        self._last_bytes = files.size(snapshot_path(data_dir, self._last)) if self._last in self.complete else 0

    @property
    def spacing(self) -> int:
        """Bytes of log that must be between the last snapshot and the next one."""
        return SNAPSHOT_SPACING * self._last_bytes

    def begin(self, position: int, store_ms: int) -> Steps | None:
        """Return the work of taking a snapshot at `position`; None where one is being taken or the last one is close enough.

        Args:
            position: where a segment begins. The index is saved exactly up to there.
            store_ms: when the last record before it was stored.
        """
        if self._writer is not None or position - self._last < self.spacing:
            return None
        try:
            self._writer = SnapshotWriter(self._data_dir, self._index, position, store_ms, files=self._files)
        except OSError as error:
            _log_failure(position, error)
            return None
        return self._steps(self._writer, store_ms)

    def _steps(self, writer: SnapshotWriter, store_ms: int) -> Steps:
        try:
            yield from writer.slices()
            finished = self._thread.submit(writer.finish)
            while not finished.done():
                yield True
            finished.result()
            self.complete[writer.position] = store_ms
            self._last, self._last_bytes = writer.position, writer.bytes
        except OSError as error:
            _log_failure(writer.position, error)
        finally:
            writer.close()
            self._writer = None

    def verify(self, position: int) -> Steps:
        """Read a snapshot whole, unless this process has written or read it. One that can't be used counts no more.

        Segments that were dropped because of a damaged snapshot would leave nothing from which to rebuild the index. The file
        stays for `penstock repair`.
        """
        if position not in self._unread:
            return
        try:
            for _ in SnapshotReader(self._data_dir, position, self._files).blocks():
                yield False
        except (SnapshotInvalid, OSError) as error:
            logger.error("snapshot.invalid", position=position, error=str(error))
            del self.complete[position]
        self._unread.discard(position)

    def set_aside(self, after: int) -> None:
        """Set the snapshots after a position aside: they may know more than the index, which was built anew.

        A repair had kept an index that knew what damaged records said, and these were taken from it. Raises OSError.
        """
        for position in [each for each in self.complete if each > after]:
            aside = set_aside(self._files, self._data_dir, snapshot_path(self._data_dir, position))
            logger.warning("snapshot.set_aside", position=position, file=str(aside), damaged=after)
            del self.complete[position]
        self._last = max(self.complete, default=self._log_start)

    def drop_before(self, position: int) -> None:
        """Delete the snapshots before `position`. Raises OSError."""
        for each in [each for each in self.complete if each < position]:
            self._files.unlink(snapshot_path(self._data_dir, each))
            del self.complete[each]

    def wait(self) -> None:
        """Wait for the thread that makes a snapshot durable, and end it."""
        self._thread.shutdown()

    def close(self) -> None:
        """Discard the snapshot that is being written, if its steps have not begun."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _log_failure(position: int, error: OSError) -> None:
    # The log still has everything, and the next segment tries again.
    logger.error("snapshot.failed", position=position, error=str(error))
