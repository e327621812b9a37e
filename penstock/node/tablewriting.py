"""Has sealed segments written as Parquet tables, by a child process: `penstock.spark.parquet.writerchild`.

The node neither loads pyarrow nor waits for a file of the tables. Once a second it looks whether the tables lack a segment that
is durable, and starts one child, which writes all of them and ends. A child that fails is started again later, and never ends
the node. Retention waits for the tables within bounds: see `needed_from`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Final

import structlog

from penstock.node.tablesoptions import TablesOptions
from penstock.spark.parquet import writerchild
from penstock.spark.parquet.files import DIRECTORY
from penstock.spark.parquet.reach import NOTHING, written_until
from penstock.store.clock import Clock
from penstock.store.options import HOUR_MS
from penstock.store.space.space import Level
from penstock.store.store import Store

logger = structlog.get_logger("tables")

TURN_S: Final = 1.0

RETRY_S: Final = 5.0
"""Seconds until the first retry. Each further failure doubles them."""

RETRY_S_MAX: Final = 600.0

EXPIRY_S: Final = HOUR_MS / 1000
"""Seconds after which a child looks for files that are too old, even if no segment was sealed meanwhile."""

GRACE_S: Final = 5.0
"""Seconds that a child has to end after SIGTERM. It needs none but to leave a call of the system."""

LINES_MAX: Final = 20
"""Lines of a child's error that the log shows: the last ones."""

READ_BYTES: Final = 65_536


class TableWriting:
    """Writes the tables of a node.

    Parameters:
        store: of the node.
        data_dir: of the node.
        options: see `TablesOptions`.
        clock: measures back-off.
    """

    def __init__(self, store: Store, data_dir: Path, options: TablesOptions, clock: Clock) -> None:
        self._store = store
        self._data_dir = data_dir.absolute()
        self._options = options
        self._clock = clock
        self.command: list[str] = [sys.executable, "-P", "-m", writerchild.__name__]
        """Begins the command of a child. Tests replace it."""
        self._timer: asyncio.TimerHandle | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._run: asyncio.Task[None] | None = None
        """Follows the child. The last one has ended if there is no process."""
        self._is_terminated = False
        """Whether the node has ended the child, which then has not failed."""
        self._retry_s = 0.0
        self._backoff_s = RETRY_S
        self._expiry_s = 0.0
        self._dropped_until = store.log.start
        self.position = written_until(self._data_dir)
        """The tables have the log up to here; `NOTHING` if there are none."""
        self.failures = 0
        self.dropped_bytes = 0
        """Bytes of the log that retention has deleted before the tables had them."""
        store.retention.needed_from = self.needed_from
        store.retention.seal_ms = options.seal_ms

    # --- what others ask --------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Process id of the child; None while there is none."""
        return self._process.pid if self._process is not None else None

    @property
    def lag_bytes(self) -> int:
        """Bytes of sealed segments that the tables lack and the log still has."""
        log = self._store.log
        return max(log.open_segment.base - max(self.position, log.start), 0)

    @property
    def lag_segments(self) -> int:
        """Number of those segments."""
        return sum(base >= self.position for base, _ in self._store.log.segments()[:-1])

    def needed_from(self) -> int:
        """Return the position from which retention must keep the log for the tables.

        They never hold it back by more than `lag_bytes_max`, and not at all while the disk is nearly full.
        """
        log = self._store.log
        if self._store.space.level is not Level.OPEN:
            return log.end
        return max(self.position, log.open_segment.base - self._options.lag_bytes_max)

    # --- the child --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look for sealed segments, on the running loop. The store must have started."""
        why = f'tables.enabled is "{self._options.enabled}", and pyarrow is installed'
        logger.info("tables.on", why=why, lag_bytes=self.lag_bytes, directory=str(self._data_dir / DIRECTORY))
        self._turn()

    def _turn(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(TURN_S, self._turn)
        self.check()

    def check(self) -> None:
        """Start a child if there is work for one. End the child if the disk is nearly full."""
        self._count_dropped()
        if self._store.space.level is not Level.OPEN:
            self._terminate()  # what is left of the disk is for the log and its index
        elif self._process is None and self._clock.monotonic_s() >= self._retry_s and self._is_due():
            self._begin()

    def _count_dropped(self) -> None:
        start = self._store.log.start
        self.dropped_bytes += max(start - max(self._dropped_until, self.position), 0)
        self._dropped_until = start

    def _is_due(self) -> bool:
        reached = max(self.position, self._store.log.start)
        if self._store.log.open_segment.base > reached and self._durable_until() > reached:
            return True
        return self.position != NOTHING and self._may_expire() and self._clock.monotonic_s() >= self._expiry_s

    def _may_expire(self) -> bool:
        return bool(self._options.retention_ms) and self._store.timekeeping.is_confirmed

    def _durable_until(self) -> int:
        """Return the position up to which segments can be written: they are sealed and durable, and no replica loses them."""
        log = self._store.log
        reached = min(self._store.committed_position, log.marked)
        return max((base for base, _ in log.segments() if base <= reached), default=log.start)

    def _begin(self) -> None:
        drop_before_ms = 0
        if self._may_expire():
            drop_before_ms = max(self._store.now_ms() - self._options.retention_ms, 0)
            self._expiry_s = self._clock.monotonic_s() + EXPIRY_S
        arguments = [str(self._data_dir), str(self._durable_until()), str(drop_before_ms)]
        try:
            self._process = subprocess.Popen(
                [*self.command, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
                start_new_session=True,  # so that a terminal does not interrupt it
            )
        except OSError as error:
            self._failed(str(error))
            return
        self._is_terminated = False
        self._run = asyncio.get_running_loop().create_task(self._follow(self._process))

    async def _follow(self, process: subprocess.Popen[bytes]) -> None:
        """Take what a child prints, and what its end means."""
        begun_at, rest, said = self.position, b"", deque[str](maxlen=LINES_MAX)
        output = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(output), process.stdout)
        while data := await output.read(READ_BYTES):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.isdigit():
                    self.position = max(self.position, int(line))
                else:
                    said.append(line.decode(errors="replace"))
        status = await asyncio.to_thread(process.wait)
        self._process = None
        if self._is_terminated:
            return
        if status not in (0, writerchild.EXIT_AGAIN):
            why = f": {' '.join(said)}" if said else ""
            self._failed(f"the process that writes the tables has ended with status {status}{why}")
            return
        self._backoff_s = RETRY_S
        if status == 0 and self.position > begun_at:
            self.check()  # a segment may have been sealed meanwhile
            return
        self._retry_s = self._clock.monotonic_s() + RETRY_S
        if status:
            logger.info("tables.postponed", why=" ".join(said), retry_s=RETRY_S)

    def _failed(self, error: str) -> None:
        self.failures += 1
        self._retry_s = self._clock.monotonic_s() + self._backoff_s
        logger.error("tables.failed", error=error, retry_s=self._backoff_s, lag_bytes=self.lag_bytes)
        self._backoff_s = min(2 * self._backoff_s, RETRY_S_MAX)

    def _terminate(self) -> None:
        if self._process is not None and not self._is_terminated:
            self._is_terminated = True
            self._process.terminate()

    async def stop(self) -> None:
        """End the child. The store may be closed afterwards."""
        if self._timer is not None:
            self._timer.cancel()
        self._terminate()
        if self._run is not None:
            _, running = await asyncio.wait((self._run,), timeout=GRACE_S)
            if running and self._process is not None:
                self._process.kill()
            await self._run
