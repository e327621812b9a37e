"""A store that is used, killed, cut and reopened in any order, checked against a model made from a list of events."""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from penstock.store.index.index import KeySpace
from penstock.store.queues import backfill as backfill_module
from penstock.store.queues import lightqueue as lightqueue_module
from penstock.store.queues.catalogue import Catalogue
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES, LightQueue, Start
from penstock.store.recovery import recovery as recovery_module
from penstock.store.store import Store
from penstock.store.topics import matches
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.store.cutting import cut_log
from tests.store.keeper import Keeper
from tests.store.wiring import close, crash, entries, fill, numbered_bodies, open_store, publish, retain, work_on

SEGMENT_BYTES = 600
RETENTION_BYTES = 2000
KEPT_MAX = 4
"""Messages at most that a part of the store keeps at a time. Their copies take a part of what retention lets the log have."""

topics = st.sampled_from(["plant/1", "plant/2/temp", "office/1", "office/1/temp", "/1", "yard"])
filters = st.sampled_from(["plant/#", "plant/+", "plant/2/temp", "+/1", "#", "+/+/temp", "office/1", "yard"])
owners = st.sampled_from(["group:a", "session:b"])
BEGAN_MS = 1_000
starts: st.SearchStrategy[Start] = st.sampled_from(["earliest", "latest", BEGAN_MS + 2, BEGAN_MS + 5])


class Event(NamedTuple):
    """A record of the log in the model's terms, with the position at which the record ends."""

    end: int
    what: str
    name: str
    detail: str
    ms: int
    start: Start = "latest"


class Expected(NamedTuple):
    owners: set[str]
    bodies: list[str]
    declared: int
    """End of the record that first declared the queue."""


ROOT_FILTER = "plant/#"
"""The one of `filters` that names a root. Its queue has all messages, whatever start a declaration gives."""

Key = tuple[str, Start]
"""Filter and start, which identify a durable queue."""


def key_of(topic_filter: str, start: Start) -> Key:
    return topic_filter, "latest" if topic_filter == ROOT_FILTER else start


def model(events: list[Event], log_start: int) -> dict[Key, Expected]:
    """Return the queues that follow from the log, without roots that nobody has declared.

    No record spans two segments, so the log still has exactly the records that end after its start.
    """
    found: dict[Key, Expected] = {}
    for at, (end, what, name, detail, _, start) in enumerate(events):
        if what == "message":
            if end <= log_start:
                continue
            for (topic_filter, _), queue in found.items():
                if matches(topic_filter, name):
                    queue.bodies.append(detail)
        elif what == "declare":
            before = events[:at] if start != "latest" or name == ROOT_FILTER else []
            since_ms = start if isinstance(start, int) and name != ROOT_FILTER else 0
            left = (event for event in before if event.end > log_start and event.what == "message" and event.ms >= since_ms)
            old = [event.detail for event in left if matches(name, event.name)]
            found.setdefault(key_of(name, start), Expected(set(), old, end)).owners.add(detail)
        else:
            key = key_of(name, start)
            found[key].owners.discard(detail)
            if not found[key].owners:
                del found[key]
    return found


class StoreMachine(RuleBasedStateMachine):
    """`events` are all appended records; `durable` is the position up to which a power cut leaves the log intact."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: dict[tuple[Key, int], dict[str, int]] = {}
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(backfill_module, "SLICE_BYTES", 100)
        self.patch.setattr(recovery_module, "REPLAY_BYTES", 1000)
        self.patch.setattr(lightqueue_module, "ROW_ENTRIES", 4)
        self.clock = ManualClock(BEGAN_MS)
        self.directory = Path(mkdtemp(prefix="penstock-store-"))
        self.lives = 0
        self.numbers = 0
        self.events: list[Event] = []
        self.attached: dict[str, tuple[LightQueue, int]] = {}
        self.positions: dict[str, int] = {}
        """Position of each message, by body."""
        self.keeper = Keeper()
        self.seen: dict[Key, dict[int, str]] = {}
        """Bodies by offset that each durable queue had at the last check, if the index was not lost since."""
        self.seen_ids: dict[Key, int] = {}
        self.store: Store
        self.durable = 0
        self.flushed = 0
        """Position up to which the index is on disk."""

    @property
    def data_dir(self) -> Path:
        return self.directory / str(self.lives)

    @initialize()
    def open(self) -> None:
        self.store = open_store(
            self.data_dir,
            clock=self.clock,
            parts=[self.keeper],
            segment_bytes=SEGMENT_BYTES,
            retention_bytes=RETENTION_BYTES,
        )
        self.durable = self.store.log.written
        self.attached = {}

    def teardown(self) -> None:
        try:
            if hasattr(self, "store"):
                self.check()
                close(self.store)
        finally:
            shutil.rmtree(self.directory)
            self.patch.undo()

    # --- work -------------------------------------------------------------------------------------------------------

    @rule(topic=topics, count=st.integers(1, 12), size=st.integers(0, 300))
    def publish(self, topic: str, count: int, size: int) -> None:
        for _ in range(count):
            self.numbers += 1
            body = f"{self.numbers}:" + "x" * size
            self.positions[body] = publish(self.store, topic, body)
            self.note("message", topic, body)

    @rule(topic=topics, size=st.integers(0, 20))
    def publish_what_a_part_keeps(self, topic: str, size: int) -> None:
        """Publish a message whose record retention must carry forward."""
        if len(self.keeper.needed) < KEPT_MAX:
            self.publish(topic, 1, size)
            position = self.positions[self.events[-1].detail]
            self.keeper.needed[position] = self.events[-1].end - position

    @precondition(lambda self: self.keeper.needed)
    @rule(data=st.data())
    def need_a_kept_message_no_longer(self, data: st.DataObject) -> None:
        del self.keeper.needed[data.draw(st.sampled_from(sorted(self.keeper.needed)))]

    @rule(ms=st.integers(1, 3))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms)

    def note(self, what: str, name: str, detail: str, start: Start = "latest") -> None:
        self.events.append(Event(self.store.log.end, what, name, detail, self.store.now_ms(), start))

    def begun(self, start: Start) -> Start:
        """Return the start of a queue that is declared now; a time in the future means "latest"."""
        return "latest" if isinstance(start, int) and start > self.store.now_ms() else start

    @rule(topic_filter=filters, owner=owners, start=starts)
    def declare(self, topic_filter: str, owner: str, start: Start) -> None:
        before, begun = self.store.log.end, self.begun(start)
        self.store.queues.declare(topic_filter, owner, start)
        if self.store.log.end > before:
            self.note("declare", topic_filter, owner, begun)

    @rule(topic_filter=filters, owner=owners, start=starts)
    def drop(self, topic_filter: str, owner: str, start: Start) -> None:
        queue = self.store.queues.find(*key_of(topic_filter, start))
        if queue is not None and owner in queue.owners:
            self.store.queues.drop(queue, owner)
            self.note("drop", topic_filter, owner, start)

    @rule(topic_filter=filters)
    def attach(self, topic_filter: str) -> None:
        queue = self.store.queues.attach(topic_filter, "connection:1")
        if queue.transient:
            self.attached.setdefault(topic_filter, (queue, len(self.events)))

    @rule(topic_filter=filters)
    def detach(self, topic_filter: str) -> None:
        if topic_filter in self.attached:
            self.store.queues.detach(self.attached.pop(topic_filter)[0], "connection:1")

    @rule()
    def commit(self) -> None:
        self.store.commit()

    @rule()
    def fill_a_slice(self) -> None:
        self.store.commit()
        self.store.queues.backfill()

    @rule()
    def sync(self) -> None:
        self.store.commit()
        self.store.log.sync()
        self.durable = self.store.log.written

    @rule()
    def flush_the_index(self) -> None:
        self.store.commit()
        self.store.index.flush()
        self.flushed = self.store.log.written

    @rule(topic=topics, segments=st.integers(0, 6))
    def retain(self, topic: str, segments: int) -> None:
        """Fill some segments, finish their snapshots, and drop the segments that exceed the bound."""
        for _ in range(segments):
            self.publish(topic, 3, 200)
            work_on(self.store)
        start = self.store.log.start
        retain(self.store)
        self.durable = max(self.durable, self.store.log.start)
        if self.store.log.start > start:
            self.check_what_trimming_leaves()

    @rule(steps=st.integers(1, 20))
    def retain_a_little(self, steps: int) -> None:
        """Do a few steps of retention, so that other rules run in the middle of it."""
        self.store.retention.begin_due()
        for _ in range(steps):
            self.store.retention.step(0.0)
        self.durable = max(self.durable, self.store.log.start)

    # --- stops and restarts -----------------------------------------------------------------------------------------

    @rule()
    def restart(self) -> None:
        end = self.store.log.end
        close(self.store)
        self.flushed = end
        self.open()
        assert self.store.log.end == end
        self.check()

    @rule(keep_index=st.booleans())
    def kill(self, keep_index: bool) -> None:
        """Kill the process: written bytes remain, all others are lost."""
        self._come_back(self.store.log.written, b"", keep_index)

    @precondition(lambda self: self.store.log.written > self.durable)
    @rule(part=st.floats(0, 1), garbage=st.binary(max_size=60), keep_index=st.booleans())
    def cut_the_power(self, part: float, garbage: bytes, keep_index: bool) -> None:
        """Cut the power: any part of the bytes that were not durable remains, and garbage may follow it."""
        durable = max(self.durable, self.store.log.segments()[-1][0])  # a segment is synced before the next one begins
        self._come_back(durable + int(part * (self.store.log.written - durable)), garbage, keep_index)

    def _come_back(self, cut: int, garbage: bytes, keep_index: bool) -> None:
        print(f"log: durable until {self.durable}, written until {self.store.log.written}, left until {cut}")
        old = self.data_dir
        self.lives += 1
        crash(self.store, self.data_dir)
        shutil.rmtree(old)
        cut_log(self.data_dir, cut, garbage, SEGMENT_BYTES)
        if not (keep_index and self.store.log.start <= self.flushed <= cut):
            self.seen.clear()  # the index is rebuilt, if need be from a snapshot, which has no entries of messages
            self.flushed = 0
        if not keep_index:
            shutil.rmtree(self.data_dir / "index")
        self.events = [event for event in self.events if event.end <= cut]
        left = {event.detail for event in self.events if event.what == "message"}
        self.seen = {key: {offset: body for offset, body in seen.items() if body in left} for key, seen in self.seen.items()}
        self.keeper.needed = {position: size for position, size in self.keeper.needed.items() if position + size <= cut}
        self.open()
        self.check()

    @rule()
    def check(self) -> None:
        self.store.commit()
        fill(self.store)
        start_of_log = self.store.retention.expires_before
        wanted = model(self.events, start_of_log)
        for (topic_filter, start), (names, sent, declared) in wanted.items():
            queue = self.store.queues.find(topic_filter, start)
            assert queue is not None, topic_filter
            assert queue.owners - {"root"} == names, topic_filter
            found = self.check_bodies(queue, sent)
            self.check_seen((topic_filter, start), queue.id, found)
            known = self.offsets.setdefault(((topic_filter, start), declared), {})
            for offset, body in found.items():
                assert known.setdefault(body, offset) == offset, (topic_filter, body)
        kept = (queue for queue in self.store.queues if not queue.transient)
        rest = {queue.filter: queue for queue in kept if (queue.filter, queue.start) not in wanted}
        for topic_filter, queue in rest.items():
            assert queue.owners == {"root"}, topic_filter
            left = (event for event in self.events if event.what == "message" and event.end > start_of_log)
            self.check_bodies(queue, [event.detail for event in left if matches(topic_filter, event.name)])
        for topic_filter, (queue, since) in self.attached.items():
            later = (event for event in self.events[since:] if event.what == "message" and event.end > start_of_log)
            self.check_bodies(queue, [event.detail for event in later if matches(topic_filter, event.name)])
        assert len(self.store.queues) == len(wanted) + len(rest) + len(self.attached)
        self.check_what_is_saved()

    def check_bodies(self, queue: LightQueue, sent: list[str]) -> dict[int, str]:
        """Check that a queue has the messages of the log, after older ones that were carried forward. Return all by offset."""
        found = numbered_bodies(self.store, queue)
        listed = list(found.values())
        kept, rest = listed[: len(listed) - len(sent)], listed[len(listed) - len(sent) :]
        assert rest == sent, queue.filter
        positions = [self.positions[body] for body in kept]
        assert positions == sorted(positions)
        assert all(self.store.copies.where(position) is not None for position in positions)
        return found

    def check_seen(self, key: Key, queue_id: int, found: dict[int, str]) -> None:
        """Check that a queue still has the entry of each message that can be read, if it had it at the last check."""
        seen = self.seen.get(key, {}) if self.seen_ids.get(key) == queue_id else {}
        for offset, body in seen.items():
            assert found.get(offset) == body or self.store.is_expired(self.positions[body]), (key, offset, body)
        self.seen[key], self.seen_ids[key] = found, queue_id

    def check_what_trimming_leaves(self) -> None:
        """Check that after a drop of segments no row is left that should be gone."""
        start, index = self.store.log.start, self.store.index
        for _, row in index.rows(bytes(KeySpace.PINNED)):
            for position, _, _ in ENTRY.iter_unpack(row):
                copy = self.store.copies.where(position)
                assert copy is not None
                assert copy >= start
        last = b""
        for key, row in index.rows(bytes(KeySpace.ENTRIES)):
            if key[:5] != last[:5]:
                assert max(position for position, _, _ in ENTRY.iter_unpack(row)) >= start, "the first row of its queue"
            last = key

    def check_what_is_saved(self) -> None:
        """Check that newly loaded queues equal the queues that have been held all along."""
        saved = {queue.id: queue for queue in Catalogue(self.store.index)}
        for queue in self.store.queues:
            if not queue.transient:
                found = saved.pop(queue.id)
                assert (found.filter, found.start, found.owners) == (queue.filter, queue.start, queue.owners)
                assert (found.open_offset, found.open_row) == (queue.open_offset, queue.open_row)
                assert len(queue.open_row) < 4 * ENTRY_BYTES
                assert found.read_from(0, 1_000) == queue.read_from(0, 1_000)
                assert found.first_offset() == queue.first_offset() == found.read_from(0, 1_000)[0]
                assert found.count_from(0) == queue.count_from(0) == len(entries(queue))
        assert not saved


def test_a_power_cut_takes_what_was_seen_before_it() -> None:
    """A search found this: the model took the messages that were gone for some that had to come back."""
    machine = StoreMachine()
    try:
        machine.open()
        machine.publish("plant/1", 9, 0)
        machine.declare("plant/#", "group:a", "earliest")
        machine.publish("plant/1", 9, 0)
        machine.check()
        machine.cut_the_power(0.0, b"", True)
    finally:
        machine.teardown()


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=6 * DEPTH, stateful_step_count=30)
