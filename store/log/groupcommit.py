"""Group commit: one fdatasync at a time, outside of the event loop, for everything that was written before it was requested.

A record is *committed* when a caller may be told that nothing can lose it. Without replication that is when it is durable here.
On a replicated node the leader says up to where it is (`commit_to`): what is durable on every replica of the in-sync set.

Callers that must wait for durability register a callback. The callbacks that wait for one write of the log form a group
with one position, so waiting costs an append to a list. While a sync runs, the next groups form. Callbacks run on the event
loop, in the order of registration.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator

from penstock.store.histogram import DURATION_BOUNDS_S, Histogram
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.syncing import MakeSync

ASKED_MAX = 64
"""Maximum number of requested syncs that have not ended. The next sync is requested while one runs, so that it begins when that
one ends. Otherwise the disk would idle until both this process and the one that syncs have woken up, which with one busy
publisher is a quarter of the time (see `python -m bench store --only synced`). One sync serves all requests that are there
when it begins."""


class GroupCommit:
    """Syncs a log on behalf of callers that wait for durability.

    Parameters:
        log: is synced.
        loop: runs the callbacks.
        on_failure: called on the loop with the error of a failed sync. The node must end then: the kernel may have dropped
            written data, and a second sync would report success for data that is gone.
        sync: creates the object that calls fdatasync.
        now_s: returns monotonic seconds.
        on_durable: called on the loop when more is durable here. Without it, what is durable is committed; with it, somebody
            else calls `commit_to`.

    Raises:
        OSError: the process that syncs can't be started.
    """

    def __init__(
        self,
        log: CommitLog,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[OSError], None],
        sync: MakeSync,
        now_s: Callable[[], float] = time.monotonic,
        on_durable: Callable[[], None] | None = None,
    ) -> None:
        self._log = log
        self._on_durable = on_durable
        self._loop = loop
        self._on_failure = on_failure
        self._unwritten: list[Callable[[], None]] = []
        """Callbacks that wait for records which may not be written yet."""
        self._now_s = now_s
        self._groups: deque[tuple[int, Iterator[Callable[[], None]], float]] = deque()
        """Groups of callbacks that wait for written records, each with the position up to which those go, and with the time of
        the write."""
        self._releasing = False
        self._targets: deque[tuple[int, float]] = deque()
        """Position up to which each requested sync makes the log durable, and the time of the request."""
        self._ended_s = 0.0
        """When the last sync ended."""
        self._sync = sync(log, loop, self._ended)
        self.durable = log.written
        """Everything before this position is on disk."""
        self.committed = log.written if on_durable is None else 0
        """Everything before this position is committed."""
        self.syncs = 0
        self.sync_times = Histogram(DURATION_BOUNDS_S)
        """How long each sync took, from its request, or else from the end of the one before."""
        self.commit_times = Histogram(DURATION_BOUNDS_S)
        """How long each write for which somebody waited took until it was committed and its callbacks ran."""

    def wait(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all records appended so far are committed. The caller calls `advance` when they are written."""
        self._unwritten.append(callback)

    def cut_to(self, position: int) -> None:
        """Take that the log was cut at `position`. What is left is durable, and syncs under way say nothing of the rest."""
        self.durable = position
        for number, (target, asked_s) in enumerate(self._targets):
            self._targets[number] = (min(target, position), asked_s)
        for number, (written, callbacks, asked_s) in enumerate(self._groups):
            self._groups[number] = (min(written, position), callbacks, asked_s)

    def request(self) -> None:
        """Request a sync if a callback waits for one. Called after each write of the log. It runs no callbacks."""
        written = self._log.written
        if self._unwritten and self._log.end == written:
            self._groups.append((written, iter(self._unwritten), self._now_s()))
            self._unwritten = []
        targets = self._targets
        asked = targets[-1][0] if targets else self.durable
        is_due = self._groups and len(targets) < ASKED_MAX and self._groups[-1][0] > asked
        if is_due and self._sync.begin():
            targets.append((written, self._now_s()))

    def advance(self) -> None:
        """Do what `request` does, and run the callbacks that need not wait for a sync."""
        self.request()
        if self._groups and self._groups[0][0] <= self.committed:
            self._release()

    def commit_to(self, position: int) -> None:
        """Take that everything before `position` is committed, and run the callbacks that wait for that."""
        if position > self.committed:
            self.committed = position
            self._release()

    def collect(self) -> None:
        """Run the callbacks that wait for syncs which have ended by now, and request the next sync."""
        if self._targets:
            self._sync.collect()

    def _ended(self, error: OSError | None, served: int) -> None:
        if error is not None:
            self._on_failure(error)
            return
        self.syncs += 1
        now_s = self._now_s()
        self.sync_times.add(now_s - max(self._targets[0][1], self._ended_s))
        self._ended_s = now_s
        for _ in range(served):
            self.durable = max(self.durable, self._targets.popleft()[0])
        self.request()  # the disk syncs while the callbacks run
        try:
            self._durable_grew()
        finally:
            self.advance()

    def _durable_grew(self) -> None:
        if self._on_durable is None:
            self.committed = self.durable
            self._release()
        else:
            self._on_durable()

    def _release(self) -> None:
        groups = self._groups
        if self._releasing:  # called by a callback that waits for a position which is committed already
            return
        self._releasing = True
        committed = self.committed
        try:
            while groups and groups[0][0] <= committed:
                for callback in groups[0][1]:
                    callback()
                self.commit_times.add(self._now_s() - groups.popleft()[2])
        finally:
            self._releasing = False
            if groups and groups[0][0] <= self.committed:  # a callback has raised, and the others must still run
                self._loop.call_soon(self._release)

    def finish(self) -> None:
        """Sync at once on the loop's thread, and run the callbacks of all that is committed then: for an orderly shutdown.

        Raises:
            OSError: this sync or an earlier one has failed. No callback runs then.
        """
        self.stop()
        if self._sync.failure is not None:
            raise self._sync.failure
        self._log.sync()
        self.durable = self._log.written
        self._durable_grew()

    def stop(self) -> None:
        """Stop after the requested syncs have ended. Runs no callbacks."""
        self._sync.stop()
