"""Asks whether a disk has room for copies before the first one is made."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from penstock.backup.copying import CopyFiles
from penstock.backup.errors import BackupFailed
from penstock.store.files import unlink_if_there
from penstock.store.options import KIB

PROBE = "probe"
"""Name that a file gets for a moment in the directory of the copies, to see whether copies share blocks."""

SPARE_BYTES = 64 * KIB
"""Bytes that must be free besides the copies: for names, a manifest, and blocks that are not filled."""


class Wanted(NamedTuple):
    """A file to be copied."""

    path: Path
    size: int
    may_link: bool
    """Whether the copy may be a hard link."""


def require_room(wanted: list[Wanted], directory: Path, files: CopyFiles, *, advice: str) -> None:
    """Check that the disk of a directory has room for copies. Hard links, and copies that share blocks, cost none.

    Args:
        wanted: the files.
        directory: for the copies. It exists.
        files: have the files and the directory.
        advice: what to do if there is not enough room, as words after "free at least ... or".

    Raises:
        BackupFailed: there is not enough room. Nothing was copied.
        OSError: the disk can't be asked.
    """
    free = files.usage(directory).free
    if _bytes_of(wanted) <= free:
        return
    if wanted and _can_clone(wanted[0].path, directory, files):
        return
    linked = next((each.path for each in wanted if each.may_link), None)
    if linked is not None and _can_link(linked, directory, files):
        wanted = [each for each in wanted if not each.may_link]
    needed = _bytes_of(wanted)
    if needed > free:
        raise BackupFailed(
            f"the copies need {needed} bytes, but the file system of {directory} has {free} free; free at least "
            f"{needed - free} bytes there, or {advice}. Nothing was copied"
        )


def _bytes_of(wanted: list[Wanted]) -> int:
    return sum(each.size for each in wanted) + SPARE_BYTES if wanted else 0


def _can_clone(path: Path, directory: Path, files: CopyFiles) -> bool:
    try:
        return files.clone(path, directory / PROBE, 0o600)
    finally:
        unlink_if_there(files, directory / PROBE)


def _can_link(path: Path, directory: Path, files: CopyFiles) -> bool:
    unlink_if_there(files, directory / PROBE)
    with suppress(OSError):  # then it is copied
        files.link(path, directory / PROBE)
        files.unlink(directory / PROBE)
        return True
    return False
