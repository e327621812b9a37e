"""A thread that authenticates clients, by plugins that no other thread uses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from penstock.gateway.auth.client_session import ClientSession
from penstock.gateway.auth.login import Answer, Login
from penstock.gateway.auth.login_queue import LoginQueue
from penstock.gateway.auth.plugin_thread import PluginThread

AT_ONCE_MAX: Final = 64
"""Logins about which the plugins of one thread are asked at once. Plugins that wait for a network reach that number. A plugin
that computes or blocks gets one login after the other, because the thread takes the next one when its loop is free."""


class Authenticator:
    """Takes logins from the queue, and asks the plugins of one thread about them.

    Parameters:
        thread: on which the plugins run.
        queue: of all threads.
        ask: asks the plugins of this thread.
        timeout_s: seconds within which the plugins must answer.
        home: the loop on which logins are answered.
    """

    def __init__(
        self,
        thread: PluginThread,
        queue: LoginQueue,
        ask: Callable[[ClientSession], Awaitable[Answer]],
        timeout_s: float,
        home: asyncio.AbstractEventLoop,
    ) -> None:
        self._thread = thread
        self._queue = queue
        self._ask = ask
        self._timeout_s = timeout_s
        self._home = home
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
        self._thread.loop.call_soon(self._take)  # After the plugins have been asked, if they don't block.

    async def _authenticate(self, login: Login) -> None:
        answer: Answer = None
        outcome = ""
        try:
            async with asyncio.timeout(self._timeout_s):
                answer = await self._ask(login.session)
        except TimeoutError:
            outcome = "timeout"
        except Exception as raised:  # A defect of a plugin concerns this login and ends nothing else.
            answer = repr(raised)
        finally:
            self._running -= 1
            self._queue.finish(login)
        if not self._home.is_closed():
            self._home.call_soon_threadsafe(login.answer, answer, outcome)
        self._take()
