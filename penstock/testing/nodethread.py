"""A node on an event loop of its own, for tests that are no coroutines."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, TypeVar

import uvloop

from penstock.pop.client.durations import Duration
from penstock.testing.nodeinprocess import NodeInProcess

T = TypeVar("T")

ANSWER_S_MAX = 60.0


class NodeInThread:
    """A node in a thread, as the fixture `penstock_node` gives it.

    Parameters:
        node: The node, which must not have started.
    """

    def __init__(self, node: NodeInProcess) -> None:
        self._node = node
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-node", daemon=True)

    def __enter__(self) -> NodeInThread:
        self._thread.start()
        self._run(self._node.__aenter__())
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._run(self._node.__aexit__(None, None, None))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    @property
    def target(self) -> str:
        """`HOST:PORT` of the gRPC listener, for `Client`, `SyncClient` and `Worker`."""
        return self._node.target

    @property
    def mqtt(self) -> tuple[str, int]:
        """Host and port of the MQTT listener."""
        return self._node.mqtt

    def advance(self, duration: Duration) -> None:
        """Set the node's clock ahead, as `penstock.testing.Node.advance`."""
        self._run(self._node.advance(duration))

    def _run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(ANSWER_S_MAX)
