"""Listings of pending delayed messages, on a real store whose clock the test moves, with rows and slices of few messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from penstock.store.errors import TopicInvalid
from penstock.store.options import MINUTE_MS
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import STEP_FIXED, Flag, Kind
from penstock.store.space.causer import NODE, Causer
from penstock.store.topics import matches
from penstock.timer import buckets, listing
from penstock.timer.delayed import Recalled
from penstock.timer.errors import ListingInvalid
from penstock.timer.listing import ListedTimer, TimerListing, TimerQuery
from tests.pop.wiring import Parts

HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
EVERYTHING = TimerQuery()
TOPICS = ["orders/1/timeout", "orders/2/timeout", "orders/2/remind", "plant/1", "clock"]


class Pending:
    """What the test knows to be pending, and the listing of the node."""

    def __init__(self, parts: Parts) -> None:
        self.parts = parts
        self.listing = TimerListing(parts.store, parts.delayed.buckets, parts.timer_keys)
        self.messages: dict[int, tuple[int, str]] = {}
        """Due time and topic by position."""

    def add(self, delay_ms: int, topic: str = TOPICS[0], key: str = "", by: Causer = NODE) -> int:
        store = self.parts.store
        due_ms = self.parts.clock.now_ms() + delay_ms
        about = Properties(deliver_at_ms=due_ms, timer_key=key, by=by.row())
        encoded = encode_properties(about)
        position = store.append_message(store.router.route(topic.encode()), b"x", encoded, 1 | Flag.DELAYED)
        self.messages[position] = (due_ms, topic)
        store.commit()
        return position

    def recall(self, position: int) -> None:
        due_ms, _ = self.messages.pop(position)
        assert self.parts.delayed.recall(position, due_ms) is Recalled.CANCELLED
        self.parts.store.commit()

    def advance(self, ms: int) -> None:
        self.parts.advance(ms)
        now_ms = self.parts.clock.now_ms()
        self.messages = {at: found for at, found in self.messages.items() if found[0] > now_ms}

    def expected(self, query: TimerQuery = EVERYTHING) -> list[int]:
        """Return the positions of the messages that a query asks for, in order."""
        return [
            position
            for due_ms, position, topic in sorted((due_ms, at, topic) for at, (due_ms, topic) in self.messages.items())
            if matches(query.filter, topic) and due_ms >= query.from_ms and (not query.before_ms or due_ms < query.before_ms)
        ]

    async def pages(
        self, query: TimerQuery = EVERYTHING, rows_max: int = 7, between: Callable[[], None] = lambda: None
    ) -> list[ListedTimer]:
        """Return the messages of all pages. `between` is called between two of them."""
        page = await self.listing.page(query, "", rows_max)
        found = [*page.timers]
        while page.next_token:
            between()
            page = await self.listing.page(query, page.next_token, rows_max)
            found += page.timers
        return found


@pytest.fixture
def pending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pending]:
    monkeypatch.setattr(buckets, "FRESH_MAX", 10)
    monkeypatch.setattr(listing, "SELECTED_MAX", 25)
    monkeypatch.setattr(listing, "SCANNED_MAX", 40)
    monkeypatch.setattr(listing, "LOOKS", 5)
    monkeypatch.setattr(listing, "TOPICS_AT_ONCE", 2)
    made = Pending(Parts(tmp_path / "data"))
    yield made
    made.parts.close()


def positions(found: list[ListedTimer]) -> list[int]:
    return [each.position for each in found]


def fill(pending: Pending, seed: int, count: int = 250) -> Random:
    """Add messages that are due in all kinds of buckets, while time goes on."""
    random = Random(seed)
    for _ in range(count):
        horizon = random.choice((2 * MINUTE_MS, 2 * HOUR_MS, 3 * DAY_MS, 80 * DAY_MS))
        pending.add(random.randrange(1_000, horizon), random.choice(TOPICS))
        if random.random() < 0.05:
            pending.advance(random.randrange(20_000))
    return random


def seeds(count: int, in_gate: int) -> list[object]:
    """Return seeds, of which `make test` takes the first, and `make nightly` the others."""
    return [*range(in_gate), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(in_gate, count))]


QUERIES = [
    EVERYTHING,
    TimerQuery("orders/+/timeout"),
    TimerQuery("clock/#"),
    TimerQuery("+/1"),
    TimerQuery("nobody/#"),
]


async def test_a_listing_has_the_messages_of_a_user_or_a_client(pending: Pending) -> None:
    ann, eve = Causer.of("ann", "10.0.0.1", "phone"), Causer.of("eve", "10.0.0.1", "tablet")
    of_ann, of_eve, _ = ([pending.add(HOUR_MS * hours, by=by) for hours in range(1, 31)] for by in (ann, eve, NODE))
    assert positions(await pending.pages(TimerQuery(user="ann"))) == of_ann
    assert positions(await pending.pages(TimerQuery(client="tablet"))) == of_eve
    assert positions(await pending.pages(TimerQuery(user="eve", from_ms=pending.messages[of_eve[20]][0]))) == of_eve[20:]
    assert await pending.pages(TimerQuery(user="ann", client="tablet")) == []


@pytest.mark.parametrize("seed", seeds(4, in_gate=1))
async def test_all_pages_together_have_each_pending_message_once_in_order(pending: Pending, seed: int) -> None:
    random = fill(pending, seed, 150)
    for position in random.sample(sorted(pending.messages), 40):
        pending.recall(position)
    for query in QUERIES:
        found = await pending.pages(query)
        assert positions(found) == pending.expected(query), query.filter
        assert all((each.due_ms, each.topic) == pending.messages[each.position] for each in found)


async def test_a_range_of_times_has_its_begin_and_not_its_end(pending: Pending) -> None:
    fill(pending, 1)
    dues = sorted({due_ms for due_ms, _ in pending.messages.values()})
    for begin, end in ((0, 50), (100, 101), (130, 200)):
        query = TimerQuery(from_ms=dues[begin], before_ms=dues[end])
        assert positions(await pending.pages(query)) == pending.expected(query) != []
    assert await pending.pages(TimerQuery(from_ms=dues[-1] + 1)) == []


@pytest.mark.parametrize("seed", seeds(12, in_gate=1))
async def test_what_is_pending_throughout_is_listed_once_while_others_fire_come_and_are_cancelled(
    pending: Pending, seed: int
) -> None:
    random = fill(pending, seed, 150)
    at_first = set(pending.messages)

    def live() -> None:
        for _ in range(random.randrange(6)):
            pending.add(random.randrange(1, 3 * DAY_MS), random.choice(TOPICS))
        for position in random.sample(sorted(pending.messages), 2):
            pending.recall(position)
        pending.advance(random.choice((0, 10, 5_000, 20 * MINUTE_MS)))

    found = positions(await pending.pages(between=live))
    assert len(found) == len(set(found))
    assert at_first & set(pending.messages) <= set(found)


async def test_a_page_looks_at_a_bounded_number_of_messages(pending: Pending) -> None:
    for number in range(120):
        pending.add(10 * DAY_MS + number)
    page = await pending.listing.page(EVERYTHING, "", 100)
    assert page.timers == []  # the bucket has more messages than one page looks at
    found = await pending.pages(rows_max=100)
    assert positions(found) == pending.expected()


async def test_a_forgotten_listing_goes_on_where_it_was(pending: Pending, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "SCANNED_MAX", 1_000)
    fill(pending, 3, 100)

    def forget() -> None:
        pending.listing = TimerListing(pending.parts.store, pending.parts.delayed.buckets, pending.parts.timer_keys)

    assert positions(await pending.pages(between=forget)) == pending.expected()


@pytest.mark.parametrize("keep_index", [True, False])
async def test_a_listing_goes_on_after_a_crash(pending: Pending, keep_index: bool, tmp_path: Path) -> None:
    fill(pending, 5, 60)
    expected = pending.expected()
    page = await pending.listing.page(EVERYTHING, "", 20)
    after = Pending(pending.parts.after_crash("later", keep_index=keep_index))
    found = positions(page.timers)
    while page.next_token:
        page = await after.listing.page(EVERYTHING, page.next_token, 20)
        found += positions(page.timers)
    after.parts.close()
    assert found == expected


async def test_messages_of_a_key_and_what_is_known_of_each(pending: Pending) -> None:
    causer = Causer.of("alice", "192.0.2.7", "press-1")
    keyed = pending.add(HOUR_MS, "orders/7/timeout", "7", causer)
    other = pending.add(2 * HOUR_MS, "orders/8/timeout", "7")
    for number in range(30):
        pending.add(HOUR_MS + number, "orders/7/timeout", f"other-{number}")
    pending.add(HOUR_MS, "orders/9/timeout")
    (first, second) = await pending.pages(TimerQuery(key="7"))
    assert (first.position, first.key, first.causer) == (keyed, "7", causer)
    assert (second.position, second.key, second.causer) == (other, "7", NODE)
    assert first.size > 0
    assert positions(await pending.pages(TimerQuery("orders/7/+", key="7"))) == [keyed]
    assert await pending.pages(TimerQuery("orders/9/+", key="7")) == []
    listed = {each.position: each.key for each in await pending.pages()}
    assert sorted(listed.values()) == sorted(["", "7", "7", *(f"other-{number}" for number in range(30))])


async def test_a_topic_that_the_caller_may_not_see_is_left_out_also_if_the_rights_change(pending: Pending) -> None:
    fill(pending, 2, 100)

    async def seen(token: str = "", hidden: str = "plant") -> tuple[list[ListedTimer], str]:
        page = await pending.listing.page(EVERYTHING, token, 5, lambda topic: not topic.startswith(hidden))
        return page.timers, page.next_token

    found, token = await seen()
    while not found:
        found, token = await seen(token)
    assert all(not each.topic.startswith("plant") for each in found)
    while token:
        more, token = await seen(token, "orders")
        assert all(not each.topic.startswith("orders") for each in more)


async def test_after_a_step_of_the_clock_no_message_is_missing(pending: Pending) -> None:
    begin_ms, begin = pending.parts.clock.now_ms(), pending.parts.store.log.end
    fill(pending, 4, 80)
    page = await pending.listing.page(EVERYTHING, "", 10)
    found = positions(page.timers)
    store, step_ms = pending.parts.store, 4 * HOUR_MS
    store.append(Kind.CLOCK_STEPPED, STEP_FIXED.pack(begin_ms, begin, step_ms))
    store.commit()
    while page.next_token:
        page = await pending.listing.page(EVERYTHING, page.next_token, 10)
        found += positions(page.timers)
    assert set(found) == set(pending.messages)


@pytest.mark.parametrize(
    ("query", "token", "rows_max", "error"),
    [
        (TimerQuery("orders/#/x"), "", 10, TopicInvalid),
        (TimerQuery(from_ms=-1), "", 10, ListingInvalid),
        (TimerQuery(before_ms=-1), "", 10, ListingInvalid),
        (TimerQuery(), "x", 10, ListingInvalid),
        (TimerQuery(), "ä" * 32, 10, ListingInvalid),
        (TimerQuery(), "", 0, ListingInvalid),
        (TimerQuery(), "", 10_001, ListingInvalid),
    ],
)
async def test_what_is_not_valid_is_refused(
    pending: Pending, query: TimerQuery, token: str, rows_max: int, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await pending.listing.page(query, token, rows_max)


def due_before(pending: Pending, end_ms: int) -> int:
    return sum(due_ms < end_ms for due_ms, _ in pending.messages.values())


@pytest.mark.parametrize("seed", seeds(8, in_gate=1))
async def test_what_is_due_soon_is_counted_exactly(pending: Pending, seed: int) -> None:
    random = fill(pending, seed, 100)
    for _ in range(25):
        for _ in range(random.randrange(8)):
            pending.add(random.choice((500, 2 * MINUTE_MS, 2 * HOUR_MS, 3 * DAY_MS)) * random.randrange(1, 4) // 2)
        for position in random.sample(sorted(pending.messages), min(len(pending.messages), random.randrange(5))):
            pending.recall(position)
        pending.advance(random.choice((0, 0, 100, 5_000, MINUTE_MS, 20 * MINUTE_MS, 7 * HOUR_MS)))
        now_ms = pending.parts.clock.now_ms()
        minute, hour = now_ms // MINUTE_MS, now_ms // HOUR_MS
        ends = ((minute + 2) * MINUTE_MS, (minute + 61) * MINUTE_MS, (hour + 25) * HOUR_MS)
        assert pending.parts.delayed.due_counts() == tuple(due_before(pending, end_ms) for end_ms in ends)
        assert await pending.listing.next_due_ms() == min((due_ms for due_ms, _ in pending.messages.values()), default=None)
