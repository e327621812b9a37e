"""Moves the time of a node: the test sets the clock ahead, and the gateway does what is due."""

from __future__ import annotations

from penstock.gateway.gateway import Gateway
from tests.clock import AheadClock, ManualClock


def pass_time(gateway: Gateway, seconds: float) -> None:
    """Set the node's clock ahead, and let the gateway do everything that is due by then."""
    clock = gateway.clock
    assert isinstance(clock, AheadClock | ManualClock), "the node needs a clock that a test can move"
    clock.advance(round(seconds * 1000))
    gateway.heartbeat.beat()
    gateway.lifecycle.turn()
    gateway.expiry.run()
    gateway.throttle.resume_due()
