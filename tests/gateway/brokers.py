"""A node with MQTT for each test."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from tests.gateway.wire import Broker

StartBroker = Callable[..., Awaitable[Broker]]
