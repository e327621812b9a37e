from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.store.bodies import TIMER_ENTRY
from penstock.store.errors import LimitExceeded, QueueUnknown, TopicInvalid
from penstock.store.index.index import KeySpace
from penstock.store.log.block import Block, read_block
from penstock.store.log.commitlog import CommitLog
from penstock.store.properties import tag_hash
from penstock.store.queues import backfill as backfill_module
from penstock.store.queues import catalogue as catalogue_module
from penstock.store.queues.catalogue import load_count_from
from penstock.store.queues.lightqueue import ENTRY_BYTES, ROW_ENTRIES, Start, entries_array, queue_prefix
from penstock.store.record import RECORD_BYTES_MAX, Flag, Kind
from penstock.store.store import Store
from penstock.store.topics import matches
from tests.clock import ManualClock
from tests.depth import DEPTH
from tests.store.wiring import bodies, close, contents, crash, durable_queue, fill, open_store, positions, publish


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    opened = open_store(tmp_path / "data")
    yield opened
    close(opened)


def filters(store: Store, topic: str) -> list[str]:
    """Return the filters of the queues that a message to `topic` would reach now."""
    return sorted(queue.filter for queue in store.router.route(topic.encode()).queues)


def kinds(store: Store) -> list[int]:
    return [found.kind for found in store.log.scan(0)]


# --- routing --------------------------------------------------------------------------------------------------------


def test_each_first_level_has_a_root_queue_that_gets_everything(store: Store) -> None:
    for topic in ("plant/1/temp", "plant", "office/x", "/leading", "plant/2"):
        publish(store, topic, topic)
    store.commit()
    found = {queue.filter: bodies(store, queue) for queue in store.queues}
    assert found == {"plant/#": ["plant/1/temp", "plant", "plant/2"], "office/#": ["office/x"], "/#": ["/leading"]}


def test_a_message_reaches_each_queue_whose_filter_matches_once(store: Store) -> None:
    wanted = ["plant/+/temp", "plant/1/#", "+/1/temp", "#", "plant/1/temp", "plant/2/temp", "office/#"]
    for topic_filter in wanted:
        store.queues.declare(topic_filter, "group:a")
    assert filters(store, "plant/1/temp") == sorted(
        topic_filter for topic_filter in [*wanted, "plant/#"] if matches(topic_filter, "plant/1/temp")
    )
    position = publish(store, "plant/1/temp")
    store.commit()
    for queue in store.queues:
        assert positions(queue) == ([position] if matches(queue.filter, "plant/1/temp") else []), queue.filter


def test_queues_of_one_filter_all_get_the_message(store: Store) -> None:
    durable = store.queues.declare("plant/+", "group:a")
    transient = store.queues.attach("plant/+", "connection:1")
    assert durable is not transient
    publish(store, "plant/1", "a")
    store.commit()
    assert bodies(store, durable) == bodies(store, transient) == ["a"]


@pytest.mark.parametrize("topic", ["", "a/+", "#", "a\0b", "a/" * 128 + "a", "x" * 4097, "$SYS/uptime", "$retry/1"])
def test_a_topic_that_cannot_be_published_to_has_no_route(store: Store, topic: str) -> None:
    with pytest.raises(TopicInvalid):
        store.router.route(topic.encode())
    assert len(store.queues) == 0
    assert store.log.end == 0


@pytest.mark.parametrize("topic", ["x" * 4096, "y/" + "y" * 4094, "/".join("z" * 128)])
def test_the_longest_and_the_deepest_topic_can_be_published_to(store: Store, topic: str) -> None:
    position = publish(store, topic)
    store.commit()
    (root,) = store.queues
    assert positions(root) == [position]


def test_leading_wildcards_do_not_match_a_stored_topic_that_begins_with_dollar(store: Store) -> None:
    for topic_filter in ("#", "+/uptime", "$SYS/+"):
        store.queues.declare(topic_filter, "group:a")
    route = store.router.route_stored(b"$SYS/uptime")
    assert sorted(queue.filter for queue in route.queues) == ["$SYS/#", "$SYS/+"]


def test_lowered_bounds_do_not_apply_to_stored_messages_and_queues(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    publish(store, "plant/" + "x" * 100, "a")
    store.queues.declare("plant/+/#", "group:a", "earliest")
    close(store)
    store = open_store(tmp_path / "data", topic_levels_max=1, topic_bytes_max=16)
    fill(store)
    assert {queue.filter: bodies(store, queue) for queue in store.queues} == {"plant/#": ["a"], "plant/+/#": ["a"]}
    close(store)


# --- the route cache ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic_filter", "is_outdated"),
    [
        ("plant/1/temp", True),
        ("plant/1/+", True),
        ("plant/#", True),
        ("+/1/temp", True),
        ("#", True),
        ("plant/2/temp", False),
        ("office/#", False),
        ("office/1/temp", False),
    ],
)
def test_a_cached_route_is_resolved_again_when_a_filter_that_may_match_it_is_added_or_removed(
    store: Store, topic_filter: str, is_outdated: bool
) -> None:
    publish(store, "plant/1/temp")
    publish(store, "office/1/temp")
    route = store.router.route(b"plant/1/temp")
    assert store.router.route(b"plant/1/temp") is route
    queue = store.queues.attach(topic_filter, "connection:1")
    if topic_filter in ("plant/#", "office/#"):  # this is the root's filter, and the root exists already
        assert store.router.route(b"plant/1/temp") is route
        return
    assert (store.router.route(b"plant/1/temp") is not route) == is_outdated
    assert (queue in store.router.route(b"plant/1/temp").queues) == matches(topic_filter, "plant/1/temp")
    between = store.router.route(b"plant/1/temp")
    store.queues.detach(queue, "connection:1")
    assert (store.router.route(b"plant/1/temp") is not between) == is_outdated
    assert queue not in store.router.route(b"plant/1/temp").queues


@pytest.mark.parametrize("topic_filter", ["plant/1", "plant/+", "+/1", "#"])
def test_the_version_of_a_kept_route_shows_that_it_is_outdated(tmp_path: Path, topic_filter: str) -> None:
    store = open_store(tmp_path / "data", route_cache_max=2)
    route = store.router.route(b"plant/1")
    assert route.version == route.root.version
    store.queues.declare(topic_filter, "group:a")
    assert route.version != route.root.version
    close(store)


def test_the_version_shows_that_a_route_is_outdated_after_it_left_the_cache(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", route_cache_max=2)
    route = store.router.route(b"plant/1")
    for number in range(2, 5):
        store.router.route(f"plant/{number}".encode())
    store.queues.declare("plant/1", "group:a")
    assert route.version != route.root.version
    close(store)


def test_the_route_cache_is_bounded(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", route_cache_max=10)
    for turn in range(3):
        for number in range(50):
            publish(store, f"plant/{number}", str(turn))
            assert len(store.router.cached) <= 10
        store.queues.declare(f"plant/{turn}/#", "group:a")
    store.commit()
    root = durable_queue(store, "plant/#")
    assert len(positions(root)) == 150
    close(store)


# --- declaring and dropping -----------------------------------------------------------------------------------------


def test_a_queue_lasts_until_its_last_owner_drops_it(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    queue = store.queues.declare("plant/+", "group:a")
    assert store.queues.declare("plant/+", "session:b") is queue
    assert store.queues.declare("plant/+", "group:a") is queue
    assert kinds(store) == [], "no record is written before the commit"
    publish(store, "plant/1", "1")
    store.commit()
    assert kinds(store).count(Kind.QUEUE_DECLARED) == 3, "one record for each of two owners, and one for the root"

    store.queues.drop(queue, "group:a")
    store.queues.drop(queue, "group:a")
    store.queues.drop(queue, "group:stranger")
    publish(store, "plant/1", "2")
    store.commit()
    assert kinds(store).count(Kind.QUEUE_DROPPED) == 1
    assert bodies(store, queue) == ["1", "2"]

    store.queues.drop(queue, "session:b")
    publish(store, "plant/1", "3")
    store.commit()
    with pytest.raises(QueueUnknown, match=f"id {queue.id}"):
        store.queues.get(queue.id)
    assert list(store.index.rows(queue_prefix(queue.id))) == []
    before = contents(store)
    assert list(before) == [("plant/#", "latest")]
    close(store)
    store = open_store(tmp_path / "data")
    assert contents(store) == before
    close(store)


def test_a_filter_declared_again_is_a_new_queue(store: Store) -> None:
    queue = store.queues.declare("plant/+", "group:a")
    publish(store, "plant/1", "1")
    store.queues.drop(queue, "group:a")
    again = store.queues.declare("plant/+", "group:a")
    publish(store, "plant/1", "2")
    store.commit()
    assert again.id != queue.id
    assert bodies(store, again) == ["2"]
    assert list(store.index.rows(queue_prefix(queue.id))) == []


@pytest.mark.parametrize("keep_index", [True, False])
def test_an_id_is_not_used_again_after_a_restart(tmp_path: Path, keep_index: bool) -> None:
    store = open_store(tmp_path / "data")
    publish(store, "plant/1", "0")
    dropped = store.queues.declare("plant/+", "group:a")
    publish(store, "plant/1", "1")
    store.commit()
    store.queues.drop(dropped, "group:a")
    close(store)
    store = open_store(tmp_path / "data")
    queue = store.queues.declare("plant/1", "group:b")
    assert queue.id > dropped.id
    publish(store, "plant/1", "2")
    store.commit()
    before = contents(store)
    if keep_index:
        store.index.flush()
    crash(store, tmp_path / "left")
    if not keep_index:
        delete_index(tmp_path / "left")  # so that one batch of recovery sees both queues
    store = open_store(tmp_path / "left")
    assert contents(store) == before
    found = durable_queue(store, "plant/1")
    assert bodies(store, found) == ["2"]
    close(store)


def delete_index(data_dir: Path) -> None:
    for path in (data_dir / "index").iterdir():
        path.unlink()


def test_dropping_a_queue_discards_its_pending_entries(store: Store) -> None:
    queue = store.queues.declare("plant/+", "group:a")
    publish(store, "plant/1")
    store.queues.drop(queue, "group:a")
    store.commit()
    assert list(store.index.rows(queue_prefix(queue.id))) == []


def test_declaring_a_roots_filter_gives_the_root(store: Store) -> None:
    publish(store, "plant/1", "1")
    root = store.queues.declare("plant/#", "group:a", "latest")
    assert root.owners == {"root", "group:a"}
    early = store.queues.declare("office/#", "group:a")
    assert early.owners == {"root", "group:a"}
    publish(store, "office/1", "2")
    store.commit()
    assert (bodies(store, root), bodies(store, early)) == (["1"], ["2"])
    store.queues.drop(root, "group:a")
    publish(store, "plant/1", "3")
    store.commit()
    assert bodies(store, root) == ["1", "3"], "a root remains when its other owners have dropped it"
    assert filters(store, "plant/1") == ["plant/#"]


def test_internal_queues_get_only_messages_appended_to_them_directly(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    retry = store.queues.declare("$retry/1", "group:1")
    everything = store.queues.declare("#", "group:1")
    position = publish(store, "plant/1", "a")
    size = store.log.end - position
    store.queues.append_to(retry, position, size, 2)
    store.commit()
    assert positions(retry) == positions(everything) == [position]
    assert store.router.route_stored(b"$retry/1").queues == (durable_queue(store, "$retry/#"),)
    close(store)
    store = open_store(tmp_path / "data")
    found = store.queues.find("$retry/1")
    assert found is not None
    assert positions(found) == [position]
    close(store)


@pytest.mark.parametrize("topic_filter", ["", "a/#/b", "a+", "a\0", "x" * 4097])
def test_declaring_an_invalid_filter_changes_nothing(store: Store, topic_filter: str) -> None:
    for declare in (store.queues.declare, store.queues.attach):
        with pytest.raises(TopicInvalid):
            declare(topic_filter, "group:a")
    assert (len(store.queues), store.log.end) == (0, 0)


# --- attaching ------------------------------------------------------------------------------------------------------


def test_attachments_to_one_filter_share_one_transient_queue(store: Store) -> None:
    queue = store.queues.attach("plant/+", "connection:1")
    assert store.queues.attach("plant/+", "connection:2") is queue
    store.queues.detach(queue, "connection:1")
    store.queues.detach(queue, "connection:1")
    publish(store, "plant/1", "a")
    store.commit()
    assert bodies(store, queue) == ["a"]
    store.queues.detach(queue, "connection:2")
    assert filters(store, "plant/1") == ["plant/#"]
    store.commit()
    assert list(store.index.rows(queue_prefix(queue.id))) == []


def test_detaching_twice_does_not_touch_the_next_queue_of_the_filter(store: Store) -> None:
    first = store.queues.attach("plant/+", "connection:1")
    store.queues.detach(first, "connection:1")
    second = store.queues.attach("plant/+", "connection:2")
    store.queues.detach(first, "connection:1")
    publish(store, "plant/1", "a")
    store.commit()
    assert second is not first
    assert bodies(store, second) == ["a"]
    assert store.queues.attach("plant/+", "connection:3") is second


def test_attaching_to_a_roots_filter_gives_the_root(store: Store) -> None:
    publish(store, "plant/1", "a")
    root = store.queues.attach("plant/#", "connection:1")
    assert not root.transient
    store.queues.detach(root, "connection:1")
    assert durable_queue(store, "plant/#") is root
    before = store.queues.attach("office/#", "connection:1")
    assert before.transient, "attaching to a filter must not declare a durable queue"
    publish(store, "office/1", "b")
    store.commit()
    assert bodies(store, before) == ["b"]
    assert store.queues.attach("office/#", "connection:2") is durable_queue(store, "office/#")


# --- limits ---------------------------------------------------------------------------------------------------------


def test_no_more_queues_than_the_limit_exist(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", queues_max=3)
    publish(store, "plant/1", "a")
    queue = store.queues.declare("plant/+", "group:a")
    transient = store.queues.attach("plant/1", "connection:1")
    end = store.log.end
    for refused in (
        lambda: store.queues.declare("plant/2", "group:a"),
        lambda: store.queues.attach("plant/2", "connection:1"),
        lambda: store.queues.declare("office/#", "group:a"),
        lambda: store.router.route(b"office/1"),
    ):
        with pytest.raises(LimitExceeded, match=r"3 light queues exist.*store\.queues_max"):
            refused()
    assert (len(store.queues), store.log.end) == (3, end)
    assert store.queues.declare("plant/+", "group:b") is queue
    assert store.queues.attach("plant/1", "connection:2") is transient
    publish(store, "plant/1", "b")
    store.queues.drop(queue, "group:a")
    store.queues.drop(queue, "group:b")
    publish(store, "office/1", "c")
    store.commit()
    assert sorted(queue.filter for queue in store.queues) == ["office/#", "plant/#", "plant/1"]
    close(store)


def test_declared_queues_survive_a_lowered_limit(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    for number in range(5):
        publish(store, f"level{number}/x")
    store.commit()
    before = contents(store)
    crash(store, tmp_path / "left")
    store = open_store(tmp_path / "left", queues_max=2)
    assert contents(store) == before
    close(store)


# --- backfill -------------------------------------------------------------------------------------------------------


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill_module, "SLICE_BYTES", 200)
    monkeypatch.setattr(backfill_module, "TOPICS_MAX", 3)


TOPICS = ["plant/1/temp", "plant/2/temp", "plant/1/state", "office/1/temp", "office/3", "yard/1/temp"]


def publish_some(store: Store, first: int, count: int) -> list[tuple[str, str]]:
    sent = [(TOPICS[number * 7 % len(TOPICS)], str(number)) for number in range(first, first + count)]
    for topic, body in sent:
        publish(store, topic, body)
    return sent


def expected(sent: list[tuple[str, str]], topic_filter: str) -> list[str]:
    return [body for topic, body in sent if matches(topic_filter, topic)]


def test_queues_that_are_rebuilt_together_read_the_log_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill_module, "SLICE_BYTES", 2_000)
    monkeypatch.setattr(backfill_module, "SLICE_BYTES_MIN", 2_000)
    sent = publish_some(store, 0, 200)
    store.commit()
    queues = [store.queues.declare(each, "group:a", "earliest") for each in ("plant/+/temp", "#", "+/1/temp", "office/+/temp")]
    read: list[int] = []

    def noting(log: CommitLog, position: int, bytes_max: int) -> Block:
        read.append(position)
        return read_block(log, position, bytes_max)

    monkeypatch.setattr(backfill_module, "read_block", noting)
    fill(store)
    for queue in queues:
        assert bodies(store, queue) == expected(sent, queue.filter)
    assert len(read) > 3
    assert len(read) == len(set(read))


def test_backfills_that_got_no_time_come_first_the_next_time(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backfill_module, "SLICE_BYTES", 400)
    publish_some(store, 0, 40)
    store.commit()
    first = store.queues.declare("plant/+/temp", "group:a", "earliest")
    store.commit()
    store.queues.backfill(lambda: True)
    second = store.queues.declare("#", "group:a", "earliest")
    store.commit()
    gained: list[list[bool]] = []
    for _ in range(4):
        before = [first.next_offset, second.next_offset]
        store.queues.backfill(lambda: True)
        store.commit()
        gained.append([now > was for now, was in zip([first.next_offset, second.next_offset], before, strict=True)])
    assert gained == [[True, False], [False, True], [True, False], [False, True]]


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("topic_filter", ["plant/+/temp", "plant/1/#", "+/1/temp", "#", "yard/1/temp", "cellar/#", "attic/+"])
def test_a_queue_from_earliest_has_all_earlier_and_all_later_messages(store: Store, topic_filter: str) -> None:
    sent = publish_some(store, 0, 40)
    store.commit()
    queue = store.queues.declare(topic_filter, "group:a", "earliest")
    for _ in range(50):
        sent += publish_some(store, len(sent), 30)  # more than one slice of the backfill handles
        store.commit()
        if not store.queues.backfill():
            break
        sent += publish_some(store, len(sent), 1)
        store.commit()
    else:
        pytest.fail("the backfill does not end while messages arrive")
    sent += publish_some(store, len(sent), 10)
    store.commit()
    assert bodies(store, queue) == expected(sent, topic_filter)


@pytest.mark.usefixtures("small_slices")
def test_a_filter_has_one_queue_for_each_start(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    old = publish_some(store, 0, 20)
    store.commit()
    latest = store.queues.declare("+/1/temp", "group:a", "latest")
    earliest = store.queues.declare("+/1/temp", "group:b", "earliest")
    new = publish_some(store, 20, 20)
    fill(store)
    assert bodies(store, latest) == expected(new, "+/1/temp")
    assert bodies(store, earliest) == expected(old + new, "+/1/temp")
    before = contents(store)
    close(store)
    store = open_store(tmp_path / "data")
    assert contents(store) == before
    store.queues.drop(durable_queue(store, "+/1/temp", "latest"), "group:a")
    publish(store, "yard/1/temp", "last")
    store.commit()
    assert bodies(store, durable_queue(store, "+/1/temp", "earliest")) == [*expected(old + new, "+/1/temp"), "last"]
    close(store)


@pytest.mark.usefixtures("small_slices")
@settings(max_examples=8 * DEPTH)
@given(
    steps=st.lists(st.sampled_from(["publish", "publish 4", "commit", "fill", "declare", "crash", "save"]), max_size=40),
    topic_filter=st.sampled_from(["+/1/temp", "plant/+/temp", "#"]),
)
def test_a_backfill_between_other_work_skips_and_duplicates_nothing(
    steps: list[str], topic_filter: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("fill")
    store = open_store(directory / "0")
    sent: list[tuple[str, str]] = []
    for number, step in enumerate(["publish 4", "commit", *steps]):
        if step.startswith("publish"):
            sent += publish_some(store, len(sent), 4 if step[-1] == "4" else 1)
            continue
        if step == "declare":
            store.queues.declare(topic_filter, "group:a", "earliest")
            continue
        store.commit()
        if step == "fill":
            store.queues.backfill()
        elif step == "save":
            store.index.flush()
        elif step == "crash":
            crash(store, directory / str(number + 1))
            store = open_store(directory / str(number + 1))
    queue = store.queues.declare(topic_filter, "group:a", "earliest")
    fill(store)
    sent += publish_some(store, len(sent), 5)
    store.commit()
    assert bodies(store, queue) == expected(sent, topic_filter)
    close(store)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("slices", [0, 1, 3, 6])
def test_an_interrupted_backfill_resumes_after_a_restart(tmp_path: Path, slices: int) -> None:
    store = open_store(tmp_path / "data")
    sent = publish_some(store, 0, 60)
    queue = store.queues.declare("+/1/temp", "group:a", "earliest")
    store.commit()
    for _ in range(slices):
        assert store.queues.backfill()
        store.commit()
    half = bodies(store, queue)
    store.index.flush()
    sent += publish_some(store, 60, 10)
    store.commit()
    crash(store, tmp_path / "left")
    store = open_store(tmp_path / "left")
    found = durable_queue(store, "+/1/temp", "earliest")
    assert bodies(store, found) == half
    fill(store)
    assert bodies(store, found) == expected(sent, "+/1/temp")
    close(store)


@pytest.mark.usefixtures("small_slices")
def test_a_queue_can_be_dropped_during_its_backfill(store: Store) -> None:
    publish_some(store, 0, 40)
    queue = store.queues.declare("plant/+/temp", "group:a", "earliest")
    store.commit()
    assert store.queues.backfill()
    store.queues.drop(queue, "group:a")
    store.commit()
    assert not store.queues.backfill()
    store.commit()
    assert list(store.index.rows(queue_prefix(queue.id))) == []
    assert "plant/+/temp" not in filters(store, "plant/1/temp")


@pytest.mark.usefixtures("small_slices")
def test_several_queues_are_backfilled_side_by_side(store: Store) -> None:
    sent = publish_some(store, 0, 50)
    wanted = ["plant/+/temp", "+/1/temp", "office/#", "#"]
    found = [store.queues.declare(topic_filter, "group:a", "earliest") for topic_filter in wanted]
    fill(store)
    for queue in found:
        assert bodies(store, queue) == expected(sent, queue.filter)


@pytest.mark.usefixtures("small_slices")
def test_a_backfill_begins_at_the_start_of_the_log(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", segment_bytes=512)
    sent = publish_some(store, 0, 60)
    close(store)
    first, second, *_ = sorted((tmp_path / "data" / "commitlog").iterdir())
    first.unlink()
    second.unlink()
    (tmp_path / "data" / "synced").unlink()  # it says where the log began
    store = open_store(tmp_path / "data", segment_bytes=512)
    left = [found.body.decode() for found in store.log.scan(store.log.start) if found.kind == Kind.MESSAGE]
    assert left[0] != sent[0][1]
    queue = store.queues.declare("#", "group:a", "earliest")
    fill(store)
    assert bodies(store, queue) == left
    close(store)


@pytest.mark.usefixtures("small_slices")
def test_a_backfill_puts_a_delayed_message_where_it_fired(store: Store) -> None:
    publish(store, "plant/1", "a")
    delayed = publish(store, "plant/1", "delayed", tag="t", flags=Flag.DELAYED)
    size = store.log.end - delayed
    never = publish(store, "plant/2", "never fires", flags=Flag.DELAYED)
    publish(store, "plant/1", "b")
    other = publish(store, "office/1", "of another topic", flags=Flag.DELAYED)
    fired = TIMER_ENTRY.pack(other, store.log.end - other) + TIMER_ENTRY.pack(delayed, size)
    routes = orjson.dumps({"topics": ["office/1", "plant/1"], "topic": [0, 1], "tag": [0, tag_hash("t")]})
    store.append(Kind.TIMER_FIRED, body=fired, properties=routes)
    publish(store, "plant/1", "c")
    queue = store.queues.declare("plant/+", "group:a", "earliest")
    fill(store)
    assert bodies(store, queue) == ["a", "b", "delayed", "c"]
    assert never not in positions(queue)
    assert entries_array(queue.read(0, 9))["aux"].tolist() == [0, 0, tag_hash("t"), 0]


# --- from a time ----------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("since_ms", [0, 999, 1_000, 1_001, 1_037, 1_098, 1_099])
def test_a_queue_from_a_time_has_the_messages_stored_then_or_later(tmp_path: Path, since_ms: int) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path / "data", clock=clock, segment_bytes=700)
    sent: list[tuple[int, str, str]] = []

    def send(count: int) -> None:
        for _ in range(count):
            topic = TOPICS[len(sent) * 7 % len(TOPICS)]
            publish(store, topic, str(len(sent)))
            sent.append((clock.now_ms(), topic, str(len(sent))))

    for _ in range(34):
        send(3)
        store.commit()
        clock.advance(3)
    clock.advance(-3)  # the last messages have the same time as the declaration
    send(1)
    queue = store.queues.declare("+/1/temp", "group:a", since_ms)
    store.commit()
    for _ in range(3):
        store.queues.backfill()
        send(1)
        store.commit()
    fill(store)
    send(2)
    store.commit()
    assert bodies(store, queue) == [body for at, topic, body in sent if at >= since_ms and matches("+/1/temp", topic)]
    assert store.queues.offset_of(queue, since_ms) == 0
    before = contents(store)
    crash(store, tmp_path / "left")
    delete_index(tmp_path / "left")
    store = open_store(tmp_path / "left", segment_bytes=700)
    fill(store)
    assert contents(store) == before, "a rebuild from the log gives the same queues with the same offsets"
    close(store)


@pytest.mark.usefixtures("small_slices")
@pytest.mark.parametrize("slices", [0, 1, 5])
def test_a_backfill_from_a_time_resumes_after_a_restart(tmp_path: Path, slices: int) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path / "data", clock=clock)
    for number in range(40):
        clock.advance(1)
        publish(store, "plant/1", str(number))
        store.commit()
    queue = store.queues.declare("plant/1", "group:a", 1_011)
    store.commit()
    for _ in range(slices):
        assert store.queues.backfill()
        store.commit()
    assert len(positions(queue)) < 30
    store.index.flush()
    crash(store, tmp_path / "left")
    store = open_store(tmp_path / "left")
    fill(store)
    assert bodies(store, durable_queue(store, "plant/1", 1_011)) == [str(number) for number in range(10, 40)]
    close(store)


@pytest.mark.usefixtures("small_slices")
def test_a_delayed_message_is_in_a_queue_from_a_time_if_it_fired_then_or_later(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path / "data", clock=clock)
    delayed = [publish(store, "plant/1", body, flags=Flag.DELAYED) for body in ("fires early", "fires late")]
    early, late = zip(delayed, (delayed[1] - delayed[0], store.log.end - delayed[1]), strict=True)
    for now_ms, body, fired in ((1_010, "a", early), (1_020, "b", late), (1_030, "c", None)):
        store.commit()
        clock.advance(now_ms - clock.now_ms())
        publish(store, "plant/1", body)
        if fired:
            store.append(Kind.TIMER_FIRED, body=TIMER_ENTRY.pack(*fired), properties=b'{"topics":["plant/1"]}')
    queue = store.queues.declare("plant/+", "group:a", 1_015)
    fill(store)
    assert bodies(store, queue) == ["b", "fires late", "c"]
    close(store)


def test_a_message_reaches_the_queues_of_all_starts_of_its_topic(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path / "data", clock=clock)
    starts: list[Start] = ["earliest", "latest", 900, 950]
    for start in starts:
        store.queues.declare("plant/1", "group:a", start)
    fill(store)
    publish(store, "plant/1", "a")
    store.commit()
    assert [bodies(store, durable_queue(store, "plant/1", start)) for start in starts] == [["a"]] * 4
    close(store)
    store = open_store(tmp_path / "data", clock=clock)
    publish(store, "plant/1", "b")
    store.queues.drop(durable_queue(store, "plant/1", 900), "group:a")
    publish(store, "plant/1", "c")
    store.commit()
    assert {queue.start: bodies(store, queue) for queue in store.queues if queue.filter == "plant/1"} == {
        start: ["a", "b", "c"] for start in ("earliest", "latest", 950)
    }
    close(store)


def test_a_start_in_the_future_means_latest(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path / "data", clock=clock)
    publish(store, "plant/1", "a")
    queue = store.queues.declare("plant/1", "group:a", 1_001)
    publish(store, "plant/1", "b")
    assert queue is store.queues.declare("plant/1", "group:b", "latest")
    assert (queue.start, store.queues.offset_of(queue, 1_001)) == ("latest", 1)
    store.commit()
    assert bodies(store, queue) == ["b"]
    close(store)


def test_declaring_a_root_from_a_time_gives_the_offset_of_that_time_in_the_root(tmp_path: Path) -> None:
    clock = ManualClock(1_000)
    store = open_store(tmp_path / "data", clock=clock)
    for number in range(10):
        publish(store, "plant/1", str(number))
        store.commit()
        clock.advance(10)
    queue = store.queues.declare("plant/#", "group:a", 1_050)
    assert queue.start == "latest"
    starts: list[Start] = ["earliest", 1_050, 1_041, "latest", 2_000]
    assert [store.queues.offset_of(queue, start) for start in starts] == [0, 5, 5, 10, 10]
    close(store)


@pytest.mark.usefixtures("small_slices")
def test_a_backfill_remembers_a_bounded_number_of_topics(store: Store) -> None:
    sent = [(f"plant/{number % 20}/temp", str(number)) for number in range(60)]
    for topic, body in sent:
        publish(store, topic, body)
    queue = store.queues.declare("+/7/temp", "group:a", "earliest")
    store.commit()
    filling = store.queues._backfills[queue.id]
    while store.queues.backfill():
        assert len(filling._matches) <= 3
        store.commit()
    store.commit()
    assert bodies(store, queue) == expected(sent, "+/7/temp")


def test_a_backfill_includes_a_record_larger_than_a_slice(tmp_path: Path, small_slices: None) -> None:
    store = open_store(tmp_path / "data")
    sent = ["x" * 1_000, "y", "z" * 5_000]
    for body in sent:
        publish(store, "plant/1", body)
    queue = store.queues.declare("plant/1", "group:a", "earliest")
    fill(store)
    assert bodies(store, queue) == sent
    close(store)


def test_the_filter_of_a_root_may_not_exceed_the_maximum_length_in_a_record(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data", segment_bytes=RECORD_BYTES_MAX, topic_bytes_max=65_535)
    position = publish(store, "x" * 65_533)
    with pytest.raises(TopicInvalid):
        publish(store, "y" * 65_534)  # the filter of its root would have 65,536 bytes
    store.commit()
    assert [positions(queue) for queue in store.queues] == [[position]]
    close(store)


# --- plain filters, which a topic finds by its own name ------------------------------------------------------------------


@pytest.mark.parametrize("limit", [2, 100])
def test_a_plain_filter_gets_its_messages_however_many_plain_filters_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(catalogue_module, "PLAIN_MAX", limit)
    store = open_store(tmp_path / "data")
    names = [" odd/1", "!/1", "plant/1", "plant/2", "zoo"]
    queues = [store.queues.declare(name, "session:1") for name in names]
    store.queues.declare("$dlq/billing", "group:billing")
    for reopen in (False, True, True):
        if reopen:
            close(store)
            store = open_store(tmp_path / "data")
            queues = [durable_queue(store, name) for name in names]
        for name in [*names, "plant/3", "other"]:
            publish(store, name)
        store.commit()
    assert [queue.committed_offset for queue in queues] == [3] * len(names)
    close(store)


def test_a_plain_filter_that_is_dropped_and_declared_again_gets_only_later_messages(store: Store) -> None:
    latest, all_of_it = store.queues.declare("plant/1", "a"), store.queues.declare("plant/1", "b", "earliest")
    fill(store)
    store.queues.drop(latest, "a")
    publish(store, "plant/1", "one")
    store.commit()
    assert bodies(store, all_of_it) == ["one"]
    store.queues.drop(all_of_it, "b")
    publish(store, "plant/1", "two")
    store.commit()
    again = store.queues.declare("plant/1", "c")
    publish(store, "plant/1", "three")
    store.commit()
    assert bodies(store, again) == ["three"]


# --- rows of the catalogue -------------------------------------------------------------------------------------------------


def filter_rows(store: Store) -> dict[str, int]:
    """Return the size in bytes of the row of each plain filter, which topics find by their own name."""
    return {key[1:].decode(): len(row) for key, row in store.index.rows(bytes(KeySpace.NAME))}


def test_the_queues_of_one_filter_share_a_row_and_do_not_overwrite_each_other(store: Store) -> None:
    store.queues.declare("plant/1", "a")
    store.commit()
    latest = durable_queue(store, "plant/1")  # a group has held this queue since it was the only one of the filter
    publish(store, "plant/1", "one")
    store.commit()
    alone = filter_rows(store)["plant/1"]
    publish(store, "plant/1", "two")
    store.queues.declare("plant/1", "b", "earliest")
    fill(store)
    publish(store, "plant/1", "three")
    store.commit()
    assert filter_rows(store)["plant/1"] == 2 * alone + 4 * ENTRY_BYTES
    for round_number in range(20):
        publish(store, "plant/1", f"more {round_number}")
        store.commit()
    all_of_it = durable_queue(store, "plant/1", "earliest")
    more = [f"more {round_number}" for round_number in range(20)]
    assert bodies(store, latest) == bodies(store, all_of_it) == ["one", "two", "three", *more]
    store.queues.drop(latest, "a")
    store.commit()
    publish(store, "plant/1", "last")
    store.commit()
    assert bodies(store, all_of_it)[-2:] == [more[-1], "last"]
    assert filter_rows(store)["plant/1"] == alone + (24 % ROW_ENTRIES - 1) * ENTRY_BYTES


def test_a_short_queue_is_stored_in_the_catalogue_row_of_its_filter(store: Store) -> None:
    queue = store.queues.declare("plant/1", "a")
    store.commit()
    empty = filter_rows(store)["plant/1"]
    for count in range(1, 2 * ROW_ENTRIES + 2):
        publish(store, "plant/1", str(count))
        store.commit()
        assert filter_rows(store)["plant/1"] == empty + count % ROW_ENTRIES * ENTRY_BYTES
        assert len(list(store.index.rows(queue_prefix(queue.id)))) == count // ROW_ENTRIES
        assert bodies(store, queue) == [str(number) for number in range(1, count + 1)]


def test_a_queue_dropped_and_declared_again_in_one_turn_starts_empty(store: Store) -> None:
    queue = store.queues.declare("plant/1", "a")
    for number in range(20):
        publish(store, "plant/1", str(number))
    store.commit()
    publish(store, "plant/1", "gone")
    store.queues.drop(queue, "a")
    again = store.queues.declare("plant/1", "a")
    publish(store, "plant/1", "new")
    store.commit()
    assert again.id != queue.id
    assert bodies(store, again) == ["new"]
    assert list(store.index.rows(queue_prefix(queue.id))) == []
    assert load_count_from(store.index, again.id, 0) == 1
    assert load_count_from(store.index, queue.id, 0) == 0


def test_queues_without_references_do_not_stay_in_memory(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue_module, "SWEEP_MIN", 10)
    held = [store.queues.declare(f"held/{number}", "a") for number in range(20)]
    for number in range(200):
        store.queues.declare(f"silent/{number}", "a")
        store.commit()
    for number in range(200):
        assert store.queues.find(f"silent/{number}") is not None
    catalogue = store.queues._catalogue
    assert len(catalogue._loaded) <= 2 * len(held) + 10
    assert [store.queues.find(queue.filter) for queue in held] == held
