"""An asyncio client on a thread of its own, for what threads can't do with single calls."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from penstock.pop.client.batcher import CLOSED
from penstock.pop.client.client import Client
from penstock.pop.client.durations import Duration
from penstock.pop.client.security import Security
from penstock.pop.client.tracing import Tracing
from penstock.pop.errors import ClientClosed

A = TypeVar("A")

STOP_S = 30.0
"""Seconds that `close` waits for the thread."""


class BackgroundClient:
    """A `Client` with its event loop on a thread that ends with the process.

    Parameters:
        target, timeout, security, inbox, tracing: As for `Client`.
    """

    def __init__(
        self, target: str, *, timeout: Duration, security: Security, inbox: str, tracing: Tracing | None = None
    ) -> None:
        self._loop = asyncio.new_event_loop()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="penstock-client", daemon=True)
        self._thread.start()

        async def made() -> Client:
            return Client(target, timeout=timeout, security=security, inbox=inbox, tracing=tracing)

        self.client = self.run(made())
        """The client. Its methods must run on its loop: see `run` and `submit`."""

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.close()

    def submit(self, work: Coroutine[Any, Any, A]) -> concurrent.futures.Future[A]:
        """Begin a coroutine on the client's loop; return the future of its result. Raises ClientClosed after `close`."""
        if self._closed:
            work.close()
            raise ClientClosed(CLOSED)
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, A]) -> A:
        """Return the result of a coroutine on the client's loop. Cancel it if the waiting thread is interrupted."""
        running = self.submit(work)
        try:
            return running.result()
        except BaseException:
            running.cancel()
            raise

    def close(self) -> None:
        """Close the client, and end the thread. Closing twice does nothing."""
        if self._closed:
            return
        try:
            self.run(self.client.aclose())
        finally:
            self._closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
