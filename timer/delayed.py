"""Delayed messages: they are stored at once, and routed when they are due unless they are recalled before.

A delayed message is an ordinary record with the flag DELAYED and `deliver_at_ms` in its properties. When it is due, the node
appends a TIMER_FIRED record that names it, and applying that record puts its entries into the light queues. Both happen in one
commit, so the message fires exactly once across any crash. The body stays where it is.

What firing needs is kept with the pending message, so that no record is read then.

Rows of the index: key b"T", due ms u64 big-endian, position u64 big-endian; value size u32, account u64 (`store.ledger`), tag
hash u32, topic.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator, Mapping
from enum import Enum
from struct import Struct
from typing import NamedTuple

import numpy as np

from penstock.store.accounts import NODE_ACCOUNT, Resource
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.causer import NODE, Causer
from penstock.store.clocksteps import step_of
from penstock.store.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.properties import decode_properties, tag_hash
from penstock.store.recent import RecentIds
from penstock.store.record import Flag, Kind, Record
from penstock.store.routing import Routing
from penstock.store.store import Store
from penstock.timer.latencies import Latencies
from penstock.timer.options import TimerOptions
from penstock.timer.ticker import Ticker

RECALLED_REMEMBERED = 100_000
"""Number of recalled messages that are remembered, so that a second recall returns ALREADY_CANCELLED. For older ones, and after
a restart, it returns ALREADY_FIRED once they are due."""

_KEY = Struct(">cQQ")
_VALUE = Struct("<IQI")


class Recalled(Enum):
    """Result of a recall."""

    CANCELLED = "cancelled"
    ALREADY_FIRED = "already fired"
    ALREADY_CANCELLED = "already cancelled"
    UNKNOWN = "unknown"


class PendingMessage(NamedTuple):
    """A delayed message that has not fired."""

    due_ms: int
    """When it is due, in ms since 1970."""
    size: int
    """Size of its record in bytes."""
    account: int
    """Id of the account that is charged for it."""
    tag: int
    """Hash of its tag; 0 for none."""
    topic: str


class DelayedMessages:
    """Fires and recalls delayed messages. It is a part of the store.

    Parameters:
        store: holds the messages and gets them back when they are due.
        options: see `TimerOptions`.
    """

    def __init__(self, store: Store, options: TimerOptions) -> None:
        self._store = store
        self._options = options
        self._pending: dict[int, PendingMessage] = {}
        self._recalled: RecentIds[int, None] = RecentIds(RECALLED_REMEMBERED)
        self._added: dict[int, PendingMessage] = {}
        self._removed: list[tuple[int, int]] = []
        self._ticker: Ticker[int] = Ticker(
            store.now_ms, self._fire, fire_max=options.fire_max, tick_ms=options.tick_ms, start_ms=0
        )
        store.ledger.limit(Resource.DELAYED, options.pending_max, "timer.pending_max")
        store.ledger.limit(Resource.DELAYED_BYTES, options.pending_bytes_max, "timer.pending_bytes_max")
        self.fired = 0
        self.cancelled = 0
        self.lateness = Latencies()
        """How long after it was due a message fired."""

    @property
    def remembered(self) -> int:
        """Number of recalled messages that are in memory, so that a second recall gets an exact answer."""
        return len(self._recalled)

    def __len__(self) -> int:
        """Return how many messages are pending."""
        return len(self._pending)

    def admit(self, causer: Causer = NODE, size: int = 0, topic: str = "") -> None:
        """Check that one more message may be delayed. Callers call it before they store the message.

        Args:
            causer: is charged for the message until it fires or is recalled, because the record names it as `by`.
            size: of the record in bytes.
            topic: of the message.

        Raises:
            LimitExceeded: `timer.pending_max` messages or `timer.pending_bytes_max` bytes are pending, or the causer may have
                no more.
        """
        ledger = self._store.ledger
        ledger.admit(causer, Resource.DELAYED, topic=topic)
        ledger.admit(causer, Resource.DELAYED_BYTES, size, topic=topic)

    def due_ms(self, position: int) -> int | None:
        """Return when a pending message is due, in ms since 1970; None if no message is pending at `position`."""
        found = self._pending.get(position)
        return found.due_ms if found else None

    def size(self, position: int) -> int | None:
        """Return the size of the record of a pending message in bytes; None if no message is pending at `position`."""
        found = self._pending.get(position)
        return found.size if found else None

    def recall(self, position: int, due_ms: int) -> Recalled:
        """Cancel a delayed message. O(1).

        Args:
            position: of the message.
            due_ms: when it is due, in ms since 1970, as its handle says. It tells apart old messages that are not remembered.
        """
        found = self._pending.get(position)
        if found is not None:
            self._store.append(Kind.TIMER_CANCELLED, body=TIMER_ENTRY.pack(position, found.size))
            return Recalled.CANCELLED
        if not 0 <= position < self._store.log.end:
            return Recalled.UNKNOWN
        if position in self._recalled or self._store.now_ms() < due_ms:
            return Recalled.ALREADY_CANCELLED
        return Recalled.ALREADY_FIRED

    # --- firing -----------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire messages on `loop` from now on. Those that became due while no node ran fire first, in due order and paced."""
        self._ticker.start(loop)

    def stop(self) -> None:
        """Fire no more messages."""
        self._ticker.stop()

    def fire_due(self) -> bool:
        """Fire at most `timer.fire_max` due messages; return whether more may be due. For tests, which move the clock."""
        return self._ticker.fire_due()

    def _fire(self, positions: list[int]) -> None:
        pending, now_ms = self._pending, self._store.now_ms()
        # A message that a step of the clock has moved comes out at its old time too, and is scheduled for the new one.
        due = [position for position in positions if position in pending and pending[position].due_ms <= now_ms]
        if not due:
            return
        found = [pending[position] for position in due]
        routing = Routing.of(
            [(position, message.size, message.tag) for position, message in zip(due, found, strict=True)],
            [message.topic for message in found],
        )
        self._store.retention.carry_expiring(routing.entries)
        self._store.append(Kind.TIMER_FIRED, body=routing.body(), properties=routing.properties())
        self.lateness.add_all(now_ms - np.array([message.due_ms for message in found]))

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.MESSAGE: self._apply_message,
            Kind.TIMER_FIRED: self._apply_fired,
            Kind.TIMER_CANCELLED: self._apply_cancelled,
            Kind.CLOCK_STEPPED: self._apply_stepped,
        }

    def _apply_message(self, record: Record) -> None:
        if record.flags & Flag.DELAYED:
            about, ledger = decode_properties(record.properties), self._store.ledger
            account = ledger.enter(about.by)
            ledger.charge(account, Resource.DELAYED)
            ledger.charge(account, Resource.DELAYED_BYTES, record.size)
            topic = sys.intern(record.topic.decode())
            self._add(
                record.position,
                PendingMessage(about.deliver_at_ms, record.size, account, tag_hash(about.tag), topic),
            )

    def _apply_fired(self, record: Record) -> None:
        routing = Routing.from_record(record)
        ended: list[PendingMessage] = []
        accounts: dict[bytes, int] = {}
        for position in routing.entries["position"].tolist():
            message = self._remove(position)
            if message is not None:
                ended.append(message)
                accounts.setdefault(message.topic.encode(), message.account)
        route_stored = self._store.router.route_stored
        self.fired += routing.dispatch(
            self._store.queues.dispatch_run, lambda topic: route_stored(topic, accounts.get(topic, NODE_ACCOUNT))
        )
        self._release(ended)

    def _apply_cancelled(self, record: Record) -> None:
        ended: list[PendingMessage] = []
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            message = self._remove(position)
            if message is not None:
                ended.append(message)
            self.cancelled += 1
            self._recalled.add(position, None)
        self._release(ended)

    def _apply_stepped(self, record: Record) -> None:
        """Move what was set in the window as a delay from the node's time. Time of day that a publisher gave stays.

        In the window, a publisher whose clock is right gives times that are ahead of the node's by at least the step. A delay
        that is longer than the step can't be told from that, and counts as such a time.
        """
        step = step_of(record)
        moved = {
            position: message
            for position, message in self._pending.items()
            if position >= step.begin and step.end_ms < message.due_ms < step.begin_ms + step.step_ms
        }
        for position, message in moved.items():
            self._remove(position)
            self._add(position, message._replace(due_ms=message.due_ms + step.step_ms))

    def _add(self, position: int, message: PendingMessage) -> None:
        self._pending[position] = self._added[position] = message
        self._ticker.schedule(message.due_ms, position)

    def _remove(self, position: int) -> PendingMessage | None:
        found = self._pending.pop(position, None)
        if found is not None and self._added.pop(position, None) is None:
            self._removed.append((found.due_ms, position))
        return found

    def _release(self, ended: list[PendingMessage]) -> None:
        """Take back the charges for messages that have fired or were recalled, of each account at once."""
        counts: dict[int, int] = {}
        sizes: dict[int, int] = {}
        for message in ended:
            counts[message.account] = counts.get(message.account, 0) + 1
            sizes[message.account] = sizes.get(message.account, 0) + message.size
        for account, count in counts.items():
            self._store.ledger.release(account, Resource.DELAYED, count)
            self._store.ledger.release(account, Resource.DELAYED_BYTES, sizes[account])

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        for position, message in [item for item in self._pending.items() if item[0] < before]:
            if position in self._pending:
                yield position, message.size

    def load(self, index: Index) -> None:
        accounts: dict[int, int] = {}
        for key, value in index.rows(bytes(KeySpace.TIMER)):
            _, due_ms, position = _KEY.unpack(key)
            size, account, tag = _VALUE.unpack_from(value)
            account = accounts.setdefault(account, account)  # one object for each account, not for each message
            topic = sys.intern(value[_VALUE.size :].decode())
            self._pending[position] = PendingMessage(due_ms, size, account, tag, topic)
            self._ticker.schedule(due_ms, position)

    def save(self, batch: Batch) -> None:
        for position, (due_ms, size, account, tag, topic) in self._added.items():
            batch.put(_KEY.pack(KeySpace.TIMER, due_ms, position), _VALUE.pack(size, account, tag) + topic.encode())
        for due_ms, position in self._removed:
            batch.delete(_KEY.pack(KeySpace.TIMER, due_ms, position))
        self._added.clear()
        self._removed.clear()
