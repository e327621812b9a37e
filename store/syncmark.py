"""The sync mark: a small file that says up to where the log was known to be durable, and on which boot of the machine.

A power cut may leave the pages of one unsynced group out of order: a record is missing, and one behind it is there. That looks
like damage of what was acknowledged, and differs in one thing: nothing below the mark can be lost that way. The mark costs no
group anything. Housekeeping writes it once a second if there was a sync, and a start and an orderly end write it too; so it is
about a second old at most, and exact where the node was idle.

    offset  type  meaning
    0       u32   CRC-32 of everything after it
    4       u64   position
    12      36    boot id of the machine, zeros where it has none
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
    """What the file says."""

    position: int
    """Everything before it was durable."""
    boot: bytes

    @property
    def has_booted_since(self) -> bool:
        """True where the machine was started since: only then can a page be missing that a process had written."""
        return bool(self.boot.strip(b"\0")) and self.boot != boot_id()


class SyncMark:
    """The sync mark of a data directory.

    Parameters:
        data_dir: where its file is, or will be.
    """

    def __init__(self, data_dir: Path) -> None:
        self.path = data_dir / FILE
        self.position = 0
        """What was written last; 0 before that."""
        self._body = b""

    def read(self) -> Mark | None:
        """Return the mark; None where there is none that can be read, which proves nothing."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return None
        if len(data) != _CRC.size + _BODY.size or crc32(data[_CRC.size :]) != _CRC.unpack_from(data)[0]:
            return None
        self._body = data[_CRC.size :]
        return Mark(*_BODY.unpack(self._body))

    def write(self, position: int) -> None:
        """Say that everything before `position` is durable, unless the file says so. Waits for the disk, about 0.3 ms.

        Safe on another thread, one at a time.

        Raises:
            OSError: the disk fails. A full one is no failure: the old mark is true still.
        """
        body = _BODY.pack(position, boot_id())
        if body == self._body:
            self.position = position
            return
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_DSYNC, 0o640)
        try:
            os.pwrite(handle, _CRC.pack(crc32(body)) + body, 0)  # within one sector: the old mark or the new one
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return
        finally:
            os.close(handle)
        self.position, self._body = position, body


def boot_id() -> bytes:
    """Return what tells this boot of the machine from all others, 36 bytes; zeros where the system doesn't say."""
    try:
        return _BOOT_ID.read_bytes().strip()[:36].ljust(36, b"\0")
    except OSError:  # not Linux
        return bytes(36)
