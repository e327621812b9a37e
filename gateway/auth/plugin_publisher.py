"""Messages that plugins publish."""

from __future__ import annotations

import asyncio

import structlog

from penstock.gateway.counters import GatewayCounters
from penstock.store.errors import DiskFull, StoreError
from penstock.store.record import Flag
from penstock.store.store import Store

logger = structlog.get_logger("gateway")


class PluginPublisher:
    """Stores the messages that plugins publish.

    Parameters:
        store: where the messages go.
        counters: count messages for which the disk has no room.
    """

    def __init__(self, store: Store, counters: GatewayCounters) -> None:
        self._store = store
        self._counters = counters
        self._loop: asyncio.AbstractEventLoop

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Store messages on a loop from now on."""
        self._loop = loop

    def publish(self, topic: str, body: bytes, qos: int, retain: bool) -> None:
        """Publish a message. Plugins call this on their own thread."""
        self._loop.call_soon_threadsafe(self._append, topic, body, qos | (Flag.RETAIN if retain else 0))

    def _append(self, topic: str, body: bytes, flags: int) -> None:
        try:
            self._store.append_message(self._store.router.route(topic.encode()), body, b"", flags)
        except StoreError as error:
            self._counters.publishes_dropped += isinstance(error, DiskFull)
            logger.warning("plugin.publish_refused", topic=topic[:80], why=str(error))
