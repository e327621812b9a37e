"""The sync mark: a small file that says what of the log was known to be durable, where it begins, and how the node ended.

A start must not trust what it reads. After a failed sync the kernel may keep pages in memory as if they were on disk, and a
sync of the next process succeeds without them. Only what is below the mark is known to be on disk. So a start that does not
follow an orderly end writes all else to new blocks (`CommitLog.recover`).

A power cut may leave the pages of an unsynced group out of order, so that a record is missing and a later one is there.
That looks like damage of acknowledged records, with one difference: nothing below the mark can be lost that way. The mark
costs the groups nothing. Housekeeping writes it once a second if there was a sync, and a start and an orderly end write it
too. So it is at most about a second old, and exact when the node was idle.

Retention writes where the log will begin before it deletes the segments before that. So a first segment that is missing is
noticed, and one whose deletion was interrupted is deleted.

The file is one sector, which the disk writes as a whole or not at all, and stays open as long as the log.

    offset  type  meaning
    0       u32   CRC-32 of everything after it
    4       u32   version of this format
    8       u64   position up to which the log was durable
    16      u64   position at which the log begins
    24      36    boot id of the machine; zeros if it has none
    60      u8    how the node ended: see `Ending`
    61      451   why it failed, UTF-8, filled up with zeros
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from struct import Struct
from threading import Lock
from typing import NamedTuple
from zlib import crc32

from penstock.store.files import NO_BOOT_ID, PASSING, SYSTEM_FILES, File, Files, Mode, read_file, replace_file

FILE = "synced"

VERSION = 2

_CRC = Struct("<I")
_BODY = Struct("<IQQ36sB451s")
_REASON_BYTES = 451

assert _CRC.size + _BODY.size == 512


class Ending(IntEnum):
    """How the node ended that wrote the mark."""

    RUNNING = 1
    """It has not: it runs, or it was killed, or the machine lost power."""
    ORDERLY = 2
    """Everything that it wrote is durable."""
    FAILED = 3
    """It ended because a write or a sync had failed."""


class Mark(NamedTuple):
    """The content of the file."""

    position: int
    """Everything before this position was durable."""
    begin: int
    """Position at which the log begins. Everything before it has been dropped."""
    boot: bytes
    """Boot of the machine in which the mark was written; `NO_BOOT_ID` if unknown."""
    ending: Ending
    reason: str
    """Why the node failed; empty if it did not."""

    def has_booted_since(self, boot: bytes) -> bool:
        """Return whether the machine has booted since, given its boot id now."""
        return self.boot != NO_BOOT_ID and self.boot != boot

    def may_lack_pages(self, boot: bytes) -> bool:
        """Return whether pages may be missing that a process had written, given the boot id of the machine now."""
        return self.ending is Ending.FAILED or self.has_booted_since(boot)


class SyncMark:
    """The sync mark of a data directory.

    Parameters:
        data_dir: of the node. The file is in this directory, or will be.
        files: has that directory.
    """

    def __init__(self, data_dir: Path, *, files: Files = SYSTEM_FILES) -> None:
        self.path = data_dir / FILE
        self._files = files
        self._file: File | None = None
        """Stays open from the first write on, so that no write needs a free descriptor."""
        self._lock = Lock()
        self.position = 0
        """Position that was written last; 0 before the first write."""
        self.begin = 0
        """Begin of the log that was written last; 0 before the first write."""
        self._body = b""
        self.problem = ""
        """Why `read` found no mark, although there is a file; empty if there is none."""

    def read(self) -> Mark | None:
        """Return the mark, or None if there is no file that can be read. None proves nothing about the log."""
        self.problem = ""
        try:
            data = read_file(self._files, self.path)
        except FileNotFoundError:
            return None
        except OSError as error:
            self.problem = f"the disk can't read it ({error.strerror})"
            return None
        if len(data) != _CRC.size + _BODY.size:
            self.problem = f"it has {len(data)} bytes, but should have {_CRC.size + _BODY.size}"
            return None
        version, position, begin, boot, ending, reason = _BODY.unpack_from(data, _CRC.size)
        if crc32(data[_CRC.size :]) != _CRC.unpack_from(data)[0] or ending not in tuple(Ending):
            self.problem = "its checksum does not match"
            return None
        if version != VERSION:
            self.problem = f"it has version {version}, but this node reads {VERSION}"
            return None
        self._body = data[_CRC.size :]
        self.begin = begin
        return Mark(position, begin, boot, Ending(ending), reason.rstrip(b"\0").decode(errors="replace"))

    def write(self, position: int, *, begin: int | None = None, ending: Ending = Ending.RUNNING, reason: str = "") -> bool:
        """Write the mark, unless the file says the same already. Return whether the file says it now. This waits for the disk.

        Another thread may call it.

        Args:
            position: everything before it is durable.
            begin: where the log begins; the one that was written last if it is None.
            ending: `RUNNING` while the node runs.
            reason: why the node has failed.

        Raises:
            OSError: the disk fails. A full disk or a want of descriptors is no failure, since the old mark is still true.
        """
        with self._lock:
            begin = self.begin if begin is None else begin
            cut = reason.encode()[:_REASON_BYTES].decode(errors="ignore").encode()  # not within a character
            body = _BODY.pack(VERSION, position, begin, self._files.boot_id(), ending, cut)
            try:
                if body != self._body or self._file is None:
                    self._write(_CRC.pack(crc32(body)) + body)
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                return False
            self.position, self.begin, self._body = position, begin, body
            return True

    def _write(self, data: bytes) -> None:
        if self._file is None:
            if not self._body:  # there is no file that can be read, so a write in place might have to read it first
                replace_file(self._files, self.path, data)
            self._file = self._files.open(self.path, Mode.DURABLE)
        self._file.pwrite(data, 0)  # one sector: the old mark or the new one

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
