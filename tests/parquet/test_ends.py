"""Tables of a real log, with every kind of end, are what the test has done."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow", reason="the tables need the extra `tables`")

import pyarrow.dataset

from penstock.pop.core.checkpoint import delivery_id
from penstock.pop.core.groups import ResetTo
from penstock.spark.parquet.catalog import verify_tables
from penstock.spark.parquet.schema import CAUSES, TABLES, Cause
from penstock.spark.parquet.snapshot import open_state
from penstock.spark.parquet.writer import backfill
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag, Kind
from penstock.store.store import Store
from penstock.timer.delayed import Recalled
from tests.depth import DEPTH
from tests.parquet.openstate import open_in_node, queued_in_node
from tests.parquet.sealing import FILLER_TOPIC, STORE, bases, seal
from tests.pop.wiring import GROUP, TOPIC, Parts
from tests.store.wiring import work_on

Row = dict[str, Any]


@pytest.fixture
def parts(tmp_path: Path) -> Iterator[Parts]:
    made = Parts(tmp_path / "data", store=STORE)
    yield made
    made.close()


def tables_of(parts: Parts) -> dict[str, list[Row]]:
    """Seal the log, write the tables, and return their rows."""
    seal(parts)
    return written_tables(parts)


def written_tables(parts: Parts) -> dict[str, list[Row]]:
    """Stop the node, write the tables, and return their rows."""
    parts.close()
    list(backfill(parts.data_dir))
    found = verify_tables(parts.data_dir)
    assert (found.problems, found.unwritten) == ([], [])
    return read_tables(parts.data_dir)


def read_tables(data_dir: Path) -> dict[str, list[Row]]:
    return {
        table.name: pyarrow.dataset.dataset(data_dir / "tables" / table.name).to_table().sort_by("position").to_pylist()
        for table in TABLES
    }


def write_without_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let stores write acknowledgements and deletions as versions without their flags did."""
    append = Store.append

    def append_without(store: Store, kind: Kind, *arguments: Any) -> int:
        return append(store, kind, *(arguments[:4] if kind in (Kind.POP_ACK, Kind.GROUP_DELETED) else arguments))

    monkeypatch.setattr(Store, "append", append_without)


def stories(tables: dict[str, list[Row]], group: str) -> dict[int, list[tuple[Any, ...]]]:
    """Return the stages of each delivery of a group: stage, cause of its end (None if it is open) and whether that counted."""
    ends = {row["key"]: row for row in tables["ends"] if row["group_name"] == group}
    found: dict[int, list[tuple[Any, ...]]] = {}
    for row in tables["deliveries"]:
        if row["group_name"] == group:
            end = ends.pop(row["key"], {**row, "cause": None, "counted": None})
            assert (end["delivery_id"], end["stage"]) == (row["delivery_id"], row["stage"])
            found.setdefault(row["delivery_id"], []).append((row["stage"], end["cause"], end["counted"]))
    assert ends == {}
    return found


def test_each_cause_of_an_end_is_told(parts: Parts) -> None:
    groups = ["acks", "nacks", "suspends", "extends", "times out", "loses", "is left", "dead", "forwards", "resets", "deletes"]
    groups += ["is unused", "expires"]
    for name in groups:
        parts.create(name, attempts_max=1 if name == "dead" else 3)
    parts.publish(b"1", b"2")

    def pop(group: str) -> list[str]:
        handles = [each.handle for each in parts.pop(2, 10_000, group=group)]
        parts.publish(b"in between", topic=FILLER_TOPIC)
        return handles

    for handle in pop("acks"):
        parts.ack(handle, group="acks")
    first, second = pop("nacks")
    parts.change(first, 2_000, nack=True, group="nacks")
    parts.ack(second, group="nacks")
    first, _ = pop("suspends")
    parts.change(first, 2_000, suspend=True, group="suspends")
    first, second = pop("extends")
    _, first = parts.change(first, 20_000, group="extends")
    _, first = parts.change(first, 30_000, group="extends")
    parts.ack(second, group="extends")
    parts.pop(1, 10_000, group="times out")
    pop("loses")
    left = parts.core.popper.pop(parts.group("is left"), 2, 10_000)
    assert left is not None
    parts.core.deliveries.settle(Kind.POP_REVIVED, [delivery_id(left.checkpoint.position, 1)])  # as when an MQTT client goes
    parts.pop(1, 10_000, group="dead")
    forwarded, _ = pop("forwards")
    parts.core.deliveries.dead_letter("forwards", [forwarded])
    pop("resets")
    parts.groups.reset("resets", "", ResetTo("latest"))
    pop("deletes")
    parts.groups.delete("deletes")
    pop("is unused")
    parts.groups.delete("is unused", is_unused=True)
    parts.publish(b"3", properties=Properties(expires_at_ms=parts.clock.now_ms()))
    parts.pop(3, 10_000, group="expires")
    seal(parts)
    parts.advance(9_000)
    seal(parts)
    parts.advance(1_000)
    parts.ack(first, group="extends")
    tables = tables_of(parts)

    def of(group: str) -> list[list[tuple[Any, ...]]]:
        return sorted(stories(tables, group).values(), key=str)

    alone, together = [("popped", "timed_out", True)], [("popped", "timed_out", False)]  # see `pop.core.suspicion`
    assert of("acks") == [[("popped", "acked", None)]] * 2
    assert of("expires") == [[("popped", "expired", None)], together, together]
    assert of("nacks") == [[("popped", "acked", None)], [("popped", "nacked", True), ("waiting", "waited", None)]]
    assert of("suspends") == [[("popped", "suspended", False), ("waiting", "waited", None)], alone]
    extended = [("popped", "extended", None), ("extended", "extended", None), ("extended", "acked", None)]
    assert of("extends") == [[("popped", "acked", None)], extended]
    assert of("times out") == [alone]
    assert of("loses") == [together] * 2
    assert of("is left") == [[("popped", "returned", False)], alone]
    assert of("dead") == [[("popped", "dead_lettered", None)]]
    assert of("forwards") == [[("popped", "dead_lettered", None)], alone]
    assert of("resets") == [[("popped", "reset", None)]] * 2
    assert of("deletes") == [[("popped", "deleted", None)]] * 2
    assert of("is unused") == [[("popped", "last_member_left", None)]] * 2
    reasons = {row["group_name"]: row["reason"] for row in tables["ends"] if row["reason"] is not None}
    assert reasons == {"dead": "attempts_exhausted", "forwards": "forwarded"}
    assert {row["cause"] for row in tables["ends"]} == set(CAUSES) - {Cause.UNRECORDED}
    created = [row for row in tables["settings"] if row["change"] == "created"]
    assert [row["attempts_max"] for row in created] == [1 if name == "dead" else 3 for name in groups]
    assert {row["topic_filter"] for row in created} == {"plant/#"}
    others = [(row["group_name"], row["change"]) for row in tables["settings"] if row not in created]
    assert others == [("resets", "reset"), ("deletes", "deleted"), ("is unused", "deleted")]


@pytest.mark.parametrize("seed", range(2 * DEPTH))
def test_what_has_no_end_is_what_the_node_has_open(tmp_path: Path, seed: int) -> None:
    """So it is in the tables of the whole log, and in the snapshot at its end."""
    parts = Parts(tmp_path / "data", store=replace(STORE, retention_bytes=1 << 30))
    rng = random.Random(seed)
    names = ("billing", "alarms", "in order")
    for name in names:
        parts.create(name, attempts_max=2, backoff=(1_000,), fifo=name == "in order")
    handles: list[tuple[str, str]] = []
    popped = 0
    for _ in range(200):
        name = rng.choice(names)
        action = rng.randrange(8)
        if action < 2:
            parts.publish(*[b"x"] * rng.randrange(1, 5))
        elif action < 4:
            batch = parts.pop(rng.randrange(1, 6), rng.choice((2_000, 60_000)), group=name)
            popped += len(batch)
            handles += [(name, each.handle) for each in batch]
        elif action < 7 and handles:
            owner, handle = handles.pop(rng.randrange(len(handles)))
            if action == 4:
                parts.ack(handle, group=owner)
            elif action == 5:
                handles.append((owner, parts.change(handle, 20_000, group=owner)[1]))
            else:
                parts.change(handle, rng.choice((0, 5_000)), nack=rng.random() < 0.5, suspend=rng.random() < 0.3, group=owner)
        elif rng.random() < 0.2:
            seal(parts)
        elif rng.random() < 0.05:
            parts.groups.reset(name, "", ResetTo("latest"))
            handles = [(owner, handle) for owner, handle in handles if owner != name]
        else:
            parts.advance(rng.randrange(1, 3_000))
    expected, queued = open_in_node(parts), queued_in_node(parts)
    order = parts.group("in order").order
    parked = {position for position, _ in order.parked_messages()} if order else set()
    while (end := bases(parts.data_dir)[-1]) not in parts.store.retention.snapshots:
        seal(parts)
        work_on(parts.store)
    tables = written_tables(parts)
    assert expected
    ended = {row["key"] for row in tables["ends"]}
    assert len(ended) == len(tables["ends"])
    left = {row["key"]: row for row in tables["deliveries"] if row["key"] not in ended}
    assert {key: (row["deadline_ms"], row["message_position"]) for key, row in left.items()} == expected
    assert len([row for row in tables["deliveries"] if row["stage"] == "popped"]) == popped
    assert {row["delivery_id"] for row in tables["deliveries"]} == {
        row["key"] for row in tables["deliveries"] if row["stage"] == "popped"
    }
    assert {row["delivery_id"] for row in tables["ends"]} <= {row["delivery_id"] for row in tables["deliveries"]}
    assert not [row for row in tables["ends"] if row["stage"] is None]
    still_open = last_open(parts)
    stages = {row["key"]: row for row in still_open if row["stage"] != "queued"}
    assert {key: (row["deadline_ms"], row["message_position"]) for key, row in stages.items()} == expected
    back = [(row["group_name"], row["message_position"]) for row in still_open if row["stage"] == "queued"]
    assert sorted(each for each in back if each[0] != "in order") == [each for each in queued if each[0] != "in order"]
    in_order = {position for name, position in back if name == "in order"}
    assert in_order <= parked, "a message of a FIFO group waits among those that nobody has had yet"
    state, _ = open_state(parts.data_dir, end)
    assert state is not None
    assert {row["key"]: (row["deadline_ms"], row["message_position"]) for row in state.open} == expected
    for row in state.open:
        known = stages[row["key"]]
        assert (row["attempt"], row["return_ms"], row["at_ms"]) == (known["attempt"], known["return_ms"], known["at_ms"])
        assert row["stage"] == ["popped", "extended", "waiting"].index(known["stage"]) or known["stage"] == "extended"
    assert sorted((state.group_names[row["group_id"]], row["message_position"]) for row in state.queued) == queued


def last_open(parts: Parts) -> list[Row]:
    """Return what the table `open` has at the end of the last segment."""
    return pyarrow.parquet.read_table(max((parts.data_dir / "tables" / "open").rglob("*.parquet"))).to_pylist()


def test_an_end_tells_the_pop_the_deadline_and_the_message(parts: Parts) -> None:
    parts.create()
    (message,) = parts.publish(b"1")
    popped_ms = parts.clock.now_ms()
    (popped,) = parts.pop(1, 10_000)
    seal(parts)
    parts.advance(3_000)
    _, extended = parts.change(popped.handle, 50_000)
    seal(parts)
    parts.advance(1_000)
    parts.ack(extended)
    first, last = tables_of(parts)["ends"]
    assert {row["popped_ms"] for row in (first, last)} == {popped_ms}
    assert {row["message_position"] for row in (first, last)} == {message}
    assert (first["deadline_ms"], last["deadline_ms"]) == (popped_ms + 10_000, popped_ms + 53_000)
    assert (first["at_ms"], last["at_ms"]) == (popped_ms + 3_000, popped_ms + 4_000)


@pytest.mark.parametrize("is_sealed_between", [False, True])
@pytest.mark.parametrize("has_flags", [True, False])
def test_an_acknowledgement_without_a_flag_that_may_be_an_expiry_is_unrecorded(
    parts: Parts, monkeypatch: pytest.MonkeyPatch, has_flags: bool, is_sealed_between: bool
) -> None:
    """The node acknowledges what has expired, right after the pop. Without flags, a consumer that is as fast left the same."""
    if not has_flags:
        write_without_flags(monkeypatch)
    for name in ("lives", "expires", "far"):
        parts.create(name, topic_filter=f"{name}/#")
    expires_at_ms = parts.clock.now_ms() + 1_000
    parts.publish(b"1", topic="lives/1")
    parts.publish(b"2", topic="expires/1", properties=Properties(expires_at_ms=expires_at_ms))
    parts.publish(b"3", topic="far/1", properties=Properties(expires_at_ms=expires_at_ms + 3_600_000))
    if is_sealed_between:
        seal(parts)
    parts.advance(2_000)
    for name in ("lives", "far"):
        (popped,) = parts.pop(group=name, topic_filter=f"{name}/#")
        parts.ack(popped.handle, group=name)
    assert parts.pop(group="expires", topic_filter="expires/#") == []
    causes = {row["group_name"]: row["cause"] for row in tables_of(parts)["ends"]}
    # The writer keeps which segments have messages that expire, and not which messages these are.
    clear = "unrecorded" if is_sealed_between and not has_flags else "acked"
    assert causes == {"lives": clear, "expires": "expired" if has_flags else "unrecorded", "far": clear}


def test_a_deletion_without_a_flag_does_not_say_why(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    write_without_flags(monkeypatch)
    parts.create()
    parts.publish(b"1")
    parts.pop()
    parts.groups.delete(GROUP, is_unused=True)
    assert [row["cause"] for row in tables_of(parts)["ends"]] == ["deleted"]


def test_without_messages_that_expire_each_acknowledgement_is_one(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    write_without_flags(monkeypatch)
    parts.create()
    parts.publish(b"1")
    seal(parts)
    (popped,) = parts.pop()
    parts.ack(popped.handle)
    assert [row["cause"] for row in tables_of(parts)["ends"]] == ["acked"]


def test_a_message_has_what_its_publisher_gave_it(parts: Parts) -> None:
    now_ms = parts.clock.now_ms()
    described = Properties(
        user=[("unit", "°C"), ("unit", "K"), ("", "")],
        tag="red",
        message_group="press 1",
        content_type="text/plain",
        expires_at_ms=now_ms + 5,
        keys=["a", "b"],
        correlation_data=b"\x00",
    )
    plain, full = parts.publish(b"\x00\xff")[0], parts.publish(b"2", properties=described)[0]
    fillers = seal(parts)
    parts.publish(b"unsealed")
    parts.close()
    list(backfill(parts.data_dir))
    rows = read_tables(parts.data_dir)["messages"]
    assert len(rows) in (fillers + 1, fillers + 2)  # the last one may be in the next segment
    by_position = {row["position"]: row for row in rows}
    absent = dict.fromkeys(
        ("tag", "keys", "message_group", "content_type", "deliver_at_ms", "expires_at_ms", "user_names", "user_values")
    )
    of_both = {
        "at_ms": now_ms,
        "topic": TOPIC,
        "qos": 1,
        "flags": 1,
        "retain": False,
        "delayed": False,
        "recalled": False,
        "half": False,
        "rolled_back": False,
        "copied_at": None,
    }
    for position, expected in (
        (plain, {**absent, "body": b"\x00\xff"}),
        (
            full,
            {
                **absent,
                "tag": "red",
                "message_group": "press 1",
                "content_type": "text/plain",
                "expires_at_ms": now_ms + 5,
                "keys": ["a", "b"],
                "user_names": ["unit", "unit", ""],
                "user_values": ["°C", "K", ""],
                "body": b"2",
            },
        ),
    ):
        row = by_position[position]
        assert round(row.pop("time").timestamp() * 1000) == now_ms
        assert row == {"position": position, **of_both, **expected}


def test_recalled_and_rolled_back_messages_are_marked_where_the_segment_says_so(parts: Parts) -> None:
    route = parts.store.router.route(TOPIC.encode())

    def delayed(delay_ms: int, **more: Any) -> tuple[int, int]:
        due_ms = parts.clock.now_ms() + delay_ms
        properties = encode_properties(Properties(deliver_at_ms=due_ms, **more))
        position = parts.store.append_message(route, b"", properties, 1 | Flag.DELAYED)
        parts.store.commit()
        return position, due_ms

    def half() -> int:
        position = parts.store.append_message(route, b"", encode_properties(Properties(producer="p")), 1 | Flag.HALF)
        parts.store.commit()
        return position

    recalled, fired, pending = delayed(60_000), delayed(10), delayed(60_000)
    kept, thrown, unsaid = half(), half(), half()
    assert parts.delayed.recall(*recalled) is Recalled.CANCELLED
    parts.transactions.end(kept, commit=True)
    parts.transactions.end(thrown, commit=False)
    parts.advance(1_000)
    seal(parts)
    assert parts.delayed.recall(*pending) is Recalled.CANCELLED  # the table of the segment before can't say it
    rows = {row["position"]: row for row in tables_of(parts)["messages"]}
    assert [rows[position]["recalled"] for position, _ in (recalled, fired, pending)] == [True, False, None]
    assert [rows[position]["rolled_back"] for position in (kept, thrown, unsaid)] == [False, True, None]
    assert [rows[position]["half"] for position in (kept, recalled[0])] == [True, False]
    assert [rows[position]["delayed"] for position in (kept, recalled[0])] == [False, True]
