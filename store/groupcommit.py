"""Group commit: one fdatasync at a time, beside the event loop, for all that was written before it began.

Who must not answer before its records are durable leaves a callback. Those who wait for one write of the log are a group, and
have one position: to wait costs an append to a list. While a sync is under way the next groups form. Callbacks run on the event
loop, in their order.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

from store.commitlog import CommitLog
from store.syncing import MakeSync


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
        self._target = 0
        """Up to where the sync goes that is under way."""
        self._syncing = False
        self._sync = sync(log, loop, self._ended)
        self.durable = log.written
        """Everything before this position is on disk."""
        self.syncs = 0

    def wait(self, callback: Callable[[], None]) -> None:
        """Call `callback` once all that was appended so far is durable. To be followed by a `poke` when that is written."""
        self._unwritten.append(callback)

    def begin(self) -> None:
        """Begin a sync if somebody waits for one and none is under way. Called after each write of the log. Releases nobody."""
        written = self._log.written
        if self._unwritten and self._log.end == written:
            self._groups.append((written, iter(self._unwritten)))
            self._unwritten = []
        if self._groups and not self._syncing and self._groups[-1][0] > self.durable:
            self._syncing = True
            self._target = written
            self._sync.begin()

    def poke(self) -> None:
        """Begin a sync if somebody waits for one and none is under way; release who waits for none."""
        self.begin()
        if self._groups and not self._syncing:
            self._release()

    def look(self) -> None:
        """Release who waits for a sync that has ended by now, and begin the next one."""
        if self._syncing:
            self._sync.look()

    def _ended(self, error: OSError | None) -> None:
        if error is not None:
            self._on_failure(error)
            return
        self._syncing = False
        self.syncs += 1
        self.durable = max(self.durable, self._target)
        self.begin()  # the disk works while those who are released do
        try:
            self._release()
        finally:
            self.poke()

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
        """End, after the sync that is under way. Nobody is released."""
        self._sync.stop()
