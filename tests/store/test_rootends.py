"""Root queues end when nobody needs them any more, and begin again with the next message."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.store.errors import LimitExceeded
from penstock.store.options import HOUR_MS, KIB
from penstock.store.queues.queues import ROOT
from penstock.store.record import Flag
from penstock.store.space.accounts import Resource
from penstock.store.space.causer import Causer
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.store.keeper import Keeper
from tests.store.wiring import bodies, close, contents, durable_queue, open_store, publish, retain, work_on

FLOODER, HONEST = Causer.of("", "192.0.2.1", "flooder"), Causer.of("", "192.0.2.2", "honest")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def keeper() -> Keeper:
    return Keeper()


@pytest.fixture
def store(tmp_path: Path, clock: ManualClock, keeper: Keeper) -> Iterator[Store]:
    store = reopened(tmp_path, clock, keeper)
    yield store
    close(store)


def reopened(tmp_path: Path, clock: ManualClock, keeper: Keeper, **options: Any) -> Store:
    limits = {"segment_bytes": 16 * KIB, "retention_ms": HOUR_MS, "queues_max": 30, **options}
    return open_store(tmp_path / "data", clock=clock, parts=[keeper], **limits)


def expire(store: Store, clock: ManualClock) -> None:
    """Let everything that was published before expire."""
    for _ in range(2):
        for _ in range(10):
            publish(store, "other/1", "x" * 2000)
            work_on(store)
        clock.advance(HOUR_MS)
        retain(store)
        publish(store, "other/1", "x" * 2000)


def filters(store: Store) -> list[str]:
    return sorted(queue.filter for queue in store.queues)


def test_a_root_queue_ends_with_its_last_message(clock: ManualClock, tmp_path: Path, keeper: Keeper) -> None:
    store = reopened(tmp_path, clock, keeper)
    publish(store, "old/1", "x")
    assert filters(store) == ["old/#"]
    expire(store, clock)
    assert filters(store) == ["other/#"]
    assert store.ledger.held(Resource.QUEUES) == 1
    close(store)
    again = reopened(tmp_path, clock, keeper)
    assert filters(again) == ["other/#"]
    publish(again, "old/1", "new")
    assert filters(again) == ["old/#", "other/#"]
    close(again)


def test_a_first_level_that_is_used_again_gets_its_messages(clock: ManualClock, tmp_path: Path, keeper: Keeper) -> None:
    store = reopened(tmp_path, clock, keeper)
    route = store.router.route(b"old/1")
    publish(store, "old/1", "x")
    expire(store, clock)
    assert b"old/1" not in store.router.cached  # The fast path of PUBLISH takes cached routes as they are.
    assert store.append_runs([(route, [b"late"], 1)], 1000)  # A caller that still has the route of the root that has ended.
    publish(store, "old/1", "new")
    store.commit()
    assert bodies(store, durable_queue(store, "old/#")) == ["late", "new"]
    before = contents(store)
    close(store)
    shutil.rmtree(tmp_path / "data" / "index")
    again = reopened(tmp_path, clock, keeper)
    assert contents(again)["old/#", "latest"] == before["old/#", "latest"]
    close(again)


def test_a_root_queue_with_a_message_that_is_carried_forward_stays(store: Store, clock: ManualClock, keeper: Keeper) -> None:
    position = publish(store, "old/1", "kept")
    keeper.needed[position] = store.log.end - position
    expire(store, clock)
    assert filters(store) == ["old/#", "other/#"]
    keeper.needed.clear()
    expire(store, clock)
    assert filters(store) == ["other/#"]


def test_a_root_queue_with_an_owner_or_a_connection_stays(store: Store, clock: ManualClock) -> None:
    owned = [(store.queues.declare(f"{owner}/#", owner), owner) for owner in ("group:1", "sessions")]
    for owner in ("group:1", "sessions", "attached"):
        publish(store, f"{owner}/1", "x")
    attached = store.queues.attach("attached/#", "connection:1")
    expire(store, clock)
    assert filters(store) == ["attached/#", "group:1/#", "other/#", "sessions/#"]
    for queue, owner in owned:
        store.queues.drop(queue, owner)
        assert queue.owners == {ROOT}
    store.queues.detach(attached, "connection:1")
    expire(store, clock)
    assert filters(store) == ["other/#"]


def test_a_node_recovers_from_a_flood_of_first_levels(store: Store, clock: ManualClock) -> None:
    for number in range(30):
        store.append_message(store.router.route(b"flood-%d" % number, FLOODER), b"x")
    with pytest.raises(LimitExceeded, match=r"store\.queues_max"):
        store.router.route(b"honest", HONEST)
    for _ in range(2):
        for _ in range(20):
            publish(store, "flood-0", "x" * 2000)
            work_on(store)
        clock.advance(HOUR_MS)
        retain(store)
    assert store.ledger.held(Resource.QUEUES, FLOODER) <= 1
    assert store.router.route(b"honest", HONEST)
    assert store.ledger.held(Resource.QUEUES, HONEST) == 1


def test_a_delayed_message_begins_its_root_queue_again_when_it_fires(store: Store, clock: ManualClock, keeper: Keeper) -> None:
    position = publish(store, "old/1", "delayed", flags=Flag.DELAYED)
    size = store.log.end - position
    keeper.needed[position] = size
    expire(store, clock)
    assert filters(store) == ["other/#"]
    store.queues.dispatch(store.router.route_stored(b"old/1"), position, size, 0)
    store.commit()
    queue = store.queues.find("old/#")
    assert queue is not None
    assert queue.next_offset == 1
    assert store.ledger.held(Resource.QUEUES) == len(store.queues) == 2
