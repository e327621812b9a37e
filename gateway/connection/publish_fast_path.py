"""The fast path of PUBLISH: reads of nothing but plain PUBLISHes, as most reads from devices are.

Such a read is one whole packet, or several of one length to one topic, at QoS 0 or 1, without properties, to a topic that has
been published to before. The fast path sees that without decoding the read. All such reads of a turn are stored with one append
and acknowledged together. Any other read takes the general path, `incoming_publishes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.gateway.connection.backpressure import Backpressure
from penstock.gateway.connection.inbox import TURN_MESSAGES
from penstock.gateway.connection.outbox import Outbox
from penstock.gateway.counters import GatewayCounters
from penstock.gateway.protocol.packets import PUBLISH, PUBLISH_RUN, Packet
from penstock.gateway.protocol.plain import PlainPublishes
from penstock.gateway.sessions.journal import SessionJournal
from penstock.gateway.transport.socket_transport import READ_BYTES_MIN
from penstock.store.options import MIB
from penstock.store.queues.router import Route
from penstock.store.record import HEADER_BYTES
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.connection.connection import Connection

_ACK_BYTES: Final = 4

_COLLECTED_BYTES: Final = MIB
"""Bytes of records that are collected before they are stored: a turn may bring 256 KiB of each client."""


class PublishFastPath:
    """Collects the plain PUBLISHes of a turn, of all connections, and stores them.

    Parameters:
        store: where they go.
        counters: count them.
        backpressure: pauses publishers while the disk is behind.
        journal: records the progress of sessions.
        packet_bytes_max: the size of the largest packet that is taken, in bytes. Larger ones go the general path.
        inflight_max: see `GatewayOptions.inflight_max`.
    """

    def __init__(
        self,
        store: Store,
        counters: GatewayCounters,
        backpressure: Backpressure,
        journal: SessionJournal,
        *,
        packet_bytes_max: int,
        inflight_max: int,
    ) -> None:
        self._store = store
        self._counters = counters
        self._backpressure = backpressure
        self._journal = journal
        self._routes = store.router.cached
        self.packet_bytes_max = packet_bytes_max
        """The size of the largest packet that is taken, in bytes."""
        self._inflight_max = inflight_max
        self._runs: list[tuple[Route, Sequence[bytes], int]] = []
        self._publishers: list[tuple[Connection, bytes, int]] = []
        """Of each run: whose it is, its PUBACKs, which are empty at QoS 0, and how many messages it has."""
        self._bytes = 0
        """What the records take, at most."""

    def take(self, publisher: Connection, publishes: PlainPublishes, data: bytes) -> bool:
        """Take the PUBLISHes of a plain read `data`, to be stored by `flush`. Return False if they need the general path.

        To be called at most once for a connection between two flushes, or what it takes would come after what else the client
        sends: so a read that is no part of a turn of `Sockets` must be followed by a flush.
        """
        qos, topic, acks, bodies, size = publishes
        count = len(bodies)
        route = self._routes.get(topic)
        permissions = publisher.permissions
        if route is None or (
            permissions is not None and not (permissions.publish.get(topic) or permissions.may_publish_at_once(topic))
        ):
            return False
        if qos and publisher.is_v5 and publisher.outbox.unacked + len(publisher.session.received) + count > self._inflight_max:
            return False
        self._runs.append((route, bodies, qos))
        self._publishers.append((publisher, acks, count))
        self._bytes += size + count * HEADER_BYTES
        if size < len(data) or size >= READ_BYTES_MIN or count > TURN_MESSAGES:
            publisher.continue_read(data, size, count, is_acked=qos > 0)
        if self._bytes > _COLLECTED_BYTES:
            self.flush()
        return True

    def flush(self) -> None:
        """Store what was taken, and acknowledge it when it is durable.

        To be called at the end of a turn, and before a connection closes.
        """
        if not self._publishers:
            return
        publishers, runs, size = self._publishers, self._runs, self._bytes
        self._publishers, self._runs, self._bytes = [], [], 0
        count = sum([count for _, _, count in publishers])
        self._counters.packets_in += count
        if not self._store.append_runs(runs, size):
            for (publisher, acks, _), (route, bodies, qos) in zip(publishers, runs, strict=True):
                publisher.receive_late(_packet(route.topic, bodies, qos, acks))
            return
        self._counters.publishes_in += count
        is_behind = self._store.log.end > self._backpressure.check_at
        waiting = []
        for publisher, acks, count in publishers:
            publisher.messages_in += count
            if acks:
                outbox = publisher.outbox
                outbox.unacked += count
                waiting.append((outbox, acks, count))
            if publisher.session.lasts:
                self._journal.mark(publisher.session)
            if is_behind:
                self._backpressure.apply(publisher)
        if waiting:
            self._store.when_durable(partial(_acknowledge, waiting))


def _acknowledge(waiting: list[tuple[Outbox, bytes, int]]) -> None:
    for outbox, acks, count in waiting:
        outbox.send_pubacks(acks, count)


def _packet(topic: bytes, bodies: Sequence[bytes], qos: int, acks: bytes) -> Packet:
    """Return a run as `decode` returns it."""
    packet_ids = [int.from_bytes(acks[at - 2 : at]) for at in range(_ACK_BYTES, len(acks) + 1, _ACK_BYTES)]
    if len(bodies) == 1:
        return (PUBLISH, qos << 1, topic, packet_ids[0] if qos else 0, bodies[0])
    return (PUBLISH_RUN, qos << 1, topic, packet_ids, bodies)
