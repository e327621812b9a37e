"""The time of day that a process sees, which a test sets. Other processes keep the machine's."""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("wrong_clock.c")


def missing_for_time_of_day() -> str:
    """Return why this machine can't set the time of day of one process, or an empty string."""
    return "" if shutil.which("cc") else "no C compiler is installed, which makes the library that changes the time of day"


class TimeOfDay:
    """The time of day that processes see which are started with `environment`.

    Parameters:
        directory: for the library and for the file with the offset.
    """

    def __init__(self, directory: Path) -> None:
        library, offset = directory / "wrong_clock.so", directory / "offset"
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, SOURCE], check=True)
        offset.write_bytes(bytes(8))
        with offset.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 8)
        self.environment = {"LD_PRELOAD": str(library), "WRONG_CLOCK": str(offset)}

    def set_ahead(self, seconds: int) -> None:
        """Let the time of day be ahead of the true one by `seconds`, or behind it."""
        self._map[:] = struct.pack("l", seconds)
