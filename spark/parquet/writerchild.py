"""The process in which a node has the tables written: `python -m ...writerchild DATA_DIR UNTIL DROP_BEFORE_MS`.

It prints the position that the tables have reached, after each segment and at its end, and the error that ends it. It ends by
itself when everything is written, so it needs no word from a node that was killed: then it fails to print.
"""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from penstock.spark.errors import LogMissing, ReconcileError, TablesInUse, TablesLocked
from penstock.spark.parquet.reach import NOTHING, written_until
from penstock.store.errors import StoreError

NICE = 19
"""The node and everything else go first."""

EXIT_FAILED = 1
EXIT_AGAIN = 3
"""Exit status when another process writes the tables, such as that of a node that was killed, or when retention has deleted a
segment meanwhile."""


COMPACTION_S = 60.0
"""Seconds after which the child joins no further files, because segments may wait to be written. The next child goes on."""


def main(arguments: list[str]) -> int:
    """Write the sealed segments up to a position, delete files that are too old, join small ones; return the exit status.

    Args:
        arguments: the data directory; the position; the time in ms since 1970 before which rows are too old, or 0.
    """
    _give_way()
    data_dir, until, drop_before_ms = Path(arguments[0]), int(arguments[1]), int(arguments[2])
    # Loading pyarrow is most of the work where a segment is small.
    from penstock.spark.parquet.writer import backfill

    try:
        for segment in backfill(data_dir, until=until):
            _say(segment.stop)
        reached = written_until(data_dir)
        if reached != NOTHING:
            _tidy(data_dir, drop_before_ms)
        _say(reached)
    except (TablesLocked, LogMissing, FileNotFoundError) as error:
        _say(error)
        return EXIT_AGAIN
    except (ReconcileError, StoreError, OSError, MemoryError) as error:
        _say(f"{type(error).__name__}: {error}")
        return EXIT_FAILED
    return 0


def _tidy(data_dir: Path, drop_before_ms: int) -> None:
    """Delete files that are too old, and join the small ones of days that are over."""
    from penstock.spark.parquet.compaction import compact
    from penstock.spark.parquet.expiry import drop_before

    try:
        if drop_before_ms:
            drop_before(data_dir, drop_before_ms)
        end_s = time.monotonic() + COMPACTION_S
        for _ in compact(data_dir):
            if time.monotonic() > end_s:
                break
    except TablesInUse:
        pass  # a later child does it, and all that this one was for is done


def _give_way() -> None:
    os.nice(NICE)
    with suppress(OSError):  # not Linux, or not allowed
        Path("/proc/self/oom_score_adj").write_text("1000")  # where memory is short, the system ends this process first


def _say(line: object) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:  # the node has ended
        os._exit(EXIT_FAILED)
