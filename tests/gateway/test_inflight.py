"""The packet ids of deliveries under way, and the window of a session."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.protocol.packets import PUBACK, PUBCOMP, PUBREC
from penstock.gateway.sessions.inflight import PACKET_ID_MAX, Inflight, Slot

AT_1, AT_2 = Slot(0, 1, 0, 100), Slot(0, 2, 100, 100)
"""Deliveries at QoS 1 and 2."""


def test_packet_ids_count_from_1() -> None:
    some = Inflight(10)
    assert [some.assign(AT_1) for _ in range(3)] == [1, 2, 3]


def test_packet_ids_wrap_around_to_1_and_never_to_0() -> None:
    some = Inflight(10)
    some.last_packet_id = PACKET_ID_MAX - 1
    assert [some.assign(AT_1) for _ in range(2)] == [PACKET_ID_MAX, 1]


def test_a_packet_id_in_use_is_skipped() -> None:
    some = Inflight(10)
    taken = [some.assign(AT_2) for _ in range(3)]
    assert some.acknowledge(PUBREC, taken[1])
    some.last_packet_id = PACKET_ID_MAX
    assert some.assign(AT_1) == 4


def test_a_free_packet_id_is_not_reused_before_all_others() -> None:
    some = Inflight(10)
    first = some.assign(AT_1)
    assert some.acknowledge(PUBACK, first)
    assert some.assign(AT_1) == first + 1


def test_all_packet_ids_may_be_in_use() -> None:
    some = Inflight(PACKET_ID_MAX)
    taken = {some.assign(AT_1) for _ in range(PACKET_ID_MAX)}
    assert taken == set(range(1, PACKET_ID_MAX + 1))
    assert some.room == 0
    assert some.acknowledge(PUBACK, 777)
    assert some.assign(AT_1) == 777


def test_room_shrinks_with_each_delivery_and_grows_with_its_last_acknowledgement() -> None:
    some = Inflight(3)
    at_1, at_2 = some.assign(AT_1), some.assign(AT_2)
    assert some.room == 1
    assert some.acknowledge(PUBACK, at_1)
    assert some.room == 2
    assert some.acknowledge(PUBREC, at_2)
    assert some.room == 2
    assert some.acknowledge(PUBCOMP, at_2)
    assert some.room == 3


def test_an_acknowledgement_of_the_wrong_kind_changes_nothing() -> None:
    some = Inflight(10)
    at_1, at_2 = some.assign(AT_1), some.assign(AT_2)
    for kind, packet_id in [(PUBREC, at_1), (PUBCOMP, at_1), (PUBACK, at_2), (PUBCOMP, at_2), (PUBACK, 9)]:
        assert not some.acknowledge(kind, packet_id)
    assert some.slots == {at_1: AT_1, at_2: AT_2}


def test_an_acknowledgement_counts_once() -> None:
    some = Inflight(10)
    packet_id = some.assign(AT_1)
    assert some.acknowledge(PUBACK, packet_id)
    assert not some.acknowledge(PUBACK, packet_id)


@given(st.sets(st.integers(1, 12)), st.integers(0, 4), st.integers(PACKET_ID_MAX - 4, PACKET_ID_MAX + 4), st.integers(1, 9))
def test_a_run_gets_the_packet_ids_that_its_deliveries_would_get_one_by_one(
    taken: set[int], ahead: int, last: int, count: int
) -> None:
    one_by_one, together = Inflight(100), Inflight(100)
    for some in (one_by_one, together):
        some.slots = dict.fromkeys(taken, AT_1)
        some.last_packet_id = last if last <= PACKET_ID_MAX else ahead
    batch = [Slot(number, 1, number, 9) for number in range(count)]
    assert list(together.assign_run(batch)) == [one_by_one.assign(slot) for slot in batch]
    assert together.slots == one_by_one.slots
    assert list(together.slots) == list(one_by_one.slots)
    assert together.last_packet_id == one_by_one.last_packet_id


@given(st.lists(st.integers(1, 12)))
def test_pubacks_in_a_row_do_what_each_would_do(packet_ids: list[int]) -> None:
    one_by_one, together = Inflight(100), Inflight(100)
    for some in (one_by_one, together):
        some.slots = {1: AT_1, 2: AT_2, 3: None, 4: Slot(0, 1, 0, 9, delivery=77), 5: AT_1, 6: Slot(0, 1, 0, 9, delivery=78)}
    expected = [packet_id for packet_id in packet_ids if one_by_one.acknowledge(PUBACK, packet_id)]
    shared = {4: 77, 6: 78}
    assert together.acknowledge_run(packet_ids) == (len(expected), [shared[each] for each in expected if each in shared])
    assert together.slots == one_by_one.slots


@given(st.lists(st.tuples(st.sampled_from([PUBACK, PUBREC, PUBCOMP]), st.integers(0, 12)) | st.sampled_from([1, 2])))
def test_packet_ids_in_use_are_distinct_and_within_the_window(steps: list[tuple[int, int] | int]) -> None:
    some = Inflight(8)
    under_way: set[int] = set()
    for step in steps:
        if isinstance(step, tuple):
            was_expected = some.acknowledge(*step)
            if was_expected and step[0] != PUBREC:
                under_way.remove(step[1])
        elif some.room:
            packet_id = some.assign(Slot(0, step, 0, 0))
            assert 1 <= packet_id <= PACKET_ID_MAX
            assert packet_id not in under_way
            under_way.add(packet_id)
        assert some.room == 8 - len(under_way)
