"""What a record that routes earlier messages says, against a simple reading of the same list."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.store.queues.latedispatches import Routing
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.record import Kind, Record

TOPICS = ["plant/1", "plant/2", "office/1", ""]
FILTERS = {"plant/1": ("plant/#", "plant/1"), "plant/2": ("plant/#",), "office/1": ("office/#", "+/1")}

messages = st.lists(
    st.tuples(
        st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.sampled_from([0, 7, 2**32 - 1]), st.sampled_from(TOPICS)
    ),
    min_size=1,
)


def through_a_record(routing: Routing) -> Routing:
    return Routing.from_record(
        Record(0, 0, Kind.TIMER_FIRED, 0, 0, b"", b"", properties=routing.properties(), body=routing.body())
    )


@given(found=messages)
def test_a_record_says_what_was_put_into_it(found: list[tuple[int, int, int, str]]) -> None:
    routing = Routing.of([message[:3] for message in found], [topic for *_, topic in found])
    expected = [(position, size, topic, tag) for position, size, tag, topic in found]
    assert list(through_a_record(routing).messages()) == expected


@given(found=messages)
def test_each_queue_gets_the_entries_of_its_topics_in_order(found: list[tuple[int, int, int, str]]) -> None:
    routing = through_a_record(Routing.of([message[:3] for message in found], [topic for *_, topic in found]))
    got: dict[str, bytes] = defaultdict(bytes)

    def dispatch_run(queues: tuple[Any, ...], entries: bytes) -> None:
        for queue in queues:
            got[queue] += entries

    def route_of(topic: bytes) -> Any:
        return SimpleNamespace(queues=FILTERS[topic.decode()])

    assert routing.dispatch(dispatch_run, route_of) == sum(bool(topic) for *_, topic in found)
    expected: dict[str, bytes] = defaultdict(bytes)
    for position, size, tag, topic in found:
        for queue in FILTERS.get(topic, ()):
            expected[queue] += ENTRY.pack(position, size, tag)
    assert got == expected
