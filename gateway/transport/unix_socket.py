"""The file of a Unix socket on which a listener accepts."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path


class UnixSocketFile:
    """A Unix socket that nobody can reach before its file has the right mode.

    The socket first gets a file of its own beside the wanted path. `publish` then gives the file its name.

    Parameters:
        path: the wanted path.
        mode: the access rights of the file.
    """

    def __init__(self, path: str, mode: int) -> None:
        self._path = Path(path)
        self._mode = mode
        self._beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._published: tuple[int, int] | None = None
        """Device and inode of the file, once it has its name."""

    def bind(self) -> socket.socket:
        """Return the bound socket.

        Raises:
            OSError: the path is taken by something else, or by a process that listens there.
        """
        if self._path.exists() or self._path.is_symlink():
            _check_stale(self._path)
        self._beside.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX)
        try:
            server.bind(str(self._beside))
            self._beside.chmod(self._mode)
        except OSError:
            server.close()
            self._beside.unlink(missing_ok=True)
            raise
        return server

    def publish(self) -> None:
        """Give the file its name. It replaces the stale file of an earlier node."""
        found = self._beside.stat()
        self._published = found.st_dev, found.st_ino
        self._beside.rename(self._path)

    def remove(self) -> None:
        """Remove the file, unless another node has replaced it."""
        if self._published is None:
            return
        with suppress(FileNotFoundError):
            found = self._path.stat()
            if (found.st_dev, found.st_ino) == self._published:
                self._path.unlink()
        self._published = None


def _check_stale(path: Path) -> None:
    """Raise OSError unless a path is a socket on which nobody listens."""
    if not stat.S_ISSOCK(path.lstat().st_mode):
        raise FileExistsError(errno.EEXIST, "a file of that name exists and is no socket")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return
        except BlockingIOError:
            pass  # The backlog is full, so a process listens there.
    raise OSError(errno.EADDRINUSE, "another process listens there")
