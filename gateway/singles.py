"""PUBLISHes that come alone in a read, as a device's mostly do: what a turn brings of them is stored and answered together.

Such a read is one packet, whole, at QoS 0 or 1, without properties, to a topic that is known. That is seen without decoding
it; nothing is kept for the connection but what its ack says. Whatever is not exactly so takes the general way.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Final

from gateway import codec
from gateway.packets import PUBACK, PUBLISH
from store.record import HEADER_BYTES

if TYPE_CHECKING:
    from gateway.connection import Connection
    from gateway.gateway import Gateway
    from store.queues import Route

_PUBACK: Final = bytes((PUBACK << 4, 2))


class Singles:
    """The single PUBLISHes of a turn.

    Parameters:
        gateway: whose connections they come from.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = gateway.store
        self._routes = gateway.store.queues.routes
        self._packet_bytes_max = gateway.options.packet_bytes_max
        self._inflight_max = gateway.options.inflight_max
        self._messages: list[tuple[Route, bytes, int]] = []
        self._senders: list[tuple[Connection, bytes]] = []
        """Of each message: whose it is, and its packet id; empty at QoS 0."""
        self._bytes = 0

    def take(self, connection: Connection, data: bytes) -> bool:
        """Take a read that is one plain PUBLISH, to be stored by `flush`; return False, and do nothing, where it is not.

        At most one of a connection between two flushes, or they would come behind what else it sends. About 0.8 us.
        """
        found = codec.single(data, connection.side, self._packet_bytes_max)
        if found is None:
            return False
        qos, topic, packet_id, body = found
        route = self._routes.get(topic)
        guard = connection.guard
        if route is None or (guard is not None and not guard.publish.get(topic)):
            return False
        if qos and connection.unacked + len(connection.session.received) >= self._inflight_max:
            return False
        self._messages.append((route, body, qos))
        self._senders.append((connection, packet_id))
        self._bytes += len(data) + HEADER_BYTES
        return True

    def flush(self) -> None:
        """Store what was taken, and see to its acks. Called at the end of a turn, and before a connection closes."""
        if not self._senders:
            return
        gateway, senders, messages = self._gateway, self._senders, self._messages
        self._senders, self._messages, size, self._bytes = [], [], self._bytes, 0
        gateway.counters.packets_in += len(senders)
        if not self._store.append_each(messages, size):
            for (connection, packet_id), (route, body, qos) in zip(senders, messages, strict=True):
                connection.handle_late((PUBLISH, qos << 1, route.topic, int.from_bytes(packet_id), body))
            return
        gateway.counters.publishes_in += len(senders)
        is_pressed = self._store.log.end > gateway.pressure.check_at
        waiting = []
        for sender in senders:
            connection, packet_id = sender
            if packet_id:
                connection.unacked += 1
                waiting.append(sender)
            if connection.session.lasts:
                gateway.lifetimes.touch(connection.session)
            if is_pressed:
                gateway.pressure.apply(connection)
        if waiting:
            self._store.when_durable(partial(self._acknowledge, waiting))

    def _acknowledge(self, waiting: list[tuple[Connection, bytes]]) -> None:
        for connection, packet_id in waiting:
            connection.puback(_PUBACK + packet_id)
