"""Reads of nothing but plain PUBLISHes, as a device's mostly are: what a turn brings of them is stored and answered together.

Such a read is one whole packet, or several of one length to one topic, at QoS 0 or 1, without properties, to a topic that is
known. That is seen without decoding it; nothing is kept for the connection but what its acks say. Whatever is not exactly so
takes the general way.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.gateway.connection.connection import TURN_MESSAGES
from penstock.gateway.protocol.packets import PUBLISH, PUBLISH_RUN, Packet
from penstock.gateway.protocol.plain import cut_plain
from penstock.gateway.transport.sockets import READ_BYTES_MIN
from penstock.store.options import MIB
from penstock.store.record import HEADER_BYTES

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.gateway import Gateway
    from penstock.store.queues import Route

_ACK_BYTES: Final = 4

_COLLECTED_BYTES: Final = MIB
"""So much is collected before it is stored: a turn may bring 256 KiB of each client."""


class PlainReads:
    """The plain reads of a turn.

    Parameters:
        gateway: whose connections they come from.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._store = gateway.store
        self._routes = gateway.store.queues.routes
        self._packet_bytes_max = gateway.options.packet_bytes_max
        self._inflight_max = gateway.options.inflight_max
        self._runs: list[tuple[Route, Sequence[bytes], int]] = []
        self._senders: list[tuple[Connection, bytes, int]] = []
        """Of each run: whose it is, its acks, which are empty at QoS 0, and how many messages it has."""
        self._bytes = 0
        """What the records take, at most."""

    def take(self, connection: Connection, data: bytes) -> bool:
        """Take the PUBLISHes of a plain read, to be stored by `flush`; return False, and do nothing, where it isn't plain.

        At most once for a connection between two flushes, or they would come behind what else it sends: so a read that is no
        part of a turn of `Sockets` is followed by a flush. About 0.8 us for one PUBLISH, and 3 us for 20.
        """
        found = cut_plain(data, connection.side, self._packet_bytes_max)
        if found is None:
            return False
        qos, topic, acks, bodies, size = found
        count = len(bodies)
        route = self._routes.get(topic)
        guard = connection.permissions
        if route is None or (guard is not None and not guard.publish.get(topic)):
            return False
        if qos and connection.is_v5 and connection.unacked + len(connection.session.received) + count > self._inflight_max:
            return False
        self._runs.append((route, bodies, qos))
        self._senders.append((connection, acks, count))
        self._bytes += size + count * HEADER_BYTES
        if size < len(data) or size >= READ_BYTES_MIN or count > TURN_MESSAGES:
            connection.go_on(data, size, count, qos > 0)
        if self._bytes > _COLLECTED_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Store what was taken, and see to its acks. Called at the end of a turn, and before a connection closes."""
        if not self._senders:
            return
        gateway, senders, runs, size = self._gateway, self._senders, self._runs, self._bytes
        self._senders, self._runs, self._bytes = [], [], 0
        count = sum([count for _, _, count in senders])
        gateway.counters.packets_in += count
        if not self._store.append_runs(runs, size):
            for (connection, acks, _), (route, bodies, qos) in zip(senders, runs, strict=True):
                connection.handle_late(_packet(route.topic, bodies, qos, acks))
            return
        gateway.counters.publishes_in += count
        is_pressed = self._store.log.end > gateway.backpressure.check_at
        waiting = []
        for sender in senders:
            connection, acks, count = sender
            if acks:
                connection.unacked += count
                waiting.append(sender)
            if connection.session.lasts:
                gateway.journal.mark(connection.session)
            if is_pressed:
                gateway.backpressure.apply(connection)
        if waiting:
            self._store.when_durable(partial(self._acknowledge, waiting))

    def _acknowledge(self, waiting: list[tuple[Connection, bytes, int]]) -> None:
        for connection, acks, count in waiting:
            connection.puback(acks, count)


def _packet(topic: bytes, bodies: Sequence[bytes], qos: int, acks: bytes) -> Packet:
    """Return a run as what `decode` makes of it."""
    packet_ids = [int.from_bytes(acks[at - 2 : at]) for at in range(_ACK_BYTES, len(acks) + 1, _ACK_BYTES)]
    if len(bodies) == 1:
        return (PUBLISH, qos << 1, topic, packet_ids[0] if qos else 0, bodies[0])
    return (PUBLISH_RUN, qos << 1, topic, packet_ids, bodies)
