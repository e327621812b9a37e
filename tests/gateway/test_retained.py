"""The search for retained messages and their place in the store, without a broker."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.delivery import topic_lists
from penstock.gateway.delivery.retained_messages import EXPIRED_PER_CALL, RetainedMessages
from penstock.gateway.delivery.topic_lists import LEVELS_INDEXED
from penstock.store import topics
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.index.index import KeySpace
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.options import HOUR_MS, KIB, MIB, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.queues.lightqueue import ENTRY
from penstock.store.record import HEADER_BYTES, Flag, Kind, decode
from penstock.store.recovery.repair import repair, survey
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import NODE, Causer
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.store.wiring import close, publish, retain, work_on

OPTIONS = StoreOptions(segment_bytes=16 * MIB)
SHORT = StoreOptions(segment_bytes=16 * KIB, retention_ms=HOUR_MS)


class Retained:
    """A store with retained messages and no event loop. The test commits by itself."""

    def __init__(self, directory: Path, clock: ManualClock | None = None, options: StoreOptions = OPTIONS) -> None:
        self.clock = clock or ManualClock()
        directory.mkdir(exist_ok=True)
        self.store = Store(directory, options, self.clock)
        self.messages = RetainedMessages(lambda _: self.clock.now_ms(), self.store.ledger)
        self.store.add_part(self.messages)
        self.store.recover()

    def put(
        self, topic: str, body: bytes = b"x", *, expiry_ms: int = 0, delayed: bool = False, by: Causer = NODE
    ) -> tuple[int, int]:
        """Retain a message and return position and size of its record."""
        flags = Flag.RETAIN | (Flag.DELAYED if delayed else 0)
        expires_at_ms = self.clock.now_ms() + expiry_ms if expiry_ms else 0
        properties = encode_properties(Properties(expires_at_ms=expires_at_ms, by=by.row()))
        position = self.store.append_message(self.store.router.route(topic.encode()), body, properties, flags)
        size = self.store.log.end - position
        self.store.commit()
        return position, size

    def found(self, topic_filter: str) -> list[str]:
        """Return the topics of the messages that a subscription would get, in order."""
        entries = [entry for entry in self.messages.matching(topic_filter, self.store.log.end) if entry]
        records = [decode(self.store.read(position, size)) for position, size, _ in map(ENTRY.unpack, entries)]
        return [record.topic.decode() for record in records]

    def close(self) -> None:
        self.store.index.close()
        self.store.log.close()


@contextmanager
def opened(directory: Path) -> Iterator[Retained]:
    one = Retained(directory)
    try:
        yield one
    finally:
        one.close()


WORDS = st.sampled_from(["", "a", "b", "ab", "a!", "\u00fc"])
TOPICS = st.lists(WORDS, min_size=1, max_size=5).map("/".join).filter(bool)
FILTERS = st.builds(
    lambda levels, rest: "/".join([*levels, *(["#"] if rest else [])]),
    st.lists(WORDS | st.just("+"), min_size=1, max_size=4),
    st.booleans(),
).filter(bool)


@settings(max_examples=10 * DEPTH)
@given(st.lists(TOPICS, max_size=25), st.lists(FILTERS | st.just("#"), min_size=1, max_size=8), st.data())
def test_a_search_finds_what_the_definition_of_a_match_finds_in_order(
    stored: list[str], filters: list[str], data: st.DataObject
) -> None:
    cleared = data.draw(st.lists(st.sampled_from(stored), unique=True)) if stored else []
    with TemporaryDirectory() as directory, opened(Path(directory)) as some:
        for topic in stored:
            some.put(topic)
        for topic in cleared:
            some.put(topic, b"")
        left = sorted({*stored} - {*cleared}, key=str.encode)
        assert len(some.messages) == len(left)
        for topic_filter in filters:
            assert some.found(topic_filter) == [topic for topic in left if topics.matches(topic_filter, topic)]


def test_topics_with_more_levels_than_are_indexed_are_found(tmp_path: Path) -> None:
    deep = "/".join("abcdefghijkl")
    assert deep.count("/") >= LEVELS_INDEXED
    with opened(tmp_path) as some:
        for topic in (deep, deep + "/m", deep.replace("l", "x")):
            some.put(topic)
        assert some.found("a/+/c/d/e/f/g/h/i/j/k/l") == [deep]
        assert some.found("a/b/c/d/e/f/g/h/i/j/+/l") == [deep]
        assert some.found("+/#") == [deep, deep + "/m", deep.replace("l", "x")]


@pytest.mark.parametrize(("topic_filter", "looks_max"), [("+/dev7/+", 30), ("+/+/rare", 10), ("site3/+/rare", 5), ("+", 2)])
def test_a_search_does_not_read_every_topic(
    tmp_path: Path, topic_filter: str, looks_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = 0
    look: Callable[..., bytes | None] = topic_lists._TopicList.at_or_after

    def counted(self: topic_lists._TopicList, topic: bytes) -> bytes | None:
        nonlocal looks
        looks += 1
        return look(self, topic)

    monkeypatch.setattr(topic_lists._TopicList, "at_or_after", counted)
    with opened(tmp_path) as some:
        for device in range(200):
            for name in ("temp", "rpm", "rare" if device % 100 == 3 else "volt"):
                some.put(f"site{device % 5}/dev{device}/{name}")
        some.found(topic_filter)
    assert 0 < looks <= looks_max


def test_retained_messages_are_there_after_a_restart(tmp_path: Path) -> None:
    with opened(tmp_path) as some:
        for topic in ("a/1", "a/2", "b"):
            some.put(topic)
        some.put("a/2", b"")
        some.store.index.flush()
    with opened(tmp_path) as again:
        assert again.found("+/+") == ["a/1"]
        assert again.found("#") == ["a/1", "b"]
        assert len(again.messages) == 2


def test_an_expired_message_is_not_found_and_its_rows_are_deleted(tmp_path: Path) -> None:
    with opened(tmp_path) as some:
        some.put("a/1", expiry_ms=1000)
        some.put("a/2", expiry_ms=1001)
        some.clock.advance(1000)
        assert some.found("a/+") == ["a/2"]
        some.put("other")
        assert len(some.messages) == 2
        some.clock.advance(1)
        assert some.found("a/2") == []
        some.put("a/2")  # In the same turn, the row of the old message would be deleted.
        assert some.found("#") == ["a/2", "other"]


@pytest.mark.parametrize("is_search", [True, False])
def test_what_goes_on_later_leaves_what_has_replaced_an_expired_message(tmp_path: Path, is_search: bool) -> None:
    with opened(tmp_path) as some:
        some.put("a/1")
        some.put("a/2", expiry_ms=1000)
        end = some.store.log.end
        found: Iterator[object] = some.messages.matching("#", end) if is_search else some.messages.live(end)
        next(found)  # From now on it reads the index as it is now.
        some.put("a/2", b"new")
        some.clock.advance(1000)
        list(found)
        some.store.commit()
        assert some.found("#") == ["a/1", "a/2"]
        ledger = some.store.ledger
        assert len(some.messages) == ledger.held(Resource.RETAINED) == 2
        assert ledger.held(Resource.RETAINED_BYTES) == sum(size for _, size in some.messages.live(some.store.log.end))


def test_messages_that_have_expired_are_given_up_without_a_search(tmp_path: Path) -> None:
    with opened(tmp_path) as some:
        for number in range(EXPIRED_PER_CALL + 1):
            some.put(f"a/{number}", expiry_ms=1000)
        some.put("kept")
        some.put("later", expiry_ms=1000)
        some.put("later", expiry_ms=2000)
        some.clock.advance(999)
        assert not some.messages.end_expired(some.clock.now_ms())
        assert len(some.messages) == EXPIRED_PER_CALL + 3
        some.clock.advance(1)
        assert some.messages.end_expired(some.clock.now_ms())
        assert not some.messages.end_expired(some.clock.now_ms())
        some.store.commit()
        assert len(some.messages) == some.store.ledger.held(Resource.RETAINED) == 2
        assert [key[1:].decode() for key, _ in some.store.index.rows(bytes(KeySpace.RETAINED))] == ["kept", "later"]
        assert len(list(some.store.index.rows(bytes(KeySpace.RETAINED_DUE)))) == 1
        some.clock.advance(1000)
        some.messages.end_expired(some.clock.now_ms())
        some.store.commit()
        assert list(some.store.index.rows(bytes(KeySpace.RETAINED_DUE))) == []


def test_a_repair_leaves_each_retained_message_with_its_publisher(tmp_path: Path) -> None:
    ann, bob = Causer.of("ann", "192.0.2.1", "pump"), Causer.of("bob", "192.0.2.2", "press")
    with opened(tmp_path) as some:
        some.put("a", b"x" * 100, by=ann)
        position, _ = some.put("a", b"x" * 100, by=bob)
        _, size = some.put("a", b"x" * 50, by=bob)
        some.store.log.sync()
    (segment,) = (tmp_path / LOG_DIRECTORY).iterdir()
    damaged = bytearray(segment.read_bytes())
    damaged[position + HEADER_BYTES] ^= 1
    segment.write_bytes(damaged)
    repair(tmp_path, survey(tmp_path).damages)
    with opened(tmp_path) as again:
        ledger = again.store.ledger
        assert (ledger.held(Resource.RETAINED, ann), ledger.held(Resource.RETAINED, bob)) == (0, 1)
        assert ledger.held(Resource.RETAINED_BYTES, bob) == ledger.held(Resource.RETAINED_BYTES) == size


@pytest.mark.parametrize(("kind", "is_kept"), [(Kind.TIMER_FIRED, True), (Kind.TIMER_CANCELLED, False)])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_delayed_message_is_retained_when_it_fires(tmp_path: Path, kind: Kind, is_kept: bool, restarts: bool) -> None:
    with opened(tmp_path) as some:
        some.put("a", b"old")
        entry = some.put("a", b"new", delayed=True)
        some.put("b", delayed=True)
        assert [position for position, _, _ in map(ENTRY.unpack, some.messages.matching("#", some.store.log.end))] != [entry[0]]
        if not restarts:
            some.store.append(kind, body=TIMER_ENTRY.pack(*entry))
            some.store.commit()
        some.store.index.flush()
    with opened(tmp_path) as again:
        if restarts:
            again.store.append(kind, body=TIMER_ENTRY.pack(*entry))
            again.store.commit()
        (found,) = [ENTRY.unpack(one)[0] for one in again.messages.matching("#", again.store.log.end) if one]
        assert (found == entry[0]) == is_kept


def test_retained_messages_outlive_the_segments_that_they_were_stored_in(tmp_path: Path) -> None:
    clock = ManualClock()
    some = Retained(tmp_path / "data", clock, SHORT)
    store, messages = some.store, some.messages
    publish(store, "plant/1", "kept", flags=Flag.RETAIN)
    publish(store, "plant/2", "replaced", flags=Flag.RETAIN)
    for hour in range(3):
        clock.advance(HOUR_MS // 2)
        retain(store)
        publish(store, "plant/2", f"kept of {hour}", flags=Flag.RETAIN)
        for _ in range(20):
            publish(store, "other/1", "x" * 2000)
            work_on(store)
        clock.advance(HOUR_MS // 2)
        retain(store)
    assert store.log.start > 0
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    some = Retained(tmp_path / "data", clock, SHORT)
    store, messages = some.store, some.messages
    entries = [ENTRY.unpack(entry) for entry in messages.matching("plant/+", store.log.end) if entry]
    assert [decode(store.read(position, size)).body for position, size, _ in entries] == [b"kept", b"kept of 2"]
    close(store)


def test_a_retained_message_is_not_carried_forward_when_its_time_is_over(tmp_path: Path) -> None:
    clock = ManualClock()
    some = Retained(tmp_path / "data", clock, SHORT)
    store, messages = some.store, some.messages
    for number, expires_at_ms in enumerate((clock.now_ms() + HOUR_MS, clock.now_ms() + 10 * HOUR_MS)):
        properties = encode_properties(Properties(expires_at_ms=expires_at_ms))
        store.append_message(store.router.route(b"plant/%d" % number), b"short", properties, Flag.RETAIN)
    for _ in range(3):
        clock.advance(HOUR_MS // 2)
        retain(store)
        for _ in range(20):
            publish(store, "other/1", "x" * 2000)
            work_on(store)
        clock.advance(HOUR_MS // 2)
        retain(store)
    assert len(messages) == 1
    assert [key for key, _ in store.index.rows(bytes(KeySpace.RETAINED))] == [b"Rplant/1"]
    assert len(list(store.index.rows(bytes(KeySpace.COPY)))) == 1
    close(store)
