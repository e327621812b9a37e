"""The type of the fixture that starts nodes with MQTT."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.gateway.wire import Broker

StartBroker = Callable[..., Awaitable[Broker]]
"""Starts a node with the options that `Broker` describes, and returns it."""
