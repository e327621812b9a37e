"""What a plugin can do with the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from amqtt.broker import BrokerContext

from penstock.gateway.auth.client_session import ClientSession

Publish: TypeAlias = Callable[[str, bytes, int, bool], None]
"""Publishes the message of a plugin: topic, body, QoS, retain. It is called on a thread of the plugins."""


class GatewayContext(BrokerContext):  # type: ignore[misc] # amqtt ships no types
    """What a plugin can do with the broker: publish, and look at the connected clients.

    Parameters:
        config: the options of the plugins.
        publish: publishes the message of a plugin.
        sessions: the connected clients by client id. Another thread changes the mapping.
    """

    def __init__(self, config: dict[str, Any], publish: Publish, sessions: Mapping[str, ClientSession]) -> None:
        super().__init__(None)
        self.config = config
        self._publish = publish
        self._sessions = sessions

    async def broadcast_message(self, topic: str, data: bytes, qos: int | None = None) -> None:
        """Publish a message."""
        self._publish(topic, bytes(data), qos or 0, False)

    async def retain_message(self, topic_name: str, data: bytes | bytearray, qos: int | None = None) -> None:
        """Publish a retained message."""
        self._publish(topic_name, bytes(data), qos or 0, True)

    @property
    def sessions(self) -> Iterator[ClientSession]:
        """Yield the connected clients."""
        yield from tuple(self._sessions.values())

    def get_session(self, client_id: str) -> ClientSession | None:
        """Return a connected client, or None."""
        return self._sessions.get(client_id)

    @property
    def retained_messages(self) -> dict[str, Any]:
        raise NotImplementedError("Penstock shows plugins no retained messages. Subscribe as a client to get them.")

    @property
    def subscriptions(self) -> dict[str, Any]:
        raise NotImplementedError("Penstock shows plugins no subscriptions.")

    async def add_subscription(self, client_id: str, topic: str | None, qos: int | None) -> None:
        raise NotImplementedError("Penstock lets only clients subscribe, not plugins.")
