"""Transactional messages, which keep a database and the log in agreement.

A producer stores a half message, which is an ordinary record with the flag HALF, in no queue. Then it commits its own
transaction in its database, and commits the half message or rolls it back. The node asks a producer that says neither for the
outcome, up to 15 times, and then rolls the message back. Commits, roll backs and checks are records.
Applying TRANSACTION_COMMITTED puts the entries into the queues, so the message is delivered exactly once, whatever crashes.

Rows of the index: key b"X", position u64 big-endian; value state u8, checks u16, next check ms i64, size u32, account u64
(`store.space.ledger`), producer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from itertools import islice
from struct import Struct
from typing import NamedTuple

import structlog

from penstock.pop.errors import Overloaded
from penstock.pop.options import PopOptions
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.errors import PositionUnknown, RecordCorrupt
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.properties import decode_properties, tag_hash
from penstock.store.queues.latedispatches import Routing
from penstock.store.recent import RecentIds
from penstock.store.record import Flag, Kind, Record, decode
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.store import Store
from penstock.timer.options import TimerOptions
from penstock.timer.ticker import Ticker

logger = structlog.get_logger("pop")

SCANNED_MAX = 256
"""Half messages that a poll looks at without a break, if it may not have them."""

ENDED_REMEMBERED = 100_000
"""Ended transactions whose outcome is remembered. A second call that ends an older one gets the answer "unknown"."""

_KEY = Struct(">cQ")
_ROW = Struct("<BHqIQ")

OPEN, COMMITTED, ROLLED_BACK = range(3)


class EndOutcome(Enum):
    """Outcome of a commit or a roll back. The names are those of the API's codes."""

    OK = "done"
    ALREADY_COMMITTED = "the transaction was committed before"
    ALREADY_ROLLED_BACK = "the transaction was rolled back before, by its producer or after the last check"
    UNKNOWN_TRANSACTION = "the transaction is neither pending nor among those that ended lately"


class HalfMessage(NamedTuple):
    """A pending half message.

    Parameters:
        position: of its record.
        size: of its record.
        producer: who decides about it.
        checks: how often the producer was asked for the outcome.
        due_ms: when the producer is asked next, in ms since 1970.
        account: id of the account that is charged for it.
    """

    position: int
    size: int
    producer: str
    checks: int
    due_ms: int
    account: int


class Transactions:
    """The pending transactions. It is a part of the store.

    Parameters:
        store: has the half messages, and delivers them.
        options: see `PopOptions`.
        timer: see `TimerOptions`. The checks are on a timer wheel.
    """

    def __init__(self, store: Store, options: PopOptions, timer: TimerOptions) -> None:
        self._store = store
        self._options = options
        self._pending: dict[int, HalfMessage] = {}
        self._ended: RecentIds[int, int] = RecentIds(ENDED_REMEMBERED)
        self._changed: set[int] = set()
        self._asked: dict[str, dict[int, None]] = {}
        """Positions of half messages whose outcome is asked for, by producer, until a poll or a service takes the question."""
        self._polls: dict[str, list[asyncio.Future[None]]] = {}
        self.on_check: list[Callable[[HalfMessage], bool]] = []
        """Called with a half message whose outcome is asked for. A service that asks producers itself returns True."""
        self._ticker: Ticker[int] = Ticker(
            store.now_ms, self._check, fire_max=timer.fire_max, tick_ms=timer.tick_ms, start_ms=0
        )
        store.ledger.limit(Resource.TRANSACTIONS, options.transactions_max, "commit or roll back some")
        self.waiting = 0
        self.committed = 0
        self.rolled_back = 0

    def __len__(self) -> int:
        """Return the number of pending half messages."""
        return len(self._pending)

    @property
    def remembered(self) -> int:
        """Number of ended transactions whose outcome is in memory."""
        return len(self._ended)

    def __iter__(self) -> Iterator[HalfMessage]:
        """Yield the pending half messages, oldest first."""
        return iter(self._pending.values())

    def get(self, position: int) -> HalfMessage | None:
        """Return a pending half message, or None."""
        return self._pending.get(position)

    def admit(self, causer: Causer = NODE, topic: str = "") -> list[str]:
        """Return what the properties of a half message must have as `by`. Callers call it before they store the message.

        Raises:
            LimitExceeded: as many as the node has room for are pending, or the causer may have no more.
        """
        return self._store.ledger.admit(causer, Resource.TRANSACTIONS, topic=topic).row()

    def end(self, position: int, *, commit: bool) -> EndOutcome:
        """Commit or roll back a half message. The caller must not respond before `Store.when_durable`."""
        half = self._pending.get(position)
        if half is not None:
            self._end([half], commit=commit)
            return EndOutcome.OK
        state = self._ended.get(position)
        if state is None:
            return EndOutcome.UNKNOWN_TRANSACTION
        return EndOutcome.ALREADY_COMMITTED if state == COMMITTED else EndOutcome.ALREADY_ROLLED_BACK

    def _end(self, halves: list[HalfMessage], *, commit: bool) -> None:
        if not commit:
            body = b"".join(TIMER_ENTRY.pack(half.position, half.size) for half in halves)
            self._store.append(Kind.TRANSACTION_ROLLED_BACK, body=body)
            return
        self._store.commit()  # the messages are read back, and some may have been stored in this turn of the loop
        routes = [self._route(half) for half in halves]
        messages = [(half.position, half.size, tag) for half, (_, tag) in zip(halves, routes, strict=True)]
        routing = Routing.of(messages, [topic for topic, _ in routes])
        self._store.append(Kind.TRANSACTION_COMMITTED, body=routing.body(), properties=routing.properties())

    def _route(self, half: HalfMessage) -> tuple[str, int]:
        """Return the topic and the tag hash of a half message. One that an expiry is dropping is carried forward."""
        store, position = self._store, half.position
        try:
            message = decode(store.read(position, half.size), position=position)
            if message.kind != Kind.MESSAGE:  # `penstock repair` has put a record of kind DAMAGED in its place
                raise RecordCorrupt(position, "it was damaged")
        except (PositionUnknown, RecordCorrupt) as error:
            # A message without a topic can't be routed, but the others must be.
            logger.error("message.unreadable", position=position, error=str(error))
            return "", 0
        store.retention.carry_if_expiring(position, half.size)
        return message.topic.decode(), tag_hash(decode_properties(message.properties).tag)

    # --- checks -----------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Ask producers by itself from now on."""
        self._ticker.start(loop)

    def stop(self) -> None:
        """Stop asking producers."""
        self._ticker.stop()

    def fire_due(self) -> bool:
        """Ask about one portion of what is due now, and return whether more may be due. Tests that move the clock call this."""
        return self._ticker.fire_due()

    def _check(self, positions: list[int]) -> None:
        now_ms = self._store.now_ms()
        # A replay schedules every check of a message again, and all of them come out together.
        unique = dict.fromkeys(positions)
        due = [half for position in unique if (half := self._pending.get(position)) and half.due_ms <= now_ms]
        undecided = [half for half in due if half.checks >= self._options.transaction_checks_max]
        asked = [half for half in due if half.checks < self._options.transaction_checks_max]
        if undecided:
            self._end(undecided, commit=False)
        if asked:
            body = b"".join(TIMER_ENTRY.pack(half.position, half.size) for half in asked)
            self._store.append(Kind.TRANSACTION_CHECKED, body=body)
        for half in asked:
            if not any(ask(half) for ask in self.on_check):
                self._asked.setdefault(half.producer, {})[half.position] = None
                for poll in self._polls.pop(half.producer, ()):
                    if not poll.done():
                        poll.set_result(None)

    async def poll(
        self, producer: str, halves_max: int, wait_ms: int, may_have: Callable[[HalfMessage], bool] = lambda _: True
    ) -> list[HalfMessage]:
        """Return up to `halves_max` half messages of a producer whose outcome is asked for; wait up to `wait_ms` for the first.

        Each question goes to one poll that may have it. If the producer doesn't answer, the question comes again at the next
        check.

        Raises:
            Overloaded: too many polls are waiting already.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + wait_ms / 1000
        while True:
            arrived: asyncio.Future[None] = loop.create_future()
            self._polls.setdefault(producer, []).append(arrived)
            try:
                asked = await self._take_round(producer, halves_max, may_have)
                left_s = deadline_s - loop.time()
                if asked or left_s <= 0:
                    return asked
                if self.waiting >= self._options.waiters_max:
                    raise Overloaded(f"{self.waiting} polls are waiting on this node, which is the limit: use fewer clients")
                await self._wait(arrived, left_s)
            finally:
                if not arrived.done():
                    self._polls[producer].remove(arrived)
                    if not self._polls[producer]:
                        del self._polls[producer]

    async def _wait(self, arrived: asyncio.Future[None], seconds: float) -> None:
        self.waiting += 1
        try:
            await asyncio.wait((arrived,), timeout=seconds)
        finally:
            self.waiting -= 1

    async def _take_round(self, producer: str, halves_max: int, may_have: Callable[[HalfMessage], bool]) -> list[HalfMessage]:
        """Take the half messages of a producer as `take_asked` does, until there is one or all were looked at once."""
        for done in range(0, len(self._asked.get(producer, ())), SCANNED_MAX):
            if done:
                await asyncio.sleep(0)  # so that the others are served meanwhile
            if asked := self.take_asked(producer, halves_max, may_have):
                return asked
        return []

    def take_asked(
        self, producer: str, halves_max: int, may_have: Callable[[HalfMessage], bool] = lambda _: True
    ) -> list[HalfMessage]:
        """Return up to `halves_max` half messages of a producer whose outcome is asked for. Each is returned once a check.

        At most `SCANNED_MAX` are looked at. Those that the caller may not have go to the end.
        """
        asked = self._asked.get(producer)
        taken: list[HalfMessage] = []
        for position in list(islice(asked or (), SCANNED_MAX)):
            if asked is None or len(taken) == halves_max:
                break
            asked.pop(position, None)
            half = self._pending.get(position)
            if half is not None and may_have(half):
                taken.append(half)
            elif half is not None:
                asked[position] = None
        if asked is not None and not asked:
            self._asked.pop(producer, None)
        return taken

    # --- the part of the store --------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.MESSAGE: self._apply_message,
            Kind.TRANSACTION_CHECKED: self._apply_checked,
            Kind.TRANSACTION_COMMITTED: self._apply_committed,
            Kind.TRANSACTION_ROLLED_BACK: self._apply_rolled_back,
        }

    def _apply_message(self, record: Record) -> None:
        if record.flags & Flag.HALF:
            properties = decode_properties(record.properties)
            due_ms = record.store_ms + (properties.check_after_ms or self._options.transaction_check_ms)
            account = self._store.ledger.enter(properties.by)
            self._store.ledger.charge(account, Resource.TRANSACTIONS)
            self._put(HalfMessage(record.position, record.size, properties.producer, 0, due_ms, account))

    def _apply_checked(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            half = self._pending.get(position)
            if half is not None:
                due_ms = record.store_ms + self._options.transaction_check_ms
                self._put(half._replace(checks=half.checks + 1, due_ms=due_ms))

    def _put(self, half: HalfMessage) -> None:
        self._pending[half.position] = half
        self._changed.add(half.position)
        self._ticker.schedule(half.due_ms, half.position)

    def _apply_committed(self, record: Record) -> None:
        route_of, dispatch = self._store.router.route_stored, self._store.queues.dispatch
        for position, size, topic, tag in Routing.from_record(record).messages():
            half = self._pending.get(position)
            if half is not None and topic:
                dispatch(route_of(topic.encode(), half.account), position, size, tag)
                self.committed += 1
            self._forget(position, COMMITTED)

    def _apply_rolled_back(self, record: Record) -> None:
        for position, _ in TIMER_ENTRY.iter_unpack(record.body):
            if self._forget(position, ROLLED_BACK):
                self.rolled_back += 1

    def _forget(self, position: int, state: int) -> bool:
        half = self._pending.pop(position, None)
        if half is None:
            return False  # it was damaged, and a repair has set it aside
        self._store.ledger.release(half.account, Resource.TRANSACTIONS)
        asked = self._asked.get(half.producer)
        if asked is not None:
            asked.pop(position, None)
            if not asked:
                del self._asked[half.producer]
        forgotten = self._ended.add(position, state)
        self._changed.add(position)
        if forgotten is not None:
            self._changed.add(forgotten)
        return True

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        for half in [half for half in self._pending.values() if half.position < before]:
            if half.position in self._pending:
                yield half.position, half.size

    def load(self, index: Index) -> None:
        for key, value in index.rows(bytes(KeySpace.TRANSACTION)):
            _, position = _KEY.unpack(key)
            state, checks, due_ms, size, account = _ROW.unpack_from(value)
            if state == OPEN:
                self._pending[position] = HalfMessage(position, size, value[_ROW.size :].decode(), checks, due_ms, account)
                self._ticker.schedule(due_ms, position)
            else:
                self._ended.add(position, state)

    def save(self, batch: Batch) -> None:
        for position in self._changed:
            half = self._pending.get(position)
            if half is not None:
                row = _ROW.pack(OPEN, half.checks, half.due_ms, half.size, half.account) + half.producer.encode()
            elif (state := self._ended.get(position)) is not None:
                row = _ROW.pack(state, 0, 0, 0, 0)
            else:
                batch.delete(_KEY.pack(KeySpace.TRANSACTION, position))
                continue
            batch.put(_KEY.pack(KeySpace.TRANSACTION, position), row)
        self._changed.clear()
