"""Each byte of a small log is flipped in turn: no wrong message, no hang, and each error names the place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.delivery.encoding import EVERY_POSITION, DeliveryOptions, encode_batch
from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.protocol.decode import decode
from penstock.gateway.protocol.fixed_header import FROM_SERVER
from penstock.pop.core.core import PopCore
from penstock.pop.core.deliveries import VisibilityChange
from penstock.pop.core.groups import ResetTo
from penstock.pop.core.handle import Handles, load_secret
from penstock.pop.core.pops import PopResult
from penstock.pop.core.transactions import Transactions
from penstock.pop.options import PopOptions
from penstock.store.bodies import TIMER_ENTRY
from penstock.store.errors import LogCorrupt
from penstock.store.log.commitlog import CommitLog
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.log.syncmark import FILE
from penstock.store.log.tail import Tail
from penstock.store.options import KIB, StoreOptions
from penstock.store.properties import Properties, encode_properties
from penstock.store.queues.backfill import Backfill, LogStretches
from penstock.store.queues.lightqueue import ENTRY, LightQueue
from penstock.store.record import Flag, Kind, Record
from penstock.store.recovery.repair import survey
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages, Recalled
from penstock.timer.options import TimerOptions
from tests.clock import ManualClock
from tests.store.wiring import fill

MASKS = (0x01, 0xFF)
START_MS = 1_700_000_000_000
ONE_SEGMENT, TWO_SEGMENTS = 64 * KIB, 1900
EVERY = pytest.mark.parametrize("every", [23, pytest.param(1, marks=[pytest.mark.nightly, pytest.mark.timeout(1800)])])
"""How far apart the bytes are that are flipped: `make test` flips at least one of each record, `make nightly` each byte."""

BEHIND = 32
"""The number of bytes after the last record that are flipped, too."""


class Whole:
    """A store with all of its parts."""

    def __init__(self, data_dir: Path, segment_bytes: int, clock: ManualClock) -> None:
        data_dir.mkdir(exist_ok=True)
        self.clock = clock
        self.store = Store(data_dir, StoreOptions(segment_bytes=segment_bytes, reserve_bytes=0), clock)
        self.delayed = DelayedMessages(self.store, TimerOptions())
        self.retained = RetainedMessages(self.store.now_of, self.store.ledger)
        options = PopOptions(attempts_max=2, transaction_check_ms=60_000)
        self.handles = Handles(load_secret(data_dir))
        self.core = PopCore(self.store, self.handles, options, TimerOptions())
        self.groups = self.core.groups
        self.transactions = Transactions(self.store, options, TimerOptions())
        for part in (self.delayed, self.retained, self.transactions, self.core.part):
            self.store.add_part(part)
        self.recovery = self.store.recover()
        fill(self.store)

    def publish(self, topic: str, body: bytes, flags: int = 0, properties: bytes = b"") -> int:
        position = self.store.append_message(self.store.router.route(topic.encode()), body, properties, flags)
        self.store.commit()
        return position

    def take(self, count: int) -> tuple[PopResult, list[str]]:
        group = self.core.groups.get_or_create("g", "plant/#")
        fill(self.store)
        taken = self.core.popper.pop(group, count, 1000)
        self.store.commit()
        assert taken is not None
        checkpoint = taken.checkpoint
        return taken, self.handles.deliveries(checkpoint.position, checkpoint.pop_ms, group.id, checkpoint.count)

    def advance(self, ms: int) -> None:
        self.store.commit()
        self.clock.advance(ms)
        while self.core.fire_due() or self.delayed.fire_due() or self.transactions.fire_due():
            self.store.commit()
        self.store.commit()

    def queues(self) -> Iterator[LightQueue]:
        return (queue for queue in self.store.queues if not queue.transient)

    def close(self) -> None:
        self.store.commit()
        self.store.index.flush()
        self.store.retention.close()
        self.store.index.close()
        self.store.log.close()


def write_log(data_dir: Path, segment_bytes: int) -> list[Record]:
    """Write records of every kind that is in use, and return them."""
    whole = Whole(data_dir, segment_bytes, ManualClock(START_MS))
    store = whole.store
    whole.publish("plant/1", b"one")
    whole.publish("plant/1", b"kept", int(Flag.RETAIN) | 1)
    for delay_ms in (500, 900_000):
        properties = encode_properties(Properties(deliver_at_ms=START_MS + delay_ms))
        position = whole.publish("plant/2", b"late %d" % delay_ms, int(Flag.DELAYED), properties)
    assert whole.delayed.recall(position, START_MS + 900_000) is Recalled.CANCELLED
    queue = store.queues.declare("plant/+", "session:1")
    store.queues.drop(queue, "session:1")
    store.queues.declare("+/1", "session:2", "earliest")
    _, handles = whole.take(1)
    whole.core.deliveries.ack("g", handles)
    _, handles = whole.take(1)
    whole.core.deliveries.change_invisible("g", [VisibilityChange(handles[0], 2000)])
    whole.advance(600)
    whole.advance(5_000)
    whole.take(1)
    whole.take(1)
    whole.advance(5_000)
    assert whole.core.dead_letters.redrive("g") == 1
    whole.groups.pause("g")
    whole.groups.reset("g", "plant/#", ResetTo(end="latest"))
    whole.core.groups.get_or_create("h", "plant/#")
    whole.groups.delete("h")
    producer = encode_properties(Properties(producer="p"))
    committed, rolled_back, _ = (whole.publish("plant/1", body, int(Flag.HALF), producer) for body in (b"c", b"r", b"p"))
    whole.transactions.end(committed, commit=True)
    whole.transactions.end(rolled_back, commit=False)
    whole.advance(60_000)
    whole.publish("plant/3", b"", int(Flag.RETAIN))
    whole.publish("plant/3", b"properties", 2, encode_properties(Properties([("a", "b")], "tag")))
    whole.close()
    log = CommitLog(data_dir, segment_bytes=segment_bytes)
    log.recover()
    records = list(log.scan(0))
    log.close()
    return records


USED = {
    Kind.MESSAGE,
    Kind.QUEUE_DECLARED,
    Kind.QUEUE_DROPPED,
    Kind.QUEUE_BACKFILLED,
    Kind.POP_CHECKPOINT,
    Kind.POP_ACK,
    Kind.POP_INVISIBLE_CHANGED,
    Kind.POP_REVIVED,
    Kind.POP_DEAD_LETTER,
    Kind.GROUP_CREATED,
    Kind.GROUP_CHANGED,
    Kind.GROUP_OFFSET_RESET,
    Kind.GROUP_DELETED,
    Kind.DEAD_LETTER_REDRIVEN,
    Kind.TIMER_FIRED,
    Kind.TIMER_CANCELLED,
    Kind.TRANSACTION_COMMITTED,
    Kind.TRANSACTION_ROLLED_BACK,
    Kind.TRANSACTION_CHECKED,
}
ROUTING = (Kind.TIMER_FIRED, Kind.TRANSACTION_COMMITTED)


@pytest.fixture(scope="module", params=[ONE_SEGMENT, TWO_SEGMENTS], ids=["one segment", "two segments"])
def log_of(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int, list[Record]]:
    """A data directory, the size of its segments, and its records."""
    data_dir = tmp_path_factory.mktemp("flipped") / "data"
    records = write_log(data_dir, request.param)
    assert {record.kind for record in records} == USED
    assert len(list((data_dir / LOG_DIRECTORY).iterdir())) == (1 if request.param == ONE_SEGMENT else 2)
    return data_dir, request.param, records


def flips(data_dir: Path, records: list[Record], every: int) -> Iterator[tuple[Path, int, int]]:
    """Yield for each of some bytes of the log its file, its offset in the file, and its position."""
    paths = sorted((data_dir / LOG_DIRECTORY).iterdir())
    end = records[-1].position + records[-1].size
    for path, stop in zip(paths, [*(int(path.stem) for path in paths[1:]), end + BEHIND], strict=True):
        base = int(path.stem)
        for offset in range(-base % every, stop - base, every):
            yield path, offset, base + offset


class Flipped:
    """Changes one byte of a file until the block ends."""

    def __init__(self, path: Path, offset: int, mask: int) -> None:
        self.handle = os.open(path, os.O_RDWR)
        self.offset = offset
        self.byte = os.pread(self.handle, 1, offset)
        self.mask = mask

    def __enter__(self) -> None:
        os.pwrite(self.handle, bytes([self.byte[0] ^ self.mask]), self.offset)

    def __exit__(self, *_: object) -> None:
        os.pwrite(self.handle, self.byte, self.offset)
        os.close(self.handle)


def record_at(records: list[Record], position: int) -> Record | None:
    return next((r for r in records if r.position <= position < r.position + r.size), None)


def copy_of(data_dir: Path, name: str, *, keep_mark: bool, keep_index: bool = False) -> Path:
    copy = data_dir.with_name(name)
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(data_dir, copy)
    if not keep_mark:
        (copy / FILE).unlink()
    if not keep_index:
        shutil.rmtree(copy / "index")
    return copy


def check_messages(whole: Whole, records: list[Record]) -> int:
    """Read every queue, check that each message is byte for byte what was stored, and return the number of messages."""
    stored = {record.position: record for record in records}
    came = 0
    for queue in whole.queues():
        entries = queue.read(0, 10_000)
        for position, size, _ in ENTRY.iter_unpack(entries):
            data = whole.store.read_intact(position, size)
            if data is not None:
                found = stored[position]
                assert data.endswith(found.topic + found.properties + found.body)
                assert len(data) == found.size
                came += 1
        packets, _ = decode(
            encode_batch(whole.store, entries, DeliveryOptions(0), verify_before=EVERY_POSITION).data, KIB, FROM_SERVER
        )
        sent = {(record.topic, record.body) for record in records if record.kind == Kind.MESSAGE}
        assert {(packet[2], packet[4]) for packet in packets} <= sent
    return came


def recovered(data_dir: Path, segment_bytes: int) -> Tail | str:
    """Return the tail that recovery finds at the end of a log, or the message with which recovery refuses the log."""
    log = CommitLog(data_dir, segment_bytes=segment_bytes)
    try:
        return log.recover()
    except LogCorrupt as error:
        return str(error)
    finally:
        log.abandon()


@EVERY
def test_a_start_names_the_record_or_clears_the_tail(
    log_of: tuple[Path, int, list[Record]], monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """The logs have no mark, as after a power cut soon after the first start. Each distinct result is checked once."""
    for call in ("fsync", "fdatasync"):
        # Syncs would slow down a thousand starts, and nothing here has to survive a power cut.
        monkeypatch.setattr(os, call, lambda _: None)
    data_dir, segment_bytes, records = log_of
    flipped = copy_of(data_dir, "flipped", keep_mark=False)
    last = records[-1]
    left: dict[int, Path] = {}
    refused: set[int] = set()
    whole_files = {path: path.read_bytes() for path in (flipped / LOG_DIRECTORY).iterdir()}
    for path, offset, position in flips(flipped, records, every):
        damaged = record_at(records, position)
        for mask in MASKS:
            # A start clears the tail and writes the mark, so each start gets fresh copies of the files.
            with Flipped(path, offset, mask):
                found = recovered(flipped, segment_bytes)
                if isinstance(found, str):
                    assert damaged is not None
                    refused.add(damaged.position)
                    assert damaged is not last
                    assert f"position {damaged.position} " in found
                    assert path.name in found
                else:
                    assert damaged in (last, None)
                    assert found.end == (last.position if damaged else last.position + last.size)
                    assert found.torn_bytes > 0
                    if found.end not in left:
                        left[found.end] = flipped.with_name(f"left-{found.end}")
                        shutil.copytree(flipped, left[found.end])
            if not isinstance(found, str):
                path.write_bytes(whole_files[path])
                (flipped / FILE).unlink()
    assert refused == {record.position for record in records[:-1]}
    assert len(left) == 2
    for end, kept in left.items():
        whole = Whole(kept, segment_bytes, ManualClock(START_MS + 1_000_000))
        assert whole.store.log.start == 0
        assert check_messages(whole, [record for record in records if record.position < end]) > 5
        whole.close()


@EVERY
def test_a_damaged_record_of_an_orderly_closed_log_is_never_cleared_as_a_torn_tail(
    log_of: tuple[Path, int, list[Record]], every: int
) -> None:
    data_dir, segment_bytes, records = log_of
    flipped = copy_of(data_dir, "marked", keep_mark=True)
    for path, offset, position in flips(flipped, records, every):
        damaged = record_at(records, position)
        if damaged is None:
            continue
        with Flipped(path, offset, MASKS[offset % 2]):
            found = recovered(flipped, segment_bytes)
            assert isinstance(found, str)
            assert f"position {damaged.position} " in found
            assert path.name in found
            (damage,) = survey(flipped).damages
            assert (damage.position, damage.length, damage.segment) == (damaged.position, damaged.size, path.name)


def test_a_refused_log_can_be_opened_once_it_is_restored(log_of: tuple[Path, int, list[Record]]) -> None:
    data_dir, segment_bytes, records = log_of
    flipped = copy_of(data_dir, "refused", keep_mark=True)
    for path, offset, position in flips(flipped, records, 211):
        damaged = record_at(records, position)
        if damaged is None:
            continue
        with Flipped(path, offset, 0x10), pytest.raises(LogCorrupt, match=f"position {damaged.position} "):
            Whole(flipped, segment_bytes, ManualClock(START_MS + 1_000_000))
    whole = Whole(flipped, segment_bytes, ManualClock(START_MS + 1_000_000))
    assert check_messages(whole, records) > 5
    whole.close()


@EVERY
def test_a_running_node_delivers_everything_except_damaged_records(
    log_of: tuple[Path, int, list[Record]], monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """A kept index lists records that no start reads again, so each reader must detect the damage itself."""
    monkeypatch.setattr("penstock.store.store.logger.error", lambda *_, **__: None)
    monkeypatch.setattr("penstock.store.log.block.logger.error", lambda *_, **__: None)
    data_dir, segment_bytes, records = log_of
    kept = copy_of(data_dir, "kept", keep_mark=True, keep_index=True)
    whole = Whole(kept, segment_bytes, ManualClock(START_MS + 1_000_000))
    log = whole.store.log
    entries = {queue.filter: queue.read(0, 10_000) for queue in whole.queues()}
    everything = LightQueue(77, "#", whole.store.index, 0)

    def filled() -> set[int]:
        filling = Backfill(LogStretches(log), everything, 0)
        found = set()
        while filling.position < log.written:
            found |= {position for position, _, _ in filling.slice(filling.reach())}
        return found

    def readable() -> set[int]:
        found = set()
        for row in entries.values():
            for position, size, _ in ENTRY.iter_unpack(row):
                data = whole.store.read_intact(position, size)
                if data is not None:
                    assert data == originals[position]
                    found.add(position)
        return found

    originals = {record.position: log.read(record.position, record.size) for record in records}
    all_filled, all_readable = filled(), readable()
    assert len(all_filled) == 6
    fired = {r.position: {p for p, _ in TIMER_ENTRY.iter_unpack(r.body)} for r in records if r.kind in ROUTING}
    delayed = set().union(*fired.values())
    for path, offset, position in flips(kept, records, every):
        damaged = record_at(records, position)
        if damaged is None:
            continue
        with Flipped(path, offset, MASKS[offset % 2]):
            assert readable() == all_readable - {damaged.position}
            # A delayed or transactional message gets its queue entry from the record that says that it is delivered. The
            # reader of the message finds the damage.
            assert filled() == all_filled - ({damaged.position} - delayed) - fired.get(damaged.position, set())
    whole.close()
