"""Delayed messages: stored now, routed when their time has come, or recalled before.

A delayed message is an ordinary record with the flag DELAYED and `deliver_at_ms` in its properties. When it is due, a
TIMER_FIRED record names it, and applying that record puts its entries into the light queues: in one commit, so it fires
exactly once, whatever crashes. The body stays where it is.

Rows of the index: key b"T", due ms u64 big-endian, position u64 big-endian; value size u32.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from enum import Enum
from struct import Struct

import orjson
import structlog

from penstock.store.errors import LimitExceeded, PositionUnknown, RecordCorrupt
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.recent import RecentIds
from penstock.store.record import TIMER_ENTRY, Flag, Kind, Record, decode, decode_properties, tag_hash
from penstock.store.store import Store
from penstock.timer.options import TimerOptions
from penstock.timer.ticker import Ticker

logger = structlog.get_logger("timer")

RECALLED_REMEMBERED = 100_000
"""Recalled messages that a second recall is told exactly about. After that, and after a restart, it hears "fired"."""

_KEY = Struct(">cQQ")
_SIZE = Struct("<I")


class Recalled(Enum):
    """What came of a recall."""

    CANCELLED = "cancelled"
    ALREADY_FIRED = "already fired"
    ALREADY_CANCELLED = "already cancelled"
    UNKNOWN = "unknown"


def routes_of(store: Store, entries: list[tuple[int, int]]) -> bytes:
    """Return the properties of a record that routes messages which were stored before, given by position and size.

    They are topics and hashes of tags (see `store.record.TIMER_ENTRY`). A message that soon expires is carried forward.
    """
    return orjson.dumps([_route(store, position, size) for position, size in entries])


def _route(store: Store, position: int, size: int) -> tuple[str, int]:
    try:
        message = decode(store.read(position, size), position=position)
        if message.kind != Kind.MESSAGE:  # repair has set it aside
            raise RecordCorrupt(position, "it was damaged")
    except (PositionUnknown, RecordCorrupt) as error:
        # Without its topic it can go nowhere; the others must.
        logger.error("message.unreadable", position=position, error=str(error))
        return "", 0
    store.retention.carry_if_expiring(position, size)
    return message.topic.decode(), tag_hash(decode_properties(message.properties).tag)


def routed(record: Record) -> Iterator[tuple[int, int, str, int]]:
    """Yield position, size, topic and tag hash of the messages that a record routes."""
    routes = orjson.loads(record.properties)
    for (position, size), (topic, tag) in zip(TIMER_ENTRY.iter_unpack(record.body), routes, strict=True):
        yield position, size, topic, tag


class DelayedMessages:
    """The delayed messages that are pending. A part of the store.

    Parameters:
        store: where they are, and where they go.
        options: see `TimerOptions`.
    """

    def __init__(self, store: Store, options: TimerOptions) -> None:
        self._store = store
        self._options = options
        self._pending: dict[int, tuple[int, int]] = {}
        self._recalled: RecentIds[int, None] = RecentIds(RECALLED_REMEMBERED)
        self._added: dict[int, tuple[int, int]] = {}
        self._removed: list[tuple[int, int]] = []
        self._ticker: Ticker[int] = Ticker(
            store.now_ms, self._fire, fire_max=options.fire_max, tick_ms=options.tick_ms, start_ms=0
        )
        self.fired = 0
        self.cancelled = 0

    def __len__(self) -> int:
        """Return how many are pending."""
        return len(self._pending)

    def check_room(self) -> None:
        """Raise LimitExceeded where `timer.pending_max` delayed messages are pending. To be called before one is stored."""
        if len(self._pending) >= self._options.pending_max:
            raise LimitExceeded(f"{len(self._pending)} delayed messages are pending, which is the limit: see timer.pending_max")

    def due_ms(self, position: int) -> int | None:
        """Return when a pending message is due; None if no such message is pending."""
        found = self._pending.get(position)
        return found[0] if found else None

    def recall(self, position: int, due_ms: int) -> Recalled:
        """Cancel the message at `position`, which was stored to be due at `due_ms`. O(1)."""
        found = self._pending.get(position)
        if found is not None:
            self._store.append(Kind.TIMER_CANCELLED, body=TIMER_ENTRY.pack(position, found[1]))
            return Recalled.CANCELLED
        if not 0 <= position < self._store.log.end:
            return Recalled.UNKNOWN
        if position in self._recalled or self._store.now_ms() < due_ms:
            return Recalled.ALREADY_CANCELLED
        return Recalled.ALREADY_FIRED

    # --- firing -----------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire by itself from now on; first, in due order and paced, what became due while nobody ran."""
        self._ticker.start(loop)

    def stop(self) -> None:
        """Fire nothing any more."""
        self._ticker.stop()

    def fire_due(self) -> bool:
        """Fire what is due now, one portion; return whether more may be due. For a clock that is moved by hand."""
        return self._ticker.fire_due()

    def _fire(self, positions: list[int]) -> None:
        pending = self._pending
        entries = [(position, pending[position][1]) for position in positions if position in pending]
        if entries:
            self._store.commit()  # what was stored in this very turn is read back below, so it must be written
            body = b"".join(TIMER_ENTRY.pack(position, size) for position, size in entries)
            self._store.append(Kind.TIMER_FIRED, body=body, properties=routes_of(self._store, entries))

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.MESSAGE: self._apply_message,
            Kind.TIMER_FIRED: self._apply_fired,
            Kind.TIMER_CANCELLED: self._apply_cancelled,
        }

    def _apply_message(self, record: Record) -> None:
        if record.flags & Flag.DELAYED:
            due_ms = decode_properties(record.properties).deliver_at_ms
            self._pending[record.position] = self._added[record.position] = (due_ms, record.size)
            self._ticker.schedule(due_ms, record.position)

    def _apply_fired(self, record: Record) -> None:
        queues = self._store.queues
        for position, size, topic, tag in routed(record):
            self._remove(position)
            if topic:
                queues.dispatch(queues.route_stored(topic.encode()), position, size, tag)
                self.fired += 1

    def _apply_cancelled(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            self._remove(position)
            self.cancelled += 1
            self._recalled.add(position, None)

    def _remove(self, position: int) -> None:
        found = self._pending.pop(position, None)
        if found is not None and self._added.pop(position, None) is None:
            self._removed.append((found[0], position))

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        for position, (_, size) in [item for item in self._pending.items() if item[0] < before]:
            if position in self._pending:
                yield position, size

    def load(self, index: Index) -> None:
        for key, value in index.rows(bytes(KeySpace.TIMER)):
            _, due_ms, position = _KEY.unpack(key)
            self._pending[position] = (due_ms, _SIZE.unpack(value)[0])
            self._ticker.schedule(due_ms, position)

    def save(self, batch: Batch) -> None:
        for position, (due_ms, size) in self._added.items():
            batch.put(_KEY.pack(KeySpace.TIMER, due_ms, position), _SIZE.pack(size))
        for due_ms, position in self._removed:
            batch.delete(_KEY.pack(KeySpace.TIMER, due_ms, position))
        self._added.clear()
        self._removed.clear()
