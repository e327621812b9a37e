"""The disk reserve: what each level refuses, when a level ends, and how the store handles errors of a full disk."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from penstock.store.bodies import TIMER_ENTRY
from penstock.store.errors import DiskFull
from penstock.store.files import Usage
from penstock.store.log import commitlog
from penstock.store.options import GIB, KIB, MIB
from penstock.store.record import QUEUE_FIXED, Kind
from penstock.store.space.space import ADDS, FREES, Level, Space
from penstock.store.store import Store
from tests.store.wiring import bodies, close, durable_queue, open_store, publish

TOTAL = 100 * GIB
RESERVE = GIB
FLOOR = RESERVE // 4


def free(store: Store, amount: int) -> None:
    """Set the free space of the disk to `amount` bytes, and make the store measure it."""
    store.space.probe = lambda: Usage(amount, TOTAL)
    store.measure_disk()


def publish_until_full(store: Store, sent: list[str], size: int = 1) -> None:
    """Publish to `plant/1` until the store refuses a message, and add the accepted bodies to `sent`."""
    while True:
        body = f"{len(sent)}".ljust(size, "x")
        publish(store, "plant/1", body)
        sent.append(body)


def space_of(tmp_path: Path, total: int, **options: Any) -> Space:
    space = Space(tmp_path, **options)
    space.probe = lambda: Usage(total, total)
    space.measure()
    return space


@pytest.mark.parametrize(
    ("total", "options", "reserve"),
    [
        (252 * GIB, {"reserve_bytes": GIB, "reserve_percent": 5}, GIB),
        (10 * GIB, {"reserve_bytes": GIB, "reserve_percent": 5}, GIB // 2),
        (10 * GIB, {"reserve_bytes": 0, "reserve_percent": 5}, 0),
        (10 * GIB, {"reserve_bytes": GIB, "reserve_percent": 0}, 0),
        (10 * GIB, {}, 0),
    ],
)
def test_the_smaller_of_bytes_and_percent_is_the_reserve(
    tmp_path: Path, total: int, options: dict[str, int], reserve: int
) -> None:
    assert space_of(tmp_path, total, **options).reserve == reserve


def test_the_usage_of_a_real_disk_is_plausible(tmp_path: Path) -> None:
    space = Space(tmp_path)
    space.measure()
    assert 0 < space.usage.free < space.usage.total


@pytest.mark.parametrize(
    ("amounts", "level"),
    [
        ([RESERVE], Level.OPEN),
        ([RESERVE - 1], Level.READ_ONLY),
        ([FLOOR], Level.READ_ONLY),
        ([FLOOR - 1], Level.EXHAUSTED),
        ([RESERVE - 1, RESERVE], Level.READ_ONLY),
        ([RESERVE - 1, RESERVE * 10 // 9 + 1], Level.OPEN),
        ([FLOOR - 1, FLOOR + 1], Level.EXHAUSTED),
        ([FLOOR - 1, FLOOR * 10 // 9 + 1], Level.READ_ONLY),
        ([FLOOR - 1, TOTAL], Level.OPEN),
        ([FLOOR - 1, RESERVE], Level.READ_ONLY),
    ],
)
def test_a_level_begins_at_its_bound_and_ends_a_ninth_above(tmp_path: Path, amounts: list[int], level: Level) -> None:
    space = Space(tmp_path, reserve_bytes=RESERVE)
    for amount in amounts:
        space.probe = lambda amount=amount: Usage(amount, TOTAL)  # type: ignore[misc]
        space.measure()
    assert space.level is level


def test_watchers_are_told_only_of_relief_and_never_during_an_append(tmp_path: Path) -> None:
    space = Space(tmp_path, reserve_bytes=RESERVE)
    told: list[Level] = []
    space.on_relief.append(lambda: told.append(space.level))
    for amount, may_rise in [(0, False), (TOTAL, False), (TOTAL, True), (TOTAL, True)]:
        space.probe = lambda amount=amount: Usage(amount, TOTAL)  # type: ignore[misc]
        space.measure(may_rise=may_rise)
    assert told == [Level.OPEN]


@pytest.mark.parametrize("level", Level)
@pytest.mark.parametrize("kind", Kind)
def test_each_level_refuses_its_kinds(tmp_path: Path, level: Level, kind: Kind) -> None:
    space = Space(tmp_path)
    space.level = level
    refused = {Level.OPEN: frozenset(), Level.READ_ONLY: ADDS, Level.EXHAUSTED: frozenset(Kind) - FREES}[level]
    if kind in refused:
        with pytest.raises(DiskFull):
            space.check(kind)
        assert space.refused == {(kind, level): 1}
    else:
        space.check(kind)
        assert space.refused == {}


def test_operators_learn_how_much_is_free_and_clients_nothing_of_the_host(tmp_path: Path) -> None:
    store = open_store(tmp_path, reserve_bytes=RESERVE)
    free(store, 900 * MIB)
    with pytest.raises(DiskFull, match=r"too little room on its disk .* nothing new is stored until its operator") as refused:
        publish(store, "plant/1")
    assert str(tmp_path) not in str(refused.value)
    assert re.search(r"900 MiB free.*reserve is 1024 MiB \(store.reserve_bytes.*add space", store.space.why())
    assert str(tmp_path) in store.space.why()
    close(store)


def test_a_read_only_store_ends_work_and_begins_none(tmp_path: Path) -> None:
    store = open_store(tmp_path, reserve_bytes=RESERVE)
    position = publish(store, "plant/1", "before")
    queue = store.queues.declare("plant/+", "group:1")
    free(store, RESERVE - 1)
    end = store.log.end
    for refused in ("plant/1", "office/1"):
        with pytest.raises(DiskFull):
            publish(store, refused, "refused")
    with pytest.raises(DiskFull):
        store.queues.declare("office/+", "group:1")
    assert store.log.end == end
    store.append(Kind.TIMER_CANCELLED, body=TIMER_ENTRY.pack(position, 1))
    store.queues.declare("$dlq/1", "group:1")
    store.queues.drop(queue, "group:1")
    free(store, TOTAL)
    publish(store, "plant/1", "after")
    store.commit()
    assert bodies(store, durable_queue(store, "plant/#")) == ["before", "after"]
    assert store.space.refused == {(Kind.MESSAGE, Level.READ_ONLY): 1, (Kind.QUEUE_DECLARED, Level.READ_ONLY): 2}
    close(store)


def test_a_fast_writer_is_stopped_between_two_measurements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commitlog, "ALLOCATE_BYTES", 4 * KIB)
    store = open_store(tmp_path, reserve_bytes=RESERVE, segment_bytes=MIB)
    began = store.log.end
    left = 40 * KIB
    store.space.probe = lambda: Usage(RESERVE + left - (store.log.end - began), TOTAL)
    with pytest.raises(DiskFull):
        publish_until_full(store, [], 1000)
    assert left <= store.log.end - began <= left + 2 * 4 * KIB + 2 * KIB
    close(store)


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT], ids=["no space", "quota"])
def test_a_write_that_the_kernel_refuses_is_not_applied_and_works_again_once_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    monkeypatch.setattr(commitlog, "ALLOCATE_BYTES", KIB)
    store = open_store(tmp_path / "0")
    sent = []
    with monkeypatch.context() as full:

        def allocate(fd: int, offset: int, length: int) -> None:
            raise OSError(error, os.strerror(error))

        publish(store, "plant/1", "0")
        sent.append("0")
        full.setattr(os, "posix_fallocate", allocate)
        with pytest.raises(DiskFull):
            publish_until_full(store, sent)
        assert os.strerror(error) in store.space.why()
        store.commit()
        store.measure_disk()
        assert store.space.was_refused, "statvfs does not show a quota, so the store must remember the refusal"
        assert 1 < len(sent) < 50
        assert bodies(store, durable_queue(store, "plant/#")) == sent
    store.measure_disk()
    assert store.space.level is Level.OPEN
    publish(store, "plant/1", "after")
    close(store)
    again = open_store(tmp_path / "0")
    assert bodies(again, durable_queue(again, "plant/#")) == [*sent, "after"]
    close(again)


@pytest.mark.parametrize("failing", ["open", "posix_fallocate"])
def test_a_segment_without_room_leaves_no_file_and_the_old_segment_stays_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    store = open_store(tmp_path / "0", segment_bytes=KIB)
    sent: list[str] = []
    genuine = getattr(os, failing)

    def refuse(*arguments: int | str) -> int | None:
        if failing == "open" and not str(arguments[0]).endswith(".log"):
            return genuine(*arguments)
        raise OSError(errno.ENOSPC, "No space left on device")

    publish(store, "plant/1", "first")
    sent.append("first")
    with monkeypatch.context() as full:
        full.setattr(os, failing, refuse)
        for _ in range(2):
            with pytest.raises(DiskFull):
                publish_until_full(store, sent, 50)
            store.measure_disk()
            assert store.space.was_refused, "the old segment has room, but not for the refused record"
    assert len(list(store.log.directory.iterdir())) == 1
    store.measure_disk()
    publish(store, "plant/1", "last")
    sent.append("last")
    assert len(list(store.log.directory.iterdir())) == 2
    close(store)
    again = open_store(tmp_path / "0", segment_bytes=KIB)
    assert bodies(again, durable_queue(again, "plant/#")) == sent
    close(again)


def test_a_file_system_without_allocation_ahead_can_still_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(fd: int, offset: int, length: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", allocate)
    store = open_store(tmp_path, segment_bytes=KIB)
    for number in range(100):
        publish(store, "plant/1", str(number))
    store.commit()
    assert store.space.level is Level.OPEN
    assert bodies(store, durable_queue(store, "plant/#")) == [str(number) for number in range(100)]
    close(store)


def test_records_that_free_space_are_accepted_at_every_level(tmp_path: Path) -> None:
    store = open_store(tmp_path, reserve_bytes=RESERVE)
    queue = store.queues.declare("plant/+", "group:1")
    free(store, 0)
    with pytest.raises(DiskFull):
        store.append(Kind.TIMER_CANCELLED, body=TIMER_ENTRY.pack(0, 1))
    store.append(Kind.QUEUE_DROPPED, QUEUE_FIXED.pack(queue.id), b"plant/+", b"", b'{"owner":"group:1"}')
    assert store.queues.find("plant/+") is None
    close(store)
