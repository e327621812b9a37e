"""A thread with an event loop, on which plugins run."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

END_S: Final = 1.0
"""How long the node waits for the thread to end, in seconds. A blocked thread is a daemon, so it ends with the process."""

LOGIN_NICENESS: Final = 10
"""Niceness of threads that authenticate, above that of the node. A password hash computes on four threads, which left the loop
a fifth of a processor. By the weights of Linux' scheduler (1,024 and 110) this leaves it seven tenths."""

T = TypeVar("T")


class LoopThread:
    """A thread with an event loop.

    Parameters:
        name: of the thread.
        niceness: of the thread and of those that it starts, where the system knows one for each thread.
    """

    def __init__(self, name: str, niceness: int = 0) -> None:
        self._niceness = niceness
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._tasks: set[asyncio.Task[Any]] = set()

    def _run(self) -> None:
        if self._niceness and sys.platform == "linux":
            own = os.getpriority(os.PRIO_PROCESS, 0)
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), own + self._niceness)
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()
        left = asyncio.all_tasks(self.loop)
        for task in left:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.loop.close()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def end(self) -> None:
        """Let the thread end."""
        self.loop.call_soon_threadsafe(self.loop.stop)

    async def ended(self) -> None:
        """Wait for the end of the thread. A thread that is blocked is not awaited."""
        await asyncio.to_thread(self._thread.join, END_S)

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread, and return its result. Another thread calls this."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def call(self, function: Callable[..., None], *arguments: Any) -> None:
        """Call a function on the thread. Another thread calls this."""
        self.loop.call_soon_threadsafe(function, *arguments)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a task. This thread itself calls this."""
        task = self.loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
