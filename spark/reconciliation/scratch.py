"""The hidden directory beside a report in which a run makes it, and the removal of those that killed runs have left."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path

LOCK = "reconcile.lock"
"""File that a run locks as long as it lasts. The kernel releases the lock of a process that was killed."""


@contextmanager
def scratch_beside(target: Path) -> Iterator[Path]:
    """Make a hidden directory beside `target`, and remove it in the end. Those of runs that were killed are removed first."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(target)
    scratch, descriptor = _locked_directory(target)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(descriptor)


def _locked_directory(target: Path) -> tuple[Path, int]:
    """Return a new directory, and the descriptor of its locked file."""
    while True:
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
        descriptor = os.open(scratch / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # A file system without locks has none for the next run either, which then removes nothing.
            flock(descriptor, LOCK_EX)
        if (scratch / LOCK).exists():
            return scratch, descriptor
        os.close(descriptor)  # Another run has taken the file before the lock, and removed the directory.


def _remove_abandoned(target: Path) -> None:
    """Remove the directories beside `target` whose file nobody locks. One without such a file is somebody else's."""
    pattern = re.compile(rf"\.{re.escape(target.name)}\.[a-z0-9_]+")
    for directory in target.parent.iterdir():
        if pattern.fullmatch(directory.name):
            with suppress(OSError):  # The run goes on, has just ended, or is another user's.
                _remove_unlocked(directory)


def _remove_unlocked(directory: Path) -> None:
    """Remove a directory of a run that was killed. Raises OSError if it is none."""
    descriptor = os.open(directory / LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        flock(descriptor, LOCK_EX | LOCK_NB)
        shutil.rmtree(directory)
    finally:
        os.close(descriptor)
