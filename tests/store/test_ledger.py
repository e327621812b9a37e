"""The ledger: what is charged to whom, and where that is found again."""

from __future__ import annotations

import shutil
from pathlib import Path

import orjson

from penstock.store.options import StoreOptions
from penstock.store.record import QUEUE_FIXED, Kind
from penstock.store.space.accounts import RANKED_FROM, Resource
from penstock.store.space.causer import AccountKind, Causer
from penstock.store.space.quotaoptions import QuotaOptions
from penstock.store.store import Store
from tests.clock import ManualClock
from tests.store.wiring import SEGMENT_BYTES, close

ANN, BOB = Causer.of("ann", "192.0.2.1", "pump"), Causer.of("bob", "192.0.2.2")


def store_in(data_dir: Path) -> Store:
    """Return a store in which the first levels of topics are tenants."""
    data_dir.mkdir(exist_ok=True)
    options = StoreOptions(segment_bytes=SEGMENT_BYTES, sync_in="thread", queues_max=100)
    store = Store(data_dir, options, ManualClock(), quotas=QuotaOptions(tenant="topic"))
    store.recover()
    return store


def held_by(store: Store) -> dict[tuple[AccountKind, tuple[str, ...]], int]:
    """Return how many queues those hold who hold two at least."""
    store.commit()
    return {(holder.kind, holder.names): holder.held for holder in store.ledger.top(Resource.QUEUES, 100)}


def test_tenants_of_topics_and_users_are_charged_side_by_side(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    for topic_filter, causer in [("a/1", ANN), ("a/2", ANN), ("b/1", ANN), ("b/2", BOB), ("b/3", BOB), ("+/1", BOB)]:
        store.queues.declare(topic_filter, "service", causer=causer)
    expected = {
        (AccountKind.TENANT, ("a",)): 2,
        (AccountKind.TENANT, ("b",)): 3,
        (AccountKind.USER, ("ann",)): 3,
        (AccountKind.SOURCE, ("ann", "192.0.2.1")): 3,
        (AccountKind.USER, ("bob",)): 3,
        (AccountKind.SOURCE, ("bob", "192.0.2.2")): 3,
    }
    assert RANKED_FROM == 2
    assert held_by(store) == expected
    close(store)
    store = store_in(tmp_path)
    assert held_by(store) == expected
    assert store.ledger.held(Resource.QUEUES, ANN.for_topic("a")) == 2
    close(store)
    shutil.rmtree(tmp_path / "index")
    store = store_in(tmp_path)
    assert held_by(store) == expected
    store.queues.drop(store.queues.find("a/1") or store.queues.get(0), "service")
    assert store.ledger.held(Resource.QUEUES, ANN) == 2
    assert store.ledger.held(Resource.QUEUES, ANN.for_topic("a")) == 1
    moved = orjson.dumps({"owner": "service", "start": "latest", "by": ANN._replace(source="192.0.2.9").for_topic("c").row()})
    store.append(Kind.QUEUE_DECLARED, QUEUE_FIXED.pack(99), b"c/1", b"", moved)
    assert held_by(store)[AccountKind.SOURCE, ("ann", "192.0.2.9")] == 3
    assert (AccountKind.SOURCE, ("ann", "192.0.2.1")) not in held_by(store)
    close(store)


def test_what_connections_hold_of_a_tenant_is_charged_side_by_side(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    causer = store.ledger.admit(ANN, Resource.SHARED, topic="a/1")
    store.ledger.hold(causer, Resource.SHARED)
    assert {(holder.kind, holder.names) for holder in store.ledger.top(Resource.SHARED, 10)} == {
        (AccountKind.TENANT, ("a",)),
        (AccountKind.USER, ("ann",)),
        (AccountKind.SOURCE, ("ann", "192.0.2.1")),
    }
    assert store.ledger.held(Resource.SHARED) == 1
    store.ledger.let_go(causer, Resource.SHARED)
    assert store.ledger.top(Resource.SHARED, 10) == []
    assert store.ledger.held(Resource.SHARED) == 0
    close(store)
