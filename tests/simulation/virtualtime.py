"""Virtual time: an event loop that jumps to its next timer instead of waiting, and the clocks that go with it.

Nothing here runs in a thread. What a node gives to a thread runs later on the loop, at a moment that the seed decides.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextvars import Context
from itertools import count
from random import Random
from typing import Any, TypeVar, cast

from penstock.store.clock import SystemClock

T = TypeVar("T")

START_MS = 1_700_000_000_000
"""Time of day at which a simulation begins, in ms since 1970."""


class Time:
    """The time of the simulated world: virtual seconds since it began, since the machine booted, and its wall clock."""

    __slots__ = ("booted_s", "now_s", "wall_ahead_ms")

    LOOK_S = 0.0002
    """By how much time goes on whenever a process looks at it, so that work takes time and its slices end."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.booted_s = 0.0
        """When the machine has booted."""
        self.wall_ahead_ms = 0
        """By how much the wall clock is wrong."""

    def wall_ns(self) -> int:
        """Return what the wall clock shows, in ns since 1970."""
        return (START_MS + self.wall_ahead_ms) * 1_000_000 + int(self.now_s * 1e9)

    def boot_ns(self) -> int:
        """Return the virtual nanoseconds since the machine has booted."""
        return int((self.now_s - self.booted_s) * 1e9)

    def monotonic_s(self) -> float:
        """Return the virtual seconds since the world began. Looking takes a moment."""
        self.now_s += self.LOOK_S
        return self.now_s

    def clock(self, boots: int) -> SystemClock:
        """Return the clock of a process on this machine, which has booted `boots` times."""
        boot = f"{boots:036d}".encode()
        return SystemClock(boot=boot, boot_ns=self.boot_ns, wall_ns=self.wall_ns, monotonic_s=self.monotonic_s)


class Handle:
    """A callback that a loop is to run: what the node uses of an `asyncio.Handle`, without its contexts and its debugging."""

    __slots__ = ("args", "callback", "is_cancelled")

    def __init__(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        self.callback = callback
        self.args = args
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class VirtualLoop:
    """An event loop in virtual time, as far as a node uses one. It is dropped with the process that runs on it.

    Parameters:
        time: is moved forward by this loop.
        random: decides how long what belongs into a thread takes.
    """

    def __init__(self, time: Time, random: Random) -> None:
        self._time = time
        self._random = random
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._numbers = count()
        self.loop = cast(asyncio.AbstractEventLoop, self)
        self.errors: list[str] = []
        """What callbacks and tasks have raised and nobody has handled."""

    def run_until(self, until_s: float) -> None:
        """Run everything that is due up to the virtual time `until_s`, in order. What a callback raises ends it."""
        time, timers, ready = self._time, self._timers, self._ready
        asyncio._set_running_loop(self.loop)
        try:
            while True:
                while timers and timers[0][0] <= time.now_s:
                    timer = heapq.heappop(timers)[2]
                    if not timer.is_cancelled:
                        ready.append(timer)
                if not ready:
                    while timers and timers[0][2].is_cancelled:
                        heapq.heappop(timers)
                    if not timers or timers[0][0] > until_s:
                        break
                    time.now_s = timers[0][0]
                    continue
                for _ in range(len(ready)):
                    handle = ready.popleft()
                    if not handle.is_cancelled:
                        try:
                            handle.callback(*handle.args)
                        except Exception as error:  # as an event loop does
                            self.call_exception_handler({"message": f"in {handle.callback!r}", "exception": error})
        finally:
            asyncio._set_running_loop(None)
        time.now_s = max(time.now_s, until_s)

    # --- what asyncio and the node call -------------------------------------------------------------------------------

    def time(self) -> float:
        return self._time.now_s

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        handle = Handle(callback, args)
        self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        return self.call_at(self._time.now_s + max(delay, 0.0), callback, *args)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        handle = Handle(callback, args)
        heapq.heappush(self._timers, (when, next(self._numbers), handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self.loop)

    def create_task(self, coro: Any, **_: Any) -> asyncio.Task[Any]:
        return asyncio.Task(coro, loop=self.loop)

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:
        done = self.create_future()
        self.call_later(self._random.choice((0.0, 0.001, 0.02, 0.3)), _settle, done, func, args)
        return done

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        """Do nothing: no descriptor is ever ready, because packets are given to connections directly."""

    def remove_reader(self, fd: Any) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, AssertionError):  # the simulation itself has found something
            raise error
        self.errors.append(f"{context.get('message')}: {error!r}")

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        self.default_exception_handler(context)


def _settle(done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if done.cancelled():
        return
    try:
        found = func(*args)
    except Exception as error:  # the future carries it
        done.set_exception(error)
    else:
        done.set_result(found)


class LaterExecutor(Executor):
    """Runs what belongs into a thread later on a loop.

    Parameters:
        random: decides when.
    """

    def __init__(self, random: Random) -> None:
        self._random = random
        self.loop: VirtualLoop | None = None
        """Without it, everything runs at once."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(fn(*args, **kwargs))
            except Exception as error:  # the future carries it
                future.set_exception(error)

        if self.loop is None:
            run()
        else:
            self.loop.call_later(self._random.choice((0.0, 0.01, 0.5)), run)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Do nothing: there is no thread."""
