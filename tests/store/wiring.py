"""A store without an event loop: the test itself does what the loop would do."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.store.clock import SteerableClock
from penstock.store.files import SYSTEM_FILES, Files
from penstock.store.options import KIB, StoreOptions
from penstock.store.part import Part
from penstock.store.properties import Properties, encode_properties, tag_hash
from penstock.store.queues.lightqueue import ENTRY, ENTRY_BYTES, LightQueue, Start
from penstock.store.record import decode
from penstock.store.store import Platform, Store
from tests.clock import ManualClock

SEGMENT_BYTES = 16 * KIB

NEVER_S = float("inf")
"""A time that the clock never reaches, for a slice that does all work there is."""


def open_store(
    data_dir: Path,
    *,
    clock: SteerableClock | None = None,
    parts: Sequence[Part] = (),
    files: Files = SYSTEM_FILES,
    **options: Any,
) -> Store:
    """Return a store that has recovered. `options` are those of `StoreOptions`; segments are small by default."""
    data_dir.mkdir(exist_ok=True)
    store = Store(
        data_dir,
        StoreOptions(**{"segment_bytes": SEGMENT_BYTES, "sync_in": "thread", **options}),
        clock or ManualClock(),
        platform=Platform(files=files),
    )
    for part in parts:
        store.add_part(part)
    store.recover()
    return store


def publish(store: Store, topic: str, body: str = "", tag: str = "", flags: int = 0) -> int:
    """Append a message, and return its position. The message can be read after `store.commit()`."""
    properties = encode_properties(Properties(tag=tag))
    return store.append_message(store.router.route(topic.encode()), body.encode(), properties, flags, tag_hash(tag))


def fill(store: Store) -> None:
    """Commit, and backfill new queues completely, as the loop would in several turns."""
    store.commit()
    while store.queues.backfill():
        store.commit()
    store.commit()


def work_on(store: Store) -> None:
    """Do all work that retention has begun. It stops where it must wait for a backfill."""
    while store.retention.step(NEVER_S) and not store.queues.backfills_from_before(store.log.end):
        time.sleep(0.0002)  # lets the thread of the snapshots run, which would wait for the interpreter's lock otherwise


def retain(store: Store) -> None:
    """Do all retention that is due now. No backfill may be under way, because retention would wait for it."""
    fill(store)
    work_on(store)  # complete the snapshots that were begun
    store.retention.begin_due()
    work_on(store)
    store.commit()


def durable_queue(store: Store, topic_filter: str, start: Start = "latest") -> LightQueue:
    """Return the durable queue of a filter and start, which must exist."""
    queue = store.queues.find(topic_filter, start)
    assert queue is not None, (topic_filter, start)
    return queue


def positions(queue: LightQueue, offset: int = 0, count: int = 1_000_000) -> list[int]:
    return [position for position, _, _ in entries(queue, offset).values()][:count]


def entries(queue: LightQueue, offset: int = 0) -> dict[int, tuple[int, int, int]]:
    """Return position, size and aux of each entry that a queue has from an offset on, by the offset of the entry."""
    found: dict[int, tuple[int, int, int]] = {}
    while True:
        first, run = queue.read_from(offset, 1_000_000)
        if not run:
            return found
        found.update(enumerate(ENTRY.iter_unpack(run), first))
        offset = first + len(run) // ENTRY_BYTES


def bodies(store: Store, queue: LightQueue) -> list[str]:
    """Return the bodies of a queue's messages that have not expired, in order; check the checksum of each."""
    return list(numbered_bodies(store, queue).values())


def numbered_bodies(store: Store, queue: LightQueue) -> dict[int, str]:
    """Return the bodies of a queue's messages that have not expired, by offset."""
    return {
        offset: decode(store.read(position, size), position=position).body.decode()
        for offset, (position, size, _) in entries(queue).items()
        if not store.is_expired(position)
    }


Contents = dict[tuple[str, Start], tuple[list[str], dict[int, tuple[int, int, int]]]]
"""Owners and entries of queues by filter and start, as `contents` returns them."""


def contents(store: Store) -> Contents:
    """Return owners and entries of every durable queue by filter and start, all of which recovery must restore."""
    durable = (queue for queue in store.queues if not queue.transient)
    return {(queue.filter, queue.start): (sorted(queue.owners), entries(queue)) for queue in durable}


def close(store: Store) -> None:
    """Commit, save the index, and close the files, as `Store.close` does on a loop."""
    store.commit()
    store.log.sync()
    store.index.flush()
    store.retention.close()
    store.index.close()
    store.log.close()


def crash(store: Store, left: Path) -> None:
    """Copy to `left` the files that a process killed now would leave, then close the store."""
    copy_left(store.data_dir, left)
    store.retention.close()
    store.index.close()
    store.log.close()


def copy_left(data_dir: Path, left: Path) -> None:
    """Copy to `left` the files of a data directory as a process that has it open would leave them if it were killed now.

    The index loses what is only in its memory, so the copy is made before the index is closed.
    """
    copied = False
    while not copied:
        with suppress(FileNotFoundError, shutil.Error):  # RocksDB has deleted a file in a compaction
            before = _files(data_dir)
            shutil.copytree(data_dir, left, ignore=shutil.ignore_patterns("*.sock"))  # sockets can't be copied
            copied = _files(data_dir) == before
        if not copied:
            shutil.rmtree(left, ignore_errors=True)


def _files(data_dir: Path) -> list[tuple[str, int]]:
    entries = (entry for name in ("index", "commitlog") for entry in os.scandir(data_dir / name))
    return sorted((entry.path, entry.stat().st_size) for entry in entries)
