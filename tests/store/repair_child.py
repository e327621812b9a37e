"""A process that repairs a data directory and kills itself at the given step. Without a step it prints the number of steps.

python -m tests.store.repair_child DATA_DIR [STEP]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.store.repair import repair, survey

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

KILLED = 9
EVENTS = frozenset(("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"))
"""Audit events of the file operations of `repair`. Syncs have no audit event, and are counted separately."""


def main(data_dir: Path, last: int) -> None:
    steps = 0

    def step() -> None:
        nonlocal steps
        if steps == last:
            os._exit(KILLED)  # Nothing is flushed, as with kill -9.
        steps += 1

    def heard(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and str(data_dir) in str(arguments[0]):
            step()

    fsync, fdatasync = os.fsync, os.fdatasync

    def counted_fsync(fd: FileDescriptorLike) -> None:
        step()
        fsync(fd)

    def counted_fdatasync(fd: FileDescriptorLike) -> None:
        step()
        fdatasync(fd)

    os.fsync, os.fdatasync = counted_fsync, counted_fdatasync
    damages = survey(data_dir).damages
    sys.addaudithook(heard)
    repair(data_dir, damages)
    last = -1
    print(steps)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else -1)
