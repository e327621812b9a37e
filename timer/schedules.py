"""Schedules: messages that are sent again and again, by a rule.

A schedule is a record, SCHEDULE_PUT, and what becomes of it are records too. Only its next occurrence is on the timer. When
that is due, the node appends the message of the occurrence. The message's own record (`Flag.SCHEDULED`) says which occurrence
it is and when the next one comes, and applying the record moves the schedule. So each occurrence is sent exactly once across
any crash, even where the log ends between two records of one commit. A record states the next occurrence, which is not computed
again: a replay does not depend on the time zone database.

Rows of the index: key b"Y", b"d", id u64 big-endian; value account u64, size u32, bytes of JSON u32,
                   the definition as JSON, the body.
                   key b"Y", b"s", id u64 big-endian; value as in `ScheduleState.row`.
The id of a schedule is the position of its SCHEDULE_PUT record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from struct import Struct
from typing import Final

import structlog

from penstock.store.bodies import SCHEDULE_MOVED_HEAD, SCHEDULE_PUT_HEAD
from penstock.store.errors import DiskFull, StoreError
from penstock.store.index.index import Batch, Index, KeySpace
from penstock.store.part import Apply
from penstock.store.properties import Properties, decode_properties, encode_properties, tag_hash
from penstock.store.record import Flag, Kind, Record, record_bytes
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.store import Store
from penstock.timer.errors import RecurrenceInvalid
from penstock.timer.options import TimerOptions
from penstock.timer.schedule import SCHEDULE_BYTES_MAX, ScheduleDefinition, ScheduleState
from penstock.timer.ticker import Ticker

logger = structlog.get_logger("timer")

OCCURRENCES_AT_ONCE_MAX: Final = 64
"""Messages that one schedule sends in one turn of the loop, when it has to catch up."""

SCHEDULE: Final = "schedule"
OCCURRENCE_MS: Final = "occurrence-ms"
"""User properties of each message of a schedule: the name of the schedule, and the time of the occurrence in ms since 1970."""

_KEY = Struct(">ccQ")
_DEFINITION, _STATE = b"d", b"s"
_HEAD = Struct("<QII")


@dataclass(slots=True)
class Schedule:
    """A schedule of the node.

    Parameters:
        id: position of its record.
        definition: what it sends, and when.
        state: how far it has got.
        account: id of the account that is charged for it.
        size: bytes that it is charged with: those of its record.
    """

    id: int
    definition: ScheduleDefinition
    state: ScheduleState
    account: int
    size: int


class Schedules:
    """The schedules of the node. It is a part of the store.

    Parameters:
        store: gets their messages.
        options: see `TimerOptions`.
    """

    def __init__(self, store: Store, options: TimerOptions) -> None:
        self._store = store
        self._options = options
        self._by_id: dict[int, Schedule] = {}
        self._by_name: dict[str, Schedule] = {}
        self._names: list[str] | None = None
        self._changed: set[int] = set()
        """Ids of the schedules whose state has changed."""
        self._put: set[int] = set()
        """Ids of the schedules that were put or have ended."""
        self._armed: dict[int, int] = {}
        """When the timer returns a schedule, in ms since 1970, by id. It may be earlier than the next occurrence."""
        self._ticker: Ticker[int] = Ticker(
            store.now_ms, self._fire, fire_max=options.fire_max, tick_ms=options.tick_ms, start_ms=0
        )
        store.ledger.limit(Resource.SCHEDULES, options.schedules_max, "raise timer.schedules_max")
        store.ledger.limit(Resource.SCHEDULES_BYTES, options.schedules_bytes_max, "raise timer.schedules_max")
        self.sent = 0
        """Number of messages that schedules have sent since the start."""
        self.failed = 0
        """Number of occurrences since the start that could not be sent."""
        self.missed = 0
        """How often since the start a schedule had missed occurrences, and `missed` said what becomes of them."""

    def __len__(self) -> int:
        """Return how many schedules there are, those that have ended included."""
        return len(self._by_id)

    @property
    def names(self) -> list[str]:
        """The names of the schedules, in order. A change of the schedules makes a new list."""
        if self._names is None:
            self._names = sorted(self._by_name)
        return self._names

    def get(self, name: str) -> Schedule | None:
        """Return a schedule; None if there is none of that name."""
        return self._by_name.get(name)

    # --- changes ----------------------------------------------------------------------------------------------------
    #
    # The caller must not respond before `Store.when_durable`.

    def put(self, definition: ScheduleDefinition, causer: Causer = NODE) -> Schedule:
        """Create a schedule, or replace the one of its name, which begins anew.

        Args:
            definition: what it sends, and when. If `start_ms` is 0, it starts now.
            causer: is charged for it.

        Raises:
            RecurrenceInvalid: it is not valid, or has no occurrence in the future.
            LimitExceeded: `timer.schedules_max`, the bytes that as many may have, or a quota is reached.
            TopicInvalid, DiskFull: as `Router.route` and `Store.append` raise them.
        """
        store, now_ms = self._store, self._store.now_ms()
        if not definition.start_ms:
            definition = replace(definition, start_ms=now_ms)
        definition.check(self._options.schedule_every_ms_min, now_ms)
        next_ms = definition.first_from(now_ms, 0)
        if not next_ms:
            raise RecurrenceInvalid(
                "the schedule has no occurrence within ten years from its start or from now: correct its rule, start or end"
            )
        route = store.router.route(definition.topic.encode(), causer)
        old = self._by_name.get(definition.name)
        causer = store.ledger.with_tenant(causer, route.name)
        definition = replace(definition, by=causer.row())
        name, encoded = definition.name.encode(), definition.encoded()
        body = SCHEDULE_PUT_HEAD.pack(next_ms) + definition.body
        size = record_bytes(name, body, encoded)
        if size > SCHEDULE_BYTES_MAX:
            raise RecurrenceInvalid(
                f"the schedule has {size} bytes with its body and properties; use {SCHEDULE_BYTES_MAX} at most"
            )
        is_paid = old is not None and old.account == causer.account
        if not is_paid:
            store.ledger.admit(causer, Resource.SCHEDULES, topic=route.name)
        if old is None or not is_paid or size > old.size:
            more = size - old.size if old is not None and is_paid else size
            store.ledger.admit(causer, Resource.SCHEDULES_BYTES, more, topic=route.name)
        store.append(Kind.SCHEDULE_PUT, topic=name, properties=encoded, body=body)
        return self._by_name[definition.name]

    def pause(self, schedule: Schedule) -> None:
        """Send nothing from now on, until `resume`. If it is paused already, nothing changes."""
        if not schedule.state.is_paused:
            self._move(schedule, schedule.state._replace(is_paused=True))

    def resume(self, schedule: Schedule) -> None:
        """Go on with the first occurrence from now on. What occurred during the pause is not sent."""
        state = schedule.state
        if state.is_paused:
            next_ms = schedule.definition.first_from(max(self._store.now_ms(), state.next_ms), state.counted)
            self._move(schedule, state._replace(is_paused=False, next_ms=next_ms))

    def run(self, schedule: Schedule) -> int:
        """Send a message now, besides the occurrences; return its position. It does not count against `count`.

        Raises:
            LimitExceeded, RecordTooLarge, TopicInvalid, DiskFull: the message can't be stored.
        """
        return self._send(schedule, self._store.now_ms(), schedule.state.next_ms, counts=False)

    def delete(self, schedule: Schedule) -> None:
        """Delete a schedule. Messages that it has sent stay."""
        self._store.append(Kind.SCHEDULE_DELETED, topic=schedule.definition.name.encode())

    def _move(self, schedule: Schedule, state: ScheduleState) -> None:
        name = schedule.definition.name.encode()
        self._store.append(Kind.SCHEDULE_MOVED, topic=name, body=SCHEDULE_MOVED_HEAD.pack(schedule.id) + state.row())

    # --- firing -----------------------------------------------------------------------------------------------------

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send messages on `loop` from now on."""
        self._ticker.start(loop)

    def stop(self) -> None:
        """Send no more messages."""
        self._ticker.stop()

    def fire_due(self) -> bool:
        """Send what is due now, or a part of it; return whether more may be due. For tests, which move the clock."""
        return self._ticker.fire_due()

    def _fire(self, ids: list[int]) -> None:
        for schedule_id in ids:
            self._armed.pop(schedule_id, None)
        for schedule_id in dict.fromkeys(ids):
            schedule = self._by_id.get(schedule_id)
            if schedule is not None:
                self._send_due(schedule)
                self._arm(schedule)

    def _send_due(self, schedule: Schedule) -> None:
        definition, now_ms = schedule.definition, self._store.now_ms()
        missed_before = now_ms - definition.grace_ms
        is_noted = False
        for _ in range(OCCURRENCES_AT_ONCE_MAX):
            state = schedule.state
            occurrence = state.next_ms
            if state.is_paused or not 0 < occurrence <= now_ms:
                return
            following = definition.first_from(occurrence + 1, state.counted + 1)
            if occurrence < missed_before:
                if not is_noted:
                    is_noted = True
                    self.missed += 1
                if definition.missed == "skip":
                    self._move(schedule, state._replace(next_ms=definition.first_from(missed_before, state.counted)))
                    continue
                if definition.missed == "once":
                    following = definition.first_from(missed_before, state.counted + 1)
                elif definition.missed == "latest":
                    occurrence = definition.last_before(missed_before, occurrence) or occurrence
                    following = definition.first_from(occurrence + 1, state.counted + 1)
            try:
                self._send(schedule, occurrence, following, counts=True)
            except DiskFull:
                raise  # the ticker tries again
            except StoreError as error:
                self.failed += 1
                logger.warning("schedule.unsent", schedule=definition.name, occurrence_ms=occurrence, why=str(error))
                self._move(schedule, state.failed(str(error))._replace(next_ms=following, counted=state.counted + 1))

    def _send(self, schedule: Schedule, occurrence: int, following: int, *, counts: bool) -> int:
        """Append the message of an occurrence, which moves the schedule; return its position. Raises StoreError."""
        definition, store = schedule.definition, self._store
        body = definition.body_of(occurrence, schedule.state.sent + 1)
        own = [(SCHEDULE, definition.name), (OCCURRENCE_MS, str(occurrence))]
        properties = Properties(
            [*definition.properties, *own],
            definition.tag,
            definition.message_group,
            content_type=definition.content_type or None,
            expires_at_ms=store.now_ms() + definition.expire_after_ms if definition.expire_after_ms else 0,
            schedule=[schedule.id, occurrence, following, int(counts)],
        )
        route = store.router.route(definition.topic.encode(), Causer.from_row(definition.by))
        return store.append_message(route, body, encode_properties(properties), 1 | Flag.SCHEDULED, tag_hash(definition.tag))

    def _arm(self, schedule: Schedule) -> None:
        """Let the timer return a schedule when it occurs next, if the timer does not return it before."""
        state = schedule.state
        if state.next_ms and not state.is_paused and state.next_ms < self._armed.get(schedule.id, 2**63):
            self._armed[schedule.id] = state.next_ms
            self._ticker.schedule(state.next_ms, schedule.id)

    # --- the part of the store --------------------------------------------------------------------------------------

    def applies(self) -> Mapping[Kind, Apply]:
        return {
            Kind.MESSAGE: self._apply_message,
            Kind.SCHEDULE_PUT: self._apply_put,
            Kind.SCHEDULE_MOVED: self._apply_moved,
            Kind.SCHEDULE_DELETED: self._apply_deleted,
        }

    def _apply_message(self, record: Record) -> None:
        if not record.flags & Flag.SCHEDULED:
            return
        schedule_id, occurrence, following, counts = decode_properties(record.properties).schedule
        schedule = self._by_id.get(schedule_id)
        self.sent += 1
        if schedule is not None:
            state = schedule.state
            self._set(
                schedule,
                state._replace(
                    next_ms=following, sent=state.sent + 1, counted=state.counted + counts, last_ms=occurrence, error=""
                ),
            )

    def _apply_put(self, record: Record) -> None:
        (next_ms,) = SCHEDULE_PUT_HEAD.unpack_from(record.body)
        definition = ScheduleDefinition.decoded(record.properties, record.body[SCHEDULE_PUT_HEAD.size :])
        self._end(definition.name)
        ledger = self._store.ledger
        account = ledger.enter(definition.by)
        ledger.charge(account, Resource.SCHEDULES)
        ledger.charge(account, Resource.SCHEDULES_BYTES, record.size)
        self._add(Schedule(record.position, definition, ScheduleState(next_ms), account, record.size))
        self._put.add(record.position)
        self._changed.add(record.position)

    def _apply_moved(self, record: Record) -> None:
        (schedule_id,) = SCHEDULE_MOVED_HEAD.unpack_from(record.body)
        schedule = self._by_id.get(schedule_id)
        if schedule is not None:
            self._set(schedule, ScheduleState.from_row(record.body[SCHEDULE_MOVED_HEAD.size :]))

    def _apply_deleted(self, record: Record) -> None:
        self._end(record.topic.decode())

    def _add(self, schedule: Schedule) -> None:
        self._by_id[schedule.id] = self._by_name[schedule.definition.name] = schedule
        self._names = None
        self._arm(schedule)

    def _set(self, schedule: Schedule, state: ScheduleState) -> None:
        schedule.state = state
        self._changed.add(schedule.id)
        self._arm(schedule)

    def _end(self, name: str) -> None:
        schedule = self._by_name.pop(name, None)
        if schedule is None:
            return
        del self._by_id[schedule.id]
        self._names = None
        self._armed.pop(schedule.id, None)
        self._put.add(schedule.id)
        self._changed.add(schedule.id)
        self._store.ledger.release(schedule.account, Resource.SCHEDULES, 1)
        self._store.ledger.release(schedule.account, Resource.SCHEDULES_BYTES, schedule.size)

    def load(self, index: Index) -> None:
        states: dict[int, ScheduleState] = {}
        definitions: dict[int, bytes] = {}
        for key, value in index.rows(bytes(KeySpace.SCHEDULE)):
            _, what, schedule_id = _KEY.unpack(key)
            if what == _STATE:
                states[schedule_id] = ScheduleState.from_row(value)
            else:
                definitions[schedule_id] = value
        for schedule_id, value in definitions.items():
            account, size, json_bytes = _HEAD.unpack_from(value)
            body_from = _HEAD.size + json_bytes
            definition = ScheduleDefinition.decoded(value[_HEAD.size : body_from], value[body_from:])
            self._add(Schedule(schedule_id, definition, states[schedule_id], account, size))

    def save(self, batch: Batch) -> None:
        for schedule_id in self._put:
            schedule = self._by_id.get(schedule_id)
            key = _KEY.pack(KeySpace.SCHEDULE, _DEFINITION, schedule_id)
            if schedule is None:
                batch.delete(key)
            else:
                encoded = schedule.definition.encoded()
                head = _HEAD.pack(schedule.account, schedule.size, len(encoded))
                batch.put(key, head + encoded + schedule.definition.body)
        for schedule_id in self._changed:
            schedule = self._by_id.get(schedule_id)
            key = _KEY.pack(KeySpace.SCHEDULE, _STATE, schedule_id)
            if schedule is None:
                batch.delete(key)
            else:
                batch.put(key, schedule.state.row())
        self._put.clear()
        self._changed.clear()

    def live(self, before: int) -> Iterator[tuple[int, int]]:
        """Yield nothing: the rows of the index have all that is needed."""
        yield from ()
