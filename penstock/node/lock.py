"""The lock that lets only one node at a time use a data directory."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType

from penstock.store.errors import DataDirIncomplete, DataDirLocked
from penstock.store.files import FULL

LOCK_NAME = "lock"

RESTORING = "restoring"
"""File in a data directory while `penstock restore` fills it. Nobody else may use the directory."""

PID_BYTES_MAX = 20


class DataDirLock:
    """An exclusive lock of a data directory, held until `release` or the end of the process.

    It is a lock of the kernel (flock(2)), so a killed node leaves no stale lock. The file `lock` holds the pid of its holder.
    The file is never deleted: another process may have just opened it, and would then lock a file without a name.
    """

    __slots__ = ("_fd", "data_dir")

    def __init__(self, data_dir: Path, *, may_be_incomplete: bool = False) -> None:
        """Lock `data_dir`, and create it if it is missing.

        Args:
            data_dir: the directory.
            may_be_incomplete: whether to lock a directory that a killed `penstock restore` has left incomplete.

        Raises:
            DataDirLocked: another process, or another lock of this process, holds it.
            DataDirIncomplete: a restore of the directory was not completed.
            OSError: the directory can't be created or written to.
        """
        self.data_dir = data_dir
        data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(data_dir / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, 0)
            try:
                os.pwrite(fd, b"%d\n" % os.getpid(), 0)
            except OSError as error:
                if error.errno not in FULL:  # on a full disk, the lock holds without the pid
                    raise
        except BlockingIOError as error:
            # The file is empty between the holder's lock and the writing of its pid.
            pid = os.pread(fd, PID_BYTES_MAX, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise DataDirLocked(
                f"The data directory {data_dir} is in use by the process with pid {pid}. Stop it, or use another directory.",
                pid,
            ) from error
        except BaseException:  # the descriptor must not stay open after any error
            os.close(fd)
            raise
        self._fd = fd
        if not may_be_incomplete and (data_dir / RESTORING).exists():
            self.release()
            raise DataDirIncomplete(
                f"{data_dir} is incomplete, because a `penstock restore` of it has not ended. Run that command again."
            )

    def release(self) -> None:
        """Release the lock. A second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> DataDirLock:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()


def is_locked(data_dir: Path) -> bool:
    """Return whether a process uses a data directory. It changes nothing there."""
    try:
        fd = os.open(data_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
