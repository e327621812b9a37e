"""The disk reserve: which records may still be appended while the disk fills up.

A write to the log should never be what finds the disk full. The node therefore measures free space ahead of it, and three
levels say which records may be appended. This module alone decides which kinds are refused at which level:

    OPEN        Everything may be appended.
    READ_ONLY   Less than the reserve is free. Records that add work are refused (`ADDS`): messages, also delayed ones and
    halves
                of transactions; queues; groups and their settings; sessions and their subscriptions; redriven dead letters;
                schedules.
                Records that finish work are appended, because the reserve exists for them: pops of existing groups and their
                acknowledgements, changes of invisible time, revivals, timers that fire or are cancelled, commits, rollbacks and
                checks of transactions, resets, dead letters (and the declaration of their queue), clients that resume their
                sessions, and what those acknowledge.
    EXHAUSTED   Less than the floor is free, or the kernel has refused room for the log. Only records that free space are
                appended (`FREES`). Pops return nothing, acknowledgements fail with `DiskFull`, timers wait. The space that is
                left belongs to the index, which must be able to write its memtables and to compact.

The node returns to a better level when a ninth more than that level's bound is free, so that it does not waver at the bound.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from pathlib import Path

import structlog

from penstock.store.errors import DiskFull
from penstock.store.files import SHORT, SYSTEM_FILES, Files, Usage
from penstock.store.options import MIB
from penstock.store.record import Kind

logger = structlog.get_logger("store")

FLOOR_DIVISOR = 4
"""The floor is the reserve divided by this. By default that is 256 MiB, which is what the memtables of the index may take."""

ADDS = frozenset(
    (
        Kind.MESSAGE,
        Kind.QUEUE_DECLARED,
        Kind.GROUP_CREATED,
        Kind.GROUP_CHANGED,
        Kind.SESSION_OPENED,
        Kind.SESSION_SUBSCRIBED,
        Kind.DEAD_LETTER_REDRIVEN,
        Kind.SCHEDULE_PUT,
    )
)
"""Kinds that add work. They are refused at `READ_ONLY` and at `EXHAUSTED`."""

FREES = frozenset(
    (
        Kind.QUEUE_DROPPED,
        Kind.QUEUE_BACKFILLED,
        Kind.GROUP_DELETED,
        Kind.SESSION_CLOSED,
        Kind.SESSION_UNSUBSCRIBED,
        Kind.RETAINED_CLEARED,
        Kind.COPIED,
        Kind.SCHEDULE_DELETED,
        Kind.DEAD_LETTER_PURGED,
    )
)
"""Kinds that free space: with copies, for example, segments can be dropped. They are never refused while the disk has room."""

DEAD_LETTERS = b"$dlq/"
"""Prefix of dead-letter queues. They may be declared while the node is read-only, as part of a revival."""


class Level(IntEnum):
    """How much may be stored. OPEN is 0, so that the hot path only tests for truth."""

    OPEN = 0
    READ_ONLY = 1
    EXHAUSTED = 2


class Space:
    """The free space of a data directory's disk, and the level that follows from it. The index may be on a disk of its own.

    Parameters:
        data_dir: a directory on that disk.
        reserve_bytes: bytes to keep free, see `StoreOptions`. 0 means no reserve.
        reserve_percent: percent of the file system to keep free. The smaller of the two applies.
        files: has that directory.
    """

    def __init__(
        self, data_dir: Path, *, reserve_bytes: int = 0, reserve_percent: int = 100, files: Files = SYSTEM_FILES
    ) -> None:
        self._data_dir = data_dir
        self._reserve_bytes = reserve_bytes
        self._reserve_percent = reserve_percent
        self._refusal = ""
        self._is_short = False
        self._index_refusal = ""
        self._index_dir: Path | None = None
        self._files = files
        self.probe: Callable[[], Usage] = partial(files.usage, data_dir)
        """Returns the usage. Tests replace it."""
        self.level = Level.OPEN
        self.usage = Usage(0, 0)
        """Usage at the last measurement."""
        self.index_usage: Usage | None = None
        """The same of the disk of the index, once `watch_index` was called."""
        self.reserve = 0
        """Bytes to keep free, as of the last measurement."""
        self.refused: dict[tuple[Kind, Level], int] = {}
        """Number of refused records, by kind and level."""
        self.on_relief: list[Callable[[], None]] = []
        """Functions that are called on the loop, in order, when more may be stored than before."""

    def watch_index(self, directory: Path) -> None:
        """Measure the disk of the index too, which is in `directory`."""
        self._index_dir = directory

    def measure(self, *, may_rise: bool = True) -> None:
        """Measure the free space, and change the level accordingly.

        Args:
            may_rise: whether the level may get better. It must not during an append, since `on_relief` appends too.

        Raises:
            OSError: the file system can't be asked.
        """
        self.usage = self.probe()
        self.reserve = self._reserve_of(self.usage)
        if self._index_dir is not None:
            with suppress(FileNotFoundError):  # the next flush finds out that somebody has deleted it
                self.index_usage = self._files.usage(self._index_dir)
        lower, upper = self._level_at(10), self._level_at(9)
        if lower > self.level:
            self._change(lower)
        elif upper < self.level and may_rise:
            self._change(upper)
            for relieved in self.on_relief:
                relieved()

    @property
    def index_reserve(self) -> int:
        """Bytes to keep free on the disk of the index."""
        return self._reserve_of(self.index_usage) if self.index_usage is not None else 0

    def _reserve_of(self, usage: Usage) -> int:
        return min(self._reserve_bytes, usage.total * self._reserve_percent // 100)

    def _level_at(self, tenths: int) -> Level:
        """Return the level that follows when so many tenths of the free space are counted."""
        if self._refusal or self._index_refusal:
            return Level.EXHAUSTED
        level = _level_of(self.usage.free * tenths // 10, self.reserve)
        if self.index_usage is None:
            return level
        return max(level, _level_of(self.index_usage.free * tenths // 10, self._reserve_of(self.index_usage)))

    def _change(self, level: Level) -> None:
        self.level = level
        log = logger.info if level is Level.OPEN else logger.error
        log("disk.level", level=level.name.lower(), free=self.usage.free, reserve=self.reserve, why=self.why())

    @property
    def was_refused(self) -> bool:
        """Whether the kernel has refused room for the log. Its figure of free space does not tell, as it leaves out quotas."""
        return bool(self._refusal)

    def refuse(self, error: OSError) -> DiskFull:
        """Note that the kernel has refused room for the log, or a descriptor for a segment (see `FULL`, `SHORT` of
        `store.files`). Return the error to raise."""
        self._refusal = error.strerror or str(error)
        self._is_short = error.errno in SHORT
        if self.level is not Level.EXHAUSTED:
            self._change(Level.EXHAUSTED)
        return DiskFull(self.refusal())

    def granted(self) -> None:
        """Note that the kernel grants room for the log again."""
        self._refusal = ""

    @property
    def index_was_refused(self) -> bool:
        """Whether the index could not be flushed for want of room or descriptors. Each turn of housekeeping tries again."""
        return bool(self._index_refusal)

    def refuse_index(self, error: OSError) -> None:
        """Note that there is no room, or no descriptor, to flush the index."""
        self._index_refusal = error.strerror or str(error)
        if self.level is not Level.EXHAUSTED:
            self._change(Level.EXHAUSTED)

    def index_granted(self) -> None:
        """Note that the index was flushed."""
        self._index_refusal = ""

    def check(self, kind: Kind, topic: bytes = b"") -> None:
        """Raise DiskFull if a record of this kind and topic may not be appended at the present level."""
        level = self.level
        if level is Level.EXHAUSTED:
            refused = kind not in FREES
        else:
            refused = level is Level.READ_ONLY and kind in ADDS and not topic.startswith(DEAD_LETTERS)
        if refused:
            self.refused[kind, level] = self.refused.get((kind, level), 0) + 1
            raise DiskFull(self.refusal())

    def refusal(self) -> str:
        """Return a sentence for clients, which learn nothing of the host by it. `why` is for those who run the node."""
        is_short = bool(self._refusal) and self._is_short
        lack = "few file descriptors" if is_short else "little room on its disk (store.reserve_bytes)"
        return f"the node has too {lack}, so {self._stored} until its operator makes room: its log says where"

    @property
    def _stored(self) -> str:
        return "nothing new is stored" if self.level is Level.READ_ONLY else "nothing is stored"

    def why(self) -> str:
        """Return a sentence that explains the level and says what to do."""
        if self.level is Level.OPEN:
            return "everything can be stored"
        stored = self._stored
        if self._refusal and self._is_short:
            return (
                f"no file descriptor is left for the next segment ({self._refusal}): {stored} until there is one; raise the "
                "limit of the process (`ulimit -Hn`, LimitNOFILE=), or lower mqtt.connections_max"
            )
        if self._refusal:
            found = f"the file system of {self._data_dir} gives the log no more room ({self._refusal})"
        elif self._index_refusal:
            found = f"the index {self._index_dir} can't be written ({self._index_refusal})"
        else:
            where, usage, reserve = self._data_dir, self.usage, self.reserve
            if self.index_usage is not None and _level_of(usage.free, reserve) is Level.OPEN:
                where, usage, reserve = self._index_dir or where, self.index_usage, self._reserve_of(self.index_usage)
            found = (
                f"the file system of {where} has {usage.free // MIB} MiB free, and the reserve is {reserve // MIB} MiB "
                "(store.reserve_bytes, or 5 percent of a small disk)"
            )
        return f"{found}: {stored} until there is more; free or add space there"


def _level_of(free: int, reserve: int) -> Level:
    if free < reserve // FLOOR_DIVISOR:
        return Level.EXHAUSTED
    return Level.READ_ONLY if free < reserve else Level.OPEN
