"""Calls fdatasync for group commit, in a separate process or in a thread.

When the call returns, a thread needs the interpreter, which the event loop holds. The loop releases it for each system
call, but takes it back before the thread has woken up. So a sync in a thread takes longer than the disk needs, and waking
the thread in vain costs time of the loop (compare both with `python -m bench store --only synced`). A process
has its own interpreter.
"""

from __future__ import annotations

import asyncio
import errno
import os
import signal
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

from penstock.store.log import syncchild
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.segment import Segment

CHILD: Final = str(Path(syncchild.__file__))
BLOCKED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that never reach the child: operators may send them to all processes of a node while it still has records to sync."""

Ended = Callable[[OSError | None, int], None]
"""Called when a sync has ended, with its error or None, and with the number of requests that it served, at least one."""


class Sync(Protocol):
    """Syncs a log, one sync at a time. One sync serves all requests that came while the one before it ran.

    It is created with the log, the loop, and a function that is called on the loop when a sync has ended. An error is
    final: the kernel may have dropped written data, and a second sync would report success for data that is gone.
    """

    failure: OSError | None
    """Error of the failed sync, even if the loop has not been told yet; None while all have succeeded."""

    def begin(self) -> bool:
        """Request a sync of everything written so far. Return False if that is impossible until a running sync has ended."""

    def collect(self) -> None:
        """Report a sync that has ended at once, without waiting until the loop gets to it."""

    def stop(self) -> None:
        """Stop after the requested syncs have ended. If one has failed, the loop is still told."""


class SyncThread:
    """Syncs in a thread of this process."""

    def __init__(self, log: CommitLog, loop: asyncio.AbstractEventLoop, ended: Ended) -> None:
        self.failure: OSError | None = None
        self._log = log
        self._loop = loop
        self._ended = ended
        self._requests: SimpleQueue[bool] = SimpleQueue()
        self._done: deque[tuple[OSError | None, int]] = deque()
        """Results of syncs that have not been reported yet."""
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
            with suppress(RuntimeError):  # the loop was closed meanwhile, so nobody waits
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
    """Syncs in a child process, `store.log.syncchild`, which ends with this process.

    Raises:
        OSError: the child process can't be started.
    """

    def __init__(self, log: CommitLog, loop: asyncio.AbstractEventLoop, ended: Ended) -> None:
        self.failure: OSError | None = None
        self._log = log
        self._loop = loop
        self._ended = ended
        self._segment: Segment | None = None
        """Segment whose `sync_file` the child has."""
        self._asked = 0
        """Number of requests that the child has not answered; 0 after a failure."""
        null = subprocess.DEVNULL
        self._end, other = socket.socketpair()
        self._end.setblocking(False)
        with other:
            command = [sys.executable, "-I", "-S", CHILD, str(other.fileno())]
            blocked_before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)  # the child inherits this mask
            try:
                self._process = subprocess.Popen(command, stdin=null, stdout=null, pass_fds=[other.fileno()])
            except OSError as error:
                self._end.close()
                raise OSError(
                    error.errno,
                    f"the process that syncs the log can't be started: {error}; let the machine run more processes",
                ) from error
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked_before)
        loop.add_reader(self._end.fileno(), self._readable)

    @property
    def pid(self) -> int:
        """Process id of the child."""
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
                socket.send_fds(self._end, [request], [segment.sync_file.fileno()])
                self._segment = segment
        except BlockingIOError:
            return False
        except OSError:
            pass  # the child has ended, which `_receive` notices
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
        """Receive an answer or the end of the child. Return how many requests it served; 0 if nothing has come."""
        try:
            answer = self._end.recv(syncchild.ANSWER_BYTES)
        except BlockingIOError:
            return 0
        except ConnectionResetError:
            answer = b""
        number = int.from_bytes(answer[: syncchild.NUMBER_BYTES], "big")
        served = int.from_bytes(answer[syncchild.NUMBER_BYTES :], "big") if answer else max(self._asked, 1)
        self._asked -= served
        if not answer:
            self.failure = OSError(errno.EPIPE, "the process that syncs the log has ended; see the system log")
        elif number:
            self.failure = OSError(number, os.strerror(number))
        if self.failure is not None:
            self._asked = 0
            self._log.fail(self.failure)
            self._loop.remove_reader(self._end.fileno())
        return served

    def stop(self) -> None:
        if self._end.fileno() < 0:
            return
        with suppress(RuntimeError):  # the loop is closed
            self._loop.remove_reader(self._end.fileno())
        self._end.setblocking(True)
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
"""Classes by the value of `StoreOptions.sync_in`."""
