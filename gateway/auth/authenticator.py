"""A thread that authenticates clients."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.gateway.auth.login import Answer, Login
from penstock.gateway.auth.login_queue import LoginQueue
from penstock.gateway.auth.loop_thread import LoopThread

AT_ONCE_MAX: Final = 64
"""Logins about which the plugins of one thread are asked at once. Plugins that wait for a network reach that number. A plugin
that computes or blocks gets one login after the other, because the thread takes the next one when its loop is free."""


class Authenticator:
    """Takes logins from the queue, and verifies them on one thread.

    Parameters:
        thread: on which `verify` runs.
        queue: of all threads.
        verify: returns whether a client is who it says.
        timeout_s: seconds within which the answer must come.
        home: the loop on which logins are answered.
        answer: answers a login, on that loop: with the answer and an empty string, or None and "timeout".
    """

    def __init__(
        self,
        thread: LoopThread,
        queue: LoginQueue,
        verify: Callable[[Login], Awaitable[Answer]],
        timeout_s: float,
        home: asyncio.AbstractEventLoop,
        answer: Callable[[Login, Answer, str], None],
    ) -> None:
        self._thread = thread
        self._queue = queue
        self._verify = verify
        self._timeout_s = timeout_s
        self._home = home
        self._answer = answer
        self._running = 0

    def wake(self) -> None:
        """Look into the queue. Another thread may call this."""
        self._thread.call(self._take)

    def _take(self) -> None:
        if self._running >= AT_ONCE_MAX:
            return
        login = self._queue.take(self.wake)
        if login is None:
            return
        self._running += 1
        self._thread.begin(self._authenticate(login))
        self._thread.loop.call_soon(self._take)  # The login begins first, and takes the thread as long as it computes.

    async def _authenticate(self, login: Login) -> None:
        answer: Answer = None
        outcome = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._verify(login)
        except TimeoutError:
            outcome = "timeout"
        except Exception as raised:  # A defect of a plugin, or a damaged hash, concerns this login and ends nothing else.
            answer = repr(raised)
        finally:
            self._running -= 1
            self._queue.finish(login)
        if not self._home.is_closed():
            self._home.call_soon_threadsafe(self._answer, login, answer, outcome)
        self._take()
