"""Group commit: one fdatasync at a time, beside the event loop, for all that was written before it was asked for.

Who must not answer before its records are durable leaves a callback. Those who wait for one write of the log are a group, and
have one position: to wait costs an append to a list. While syncs are under way the next groups form. Callbacks run on the event
loop, in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from penstock.store.commitlog import CommitLog
from penstock.store.syncing import MakeSync

ASKED_MAX = 64
"""Syncs that are asked for and have not ended, at most. The next one is asked for while one is under way, so that it begins
when that ends. The disk would wait otherwise until this process and the one that syncs have woken up: a quarter of the time,
where one client publishes much (measured). One sync serves all that are asked for when it begins."""


class GroupCommit:
    """Syncs a log for those who wait.

    Parameters:
        log: what is synced.
        loop: where callbacks run.
        on_failure: called on the loop with the error of a failed sync. The node must end then: the kernel may have dropped
            what was written, and a second sync would report success for data that is gone.
        sync: makes the one who syncs.

    Raises:
        OSError: there is no process to sync in.
    """

    def __init__(
        self,
        log: CommitLog,
        loop: asyncio.AbstractEventLoop,
        on_failure: Callable[[OSError], None],
        sync: MakeSync,
    ) -> None:
        self._log = log
        self._loop = loop
        self._on_failure = on_failure
        self._unwritten: list[Callable[[], None]] = []
        """Who waits for what may not be written yet."""
        self._groups: deque[tuple[int, Iterator[Callable[[], None]]]] = deque()
        """Who waits for what is written, with the position up to which that goes."""
        self._releasing = False
        self._targets: deque[int] = deque()
        """Up to where the syncs go that are asked for."""
        self._sync = sync(log, loop, self._ended)
        self.durable = log.written
        """Everything before this position is on disk."""
        self.syncs = 0

    def wait(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all that was appended so far is durable. To be followed by a `advance` when that is written."""
        self._unwritten.append(callback)

    def request(self) -> None:
        """Ask for a sync if somebody waits for one. Called after each write of the log. Releases nobody."""
        written = self._log.written
        if self._unwritten and self._log.end == written:
            self._groups.append((written, iter(self._unwritten)))
            self._unwritten = []
        targets = self._targets
        is_due = self._groups and len(targets) < ASKED_MAX and self._groups[-1][0] > (targets[-1] if targets else self.durable)
        if is_due and self._sync.begin():
            targets.append(written)

    def advance(self) -> None:
        """As `request`; and release who waits for none."""
        self.request()
        if self._groups and self._groups[0][0] <= self.durable:
            self._release()

    def collect(self) -> None:
        """Release who waits for a sync that has ended by now, and begin the next one."""
        if self._targets:
            self._sync.collect()

    def _ended(self, error: OSError | None, served: int) -> None:
        if error is not None:
            self._on_failure(error)
            return
        self.syncs += 1
        for _ in range(served):
            self.durable = max(self.durable, self._targets.popleft())
        self.request()  # the disk works while those who are released do
        try:
            self._release()
        finally:
            self.advance()

    def _release(self) -> None:
        groups, durable = self._groups, self.durable
        if self._releasing:  # by a callback, that waits for nothing more than what is durable
            return
        self._releasing = True
        try:
            while groups and groups[0][0] <= durable:
                for callback in groups[0][1]:
                    callback()
                groups.popleft()
        finally:
            self._releasing = False
            if groups and groups[0][0] <= durable:  # a callback has raised, which must not keep the others waiting
                self._loop.call_soon(self._release)

    def finish(self) -> None:
        """Sync here and now, and release everybody. For an orderly end, on the loop's thread.

        Raises:
            OSError: this sync has failed, or one before it: nobody is released then.
        """
        self.stop()
        if self._sync.failure is not None:
            raise self._sync.failure
        self._log.sync()
        self.durable = self._log.written
        self._release()

    def stop(self) -> None:
        """End, after the syncs that are asked for. Nobody is released."""
        self._sync.stop()
