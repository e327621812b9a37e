"""`penstock verify`: nothing that is right is reported, and whatever is changed is."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock import Client, group_settings
from penstock.access.bans import FILE as BANS
from penstock.backup.comparison import describe_key, merge_ids, together
from penstock.backup.errors import BackupFailed
from penstock.backup.manifest import FILE, load_manifest
from penstock.backup.verify import Verification, verify
from penstock.cli.repair_log import repair_log
from penstock.gateway.protocol.properties import Property
from penstock.node.datafiles import check_files
from penstock.node.lock import DataDirLock
from penstock.pop.options import PopOptions
from penstock.store.errors import DataDirLocked
from penstock.store.files import SYSTEM_FILES
from penstock.store.index.index import DAMAGED, META_KEY, Batch, Covered, Index, KeySpace
from penstock.store.options import KIB
from penstock.store.queues.lightqueue import ENTRY_BYTES
from tests.backup.wiring import Readings, copy_of, make_backup
from tests.clock import AheadClock, ManualClock
from tests.depth import DEPTH
from tests.gateway.wire import Broker
from tests.store.wiring import close, copy_left, open_store, publish
from tests.waiting import until

DAY_MS = 24 * 3_600_000

KEEP = 0
"""Flags of a CONNECT whose session outlives the connection."""


async def use_everything(broker: Broker) -> None:
    """Leave rows in as many key spaces as one node has."""
    device = await broker.connect("device", flags=KEEP)
    await device.subscribe(("plant/+/temperature", 1), ("plant/#", 2))
    publisher = await broker.connect("publisher")
    for number in range(120):
        await publisher.publish("plant/1/temperature", b"%0200d" % number, 1 + number % 2, packet_id=1 + number)
        await publisher.publish(f"plant/{number % 5}/state", b"%d" % number, 1, packet_id=200, retain=True)
    for _ in range(30):
        await device.message()
    async with Client(str(broker.node.grpc)) as client:
        for name in ("billing", "ordered", "failing"):
            settings = group_settings(fifo=name == "ordered", attempts_max=1 if name == "failing" else 5)
            await client.groups.create(name, "plant/+/order", settings=settings)
        for number in range(40):
            await client.send("plant/2/order", b"%d" % number, message_group=f"g{number % 4}")
        await client.send("plant/2/order", b"later", delay=3_600.0)
        await client.transactions.begin("plant/2/order", b"half", producer="p")
        for name in ("billing", "ordered", "failing"):
            popped = await client.pop("plant/+/order", group=name, messages_max=10, invisible=3_600.0, wait=5.0)
            await client.ack([message.handle for message in popped[:2]], group=name)
            await client.dead_letter([message.handle for message in popped[2:3]], group=name)
        await client.groups.create("late", "plant/+/temperature")
        for number in range(10):
            await client.send("plant/3/order", b"%d" % number, deduplication_id=f"order-{number}")
    await until(lambda: broker.node.store.index.first_at_or_after(bytes(KeySpace.BACKFILL), bytes(KeySpace.BACKFILL)) is None)


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the data directories of two nodes that have stopped, one with retention, and their backups."""
    directory = tmp_path_factory.mktemp("used")

    async def use(name: str, **options: int) -> None:
        pop = PopOptions(deduplication_topic_ids_max=4)
        broker = await Broker(directory / name, {"segment_bytes": 16 * KIB, "pop": pop, **options}).start()
        await use_everything(broker)
        await asyncio.to_thread(make_backup, directory / name, directory / f"{name}-backup")
        if options:
            store = broker.node.store
            await until(lambda: store.log.start and not store.retention.busy)
        await copy_of_running(broker, directory / f"{name}-killed")
        await broker.stop()
        make_backup(directory / name, directory / f"{name}-later")

    asyncio.run(use("plain"))
    asyncio.run(use("retention", retention_bytes=48 * KIB))
    return directory


async def copy_of_running(broker: Broker, left: Path) -> None:
    await asyncio.to_thread(copy_left, broker.config.data_dir, left)


def check(directory: Path, tmp_path: Path) -> Verification:
    """Verify a directory, and assert that this changes nothing and leaves nothing behind."""
    work = tmp_path / "work"
    work.mkdir(exist_ok=True)
    before = content_of(directory)
    found = verify(directory, meter=Readings(), work_dir=work)
    assert content_of(directory) == before
    assert list(work.iterdir()) == []
    return found


def content_of(directory: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file() and path.name != "lock"}


# --- what is right ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["plain", "retention"])
@pytest.mark.parametrize("state", ["", "-backup", "-later", "-killed"])
def test_what_a_node_leaves_is_good(used: Path, tmp_path: Path, name: str, state: str) -> None:
    found = check(used / f"{name}{state}", tmp_path)
    assert (found.problems, found.differences) == ([], {})
    assert found.is_good
    assert found.kind == ("backup" if state in ("-backup", "-later") else "data directory")
    assert found.replayed > 100
    assert found.rows_bytes > 10 * KIB
    if state == "-later" and name == "retention":
        assert found.start > 0
        assert found.snapshots > 0
        assert found.built_from == "the log and a snapshot"


@pytest.mark.parametrize("name", ["plain", "retention"])
@pytest.mark.parametrize("state", ["", "-killed"])
def test_repair_finds_nothing_unknown_in_what_a_node_leaves(used: Path, name: str, state: str) -> None:
    """A kill may leave a snapshot that is half written."""
    assert {each.problem for each in check_files(used / f"{name}{state}")} <= {"is half written"}


@pytest.mark.parametrize(
    ("name", "state", "days"),
    [("plain", "-killed", 30), ("retention", "", -30), ("retention", "-later", 30), ("retention", "-killed", -30)],
)
def test_it_is_good_at_any_later_time_and_with_a_wrong_clock(
    used: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, state: str, days: int
) -> None:
    """A verification delivers nothing that is due and lets nothing expire."""
    clock = AheadClock()
    clock.advance(max(days, 0) * DAY_MS)
    clock.set_wall(min(days, 0) * DAY_MS)
    monkeypatch.setattr("penstock.backup.verify.SystemClock", lambda: clock)
    found = check(used / f"{name}{state}", tmp_path)
    assert (found.problems, found.differences) == ([], {})


async def use_again(data_dir: Path, left: Path, **options: int) -> None:
    """Run a node on a data directory, store more, and copy what it leaves when it is killed then; stop it in order."""
    broker = await Broker(data_dir, {"segment_bytes": 16 * KIB, **options}).start()
    device = await broker.connect(f"device of {left.name}", flags=KEEP)
    await device.subscribe(("plant/+/state", 1))
    publisher = await broker.connect(f"publisher of {left.name}")
    for number in range(200):
        topic = f"plant/{number % 5}/state"
        await publisher.publish(topic, b"%0100d" % number, 1, packet_id=200, retain=number % 3 == 0)
    await copy_of_running(broker, left)
    await broker.stop()


@pytest.mark.parametrize(
    ("options", "state"),
    [
        pytest.param({}, "", marks=pytest.mark.nightly),
        pytest.param({}, "-killed", marks=pytest.mark.nightly),
        pytest.param({"retention_bytes": 48 * KIB}, "", marks=pytest.mark.nightly),
        ({"retention_bytes": 48 * KIB}, "-killed"),
    ],
)
async def test_what_a_node_leaves_after_its_index_was_lost_is_good(
    used: Path, tmp_path: Path, options: dict[str, int], state: str
) -> None:
    """An index from a snapshot lacks entries of dropped records, and pinned ones, that the lost index had."""
    data_dir = copy_of(used / f"{'retention' if options else 'plain'}{state}", tmp_path / "data")
    for number in range(2):
        shutil.rmtree(data_dir / "index")
        found = check(data_dir, tmp_path)
        assert (found.is_good, found.has_index) == (True, False)
        assert found.notes == [f"there is no index, so the next start builds it from {found.built_from}"]
        await use_again(data_dir, tmp_path / f"killed{number}", **options)
        for directory in (data_dir, tmp_path / f"killed{number}"):
            found = check(directory, tmp_path)
            assert (found.problems, found.differences) == ([], {})


@pytest.mark.parametrize(
    ("segment", "index"),
    [
        (0, "kept"),
        pytest.param(0, "unusable", marks=pytest.mark.nightly),
        pytest.param(-1, "kept", marks=pytest.mark.nightly),
        (-1, "unusable"),
    ],
)
async def test_a_repaired_log_is_good_and_so_is_its_backup(used: Path, tmp_path: Path, segment: int, index: str) -> None:
    data_dir = copy_of(used / "retention", tmp_path / "data")
    path = sorted((data_dir / "commitlog").iterdir())[segment]
    data = path.read_bytes()
    path.write_bytes(data[:500] + b"Z" * 900 + data[1_400:])
    assert not check(data_dir, tmp_path).is_good
    if index == "unusable":
        (data_dir / DAMAGED).write_text("a block is damaged\n")
    repair_log(data_dir, dry_run=False, as_json=True, out=StringIO())
    assert check(data_dir, tmp_path).is_good
    await use_again(data_dir, tmp_path / "killed")
    make_backup(data_dir, tmp_path / "backup")
    for directory in (data_dir, tmp_path / "killed", tmp_path / "backup"):
        found = check(directory, tmp_path)
        assert (found.problems, found.differences) == ([], {})
        assert found.has_index == (index == "unusable"), "an index that a repair has kept knows more than the log"
        assert any("has kept the index" in note for note in found.notes) == (index == "kept")


# --- rows of the index ------------------------------------------------------------------------------------------------


@contextmanager
def changed(data_dir: Path) -> Iterator[Index]:
    index = Index(data_dir)
    yield index
    index.flush()
    index.close()


def spaces_of(data_dir: Path) -> list[KeySpace]:
    index = Index(data_dir, read_only=True)
    found = [space for space in KeySpace if any(key != META_KEY for key, _ in index.rows(bytes(space)))]
    index.close()
    return found


def row_to_change(index: Index, space: KeySpace, random: Random) -> tuple[bytes, bytes]:
    """Return a row of a key space; of entries, the newest, because retention may drop old ones at any time."""
    rows = [row for row in index.rows(bytes(space)) if row[0] != META_KEY]
    if space is KeySpace.ENTRIES:
        return max(rows, key=lambda row: row[1][-ENTRY_BYTES:][7::-1])
    return random.choice(rows)


def change_row(batch: Batch, space: KeySpace, change: str, row: tuple[bytes, bytes], random: Random) -> None:
    key, value = row
    if change == "delete":
        batch.delete(key)
    elif change == "add":
        batch.put(key[:-8] + (10**6).to_bytes(8, "big") if space in (KeySpace.ENTRIES, KeySpace.PINNED) else key + b"\7", value)
    elif not value:
        batch.put(key, b"\1")
    else:
        first, stop = (len(value) - ENTRY_BYTES, len(value)) if space is KeySpace.ENTRIES else (0, len(value))
        if space in (KeySpace.NAME, KeySpace.WILDCARD):
            stop = 20  # number, start and offset of the first queue; entries of dropped records may follow
        at = random.randrange(first, stop)
        batch.put(key, value[:at] + bytes([value[at] ^ (1 << random.randrange(8))]) + value[at + 1 :])


CHANGES = ("delete", "change", "add")


@pytest.mark.parametrize("every", [5, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("change", CHANGES)
def test_a_row_that_is_deleted_changed_or_added_is_named(used: Path, tmp_path: Path, change: str, every: int) -> None:
    """`make test` changes rows of some key spaces, others for each change; `make nightly` changes rows of all."""
    random = Random(change)
    for space in spaces_of(used / "retention")[CHANGES.index(change) % every :: every]:
        if space in (KeySpace.PINNED, KeySpace.SENT_ID, KeySpace.DISPATCH) and change == "delete":
            continue  # nothing tells that they were there: no snapshot has the first, options and expiries delete the others
        data_dir = copy_of(used / "retention", tmp_path / space.name)
        with changed(data_dir) as index:
            row = row_to_change(index, space, random)
            batch = index.batch()
            change_row(batch, space, change, row, random)
            index.write(batch)
        found = check(data_dir, tmp_path)
        assert not found.is_good or (space is KeySpace.PINNED and found.notes), (space, row)
        shutil.rmtree(data_dir)


async def test_retained_messages_that_are_gone_are_no_difference(tmp_path: Path) -> None:
    broker = await Broker(tmp_path / "data", {}).start()
    device, node = await broker.connect_5("device"), broker.node
    await device.publish("plant/state", b"on", 1, retain=True)
    await device.publish_with("plant/alarm", b"on", {Property.MESSAGE_EXPIRY_S: 1}, 1, retain=True)
    node.store.index.flush()
    await device.publish("plant/state", b"", 1, retain=True)
    broker.clock.advance(2_000)
    node.retained.end_expired(node.store.now_ms())
    await device.publish("plant/1/temperature", b"20", 1)
    assert len(node.retained) == 0
    await broker.stop()
    with changed(tmp_path / "data") as index:  # an earlier version has left a row that says that there are none
        batch = index.batch()
        batch.put(bytes(KeySpace.RETAINED_COUNT), bytes(8))
        index.write(batch)
    found = check(tmp_path / "data", tmp_path)
    assert found.is_good, found.differences


def test_differences_name_key_space_key_and_both_values(used: Path, tmp_path: Path) -> None:
    data_dir = copy_of(used / "plain", tmp_path / "data")
    with changed(data_dir) as index:
        timers = list(index.rows(bytes(KeySpace.TIMER)))
        batch = index.batch()
        batch.delete(timers[0][0])
        for key, _ in index.rows(bytes(KeySpace.RETAINED)):
            batch.put(key, b"\xff" * 12)
        index.write(batch)
    found = check(data_dir, tmp_path)
    assert found.counts["timer"] == 1
    assert str(found.differences["timer"][0]).startswith("due at ")
    assert "is missing; it should be " in str(found.differences["timer"][0])
    assert "'plant/0/state' is ffffffffffffffffffffffff, but should be " in str(found.differences["retained"][0])


def test_an_index_that_covers_too_much_or_is_marked_or_unreadable_is_named(used: Path, tmp_path: Path) -> None:
    data_dir = copy_of(used / "plain", tmp_path / "far")
    with changed(data_dir) as index:
        batch = index.batch()
        batch.put_covered(Covered(2**40, 0, 0))
        index.write(batch)
    assert f"covers the log up to {2**40}, but the log goes from 0 to" in check(data_dir, tmp_path).problems[0]

    data_dir = copy_of(used / "plain", tmp_path / "marked")
    (data_dir / DAMAGED).write_text("the disk is bad")
    assert check(data_dir, tmp_path).problems == [
        "the index is marked as damaged, and the next start rebuilds it: the disk is bad"
    ]

    data_dir = copy_of(used / "plain", tmp_path / "torn")
    for path in (data_dir / "index").glob("*.sst"):
        data = bytearray(path.read_bytes())
        data[len(data) // 3] ^= 0x40
        path.write_bytes(data)
    assert not check(data_dir, tmp_path).is_good


# --- bytes ------------------------------------------------------------------------------------------------------------


def test_every_flipped_byte_of_a_backup_is_found(used: Path, tmp_path: Path) -> None:
    directory = copy_of(used / "retention-later", tmp_path / "backup")
    random = Random(17)
    paths = [directory / FILE, *(directory / file.stored for file in load_manifest(directory, SYSTEM_FILES).files)]
    for _ in range(50 * DEPTH):
        path = random.choice(paths)
        good = path.read_bytes()
        if not good:
            continue
        at, bit = random.randrange(len(good)), 1 << random.randrange(8)
        path.write_bytes(good[:at] + bytes([good[at] ^ bit]) + good[at + 1 :])
        found = verify(directory, meter=Readings(), work_dir=tmp_path)
        assert len(found.problems) == 1, (path, at, bit)
        assert str(path) in found.problems[0]
        path.write_bytes(good)


def test_all_damaged_files_of_a_backup_are_named(used: Path, tmp_path: Path) -> None:
    directory = copy_of(used / "plain-later", tmp_path / "backup")
    segments = sorted(path for path in directory.rglob("commitlog.*") if path.stat().st_size)
    segments[0].unlink()
    segments[1].write_bytes(segments[1].read_bytes()[:-1])
    found = check(directory, tmp_path)
    assert [name for problem in found.problems for name in ("is missing", "bytes in place of") if name in problem] == [
        "is missing",
        "bytes in place of",
    ]


def test_bans_on_which_no_node_starts_are_a_problem(used: Path, tmp_path: Path) -> None:
    data_dir = copy_of(used / "plain", tmp_path / "data")
    (data_dir / BANS).write_text("[]")
    assert check(data_dir, tmp_path).is_good
    (data_dir / BANS).write_text("[{")
    assert "no node starts on these bans" in check(data_dir, tmp_path).problems[0]


def test_a_damaged_record_and_a_damaged_snapshot_of_a_data_directory_are_named(used: Path, tmp_path: Path) -> None:
    data_dir = copy_of(used / "retention", tmp_path / "data")
    segment = sorted((data_dir / "commitlog").iterdir())[1]
    data = bytearray(segment.read_bytes())
    data[2_000] ^= 1
    segment.write_bytes(data)
    snapshot = sorted((data_dir / "snapshots").iterdir())[0]
    data = bytearray(snapshot.read_bytes())
    data[-3] ^= 1
    snapshot.write_bytes(data)
    found = check(data_dir, tmp_path)
    assert any("of the log are damaged at position" in problem and segment.name in problem for problem in found.problems)
    assert any(f"the snapshot {tmp_path}" in problem or "the snapshot" in problem for problem in found.problems)


@pytest.mark.parametrize("topics", [("plant/1", "plant/1"), ("plant/1", "plant/200")])
def test_segments_in_each_others_place_are_found_even_if_both_begin_at_the_same_time(
    tmp_path: Path, topics: tuple[str, str]
) -> None:
    """Records of equal topics and sizes leave the same index in either place. Their times must tell then."""
    is_like = topics[0] == topics[1]
    clock = ManualClock()
    store = open_store(tmp_path / "data", clock=clock)
    bodies = iter(range(10_000))
    for number, topic in enumerate(("plant/1", *topics, "plant/1")):
        base = store.log.segments()[-1][0]
        while store.log.segments()[-1][0] == base:
            publish(store, topic, f"{next(bodies):0200d}")
            store.commit()
            if is_like and number == 2:
                clock.advance(1)
    close(store)
    found = check(tmp_path / "data", tmp_path)
    assert found.is_good, found
    first, second = (path for path in sorted((tmp_path / "data" / "commitlog").iterdir())[1:3])
    if is_like:
        assert first.stat().st_size == second.stat().st_size
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)
    found = check(tmp_path / "data", tmp_path)
    assert not found.is_good
    assert ("is older than the one before it" in str(found.problems)) == is_like


# --- directories ------------------------------------------------------------------------------------------------------


def test_a_data_directory_in_use_and_another_directory_are_refused(used: Path, tmp_path: Path) -> None:
    with DataDirLock(used / "plain"), pytest.raises(DataDirLocked):
        verify(used / "plain", meter=Readings(), work_dir=tmp_path)
    with pytest.raises(BackupFailed, match="is neither a backup nor a data directory"):
        verify(tmp_path, meter=Readings(), work_dir=tmp_path)


# --- comparing --------------------------------------------------------------------------------------------------------


@st.composite
def sides(draw: st.DrawFn) -> list[tuple[int, bytes]]:
    """Runs of entries in order, with gaps between some of them."""
    runs, offset = [], 0
    for gap, entries in draw(
        st.lists(st.tuples(st.integers(0, 3), st.lists(st.integers(0, 1), min_size=1, max_size=5)), max_size=5)
    ):
        runs.append((offset + gap, b"".join(bytes([entry]) * ENTRY_BYTES for entry in entries)))
        offset += gap + len(entries)
    return runs


def by_offset(runs: list[tuple[int, bytes]]) -> dict[int, bytes]:
    return {
        first + at // ENTRY_BYTES: entries[at : at + ENTRY_BYTES]
        for first, entries in runs
        for at in range(0, len(entries), ENTRY_BYTES)
    }


@given(one=sides(), other=sides())
def test_entries_are_compared_by_offset_however_they_are_divided_into_rows(
    one: list[tuple[int, bytes]], other: list[tuple[int, bytes]]
) -> None:
    ours: list[tuple[int, bytes]] = []
    theirs: list[tuple[int, bytes]] = []
    seen = []
    for first, left, right in together(iter(one), iter(other)):
        assert left is None or right is None or len(left) == len(right)
        seen.append(first)
        if left is not None:
            ours.append((first, left))
        if right is not None:
            theirs.append((first, right))
    assert seen == sorted(set(seen))
    assert (by_offset(ours), by_offset(theirs)) == (by_offset(one), by_offset(other))


@given(first=st.lists(st.integers(0, 9)), second=st.lists(st.integers(0, 9)))
def test_ids_of_both_sides_come_once_and_in_order(first: list[int], second: list[int]) -> None:
    assert list(merge_ids(iter(sorted(first)), iter(sorted(second)))) == sorted({*first, *second})


@pytest.mark.parametrize(
    ("key", "text"),
    [
        (b"Fplant/1/temperature", "'plant/1/temperature'"),
        (b"Q\0\0\0\5\0\0\0\0\0\0\0\x10", "queue 5, offset 16"),
        (b"C\0\0\0\0\0\0\1\0", "checkpoint at position 256"),
        (b"E" + bytes(7) + b"\5" + bytes(7) + b"\x10", "oldest message at position 5, dispatched by the record at position 16"),
        (b"C\0", "00 (of an unexpected length)"),
        (b"r\0\1\2", "000102"),
        (b"\xfe\1", "fe01"),
    ],
)
def test_keys_are_shown_decoded(key: bytes, text: str) -> None:
    assert describe_key(key) == text
