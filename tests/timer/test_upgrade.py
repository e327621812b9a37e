"""An index or a snapshot of the format before is brought to the present one, without the records that it was made from."""

from __future__ import annotations

from pathlib import Path
from struct import Struct

import pytest

from penstock.node import parts as node_parts
from penstock.store.index.index import META_KEY, OWN_KEYS, Index, after
from penstock.store.index.rowformats import FORMAT
from penstock.store.options import HOUR_MS, MINUTE_MS
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from penstock.store.snapshots import snapshotwriter
from penstock.store.snapshots.snapshotreader import SnapshotReader
from penstock.store.snapshots.snapshotwriter import SnapshotWriter, restore
from penstock.timer import buckets
from penstock.timer.buckets import CHUNK, COUNTS, RECALLED_COUNTS
from penstock.timer.upgrade import upgrade_from_17
from tests.pop.wiring import TOPIC, Parts

EARLIER = 17
VERSION = Struct("<I")
DELAYS_MS = (90 * MINUTE_MS, 3 * HOUR_MS, 30 * HOUR_MS, 70 * 24 * HOUR_MS)
PENDING = 60
"""Messages that are pending: three of four of twenty messages with each delay."""


def delay(parts: Parts, delay_ms: int) -> tuple[int, int]:
    """Store a delayed message; return its position and when it is due."""
    due_ms = parts.clock.now_ms() + delay_ms
    encoded = encode_properties(Properties(deliver_at_ms=due_ms))
    position = parts.store.append_message(parts.store.router.route(TOPIC.encode()), b"x", encoded, int(Flag.DELAYED))
    parts.store.commit()
    return position, due_ms


def rows_of(index: Index) -> dict[bytes, bytes]:
    return {key: value for key, value in index.rows(b"") if key not in OWN_KEYS}


def made_earlier(index: Index) -> None:
    """Give an index the rows that the format before has."""
    batch = index.batch()
    for key, value in index.rows(COUNTS):
        batch.put(key, value[: VERSION.size])
    batch.delete_range(RECALLED_COUNTS, after(RECALLED_COUNTS))
    row = index.get(META_KEY)
    assert row is not None
    batch.put(META_KEY, VERSION.pack(EARLIER) + row[VERSION.size :])
    index.write(batch)
    index.flush()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the directory of a stopped node with delayed messages in buckets of each width, some of them recalled."""
    monkeypatch.setattr(buckets, "FRESH_MAX", 8)
    parts = Parts(tmp_path / "data")
    named = [delay(parts, delay_ms + number * MINUTE_MS) for delay_ms in DELAYS_MS for number in range(20)]
    for position, due_ms in named[::4]:
        parts.delayed.recall(position, due_ms)
    parts.settle()
    parts.store.index.flush()
    parts.close()
    return tmp_path / "data"


def test_an_index_of_the_format_before_is_upgraded_and_not_rebuilt(home: Path) -> None:
    index = Index(home)
    expected = rows_of(index)
    assert [key for key in expected if key.startswith(RECALLED_COUNTS)], "the test has rows that the format before lacks"
    made_earlier(index)
    assert rows_of(index) != expected
    index.close()
    parts = Parts(home)
    assert not parts.recovery.rebuilt
    assert rows_of(parts.store.index) == expected
    parts.close()


def test_a_snapshot_of_the_format_before_is_restored(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    index = Index(home)
    expected = rows_of(index)
    made_earlier(index)
    monkeypatch.setattr(snapshotwriter, "FORMAT", EARLIER)
    writing = SnapshotWriter(home, index, 0, 1)
    for _ in writing.slices():
        pass
    writing.finish()
    writing.close()
    index.close()
    assert SnapshotReader(home, 0).is_earlier
    Index.destroy(home)
    index = Index(home)
    restore(home, 0, index, upgrade_from_17)
    timers = {key: value for key, value in expected.items() if key[:1] == COUNTS[:1]}
    assert {key: value for key, value in rows_of(index).items() if key[:1] == COUNTS[:1]} == timers
    index.close()


def test_rows_of_the_format_before_that_are_damaged_let_the_start_rebuild_the_index(home: Path) -> None:
    index = Index(home)
    made_earlier(index)
    batch = index.batch()
    batch.put(next(iter(index.rows(CHUNK)))[0], b"no messages")
    index.write(batch)
    index.flush()
    index.close()
    parts = Parts(home)
    assert parts.recovery.rebuilt
    assert len(parts.delayed) == PENDING
    parts.close()


def test_an_upgrade_that_a_crash_interrupts_is_done_again(home: Path) -> None:
    index = Index(home)
    expected = rows_of(index)
    made_earlier(index)
    upgrade_from_17(index)  # the version of the index is still the earlier one
    assert index.upgrade(upgrade_from_17)
    assert rows_of(index) == expected
    assert not index.upgrade(upgrade_from_17)
    index.close()


def test_a_node_has_the_upgrade_from_the_format_before() -> None:
    """Whoever raises the format writes the upgrade from the one before, and wires it."""
    assert f"upgrade_from_{FORMAT - 1}" in vars(node_parts)
