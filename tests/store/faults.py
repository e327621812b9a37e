"""A file system that fails on demand: it replaces the calls of `os` that the log makes, and fails them by a plan.

Only calls that concern segment files are affected. A descriptor belongs to a segment if `/proc` names a segment file for it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

CALLS = ("pwrite", "fdatasync", "posix_fallocate", "open")
"""The calls that can fail. `open` fails only when it would create a segment."""


class Faults:
    """Counts the calls that concern segments, and makes some of them fail.

    Parameters:
        plan: the fault of a call, by the call's name and its number (from 0). A fault is an errno, or for `pwrite` also "short"
            (half of the bytes are written) or "torn" (half of the bytes are written, then the call fails with EIO).
        full_at: total bytes of segments at which the disk is full, so that writes and allocations fail; None for never.
        short_at_most: maximum number of bytes that one `pwrite` writes; 0 for no limit.
    """

    def __init__(
        self, plan: dict[tuple[str, int], int | str] | None = None, *, full_at: int | None = None, short_at_most: int = 0
    ) -> None:
        self.plan = plan or {}
        self.full_at = full_at
        self.short_at_most = short_at_most
        self.counts = dict.fromkeys(CALLS, 0)
        self.synced: list[int] = []
        """The bytes in all segments at each successful sync."""
        self.written = 0
        self.failed = False
        """True once a call has failed with an error other than a short write."""

    @contextmanager
    def installed(self) -> Iterator[Faults]:
        """Replace the calls of `os` while the context lasts."""
        with pytest.MonkeyPatch.context() as patch:
            for name in CALLS:
                patch.setattr(os, name, getattr(self, f"_{name}")(getattr(os, name)))
            yield self

    def _fault(self, name: str) -> int | str:
        number = self.counts[name]
        self.counts[name] += 1
        fault = self.plan.get((name, number), 0)
        if isinstance(fault, int) and fault:
            self.failed = True
            raise OSError(fault, os.strerror(fault))
        return fault

    def _pwrite(self, genuine: Callable[..., int]) -> Callable[..., int]:
        def pwrite(fd: int, data: bytes, offset: int) -> int:
            if not _is_segment(fd):
                return genuine(fd, data, offset)
            fault = self._fault("pwrite")
            size = len(data)
            if self.short_at_most:
                size = min(size, self.short_at_most)
            if fault in ("short", "torn"):
                size = max(len(data) // 2, 1)
            if self.full_at is not None and self.written + size > self.full_at:
                size = self.full_at - self.written
                if size <= 0:
                    self.failed = True
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            written = genuine(fd, bytes(data)[:size], offset)
            self.written += written
            if fault == "torn":
                self.failed = True
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return written

        return pwrite

    def _fdatasync(self, genuine: Callable[[int], None]) -> Callable[[int], None]:
        def fdatasync(fd: int) -> None:
            if _is_segment(fd):
                self._fault("fdatasync")
            genuine(fd)

        return fdatasync

    def _posix_fallocate(self, genuine: Callable[[int, int, int], None]) -> Callable[[int, int, int], None]:
        def posix_fallocate(fd: int, offset: int, length: int) -> None:
            self._fault("posix_fallocate")
            genuine(fd, offset, length)

        return posix_fallocate

    def _open(self, genuine: Callable[..., int]) -> Callable[..., int]:
        def open_(path: str | os.PathLike[str], flags: int, *rest: int) -> int:
            if str(path).endswith(".log") and flags & os.O_CREAT:
                self._fault("open")
            return genuine(path, flags, *rest)

        return open_


def _is_segment(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}").endswith(".log")
