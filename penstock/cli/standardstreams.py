"""The standard streams of a command that a shell or a supervisor has started without some of them, as with `<&-`."""

from __future__ import annotations

import os
import sys
from typing import Final, TextIO

_LAST: Final = 2
"""Number of standard error, the last of the standard streams."""


def open_missing() -> None:
    """Open /dev/null in place of each standard stream that is closed.

    Otherwise the next file or socket that the process opens gets the stream's number, and libraries write into it or abort.
    `sys.stdin` stays None, so that a command that needs its input can tell a closed one from an empty one.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= _LAST:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    # These files stay open until the process ends.
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def standard_input() -> TextIO:
    """Return standard input. Raises ValueError if the process was started without one."""
    if sys.stdin is None:
        raise ValueError("standard input is closed: give the command a file or a pipe to read, or </dev/null for no input.")
    return sys.stdin
