"""Files that are read again once somebody has replaced them, such as the certificates of a listener."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

import structlog

from penstock.store.pemfiles import expiry_s

logger = structlog.get_logger("store")

WATCH_S: Final = 2.0
"""Interval in seconds in which the node looks whether certificates were replaced."""

Content = TypeVar("Content")


class WatchedFiles(Generic[Content]):
    """The content of the certificate files of a listener. It is read again when a file was replaced, or somebody asks for it.

    Parameters:
        listener: the name of the listener, for the log.
        paths: of the files, that of the certificate first.
        load: returns the content. Raises OSError if a file can't be read, or has no valid content.

    Raises:
        OSError: as `load`.
    """

    def __init__(self, listener: str, paths: Sequence[str], load: Callable[[], Content]) -> None:
        self.listener = listener
        self._paths = tuple(path for path in paths if path)
        self._load = load
        self._timer: asyncio.TimerHandle | None = None
        self._seen = self._look()
        self.content = load()
        """The content that is in force."""
        self.expires_s = self._expiry_s()
        """When the certificate in force, or one of its chain, expires, in seconds since 1970; infinite if nobody can tell."""

    def watch(self, loop: asyncio.AbstractEventLoop) -> None:
        """Read the files again whenever one was replaced, until `close`."""
        self._timer = loop.call_later(WATCH_S, self.watch, loop)
        if self.changed():
            self.reload()

    def close(self) -> None:
        """Watch the files no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def reload(self) -> None:
        """Read the files again. If they can't be used, the error is logged, and the content that was in force stays."""
        if not self._paths:
            return
        try:
            self._seen = self._look()
            self.content, self.expires_s = self._load(), self._expiry_s()
        except OSError as error:
            logger.error("tls.reload_failed", listener=self.listener, why=str(error))
        else:
            logger.info("tls.reloaded", listener=self.listener, certificate=self._paths[0])

    def changed(self) -> bool:
        """Return whether a file was replaced since it was read. A missing file does not count: it is about to appear."""
        try:
            return self._look() != self._seen
        except OSError:
            return False

    def _expiry_s(self) -> float:
        if not self._paths:
            return math.inf
        try:
            return expiry_s(self._paths[0])
        except OSError as error:  # OpenSSL has accepted it, and clients may, too
            logger.warning("tls.expiry_unknown", listener=self.listener, why=str(error))
            return math.inf

    def _look(self) -> tuple[tuple[int, int, int], ...]:
        """Return inode, size and time of change of each file. Raises OSError if one is missing."""
        stats = [Path(path).stat() for path in self._paths]
        return tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
