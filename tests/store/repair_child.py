"""A process that repairs data directories, each in a fork that kills itself at a step.

python -m tests.store.repair_child

Each line of standard input names a directory and a step: `STEP DATA_DIR`, with the step -1 for a repair that is not killed. The
answer is a line with the exit status of the fork and the number of its steps, which is 0 if it was killed.
"""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.store.recovery.repair import repair, survey

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

KILLED = 9
EVENTS = frozenset(("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"))
"""Audit events of the file operations of `repair`. Syncs have no audit event, and are counted separately."""


def repair_until(data_dir: Path, last: int) -> int:
    """Repair a directory, and return the number of steps. At step `last`, the process ends."""
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
    return steps


def main() -> None:
    for line in sys.stdin:
        last, _, data_dir = line.rstrip("\n").partition(" ")
        reading, writing = os.pipe()
        if (pid := os.fork()) == 0:
            status = 1
            try:
                os.write(writing, str(repair_until(Path(data_dir), int(last))).encode())
                status = 0
            except BaseException:  # as an interpreter does, which then exits with 1
                traceback.print_exc()
            finally:
                os._exit(status)
        os.close(writing)
        steps = os.read(reading, 100).decode() or "0"
        os.close(reading)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), steps, flush=True)


if __name__ == "__main__":
    main()
