"""A subscription: a filter of one session, and a cursor into the filter's light queue.

A subscription that has caught up is *live*: it gets each batch from the queue's fanout, which encodes it once for all of
them. One that can't take a batch (its socket is full, or too many deliveries wait for their acks) leaves the shared path,
reads on from its cursor when it can take more, and is live again when it has caught up. So a slow consumer costs disk
reads, not memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING

from gateway.encoding import SLOT, Run, encode_run
from store.lightqueue import ENTRY_BYTES, LightQueue

if TYPE_CHECKING:
    from gateway.connection import Connection

PUMP_ENTRIES = 256
"""Entries that a lagging subscription reads in one step: bounds what is encoded ahead of a socket that fills up."""


class Subscription:
    """What one session gets from one filter.

    Parameters:
        connection: where the packets go.
        queue: the filter's light queue.
        qos: the QoS granted: no delivery has a higher one.
        retained: entries of retained messages, which go out first.
    """

    __slots__ = ("connection", "cursor", "live", "qos", "queue", "retained")

    def __init__(self, connection: Connection, queue: LightQueue, qos: int, retained: Iterator[bytes]) -> None:
        self.connection = connection
        self.queue = queue
        self.qos = qos
        self.cursor = queue.committed_offset
        self.retained: Iterator[bytes] | None = retained
        self.live = False

    def deliver(self, run: Run, next_offset: int) -> bool:
        """Send a batch that begins at the cursor; return False, and send nothing, where there is no room for it."""
        if run.slots and len(run.slots) > self.connection.session.room:
            return False
        self.cursor = next_offset
        self._send(run)
        return True

    def _send(self, run: Run) -> None:
        connection = self.connection
        if not run.slots:
            connection.send_publishes(run.data, run.messages)
            return
        session = connection.session
        data = bytearray(run.data)
        fill, take = SLOT.pack_into, session.take_packet_id
        for offset, qos in run.slots:
            fill(data, offset, take(qos))
        connection.send_publishes(bytes(data), run.messages)

    def pump(self) -> None:
        """Send what a subscription that isn't live can take now; make it live when it has caught up."""
        connection = self.connection
        while connection.writable:
            room = min(connection.session.room, PUMP_ENTRIES) if self.qos else PUMP_ENTRIES
            if room <= 0:
                return
            if self.retained is not None:
                entries = b"".join(islice(self.retained, room))
                if entries:
                    self._send(encode_run(connection.store, entries, self.qos, retain=True))
                else:
                    self.retained = None
                continue
            entries = self.queue.read(self.cursor, room)
            if not entries:
                self.live = True
                connection.lagging.discard(self)
                return
            self.cursor += len(entries) // ENTRY_BYTES
            self._send(encode_run(connection.store, entries, self.qos))

    def lag(self) -> None:
        """Leave the shared path."""
        self.live = False
        self.connection.lagging.add(self)
