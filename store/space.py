"""The disk reserve: what may still be stored while the disk gets full.

The log is the last that should find out that a disk is full. So free space is looked at before that, and three levels say
what may be appended. Which kind of record is refused at which level stands here and nowhere else:

    OPEN        everything
    READ_ONLY   less than the reserve is free. What adds work is refused (`ADDS`): messages, be they delayed or half of a
                transaction; queues; groups and their settings; sessions and their subscriptions; dead letters that are sent
                back. What ends work goes on, for the reserve is there for it: pops of existing groups and their
                acknowledgements, changes of invisible time, revivals, timers that fire or are cancelled, transactions that
                are committed, rolled back or asked about, resets, dead letters (and the declaration of their queue), clients
                that come back to their sessions, and what they acknowledge.
    EXHAUSTED   less than the floor is free, or the kernel has refused room for the log. Only what frees space is appended
                (`FREES`). Pops find nothing, acknowledgements hear `DiskFull`, timers wait. What is left belongs to the
                index, which must be able to write its memtables and to compact.

A level is left by itself when there is a ninth more than its bound, so that a node at the bound does not waver.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import NamedTuple

import structlog

from penstock.store.errors import DiskFull
from penstock.store.options import MIB
from penstock.store.record import Kind

logger = structlog.get_logger("store")

FLOOR_DIVISOR = 4
"""The floor is this part of the reserve: with the default, 256 MiB, which is what the memtables of the index may take."""

ADDS = frozenset(
    (
        Kind.MESSAGE,
        Kind.QUEUE_DECLARED,
        Kind.GROUP_CREATED,
        Kind.GROUP_CHANGED,
        Kind.SESSION_OPENED,
        Kind.SESSION_SUBSCRIBED,
        Kind.DEAD_LETTER_REDRIVEN,
    )
)
"""Kinds that bring new work. Refused from `READ_ONLY` on."""

FREES = frozenset(
    (
        Kind.QUEUE_DROPPED,
        Kind.QUEUE_BACKFILLED,
        Kind.GROUP_DELETED,
        Kind.SESSION_CLOSED,
        Kind.SESSION_UNSUBSCRIBED,
        Kind.RETAINED_CLEARED,
        Kind.COPIED,
    )
)
"""Kinds after which less is needed than before: with copies, segments can go. Never refused while the disk takes them."""

DEAD_LETTERS = b"$dlq/"
"""Queues of dead letters may be declared while the node is read-only: that is part of a revival, not of new work."""


class Level(IntEnum):
    """How much may be stored. 0 is everything, so that the hot path asks for truth only."""

    OPEN = 0
    READ_ONLY = 1
    EXHAUSTED = 2


class Usage(NamedTuple):
    """Bytes of a file system."""

    free: int
    """For processes that aren't root's."""
    total: int


def usage_of(path: Path) -> Usage:
    """Return the usage of the file system that `path` is on; about 1 us. Raises OSError."""
    found = os.statvfs(path)
    return Usage(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)


class Space:
    """What the disk of a data directory has left, and what follows from it.

    Parameters:
        data_dir: on that disk.
        reserve_bytes: see `StoreOptions`; 0 for none.
        reserve_percent: of the file system. The smaller of the two counts.
    """

    def __init__(self, data_dir: Path, *, reserve_bytes: int = 0, reserve_percent: int = 100) -> None:
        self._data_dir = data_dir
        self._reserve_bytes = reserve_bytes
        self._reserve_percent = reserve_percent
        self._refusal = ""
        self.probe: Callable[[], Usage] = partial(usage_of, data_dir)
        """Tells the usage. Tests put their own in its place."""
        self.level = Level.OPEN
        self.usage = Usage(0, 0)
        """As of the last look."""
        self.reserve = 0
        """Bytes."""
        self.refused: dict[tuple[Kind, Level], int] = {}
        """Records that were refused, by their kind and by the level at which that was."""
        self.on_relief: list[Callable[[], None]] = []
        """Called on the loop when more may be stored than before."""

    def measure(self, *, may_rise: bool = True) -> None:
        """Look at the disk, and change the level.

        Args:
            may_rise: also back to a better level. Not in the midst of an append, for those who wait for it append, too.

        Raises:
            OSError: the file system tells nothing.
        """
        self.usage = self.probe()
        self.reserve = min(self._reserve_bytes, self.usage.total * self._reserve_percent // 100)
        lower, upper = self._level_at(self.usage.free), self._level_at(self.usage.free * 9 // 10)
        if lower > self.level:
            self._change(lower)
        elif upper < self.level and may_rise:
            self._change(upper)
            for relieved in self.on_relief:
                relieved()

    def _level_at(self, free: int) -> Level:
        if self._refusal or free < self.reserve // FLOOR_DIVISOR:
            return Level.EXHAUSTED
        return Level.READ_ONLY if free < self.reserve else Level.OPEN

    def _change(self, level: Level) -> None:
        self.level = level
        log = logger.info if level is Level.OPEN else logger.error
        log("disk.level", level=level.name.lower(), free=self.usage.free, reserve=self.reserve, why=self.why())

    @property
    def was_refused(self) -> bool:
        """True where the kernel refused room for the log, whatever it says to be free: a quota isn't in that figure."""
        return bool(self._refusal)

    def refuse(self, error: OSError) -> DiskFull:
        """Note that the kernel gave the log no room (ENOSPC, EDQUOT); return what to raise."""
        self._refusal = error.strerror or str(error)
        if self.level is not Level.EXHAUSTED:
            self._change(Level.EXHAUSTED)
        return DiskFull(self.why())

    def granted(self) -> None:
        """Note that the kernel gives the log room again."""
        self._refusal = ""

    def check(self, kind: Kind, topic: bytes = b"") -> None:
        """Raise DiskFull where a record of this kind may not be appended now. `topic` is the record's."""
        level = self.level
        if level is Level.EXHAUSTED:
            refused = kind not in FREES
        else:
            refused = level is Level.READ_ONLY and kind in ADDS and not topic.startswith(DEAD_LETTERS)
        if refused:
            self.refused[kind, level] = self.refused.get((kind, level), 0) + 1
            raise DiskFull(self.why())

    def why(self) -> str:
        """Return a sentence on the level, with what to do."""
        if self.level is Level.OPEN:
            return "everything can be stored"
        stored = "nothing new is stored" if self.level is Level.READ_ONLY else "nothing is stored"
        if self._refusal:
            found = f"the file system of {self._data_dir} gives the log no more room ({self._refusal})"
        else:
            found = (
                f"the file system of {self._data_dir} has {self.usage.free // MIB} MiB free, and the reserve is "
                f"{self.reserve // MIB} MiB (store.reserve_bytes, store.reserve_percent)"
            )
        return f"{found}: {stored} until there is more; free or add space there"
