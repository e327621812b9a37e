"""Time that a test moves: the gateway's loop, the store's clock, and the keep-alive wheel."""

from __future__ import annotations

import asyncio
from typing import Any

from penstock.gateway.gateway import Gateway
from tests.clock import AheadClock


class LoopAhead:
    """The event loop, with a clock that a test moves."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self.ahead_s = 0.0

    def time(self) -> float:
        return self._loop.time() + self.ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)


def pass_time(gateway: Gateway, seconds: float) -> None:
    """Let the gateway's wheel turn as if this much time had passed, and let it do all that is due."""
    if not isinstance(gateway.loop, LoopAhead):
        gateway.loop = LoopAhead(gateway.loop)  # type: ignore[assignment]
        gateway.store.clock = AheadClock()
    gateway.loop.ahead_s += seconds  # type: ignore[attr-defined]
    gateway.store.clock.advance(round(seconds * 1000))  # type: ignore[attr-defined]
    assert gateway._wheel_timer is not None
    gateway._wheel_timer.cancel()
    gateway._turn_wheel()
