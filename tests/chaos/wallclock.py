"""The time of day of one process, which a fault may set. Other processes keep the machine's."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("clockshim.c")
SECOND_NS = 1_000_000_000


def missing_for_clocks() -> str:
    """Return why this machine can't set the clock of one process, or an empty string."""
    return "" if shutil.which("cc") else "there is no C compiler (cc)"


class WallClock:
    """Moves the time of day of the processes that start with `environment`.

    Parameters:
        directory: for the library and the file that holds the offset.
    """

    def __init__(self, directory: Path) -> None:
        library, self._file = directory / "clockshim.so", directory / "clock"
        subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
        self._file.write_bytes(bytes(4096))
        self.environment = {"LD_PRELOAD": str(library), "CHAOS_CLOCK": str(self._file)}

    def set_off(self, seconds: float) -> None:
        """Set the time of day this many seconds before or after the machine's."""
        with self._file.open("r+b") as file:
            file.write(struct.pack("<q", int(seconds * SECOND_NS)))
