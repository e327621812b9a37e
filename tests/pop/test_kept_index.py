"""Repairs of a log whose beginning retention has dropped: the index is kept where nothing can replace it."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest

from penstock.cli.repair_log import repair_log
from penstock.pop.options import PopOptions
from penstock.store.errors import LogCorrupt
from penstock.store.files import SystemFiles
from penstock.store.index.index import DAMAGED, DIRECTORY, DISCARDED, Index
from penstock.store.log.commitlog import CommitLog
from penstock.store.options import HOUR_MS, KIB, StoreOptions
from penstock.store.record import Kind, Record
from penstock.store.recovery.indexplan import Fate
from penstock.store.recovery.repair import repair, survey
from tests.pop.wiring import FILTER, GROUP, Parts
from tests.store.wiring import retain, work_on

STORE = StoreOptions(segment_bytes=16 * KIB, retention_ms=HOUR_MS)
POP = PopOptions(invisible_ms_max=1000 * HOUR_MS)
NEW_GROUP = "auditors"


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    """Parts that have stopped. Retention has dropped the beginning of their log, and all snapshots are damaged.

    The group has acknowledged all messages up to `3`, and `4` is in flight.
    """
    parts = Parts(tmp_path_factory.mktemp("dropped") / "data", store=STORE, pop=POP)
    parts.group()
    parts.publish(b"0", b"1")
    parts.ack(*[message.handle for message in parts.pop()])
    for _ in range(2):
        parts.advance(HOUR_MS // 2)
        retain(parts.store)
        for _ in range(10):
            parts.publish(b"x" * 2000, topic="other/1")
            work_on(parts.store)
    parts.advance(HOUR_MS // 2)
    retain(parts.store)
    assert parts.store.log.start
    parts.publish(b"2", b"3", b"4")
    parts.ack(*[message.handle for message in parts.pop(2)])
    parts.pop(1, 500 * HOUR_MS)
    parts.publish(b"5", b"6")
    parts.close()
    for path in (parts.data_dir / "snapshots").iterdir():
        path.write_bytes(path.read_bytes()[:-20])
    return parts


def copied(stopped: Parts, tmp_path: Path) -> Path:
    shutil.copytree(stopped.data_dir, tmp_path / "data", dirs_exist_ok=True)
    return tmp_path / "data"


def records(data_dir: Path) -> list[Record]:
    log = CommitLog(data_dir, segment_bytes=STORE.segment_bytes)
    log.recover()
    found = list(log.scan(log.start))
    log.close()
    return found


def flip(data_dir: Path, record: Record, at: int = 9) -> None:
    path = max(path for path in (data_dir / "commitlog").iterdir() if int(path.stem) <= record.position)
    data = bytearray(path.read_bytes())
    data[record.position - int(path.stem) + at] ^= 0x41
    path.write_bytes(data)


def restarted(stopped: Parts, data_dir: Path) -> Parts:
    return Parts(data_dir, stopped.clock, store=STORE, pop=POP)


def bodies(parts: Parts, group: str = "billing") -> list[bytes]:
    found = []
    while delivered := parts.pop(group=group):
        found += [message.body for message in delivered]
        parts.ack(*(message.handle for message in delivered), group=group)
    return found


def test_a_node_starts_with_groups_and_deliveries_whichever_record_is_damaged(stopped: Parts, tmp_path: Path) -> None:
    for damaged in [each for each in records(copied(stopped, tmp_path)) if each.topic != b"other/1"]:
        data_dir = copied(stopped, tmp_path)
        flip(data_dir, damaged)
        planned = repair(data_dir, survey(data_dir).damages)
        assert planned.fate is Fate.ADJUSTED, Kind(damaged.kind)
        parts = restarted(stopped, data_dir)
        assert not parts.recovery.rebuilt
        assert bodies(parts) == [each for each in (b"5", b"6") if each != damaged.body], Kind(damaged.kind)
        assert parts.group().in_flight == 1
        parts.publish(b"7")
        assert bodies(parts) == [b"7"]
        parts.advance(500 * HOUR_MS)
        assert bodies(parts) == ([b"4"] if damaged.body != b"4" else [])
        assert set(bodies(parts, NEW_GROUP)) >= {b"5", b"6", b"7"} - {damaged.body}
        parts.close()
        again = restarted(stopped, data_dir)
        assert bodies(again) == []
        again.close()
        shutil.rmtree(data_dir)


@pytest.mark.parametrize("fifo", [False, True])
def test_what_follows_a_damaged_message_is_not_passed_over(tmp_path: Path, fifo: bool) -> None:
    """The log goes back to position 0, so the index could be built again. But its queue would have fewer entries."""
    parts = Parts(tmp_path / "data", store=STORE, pop=POP)
    parts.create(fifo=fifo)
    parts.publish(*(b"%d" % number for number in range(10)))
    for _ in range(3):
        parts.ack(*[message.handle for message in parts.pop(1)])
    parts.close()
    found = records(parts.data_dir)
    for body in (b"0", b"1", b"6"):
        flip(parts.data_dir, next(each for each in found if each.body == body))
    acked = next(each for each in found if each.kind == Kind.POP_ACK)
    flip(parts.data_dir, acked)
    assert repair(parts.data_dir, survey(parts.data_dir).damages).fate is Fate.ADJUSTED
    again = restarted(parts, parts.data_dir)
    assert not again.recovery.rebuilt
    assert bodies(again) == [b"3", b"4", b"5", b"7", b"8", b"9"]
    again.close()


@pytest.mark.parametrize("declared", [b"$dlq/billing", b"$retry/1"])
def test_a_group_lives_on_without_the_declaration_of_an_internal_queue(tmp_path: Path, declared: bytes) -> None:
    parts = Parts(tmp_path / "data", store=STORE, pop=POP)
    parts.create(attempts_max=2, backoff=())
    _, dead, _ = parts.publish(b"0", b"1", b"2")
    popped = parts.pop(2)
    parts.ack(popped[0].handle)
    parts.core.deliveries.dead_letter(GROUP, [popped[1].handle])
    parts.store.commit()
    parts.close()
    found = [each for each in records(parts.data_dir) if each.kind == Kind.QUEUE_DECLARED and each.topic == declared]
    flip(parts.data_dir, found[0])
    Index.destroy(parts.data_dir)
    assert repair(parts.data_dir, survey(parts.data_dir).damages).fate is Fate.REBUILT
    for _ in range(2):
        parts = restarted(parts, parts.data_dir)
        parts.settle_queues()
        assert [letter.position for letter in parts.dead_letters.list(GROUP)] == [dead]
        parts.close()
    parts = restarted(parts, parts.data_dir)
    assert bodies(parts) == [b"2"]
    parts.close()


def test_a_group_that_was_created_again_is_there_once_though_its_deletion_was_damaged(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "data", store=STORE, pop=POP)
    parts.create()
    parts.publish(b"0", b"1")
    assert len(parts.pop(1)) == 1
    parts.core.groups.delete(GROUP, FILTER)
    parts.create()
    parts.close()
    deleted = next(each for each in records(parts.data_dir) if each.kind == Kind.GROUP_DELETED)
    flip(parts.data_dir, deleted)
    Index.destroy(parts.data_dir)
    repair(parts.data_dir, survey(parts.data_dir).damages)
    parts = restarted(parts, parts.data_dir)
    parts.settle_queues()
    assert [group.in_flight for group in parts.core.groups] == [0]
    assert bodies(parts) == [b"0", b"1"]
    parts.core.groups.delete(GROUP, FILTER)
    assert not list(parts.core.groups)
    parts.close()


def test_an_index_that_covers_nothing_damaged_is_kept_as_it_is(stopped: Parts, tmp_path: Path) -> None:
    parts = restarted(stopped, copied(stopped, tmp_path))
    parts.publish(b"7", b"8")
    data_dir = tmp_path / "left"
    shutil.copytree(parts.data_dir, data_dir)  # RocksDB has not flushed what came last
    parts.close()
    shutil.rmtree(data_dir / DIRECTORY)
    shutil.copytree(stopped.data_dir / DIRECTORY, data_dir / DIRECTORY)
    flip(data_dir, next(each for each in records(data_dir) if each.body == b"7"))
    assert repair(data_dir, survey(data_dir).damages).fate is Fate.KEPT
    again = restarted(stopped, data_dir)
    assert not again.recovery.rebuilt
    assert again.recovery.replayed == 2, "the marker, and the last message"
    assert bodies(again) == [b"5", b"6", b"8"]
    again.close()


def test_a_record_begins_where_a_kept_index_ends(stopped: Parts, tmp_path: Path) -> None:
    """The index covers a part of a damaged range."""
    data_dir = copied(stopped, tmp_path)
    last = records(data_dir)[-3:]
    index = Index(data_dir)
    covered = index.covered()
    assert covered is not None
    batch = index.batch()
    batch.put_covered(covered._replace(position=last[1].position))
    index.write(batch)
    index.close()
    for each in last:
        flip(data_dir, each, at=2)  # the size, so that it is one range
    (damage,) = survey(data_dir).damages
    assert damage.position == last[0].position < last[1].position < damage.position + damage.length
    assert repair(data_dir, [damage]).fate is Fate.ADJUSTED
    parts = restarted(stopped, data_dir)
    assert not parts.recovery.rebuilt
    parts.publish(b"7")
    assert bodies(parts) == [b"7"]
    parts.close()


def test_the_log_is_filled_up_to_what_a_kept_index_covers(stopped: Parts, tmp_path: Path) -> None:
    """A power cut has taken records that were never durable, but the index has them."""
    data_dir = copied(stopped, tmp_path)
    last = records(data_dir)[-1]
    path = max((data_dir / "commitlog").iterdir())
    with path.open("r+b") as file:
        file.truncate(last.position - int(path.stem))
    (data_dir / "synced").unlink()
    with pytest.raises(LogCorrupt, match="run `penstock repair`"):
        restarted(stopped, data_dir)
    assert (data_dir / DIRECTORY).exists(), "a start must not delete what it can't replace"
    assert survey(data_dir).damages == []
    assert repair(data_dir, []).fate is Fate.ADJUSTED
    parts = restarted(stopped, data_dir)
    assert not parts.recovery.rebuilt
    parts.publish(b"7")
    assert bodies(parts) == [b"5", b"7"]
    parts.close()


@pytest.mark.parametrize("lost", ["deleted", "marked"])
def test_a_log_of_which_nothing_tells_the_beginning_begins_anew_only_if_the_operator_says_so(
    stopped: Parts, tmp_path: Path, lost: str
) -> None:
    data_dir = copied(stopped, tmp_path)
    shutil.rmtree(data_dir / DIRECTORY) if lost == "deleted" else (data_dir / DAMAGED).write_text("a block is damaged")
    with pytest.raises(LogCorrupt, match="nothing tells what was before"):
        restarted(stopped, data_dir)
    before = {path: path.read_bytes() for path in data_dir.rglob("*") if path.is_file()}
    out = io.StringIO()
    assert repair_log(data_dir, dry_run=True, as_json=False, out=out)
    assert "--forget-beginning" in out.getvalue()
    assert "sessions, subscriptions, groups" in out.getvalue()
    with pytest.raises(LogCorrupt, match="--forget-beginning"):
        repair_log(data_dir, dry_run=False, as_json=False)
    assert {path: path.read_bytes() for path in data_dir.rglob("*") if path.is_file() and path.name != "lock"} == {
        path: data for path, data in before.items() if path.name != "lock"
    }
    assert not repair_log(data_dir, dry_run=False, as_json=False, forget_beginning=True, out=io.StringIO())
    assert not repair_log(data_dir, dry_run=True, as_json=False, out=io.StringIO())
    parts = restarted(stopped, data_dir)
    assert bodies(parts, NEW_GROUP)[-2:] == [b"5", b"6"]
    parts.publish(b"7")
    assert bodies(parts, NEW_GROUP) == [b"7"]
    parts.close()
    again = restarted(stopped, data_dir)
    assert not again.recovery.rebuilt
    assert bodies(again, NEW_GROUP) == []
    again.close()


def test_the_command_says_what_a_kept_index_has_and_lacks(stopped: Parts, tmp_path: Path) -> None:
    data_dir = copied(stopped, tmp_path)
    flip(data_dir, next(each for each in records(data_dir) if each.body == b"5"))
    found = {}
    for name, as_json in (("text", False), ("json", True)):
        out = io.StringIO()
        assert repair_log(data_dir, dry_run=True, as_json=as_json, out=out)
        found[name] = out.getvalue()
    assert "The index would be kept, and knows what the damaged records said" in found["text"]
    assert "rows of group" in found["text"]
    index = json.loads(found["json"])["index"]
    assert index["fate"] == "adjusted"
    assert index["entries_lost"] == 1
    out = io.StringIO()
    assert not repair_log(data_dir, dry_run=False, as_json=False, out=out)
    assert "The index is kept" in out.getvalue()


def test_a_killed_deletion_of_the_index_is_made_durable_by_the_next(tmp_path: Path) -> None:
    (tmp_path / DISCARDED).mkdir()
    synced = []

    class Noting(SystemFiles):
        def sync_directory(self, path: Path) -> None:
            synced.append((path, (tmp_path / DISCARDED).exists()))
            super().sync_directory(path)

    Index.destroy(tmp_path, Noting())
    assert synced == [(tmp_path, True)]
