"""The topics of the messages in a light queue."""

from __future__ import annotations

from penstock.store.errors import PositionUnknown
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.record import topic_of
from penstock.store.store import Store


def topics_of(store: Store, entries: bytes) -> list[bytes]:
    """Return the topics of the messages to which entries of a light queue point, in order.

    The topic of a message that retention has dropped is empty.
    """
    read = store.read
    topics = []
    for position, size, _ in ENTRY.iter_unpack(entries):
        try:
            data = read(position, size)
        except PositionUnknown:
            topics.append(b"")
            continue
        topics.append(topic_of(data))
    return topics
