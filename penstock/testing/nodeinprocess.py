"""A real node inside the process of a test."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import TracebackType

import structlog

from penstock.node.config import Config
from penstock.node.node import Node
from penstock.pop.client.durations import Duration, seconds
from penstock.store.clock import SystemClock
from penstock.store.options import MIB, HostPort, StoreOptions


class AdvancingClock(SystemClock):
    """The machine's clock, ahead by what the test says. All times are ahead alike, so the node sees no jump."""

    __slots__ = ("ahead_ns",)

    def __init__(self) -> None:
        self.ahead_ns = 0
        super().__init__(
            boot=bytes(36),
            boot_ns=lambda: time.monotonic_ns() + self.ahead_ns,
            wall_ns=lambda: time.time_ns() + self.ahead_ns,
            monotonic_s=lambda: time.monotonic() + self.ahead_ns / 1e9,
        )


FREE = HostPort("127.0.0.1", 0)


class NodeInProcess:
    """A node on the running event loop, in a temporary directory, on free ports: `penstock.testing.Node`.

        async with Node() as node, Client(node.target) as client:
            await client.send("plant/1/temperature", b"21.5")

    The node is the real one, with its log and index on disk. Only its clock differs: `advance` sets it ahead.

    Parameters:
        data_dir: Directory of the node, which stays. By default a temporary one, which is deleted.
        config: Options of the node, such as `Config(pop=PopOptions(attempts_max=3))` of `penstock.node.config`. Listeners and
            directory are replaced, and it writes no Parquet tables.
    """

    def __init__(self, data_dir: Path | None = None, *, config: Config | None = None) -> None:
        self._data_dir = data_dir
        self._config = config or Config(store=StoreOptions(segment_bytes=16 * MIB))
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._clock = AdvancingClock()
        self._node: Node | None = None
        self._has_configured_logs = False

    async def __aenter__(self) -> NodeInProcess:
        self._has_configured_logs = not structlog.is_configured()
        if self._has_configured_logs:
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
        if self._data_dir is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="penstock-test-")
            data_dir = Path(self._temporary.name)
        else:
            data_dir = self._data_dir
        config = self._config
        self._node = Node(
            replace(
                config,
                data_dir=data_dir,
                store=replace(config.store, sync_in="thread"),
                mqtt=replace(config.mqtt, listen=FREE),
                pop=replace(config.pop, listen=FREE),
                tables=replace(config.tables, enabled="off"),
                admin=replace(config.admin, listen=FREE),
            ),
            self._clock,
        )
        await self._node.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        node, self._node = self._running(), None
        await node.stop()
        if self._has_configured_logs:
            structlog.reset_defaults()
        if self._temporary is not None:
            await asyncio.to_thread(self._temporary.cleanup)

    @property
    def target(self) -> str:
        """`HOST:PORT` of the gRPC listener, for `Client`, `SyncClient` and `Worker`."""
        return str(self._running().grpc)

    @property
    def mqtt(self) -> tuple[str, int]:
        """Host and port of the MQTT listener."""
        address = self._running().mqtt
        return address.host, address.port

    async def advance(self, duration: Duration) -> None:
        """Set the node's clock ahead, and return when all that became due has happened: retries, delayed messages, schedules.

        The clocks of clients go on as before. What expires at the client, such as the invisible time of a buffered message,
        does not.

        Args:
            duration: How far, in seconds or as a timedelta.

        Raises:
            TypeError, ValueError: It is no duration. The clock of a node only goes forward.
        """
        ahead_s = seconds(duration, "duration")
        node = self._running()
        self._clock.ahead_ns += round(ahead_s * 1e9)
        for part in (node.pop, node.delayed, node.schedules, node.transactions):
            while part.fire_due():  # noqa: ASYNC110 - each call does one portion of what is due
                await asyncio.sleep(0)
        await node.store.durable()

    def _running(self) -> Node:
        if self._node is None:
            raise RuntimeError("the node is not running: use it within `async with`")
        return self._node
