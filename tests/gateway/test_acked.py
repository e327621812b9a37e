"""What is recorded of acknowledgements between two full records of a session, and what follows from it after a kill."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.sessions.acked import AckedColumns, AckedEntry, add_up, decode_acked
from penstock.gateway.sessions.inflight import PACKET_ID_MAX, Inflight, Slot
from penstock.gateway.sessions.unrecorded import NOT_QUEUED, OVERTAKING_DIVISOR, RUNS_MAX, Advance, Unrecorded
from penstock.store.bodies import SESSIONS_ACKED_NONE
from penstock.store.record import Kind, encode
from tests.depth import DEPTH

offsets = st.one_of(st.integers(0, 300), st.integers(0, 2**63))
advances = st.builds(
    Advance, st.integers(0, PACKET_ID_MAX), st.dictionaries(st.integers(0, SESSIONS_ACKED_NONE - 1), offsets, max_size=3)
)

# --- the record -----------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(offsets, advances), min_size=1, max_size=20), offsets, offsets)
def test_a_record_has_the_entries_that_were_added(added: list[tuple[int, Advance]], obsolete_from: int, before: int) -> None:
    columns = AckedColumns()
    for key, advance in added:
        columns.add(key, advance)
    found = decode_acked(columns.encode(obsolete_from, before))
    assert (found.obsolete_from, found.obsolete_before) == (obsolete_from, before)
    expected: list[AckedEntry] = []
    for key, (first, floors) in added:
        expected += [AckedEntry(key, first, number, floor) for number, floor in floors.items()] or [
            AckedEntry(key, first, None, 0)
        ]
    assert found.entries == expected


def test_the_entries_of_a_thousand_clients_that_acknowledge_the_same_messages_take_three_bytes_each() -> None:
    columns = AckedColumns()
    for n in range(1000):
        columns.add(10**9 + 60 * n, Advance(0, {0: 123_456}))
    assert len(columns.encode(0, 10**9)) < 2100
    for n in range(1000):
        columns.add(10**9 + 60 * n, Advance(0, {0: 123_000 + n}))
    assert len(columns.encode(0, 10**9)) < 8100


class Records:
    """Records of a log, of which some can't be read."""

    def __init__(self, *bodies: bytes | None) -> None:
        self.records = [encode(Kind.SESSIONS_ACKED, body=body, store_ms=0) if body is not None else None for body in bodies]

    def read_intact(self, position: int, _: int, /) -> bytes | None:
        return self.records[position]


def body_of(key: int, advance: Advance) -> bytes:
    columns = AckedColumns()
    columns.add(key, advance)
    return columns.encode(0, 0)


def test_later_records_of_a_session_add_to_earlier_ones() -> None:
    bodies = (body_of(7, Advance(3, {0: 10, 1: 5})), None, body_of(8, Advance(1, {})), body_of(7, Advance(0, {0: 12})))
    found = add_up(Records(*bodies), iter((position, 0) for position in range(4)))
    assert found == {7: Advance(0, {0: 12, 1: 5}), 8: Advance(1, {})}


# --- one session ----------------------------------------------------------------------------------------------------------


@dataclass
class Modelled:
    """A session of some subscriptions, what the log says of it, and what is true."""

    window: int
    inflight: Inflight
    unrecorded: Unrecorded = field(default_factory=Unrecorded)
    cursors: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    under_way: dict[int, tuple[int, int]] = field(default_factory=dict)
    """By packet id: subscription and offset."""
    # What a full record says:
    saved: dict[int, Slot | None] = field(default_factory=dict)
    saved_under_way: dict[int, tuple[int, int]] = field(default_factory=dict)
    saved_cursors: dict[int, int] = field(default_factory=lambda: {0: 0, 1: 0})
    # What the records since then say:
    first: int | None = None
    floors: dict[int, int] = field(default_factory=dict)
    finished: int = 0
    """Acknowledgements since the last record of either kind."""

    def send(self, number: int, delivered: list[bool]) -> None:
        """Send the next messages of a queue, of which some get no packet id, as those at QoS 0."""
        first, before = self.cursors[number], self.inflight.last_packet_id
        count = 0
        for is_delivered in delivered:
            if is_delivered and self.inflight.room > 0:
                packet_id = self.inflight.assign(Slot(0, 1, 0, 0))
                self.under_way[packet_id] = number, self.cursors[number]
                count += 1
            elif is_delivered:
                break
            self.cursors[number] += 1
        if count:
            end = self.cursors[number]
            self.unrecorded.add(number, first, end, before, self.inflight.last_packet_id, count)

    def send_shared(self) -> None:
        if self.inflight.room > 0:
            before = self.inflight.last_packet_id
            packet_id = self.inflight.assign(Slot(0, 1, 0, 0, 9))
            self.under_way[packet_id] = NOT_QUEUED, 0
            self.unrecorded.add(NOT_QUEUED, NOT_QUEUED, 5, before, packet_id, 1)

    def acknowledge(self, at: int) -> None:
        slots = self.inflight.slots
        if slots:
            packet_id = list(slots)[at % len(slots)]
            del slots[packet_id], self.under_way[packet_id]
            self.finished += 1

    def record(self, is_full: bool) -> None:
        slots = self.inflight.slots
        advance = None if is_full else self.unrecorded.advance(slots, self.saved, self.window)
        self.finished = 0
        if advance is not None:
            self.unrecorded.said = self.first = advance.first
            self.floors |= advance.floors
            return
        self.saved, self.saved_under_way, self.saved_cursors = dict(slots), dict(self.under_way), dict(self.cursors)
        self.first, self.floors = None, {}
        self.unrecorded.reset(slots)

    def again(self) -> set[tuple[int, int]]:
        """Return what is sent again after a kill."""
        ids = list(self.saved)
        done = set(takewhile(lambda packet_id: packet_id != self.first, ids)) if self.first is not None else set()
        found = {place for packet_id, place in self.saved_under_way.items() if packet_id not in done}
        for number, cursor in self.saved_cursors.items():
            floor = max(cursor, self.floors.get(number, 0))
            found |= {(number, offset) for offset in range(floor, self.cursors[number])}
        return found


steps = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 1), st.lists(st.booleans() | st.just(True), min_size=1, max_size=8)),
    st.tuples(st.just("send_shared")),
    st.tuples(st.just("acknowledge"), st.just(0) | st.integers(0, 20)),
    st.tuples(st.just("record"), st.booleans()),
    st.tuples(st.just("record"), st.just(False)),
)


@settings(max_examples=25 * DEPTH, deadline=None)
@given(st.integers(1, 24), st.sampled_from([0, 1, PACKET_ID_MAX - 20, PACKET_ID_MAX - 1]), st.lists(steps, min_size=10))
def test_whatever_is_under_way_is_sent_again_and_little_else(window: int, last: int, steps: list[Any]) -> None:
    one = Modelled(window, Inflight(window))
    one.inflight.last_packet_id = last
    delivered: set[tuple[int, int]] = set()
    for name, *arguments in steps:
        getattr(one, name)(*arguments)
        under_way = set(one.under_way.values())
        delivered |= under_way
        again = one.again()
        assert under_way - {(NOT_QUEUED, 0)} <= again, "a delivery under way would be lost"
        twice = len(again & (delivered - under_way))
        assert twice <= window // OVERTAKING_DIVISOR + one.finished, "more would come twice than what no record has"


def test_a_client_that_acknowledges_in_order_needs_no_other_full_record() -> None:
    one = Modelled(10, Inflight(10))
    for _ in range(2000):
        one.send(0, [True] * 7)
        one.acknowledge(0)
        one.acknowledge(0)
        one.record(is_full=False)
        assert one.saved == {}
        assert one.again() == set(one.under_way.values())


def test_deliveries_that_alternate_between_many_subscriptions_take_bounded_memory() -> None:
    one = Modelled(PACKET_ID_MAX, Inflight(PACKET_ID_MAX))
    for n in range(2 * RUNS_MAX):
        one.send(n % 2, [True])
    assert one.unrecorded.advance(one.inflight.slots, one.saved, PACKET_ID_MAX) is None, "it takes a full record"
    one.record(is_full=True)
    one.acknowledge(0)
    one.record(is_full=False)
    assert len(one.saved) == 2 * RUNS_MAX
    assert len(one.again()) == 2 * RUNS_MAX - 1


def test_a_run_that_takes_all_packet_ids_needs_a_full_record() -> None:
    one = Modelled(PACKET_ID_MAX, Inflight(PACKET_ID_MAX))
    one.send(0, [True] * PACKET_ID_MAX)
    for _ in range(3):
        one.acknowledge(0)
    one.record(is_full=False)
    assert one.again() == set(one.under_way.values())
