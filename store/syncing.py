"""Who calls fdatasync for group commit: a process of its own, or a thread.

A thread needs the interpreter when its call returns, and the event loop has it. The loop gives it up for each system call, and
takes it again before the thread has woken. So a sync took twice as long as the disk did, and to wake it in vain a tenth of the
loop's time where many clients publish (measured). A process has an interpreter of its own.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Final, Protocol

from penstock.store import syncchild
from penstock.store.commitlog import CommitLog
from penstock.store.segment import Segment

CHILD: Final = str(Path(syncchild.__file__))

Ended = Callable[[OSError | None, int], None]
"""Told of the end of a sync: its error, or None, and how many of those that were begun it was, which is one or more."""


class Sync(Protocol):
    """Syncs a log, one sync at a time. Those that are begun while one is under way are one together, which follows it.

    It is made with the log, the loop, and what is called there when a sync has ended. An error is final: the kernel may have
    dropped what was written, and a second sync would report success for data that is gone.
    """

    failure: OSError | None
    """Why the last sync has failed: also where the loop has not been told yet."""

    def begin(self) -> bool:
        """Sync what is written now. Return False where that can't be asked for before a sync that is under way has ended."""

    def collect(self) -> None:
        """Tell of a sync that has ended, where the loop has not come to that yet: it may have others to serve first."""

    def stop(self) -> None:
        """End, when the syncs that were begun have. If one has failed, the loop is still told."""


class SyncThread:
    """Syncs on a thread of this process."""

    def __init__(self, log: CommitLog, loop: asyncio.AbstractEventLoop, ended: Ended) -> None:
        self.failure: OSError | None = None
        self._log = log
        self._loop = loop
        self._ended = ended
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._done: deque[tuple[OSError | None, int]] = deque()
        """How the syncs have ended that nobody has been told of."""
        self._thread = Thread(target=self._run, name="penstock-sync", daemon=True)
        self._thread.start()

    def begin(self) -> bool:
        self._requests.put(True)
        return True

    def _run(self) -> None:
        requests = self._requests
        is_asked = requests.get()
        while is_asked:
            served = 1
            while is_asked and not requests.empty():
                is_asked = requests.get()
                served += is_asked
            try:
                self._log.sync()
            except OSError as error:
                self.failure = error
            self._done.append((self.failure, served))
            with suppress(RuntimeError):  # the loop was closed in between: nobody waits any more
                self._loop.call_soon_threadsafe(self.collect)
            if self.failure is not None:
                return
            is_asked = is_asked and requests.get()

    def collect(self) -> None:
        if self._done:
            self._ended(*self._done.popleft())

    def stop(self) -> None:
        self._requests.put(False)
        self._thread.join()


class SyncProcess:
    """Syncs in a process of its own, `store.syncchild`, which ends with this one.

    Raises:
        OSError: it can't be started.
    """

    def __init__(self, log: CommitLog, loop: asyncio.AbstractEventLoop, ended: Ended) -> None:
        self.failure: OSError | None = None
        self._log = log
        self._loop = loop
        self._ended = ended
        self._segment: Segment | None = None
        """The one whose descriptor the process has. It is the same open file as here: of an error only one of us hears."""
        self._asked = 0
        """Syncs that it has not answered; none after a failure."""
        null = subprocess.DEVNULL
        self._end, other = socket.socketpair()
        with other:
            command = [sys.executable, "-I", "-S", CHILD, str(other.fileno())]
            try:
                self._process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[other.fileno()])
            except OSError as error:
                self._end.close()
                raise OSError(
                    error.errno, f'the process that syncs the log can\'t be started: {error}; set store.sync_in = "thread"'
                ) from error
        loop.add_reader(self._end.fileno(), self._readable)

    @property
    def pid(self) -> int:
        """The number of the process, by which the system knows it."""
        return self._process.pid

    def begin(self) -> bool:
        if self.failure is not None:
            return False
        segment = self._log.open_segment
        request = (self._log.written - segment.base).to_bytes(syncchild.REQUEST_BYTES, "big")
        try:
            if segment is self._segment:
                self._end.send(request)
            else:
                socket.send_fds(self._end, [request], [segment.fd])
                self._segment = segment
        except BlockingIOError:
            return False
        except OSError:
            pass  # it has ended: the answer says so
        self._asked += 1
        return True

    def collect(self) -> None:
        if self._asked:
            self._readable()

    def _readable(self) -> None:
        served = self._receive()
        if served:
            self._ended(self.failure, served)

    def _receive(self) -> int:
        """Take an answer, or the end of the process; return how many syncs that was, and 0 where there is neither."""
        try:
            answer = self._end.recv(syncchild.ANSWER.size)
        except BlockingIOError:
            return 0
        except ConnectionResetError:
            answer = b""
        number, served = syncchild.ANSWER.unpack(answer) if answer else (0, max(self._asked, 1))
        self._asked -= served
        if not answer:
            self.failure = OSError(errno.EPIPE, "the process that syncs the log has ended; see what has killed it")
        elif number:
            self.failure = OSError(number, os.strerror(number))
        if self.failure is not None:
            self._asked = 0
            self._log.fail(self.failure)
            self._loop.remove_reader(self._end.fileno())
        return int(served)

    def stop(self) -> None:
        if self._end.fileno() < 0:
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._end.fileno())
        self._end.setblocking(True)  # the loop has set it otherwise
        while self._asked:
            served = self._receive()
            if self.failure is not None:
                self._loop.call_soon(self._ended, self.failure, served)
        self._end.close()
        self._process.wait()


MakeSync = Callable[[CommitLog, asyncio.AbstractEventLoop, Ended], Sync]

SYNCS: Final[dict[str, MakeSync]] = {
    "process": SyncProcess,
    "thread": SyncThread,
}
"""By the option `store.sync_in`."""
