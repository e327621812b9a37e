"""Delayed messages: they are stored at once, and routed when they are due unless they are recalled before.

A delayed message is an ordinary record with the flag DELAYED and `deliver_at_ms` in its properties. When it is due, the node
appends a TIMER_FIRED record that names it, and applying that record puts its entries into the light queues. Both happen in one
commit, so the message fires exactly once across any crash. The body stays where it is.

Pending messages wait in `timer.buckets`, with what firing needs. So no record is read then.

A TIMER_FIRED record names messages in the order of their due times, and then of their positions. Besides what
`store.queues.latedispatches` says, its properties have for these messages:

    now       when they fired, in ms since 1970
    late      for each message, how long after its due time that was, in ms
    accounts  ids of the accounts that are charged for the messages (`store.space.ledger`)
    account   for each message, the index of its account. It is left out when there is one account.

A TIMER_CANCELLED record has as properties lists of due times (`due`) and of account ids (`account`), one for each message.

Rows of the index, besides those of `timer.buckets`:

    key b"Ts"  steps of the clock; for each the begin of its window u64, position of its record u64, end of the window in ms
               i64, due time from which on it has moved nothing in ms i64, by how many ms it has moved the others i64
    key b"Tr"  ranges of the log that were damaged when their records were to be applied: begin u64, end u64
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from struct import Struct
from typing import Final, NamedTuple

import numpy as np
import orjson

from penstock.store.bodies import TIMER_ENTRY
from penstock.store.clocksteps import step_of
from penstock.store.errors import DiskFull, PositionUnknown, RecordCorrupt
from penstock.store.histogram import LATENCY_BOUNDS_MS, Histogram
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.options import MINUTE_MS
from penstock.store.part import Apply
from penstock.store.properties import delay_of, tag_hash
from penstock.store.queues.latedispatches import Routing
from penstock.store.queues.lightqueue import ENTRY_DTYPE
from penstock.store.queues.router import Route
from penstock.store.record import Flag, Kind, Record
from penstock.store.space.accounts import NODE_ACCOUNT, Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.store import Store
from penstock.store.topics import first_level
from penstock.timer.alarm import Alarm
from penstock.timer.buckets import DUE_MS_MAX, TimerBuckets
from penstock.timer.entries import PENDING_DTYPE, Column, Entries
from penstock.timer.options import TimerOptions
from penstock.timer.ticker import RETRY_MS

OPENED_MAX: Final = 16_384
"""Number of messages from which on no more buckets are opened in the same turn of the event loop."""

OPENING_S: Final = 0.003
"""Seconds after which no further step of opening buckets is done in the same turn of the event loop. A step takes some ms at
most."""

STEPS_MAX: Final = 64
"""Steps of opening buckets that are done in one turn of the event loop, at most."""

STEPS_REMEMBERED: Final = 1_000
"""Steps of the clock that are remembered. A message that an older one has moved can't be recalled any more."""

_STEPS = KeySpace.TIMER + b"s"
_RANGES = KeySpace.TIMER + b"r"
_STEP = Struct("<QQqqq")
_RANGE = Struct("<QQ")


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


class DueCounts(NamedTuple):
    """How many messages are pending that are due within some time from now, with those that are late."""

    minute: int
    """Within a minute, up to the end of a minute."""
    hour: int
    """Within an hour, up to the end of a minute."""
    day: int
    """Within a day, up to the end of an hour."""


class DelayedMessages:
    """Fires and recalls delayed messages. It is a part of the store.

    Parameters:
        store: holds the messages and gets them back when they are due.
        options: see `TimerOptions`.
    """

    def __init__(self, store: Store, options: TimerOptions) -> None:
        self._store = store
        self.delay_ms_max = options.delay_ms_max
        """Longest delay of a message, in ms."""
        self._fire_max = options.fire_max
        self._buckets = TimerBuckets()
        self._alarm = Alarm(store.now_ms, self.fire_due, self._next_due_ms)
        self._retry_ms = 0
        """When to fire again after the disk was too full to record it."""
        self._steps: list[tuple[int, int, int, int, int]] = []
        self._are_steps_changed = False
        self._damaged: list[tuple[int, int]] = []
        self._are_ranges_changed = False
        store.ledger.limit(Resource.DELAYED, options.pending_max, "raise timer.pending_max")
        store.ledger.limit(Resource.DELAYED_BYTES, options.pending_bytes_max, "raise timer.pending_max")
        store.retention.on_dropped.append(self._forget_dropped)
        self.fired = 0
        self.cancelled = 0
        self.lateness = Histogram(LATENCY_BOUNDS_MS)
        """How long after it was due a message fired."""

    def __len__(self) -> int:
        """Return how many messages are pending."""
        return self._store.ledger.held_by(NODE_ACCOUNT, Resource.DELAYED)

    def due_counts(self) -> DueCounts:
        """Return how many messages are pending that are due soon."""
        minute, buckets = self._store.now_ms() // MINUTE_MS, self._buckets
        ends = ((minute + 2) * MINUTE_MS, (minute + 61) * MINUTE_MS, (minute // 60 + 25) * 60 * MINUTE_MS)
        return DueCounts(*map(buckets.count_before, ends))

    @property
    def buckets(self) -> TimerBuckets:
        """Where the messages wait."""
        return self._buckets

    @property
    def in_memory(self) -> int:
        """Number of messages that are in memory because they are due soon, or not sorted into buckets yet."""
        return self._buckets.in_memory

    def admit(self, causer: Causer = NODE, size: int = 0, topic: str = "") -> None:
        """Check that one more message may be delayed. Callers call it before they store the message.

        Args:
            causer: is charged for the message until it fires or is recalled, because the record names it as `by`.
            size: of the record in bytes.
            topic: of the message.

        Raises:
            LimitExceeded: `timer.pending_max` messages, or as many bytes as they may have, are pending, or the causer may have
                no more.
        """
        ledger = self._store.ledger
        ledger.admit(causer, Resource.DELAYED, topic=topic)
        ledger.admit(causer, Resource.DELAYED_BYTES, size, topic=topic)

    def due_ms(self, position: int) -> int | None:
        """Return when a pending message is due, in ms since 1970; None if no message is pending at `position`."""
        found = self._pending_at(position)
        return found.due_ms if found else None

    def size(self, position: int) -> int | None:
        """Return the size of the record of a pending message in bytes; None if no message is pending at `position`."""
        found = self._pending_at(position)
        return found.size if found else None

    def recall(self, position: int, due_ms: int) -> Recalled:
        """Cancel a delayed message. See `recall_all`."""
        return self.recall_all([(position, due_ms)])[0]

    def recall_all(self, named: Sequence[tuple[int, int]]) -> list[Recalled]:
        """Cancel delayed messages, and return what came of each. It reads the records of the messages, whatever is pending.

        The answer is right as long as the log has a message, across restarts. A message whose record is damaged can be recalled
        too: then its row is searched, which takes longer.

        Args:
            named: position of each, and when it is due, in ms since 1970, as its handle says; 0 if that is not known. It is
                used if the record can't be read.
        """
        outcomes: list[Recalled] = []
        pending: dict[int, PendingMessage] = {}
        for position, due_ms in named:
            found = self._judged(position, due_ms) if position not in pending else Recalled.ALREADY_CANCELLED
            if isinstance(found, PendingMessage):
                pending[position] = found
                found = Recalled.CANCELLED
            outcomes.append(found)
        if pending:
            body = b"".join([TIMER_ENTRY.pack(position, found.size) for position, found in pending.items()])
            about = {
                "due": [found.due_ms for found in pending.values()],
                "account": [found.account for found in pending.values()],
            }
            self._store.append(Kind.TIMER_CANCELLED, body=body, properties=orjson.dumps(about))
        return outcomes

    def _judged(self, position: int, due_ms: int) -> Recalled | PendingMessage:
        """Return what is known of a pending message, or why a message can't be recalled."""
        record, is_damaged = self._message_at(position)
        is_expired = record is None and 0 <= position < self._store.log.start
        if record is None and not is_damaged and not is_expired:
            return Recalled.UNKNOWN
        by: Sequence[str] = ()
        is_named = due_ms != 0
        if record is not None:
            deliver_at_ms, _, by = delay_of(record.properties)
            due_ms = _due_of(deliver_at_ms, record.store_ms)
        dues = self._dues(position, due_ms)
        for due_ms in dues:
            if self._buckets.is_recalled(position, due_ms):
                return Recalled.ALREADY_CANCELLED
        is_due = 0 < dues[-1] <= self._store.now_ms()
        if record is not None:
            found = self._unfired(record, dues[-1], by)
        elif is_due and not is_damaged:
            found = None
        else:  # the record is damaged, and retention may have dropped it since
            found = self._in_rows(position, dues if is_named else None)
        if found is None:
            return Recalled.ALREADY_FIRED if record is not None or is_due else Recalled.ALREADY_CANCELLED
        return found

    def _message_at(self, position: int) -> tuple[Record | None, bool]:
        """Return the delayed message at a position, or None; then also whether a record there is damaged."""
        store = self._store
        if not 0 <= position < store.log.end:
            return None, False
        if position >= store.log.written:
            store.commit()
        try:
            record = store.copies.record(position)
        except RecordCorrupt:
            return None, True
        except PositionUnknown:
            return None, False
        return (record if record.kind == Kind.MESSAGE and record.flags & Flag.DELAYED else None), False

    def _pending_at(self, position: int) -> PendingMessage | None:
        record, is_damaged = self._message_at(position)
        if is_damaged:
            return self._in_rows(position)
        return self._pending(record) if record is not None else None

    def _in_rows(self, position: int, dues: Sequence[int] | None = None) -> PendingMessage | None:
        """Return what is known of a message whose record can't be read, if it is pending."""
        found = self._buckets.find(position, dues)
        return PendingMessage(*found) if found is not None else None

    def _pending(self, record: Record) -> PendingMessage | None:
        """Return what is known of a delayed message if it is pending."""
        deliver_at_ms, _, by = delay_of(record.properties)
        dues = self._dues(record.position, _due_of(deliver_at_ms, record.store_ms))
        found = self._unfired(record, dues[-1], by)
        if found is None or any(self._buckets.is_recalled(record.position, due_ms) for due_ms in dues):
            return None
        return found

    def _unfired(self, record: Record, due_ms: int, by: Sequence[str]) -> PendingMessage | None:
        """Return what is known of a delayed message if it has not fired. It may have been recalled."""
        if not self._buckets.cursors.is_ahead(record.topic, due_ms, record.position):
            return None
        return PendingMessage(due_ms, record.size, Causer.from_row(by).account)

    def _dues(self, position: int, due_ms: int) -> list[int]:
        """Return when a message was to be delivered, and when it is after each step of the clock that has moved it."""
        dues = [due_ms]
        for begin, end, after_ms, before_ms, step_ms in self._steps:
            if begin <= position < end and after_ms < dues[-1] < before_ms:
                dues.append(dues[-1] + step_ms)
        return dues

    # --- firing -----------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fire messages on `loop` from now on. Those that became due while no node ran fire first, in due order and paced."""
        self._alarm.start(loop)

    def stop(self) -> None:
        """Fire no more messages."""
        self._alarm.stop()

    def fire_due(self) -> bool:
        """Fire at most `timer.fire_max` due messages; return whether more may be due. For tests, which move the clock."""
        buckets, now_ms = self._buckets, self._store.now_ms()
        if buckets.is_opening_due(now_ms):
            self._store.commit()  # what is left out while buckets are opened must be in the index
            monotonic_s = self._store.clock.monotonic_s
            opened, steps, until_s = 0, 0, monotonic_s() + OPENING_S
            while buckets.is_saved and buckets.is_opening_due(now_ms) and opened < OPENED_MAX and steps < STEPS_MAX:
                opened += buckets.open_next(now_ms)
                steps += 1
                self._store.commit()
                if monotonic_s() >= until_s:
                    break
        if now_ms >= self._retry_ms:
            taken = buckets.take_due(now_ms, self._fire_max)
            if len(taken):
                try:
                    self._fire(taken, now_ms)
                except DiskFull:  # the store logs that
                    buckets.put_back(taken)
                    self._retry_ms = now_ms + RETRY_MS
                except BaseException:
                    buckets.put_back(taken)
                    raise
        self._alarm.fired()
        due_ms = self._next_due_ms()
        return due_ms is not None and due_ms <= now_ms

    def _next_due_ms(self) -> int | None:
        due_ms = self._buckets.next_due_ms()
        return None if due_ms is None else max(due_ms, self._retry_ms)

    def _fire(self, taken: Entries, now_ms: int) -> None:
        rows = taken.rows
        entries = np.empty(len(taken), dtype=ENTRY_DTYPE)
        entries["position"], entries["size"], entries["aux"] = rows["position"], rows["size"], rows["tag"]
        routing = Routing(entries, [topic.decode() for topic in taken.topics], rows["topic"].astype(np.intp))
        late = now_ms - rows["due"]
        accounts, account = np.unique(rows["account"], return_inverse=True)
        about: dict[str, object] = {"now": now_ms, "late": late, "accounts": accounts}
        if len(accounts) > 1:
            about["account"] = account
        self._store.retention.carry_expiring(entries)
        self._store.append(Kind.TIMER_FIRED, body=routing.body(), properties=routing.properties(**about))
        self.lateness.add_all(late)

    # --- the part ---------------------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.MESSAGE: self._apply_message,
            Kind.TIMER_FIRED: self._apply_fired,
            Kind.TIMER_CANCELLED: self._apply_cancelled,
            Kind.CLOCK_STEPPED: self._apply_stepped,
            Kind.DAMAGED: self._apply_damaged,
        }

    def _apply_message(self, record: Record) -> None:
        if record.flags & Flag.DELAYED:
            (deliver_at_ms, tag, by), ledger = delay_of(record.properties), self._store.ledger
            account = ledger.enter(by)
            ledger.charge(account, Resource.DELAYED)
            ledger.charge(account, Resource.DELAYED_BYTES, record.size)
            due_ms = _due_of(deliver_at_ms, record.store_ms)
            self._buckets.add(due_ms, record.position, account, record.size, tag_hash(tag), record.topic)
            self._alarm.expect(due_ms)

    def _apply_fired(self, record: Record) -> None:
        about = orjson.loads(record.properties)
        routing = Routing.from_properties(record.body, about)
        accounts = np.array(about["accounts"], dtype=np.uint64)[np.array(about.get("account", [0] * len(routing.topic)))]
        rows = np.empty(len(routing.topic), dtype=PENDING_DTYPE)
        rows["due"] = about["now"] - np.array(about["late"], dtype=np.int64)
        for field, column in (("position", "position"), ("size", "size"), ("tag", "aux")):
            rows[field] = routing.entries[column]
        rows["account"], rows["topic"] = accounts, routing.topic
        topics = [topic.encode() for topic in routing.topics]
        self._buckets.fired(Entries(rows, topics))
        router, ledger = self._store.router, self._store.ledger

        def route_of(topic: bytes) -> Route:
            route = router.known(topic)
            if route is not None:
                return route
            account = NODE_ACCOUNT
            if first_level(topic.decode()) not in router.roots:
                of_topic = int(accounts[np.argmax(routing.topic == topics.index(topic))])
                if ledger.has(of_topic):  # after damage it may not
                    account = of_topic
            return router.route_stored(topic, account)

        self.fired += routing.dispatch(self._store.queues.dispatch_run, route_of)
        self._release_all(rows)

    def _apply_cancelled(self, record: Record) -> None:
        about = orjson.loads(record.properties)
        named = zip(TIMER_ENTRY.iter_unpack(record.body), about["due"], about["account"], strict=True)
        released: dict[int, list[int]] = {}
        for (position, size), due_ms, account in named:
            self._buckets.recall(position, due_ms)
            self.cancelled += 1
            if not any(start <= position < stop for start, stop in self._damaged):
                released.setdefault(account, []).append(size)
        for account, sizes in released.items():
            self._release(account, len(sizes), sum(sizes))

    def _apply_stepped(self, record: Record) -> None:
        """Move what was set in the window as a delay from the node's time. Time of day that a publisher gave stays.

        In the window, a publisher whose clock is right gives times that are ahead of the node's by at least the step. A delay
        that is longer than the step can't be told from that, and counts as such a time.
        """
        step = step_of(record)
        before_ms = step.begin_ms + step.step_ms
        self._buckets.delay(step.end_ms, before_ms, step.begin, step.step_ms)
        moved = (step.begin, record.position, step.end_ms, before_ms, step.step_ms)
        self._steps = [*self._steps, moved][-STEPS_REMEMBERED:]
        self._are_steps_changed = True

    def _apply_damaged(self, record: Record) -> None:
        """Note that delayed messages may be missing: later records may say that they have fired.

        An index that a repair has kept knows those before the position that it covered. Where nothing is pending, messages
        from before may be missing too: the log may begin anew with this record.
        """
        known_before = self._store.index.adjusted()
        start = max(record.position if len(self) else 0, known_before)
        stop = record.position + record.size
        if start < stop:
            self._damaged.append((start, stop))
            self._are_ranges_changed = True

    def _release_all(self, fired: Column) -> None:
        """Take back the charges for messages that have fired, of each account at once."""
        for start, stop in self._damaged:
            fired = fired[(fired["position"] < start) | (fired["position"] >= stop)]
        for account in np.unique(fired["account"]).tolist():
            sizes = fired["size"][fired["account"] == account]
            self._release(account, len(sizes), int(sizes.sum(dtype=np.int64)))

    def _release(self, account: int, count: int, size: int) -> None:
        """Take back the charges for messages. After damage, an account may hold less than was charged."""
        ledger = self._store.ledger
        for resource, amount in ((Resource.DELAYED, count), (Resource.DELAYED_BYTES, size)):
            held = ledger.held_by(account, resource)
            if held:
                ledger.release(account, resource, min(amount, held))

    def _forget_dropped(self) -> Iterator[None]:
        """Forget the recalls of messages that the log does not have any more."""
        self._buckets.forget_recalled(self._store.log.stored_ms(self._store.log.start))
        yield

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        return self._buckets.before(before)

    def load(self, index: Index) -> None:
        self._buckets.load(index)
        self._steps = list(_STEP.iter_unpack(index.get(_STEPS) or b""))
        self._damaged = list(_RANGE.iter_unpack(index.get(_RANGES) or b""))

    def save(self, batch: Batch) -> None:
        self._buckets.save(batch)
        if self._are_steps_changed:
            batch.put(_STEPS, b"".join(_STEP.pack(*step) for step in self._steps))
            self._are_steps_changed = False
        if self._are_ranges_changed:
            batch.put(_RANGES, b"".join(_RANGE.pack(*found) for found in self._damaged))
            self._are_ranges_changed = False


def _due_of(deliver_at_ms: int, store_ms: int) -> int:
    """Return when a message is due. It must not be before what has fired already, or the cursors would be wrong."""
    return min(max(deliver_at_ms, store_ms), DUE_MS_MAX)
