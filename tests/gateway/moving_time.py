"""Time that a test moves: the clock of the node, and what the gateway does when its time has come."""

from __future__ import annotations

from penstock.gateway.gateway import Gateway
from tests.clock import AheadClock, ManualClock


def pass_time(gateway: Gateway, seconds: float) -> None:
    """Set the node's clock ahead, and let the gateway do everything that is due then."""
    clock = gateway.clock
    assert isinstance(clock, AheadClock | ManualClock), "the node was not given a clock that a test can move"
    clock.advance(round(seconds * 1000))
    gateway.heartbeat.beat()
    gateway.throttle.resume_due()
