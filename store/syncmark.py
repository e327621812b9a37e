"""The sync mark: a small file that says up to where the log was known to be durable, and in which boot of the machine.

A power cut may leave the pages of an unsynced group out of order, so that a record is missing and a later one is there.
That looks like damage of acknowledged records, with one difference: nothing below the mark can be lost that way. The mark
costs the groups nothing. Housekeeping writes it once a second if there was a sync, and a start and an orderly end write it
too. So it is at most about a second old, and exact when the node was idle.

    offset  type  meaning
    0       u32   CRC-32 of everything after it
    4       u64   position
    12      36    boot id of the machine; zeros if it has none
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from struct import Struct
from typing import NamedTuple
from zlib import crc32

FILE = "synced"

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_CRC = Struct("<I")
_BODY = Struct("<Q36s")


class Mark(NamedTuple):
    """The content of the file."""

    position: int
    """Everything before this position was durable."""
    boot: bytes

    @property
    def has_booted_since(self) -> bool:
        """Whether the machine has booted since. Only then can a page be missing that a process had written."""
        return bool(self.boot.strip(b"\0")) and self.boot != boot_id()


class SyncMark:
    """The sync mark of a data directory.

    Parameters:
        data_dir: of the node. The file is in this directory, or will be.
    """

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / FILE
        self.position = 0
        """Position that was written last; 0 before the first write."""
        self._body = b""

    def read(self) -> Mark | None:
        """Return the mark, or None if there is no file that can be read. None proves nothing about the log."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != _CRC.size + _BODY.size or crc32(data[_CRC.size :]) != _CRC.unpack_from(data)[0]:
            return None
        self._body = data[_CRC.size :]
        return Mark(*_BODY.unpack(self._body))

    def write(self, position: int) -> None:
        """Write that everything before `position` is durable, unless the file says so already. This waits for the disk.

        Another thread may call it, but only one at a time.

        Raises:
            OSError: the disk fails. A full disk is no failure, since the old mark is still true.
        """
        body = _BODY.pack(position, boot_id())
        if body == self._body:
            self.position = position
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DSYNC, 0o640)
        try:
            os.pwrite(handle, _CRC.pack(crc32(body)) + body, 0)  # one sector: the old mark or the new one
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return
        finally:
            os.close(handle)
        self.position, self._body = position, body


def boot_id() -> bytes:
    """Return the 36 bytes that tell this boot of the machine from all others; zeros if the system has no boot id."""
    try:
        return _BOOT_ID.read_bytes().strip()[:36].ljust(36, b"\0")
    except OSError:  # not Linux
        return bytes(36)
