"""The drain: a node that is about to stop sends its clients away at an even pace, and lets consumers finish."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import StrEnum
from typing import Final

import structlog

from penstock.gateway.gateway import Gateway
from penstock.pop.core.core import PopCore

logger = structlog.get_logger("node")

LOOK_S: Final = 0.05
"""Seconds between two looks whether consumers have finished."""


class DrainState(StrEnum):
    """How far a drain is."""

    SERVING = "serving"
    """The node does not drain."""
    DRAINING = "draining"
    """Clients are sent away, and consumers finish."""
    DRAINED = "drained"
    """The node stops now."""


class Drain:
    """Drains a node, once.

    New clients are refused, and `/readyz` says 503. MQTT clients are disconnected one after the other. Consumers get no more
    messages, but may settle those that they have. The drain ends when all of that is done, or its time is over.

    Parameters:
        gateway: has the MQTT clients.
        core: has the deliveries.
        serves: returns whether the node serves clients. A follower has none to send away.
        on_begun: called when the drain begins. The node is not ready any more.
    """

    def __init__(self, gateway: Gateway, core: PopCore, serves: Callable[[], bool], on_begun: Callable[[], None]) -> None:
        self._gateway = gateway
        self._core = core
        self._serves = serves
        self._on_begun = on_begun
        self._work: asyncio.Task[None] | None = None
        self.state = DrainState.SERVING

    def begin(self, grace_s: float) -> asyncio.Task[None]:
        """Begin to drain within `grace_s` seconds, unless the node drains already; return the work, which ends with it."""
        if self._work is None:
            self.state = DrainState.DRAINING
            self._work = asyncio.get_running_loop().create_task(self._drain(grace_s))
        return self._work

    @property
    def clients(self) -> int:
        """Number of MQTT clients that are connected."""
        return len(self._gateway.clients)

    @property
    def deliveries(self) -> int:
        """Number of checkpoints with deliveries that consumers have not settled."""
        return self._core.checkpoints_open

    def stop(self) -> None:
        """Give up: the node stops now."""
        if self._work is not None:
            self._work.cancel()

    async def _drain(self, grace_s: float) -> None:
        logger.info("node.draining", grace_s=grace_s, clients=self.clients, checkpoints=self.deliveries)
        self._on_begun()
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + grace_s
        if self._serves():
            self._core.polls.drain(self._core.groups)
            await self._gateway.drain(grace_s)
        while self._serves() and self.deliveries and loop.time() < ends_s:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S)  # nobody is told when the last one is settled
        self.state = DrainState.DRAINED
        logger.info("node.drained", clients=self.clients, checkpoints=self.deliveries)
