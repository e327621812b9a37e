"""The stored form of a subscription, and of one that is draining."""

from __future__ import annotations

from struct import Struct

import orjson

_ROW = Struct("<IIBIQQQBQ")
"""number, queue id, options, identifier, account, cursor, maybe_sent; whether retained messages are still to be sent, and the
position before which these are stored. The topic of the last retained message that was sent follows."""


class StoredSubscription:
    """A subscription, and how far it has got.

    Parameters:
        topic_filter: as the client sent it, with `$share/` and the share name if it is shared.
        number: the number of the subscription in its session, counted from 0.
        queue_id: of its light queue.
        options: the subscription options (MQTT 5.0, 3.8.3.1).
        identifier: the subscription identifier, or 0.
        cursor: offset of the next message in the light queue.
        account: id of the account that is charged for it (`store.space.ledger`).
    """

    __slots__ = (
        "account",
        "cursor",
        "filter",
        "identifier",
        "maybe_sent",
        "number",
        "options",
        "queue_id",
        "retained_after",
        "retained_before",
    )

    def __init__(
        self, topic_filter: str, number: int, queue_id: int, options: int, identifier: int, cursor: int, account: int
    ) -> None:
        self.filter = topic_filter
        self.account = account
        self.number = number
        self.queue_id = queue_id
        self.options = options
        self.identifier = identifier
        self.cursor = cursor
        self.maybe_sent = 0
        """Offset before which messages may have been sent by a node that was killed. If the cursor is below it, they are sent
        once more, with DUP."""
        self.retained_before: int | None = None
        """While retained messages are still to be sent: the position before which they are stored; otherwise None."""
        self.retained_after = b""
        """Topic of the last retained message that was sent."""

    def row(self) -> bytes:
        """Return the value of the subscription's row in the index."""
        before = self.retained_before
        place = (self.account, self.cursor, self.maybe_sent)
        head = (self.number, self.queue_id, self.options, self.identifier, *place, before is not None, before or 0)
        return _ROW.pack(*head) + self.retained_after

    @classmethod
    def from_row(cls, topic_filter: str, row: bytes) -> StoredSubscription:
        """Return the subscription that a row describes."""
        number, queue_id, options, identifier, account, cursor, maybe_sent, has_retained, before = _ROW.unpack_from(row)
        found = cls(topic_filter, number, queue_id, options, identifier, cursor, account)
        found.maybe_sent = maybe_sent
        if has_retained:
            found.retained_before, found.retained_after = before, row[_ROW.size :]
        return found


class StoredDraining(StoredSubscription):
    """A subscription that the client has ended and that still sends for others: see `gateway.delivery.draining`.

    Parameters:
        one: the subscription that ended.
        stop: offset at which its queue ended then.
        cuts: by number of a younger subscription, the offset at which that one's queue ended then.
    """

    __slots__ = ("cuts", "stop")

    def __init__(self, one: StoredSubscription, stop: int, cuts: dict[int, int]) -> None:
        super().__init__(one.filter, one.number, one.queue_id, 0, 0, one.cursor, one.account)
        self.maybe_sent = one.maybe_sent
        self.stop = stop
        self.cuts = cuts

    def row(self) -> bytes:
        return super().row() + orjson.dumps({"filter": self.filter, "stop": self.stop, "cuts": list(self.cuts.items())})

    @classmethod
    def from_draining_row(cls, row: bytes) -> StoredDraining:
        """Return the draining subscription that a row describes."""
        more = orjson.loads(row[_ROW.size :])
        return cls(StoredSubscription.from_row(more["filter"], row), more["stop"], dict(more["cuts"]))
