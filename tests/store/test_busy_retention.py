"""Retention keeps to its limit while segments fill many times a second, and says what keeps it from that.

The store runs on a loop in virtual time, so nothing depends on the speed of the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from structlog.testing import capture_logs

from penstock.store.options import KIB, StoreOptions
from penstock.store.queues.queues import Queues
from penstock.store.retention import retention
from penstock.store.retention.retention import Blocker
from penstock.store.retention.trimming import Trimming
from penstock.store.snapshots.snapshots import Snapshots
from penstock.store.store import Platform, Store
from tests.simulation.process import SimulatedSync
from tests.simulation.virtualtime import LaterExecutor, Time, VirtualLoop
from tests.store.keeper import Keeper
from tests.store.wiring import close, publish

SEGMENT_BYTES = 4 * KIB
LIMIT = 8 * SEGMENT_BYTES

SEGMENT_S = 0.05
"""Seconds in which a segment fills: twenty a second."""

SYNC_S = 0.01
"""Seconds that a sync takes, and what an executor does."""


class Steady(Random):
    """Takes the second of several times, so that an executor always takes as long."""

    def choice(self, seq: Any) -> Any:
        return seq[1]


class BusyStore:
    """A store on a loop in virtual time, and a publisher that fills its segments."""

    def __init__(self, data_dir: Path) -> None:
        self.keeper = Keeper()
        self._time = Time()
        self._loop = VirtualLoop(self._time, Steady())
        executor = LaterExecutor(Steady())
        executor.loop = self._loop
        data_dir.mkdir()
        self.store = Store(
            data_dir,
            StoreOptions(segment_bytes=SEGMENT_BYTES, retention_bytes=LIMIT, retention_ms=0),
            self._time.clock(1),
            platform=Platform(
                make_sync=lambda log, loop, ended: SimulatedSync(log, loop, ended, Steady(), lambda: SYNC_S), executor=executor
            ),
        )
        self.store.add_part(self.keeper)
        self.store.recover()
        self.failures: list[OSError] = []
        self.store.start(self._loop.loop, self.failures.append)

    @property
    def size(self) -> int:
        """Bytes of the log."""
        return self.store.log.written - self.store.log.start

    def run(self, seconds: float) -> None:
        """Let time pass."""
        self._loop.run_until(self._time.now_s + seconds)

    def fill(self, segments: int) -> int:
        """Publish so much, twenty segments a second, and return how many bytes the log had at most."""
        most = 0
        for _ in range(4 * segments):
            publish(self.store, "plant/1", "x" * (SEGMENT_BYTES // 4 - 64))
            self.run(SEGMENT_S / 4)
            most = max(most, self.size)
        return most


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[BusyStore]:
    made = BusyStore(tmp_path / "data")
    yield made
    assert made.failures == []
    close(made.store)


def test_the_log_keeps_to_its_limit_while_twenty_segments_a_second_fill(busy: BusyStore) -> None:
    assert busy.fill(25) <= LIMIT + SEGMENT_BYTES + 3 * SEGMENT_BYTES, "the open segment, and what fills in a few syncs"
    assert blocked_by(busy) is None


def test_a_trimming_that_takes_long_delays_no_deletion(busy: BusyStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def endless(_: Trimming) -> Iterator[bool]:
        while True:
            yield False

    monkeypatch.setattr(Trimming, "steps", endless)
    assert busy.fill(20) <= LIMIT + 5 * SEGMENT_BYTES


def test_copies_count_besides_the_limit_so_that_they_are_not_made_again_and_again(busy: BusyStore) -> None:
    size = SEGMENT_BYTES // 4
    while sum(busy.keeper.needed.values()) <= LIMIT:
        position = publish(busy.store, "plant/1", "x" * (size - 31))
        busy.keeper.needed[position] = busy.store.log.end - position
        busy.run(SEGMENT_S / 4)
    assert busy.fill(16) <= LIMIT + sum(busy.keeper.needed.values()) + 5 * SEGMENT_BYTES
    busy.run(2)
    copied, pinned = busy.store.retention.copied_bytes, busy.store.copies.pinned_bytes
    assert pinned > LIMIT
    busy.run(5)
    assert busy.store.retention.copied_bytes == copied


def blocked_by(busy: BusyStore) -> Blocker | None:
    return busy.store.retention.blocked_by


def hold(busy: BusyStore, _: pytest.MonkeyPatch) -> Callable[[], None]:
    busy.store.retention.holds.add(Blocker.BACKUP)
    return busy.store.retention.holds.clear


def need_for_tables(busy: BusyStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(busy.store.retention, "needed_from", lambda: SEGMENT_BYTES // 2)
    return monkeypatch.undo


def keep_backfilling(_: BusyStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(Queues, "backfills_from_before", lambda *_: True)
    return monkeypatch.undo


def take_no_snapshots(_: BusyStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(Snapshots, "begin", lambda *_: None)
    return monkeypatch.undo


def need_too_much(busy: BusyStore, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    monkeypatch.setattr(Keeper, "live", lambda *_: iter([(0, busy.store.options.copied_bytes_max + 1)]))
    monkeypatch.setattr(retention, "BLOCKED_RETRY_S", 1.0)
    return monkeypatch.undo


@pytest.mark.parametrize(
    ("blocker", "block"),
    [
        (Blocker.BACKUP, hold),
        (Blocker.TABLES, need_for_tables),
        (Blocker.BACKFILL, keep_backfilling),
        (Blocker.WORK, take_no_snapshots),
        (Blocker.COPIES, need_too_much),
    ],
    ids=lambda each: each.value if isinstance(each, Blocker) else "",
)
def test_what_keeps_segments_is_named_and_logged_once(
    busy: BusyStore,
    monkeypatch: pytest.MonkeyPatch,
    blocker: Blocker,
    block: Callable[[BusyStore, pytest.MonkeyPatch], Callable[[], None]],
) -> None:
    with monkeypatch.context() as bound, capture_logs() as lines:
        bound.setattr(retention, "OVERRUN_BYTES", 2 * SEGMENT_BYTES)
        end = block(busy, monkeypatch)
        busy.fill(16)
        busy.run(3)
        assert blocked_by(busy) is blocker
        assert [line["reason"] for line in lines if line["event"] == "retention.blocked"] == [blocker]
        assert busy.store.log.start == 0
    end()
    busy.fill(2)
    busy.run(3)
    assert blocked_by(busy) is None
    assert busy.size <= LIMIT + 2 * SEGMENT_BYTES
