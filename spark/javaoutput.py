"""What a JVM says on stderr while it starts, without the warnings about itself."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager

READ_BYTES = 65_536

_WARNING = re.compile(
    rb"WARNING: (Using incubator modules: |A (terminally deprecated|restricted) method in |.* has been called by |"
    rb"Use --enable-native-access|.* will be (blocked|removed) in a future release|Please consider reporting this to )"
)
"""Java warns of modules that Spark has chosen, and of what its libraries call. Only Spark can change that, and Java has no
option against it."""


@contextmanager
def without_warnings() -> Iterator[None]:
    """Leave these warnings out of what processes say on stderr that the caller starts within the context.

    A thread hands on what they say, also after the context, until all of them have ended.
    """
    kept = os.dup(2)
    read, write = os.pipe()
    os.dup2(write, 2)
    os.close(write)
    threading.Thread(target=_hand_on, args=(read, kept), name="penstock-java-output", daemon=True).start()
    try:
        yield
    finally:
        os.dup2(kept, 2)


def _hand_on(read: int, to: int) -> None:
    """Copy lines from a pipe to a file until no process has the pipe open. Close both."""
    try:
        line = b""
        while data := os.read(read, READ_BYTES):
            line += data
            *whole, line = line.split(b"\n")
            shown = b"".join(each + b"\n" for each in whole if not _WARNING.match(each))
            if not line.startswith(b"W") or len(line) > READ_BYTES:  # a progress bar has no end of a line
                shown, line = shown + line, b""
            _write(to, shown)
        _write(to, line)
    except OSError:
        pass  # nobody reads stderr any more
    finally:
        os.close(read)
        os.close(to)


def _write(to: int, data: bytes) -> None:
    while data:
        data = data[os.write(to, data) :]
