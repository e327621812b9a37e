"""A subscription: a filter of one session, and a cursor into the filter's light queue.

A subscription that has caught up is *live*: it gets each batch from the queue's fanout, which encodes it once for all of
them. One that can't take a batch (its socket is full, or too many deliveries wait for their acks) leaves the shared path,
reads on from its cursor when it can take more, and is live again when it has caught up. So a slow consumer costs disk
reads, not memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

import numpy as np

from gateway.encoding import SLOT, Run, encode_run
from store.lightqueue import ENTRY, ENTRY_BYTES, LightQueue, entries_array
from store.options import KIB, MIB

if TYPE_CHECKING:
    from gateway.connection import Connection

PUMP_ENTRIES = 256
"""Entries that a lagging subscription reads in one step: bounds what is encoded ahead of a socket that fills up."""

PUMP_BYTES = 256 * KIB
"""Bytes of messages with which a step ends, for the same reason: 256 messages may be 256 MiB."""

PUMP_STEPS = 16
"""Steps of one subscription in one turn of the loop: about 4 ms of small messages. So one that lags by millions, with a client
that reads as fast as it is sent to, holds up nobody."""

BATCH_COPY_BYTES_MAX = MIB
"""A larger batch with packet ids, of which each client needs a copy, is read by each in steps instead."""


class Subscription:
    """What one session gets from one filter.

    Parameters:
        connection: where the packets go.
        queue: the filter's light queue.
        qos: the QoS granted: no delivery has a higher one.
        retained: entries of retained messages, which go out first (see `RetainedMessages.matching`).
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
        if run.slots and (len(run.slots) > self.connection.session.room or len(run.data) > BATCH_COPY_BYTES_MAX):
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
        """Send what a subscription that isn't live can take now, a few steps of it; make it live when it has caught up.

        One that stops before that is always called again: when its socket has drained, when an ack has made room, or soon.
        """
        connection = self.connection
        for _ in range(PUMP_STEPS):
            room = min(connection.session.room, PUMP_ENTRIES) if self.qos else PUMP_ENTRIES
            if not connection.writable or room <= 0:
                return
            if self.retained is not None:
                if not self._send_retained(self.retained, room):
                    return
                continue
            self.cursor, found = self.queue.read_from(self.cursor, room)
            entries = _portion(found)
            if not entries:
                self.live = True
                connection.lagging.pop(self, None)
                return
            admitted, passed = self._admit(entries)
            if not passed:
                return
            self.cursor += passed
            if admitted:
                self._send(encode_run(connection.store, admitted, self.qos))
        connection.pump_soon()

    def _admit(self, entries: bytes) -> tuple[bytes, int]:
        """Return those of some entries that the client may have, and how many were looked at.

        Where it is none, the plugins are asked, and when they have answered the subscriptions that lag go on.
        """
        guard = self.connection.guard
        return (entries, len(entries) // ENTRY_BYTES) if guard is None else guard.admit(entries)

    def _send_retained(self, retained: Iterator[bytes], room: int) -> bool:
        """Send the next of the retained messages, `room` at most; note when there are no more.

        Return False where that waits for the plugins.
        """
        entries = bytearray()
        body_bytes = 0
        for entry in islice(retained, room):
            if not entry:  # the search pauses
                break
            entries += entry
            body_bytes += ENTRY.unpack(entry)[1]
            if body_bytes >= PUMP_BYTES:
                break
        else:
            if len(entries) < room * ENTRY_BYTES:
                self.retained = None
        if not entries:
            return True
        admitted, passed = self._admit(bytes(entries))
        left = entries[passed * ENTRY_BYTES :]
        if left:  # they come first the next time
            again = (bytes(left[at : at + ENTRY_BYTES]) for at in range(0, len(left), ENTRY_BYTES))
            self.retained = chain(again, retained)
        if admitted:
            self._send(encode_run(self.connection.store, admitted, self.qos, retain=True))
        return passed > 0

    def lag(self) -> None:
        """Leave the shared path."""
        self.live = False
        self.connection.lagging[self] = None


def _portion(entries: bytes) -> bytes:
    """Return the first of some entries: up to the one with which their messages come to `PUMP_BYTES`."""
    message_bytes = np.cumsum(entries_array(entries)["size"], dtype=np.int64)
    count = int(np.searchsorted(message_bytes, PUMP_BYTES)) + 1
    return entries[: count * ENTRY_BYTES]
