"""A report is compared with a running node: they agree, they differ, or there is nothing to compare."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("duckdb", reason="the reconciliation needs the extra `tables`")

from penstock import Client
from penstock.cli.adminclient import state_reader
from penstock.cli.endpoint import Endpoint
from penstock.cli.main import main
from penstock.pop.core.settings import ConsumerGroupSettings
from penstock.spark.errors import NodeUnreadable
from penstock.spark.reconciliation import page, terminal
from penstock.spark.reconciliation.engines import DuckEngine
from penstock.spark.reconciliation.nodecheck import ReadState
from penstock.spark.reconciliation.reconcile import ReconcileOptions, reconcile
from penstock.spark.reconciliation.summary import NodeDifference, Summary
from tests.gateway.wire import Broker
from tests.spark.logs import every_outcome

FILTER = "plant/#"

State = dict[str, Any]


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A node with groups in all states that it counts. Time passes only where the test says so."""
    broker = await Broker(tmp_path / "data", {}).start()
    pop = broker.node.pop
    for name, settings in {
        "holds": ConsumerGroupSettings(),
        "waits": ConsumerGroupSettings(backoff=(3_600_000,)),
        "came back": ConsumerGroupSettings(),
        "in order": ConsumerGroupSettings(fifo=True),
        "gave up": ConsumerGroupSettings(attempts_max=1),
        "is redriven": ConsumerGroupSettings(attempts_max=1),
        "is deleted": ConsumerGroupSettings(),
    }.items():
        pop.groups.create(name, FILTER, "earliest", settings)
    async with Client(str(broker.node.grpc)) as client:
        for number in range(6):
            await client.send(f"plant/{number % 2}", b"21.5")
        held, *_ = await client.pop(FILTER, group="holds", messages_max=3, invisible=3_600.0)
        await held.ack()
        for message in await client.pop(FILTER, group="waits", messages_max=2):
            await message.nack()
        for name, count in (("came back", 4), ("in order", 4), ("gave up", 1), ("is redriven", 1), ("is deleted", 4)):
            await client.pop(FILTER, group=name, messages_max=count, invisible=1.0)
    broker.clock.advance(2_000)
    while pop.fire_due():
        pass
    pop.dead_letters.redrive("is redriven")
    pop.groups.delete("is deleted")
    broker.node.store.commit()
    yield broker
    await broker.stop()


async def checked(
    broker: Broker, *, edit: Callable[[State], None] = lambda state: None, groups: tuple[str, ...] = ()
) -> Summary:
    """Reconcile the log of a node and compare the report with its state, which `edit` may change on its way."""
    read = state_reader(Endpoint(broker.node.admin), None)

    def edited() -> State:
        state = read()
        edit(state)
        return state

    return await asyncio.to_thread(reconciled, broker.config.data_dir, edited, groups)


def reconciled(data_dir: Path, read: ReadState, groups: tuple[str, ...] = ()) -> Summary:
    engine = DuckEngine(data_dir.with_name("spilled"), threads=1)
    try:
        return reconcile(engine, data_dir, data_dir.with_name("out"), ReconcileOptions(groups=groups), read_state=read)
    finally:
        engine.close()


def group_of(state: State, name: str) -> State:
    (group,) = [each for each in state["groups"] if each["group"] == name]
    found: State = group
    return found


def differences(summary: Summary) -> list[tuple[str, str, int, int, int]]:
    assert summary["node"] is not None
    return [shown(each) for each in summary["node"]["differences"]]


def shown(each: NodeDifference) -> tuple[str, str, int, int, int]:
    return each["group"], each["counter"], each["node_min"], each["node_max"], each["log"]


async def test_a_node_agrees_with_its_log_in_each_state_and_while_it_goes_on(
    broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    counted: list[State] = []
    loop = asyncio.get_running_loop()

    def go_on(state: State) -> None:
        counted.append(state)
        asyncio.run_coroutine_threadsafe(work(), loop).result()  # the node moves all counters before the log is read

    async def work() -> None:
        async with Client(str(broker.node.grpc)) as client:
            await client.send("plant/0", b"22.0")
            for name in ("holds", "came back", "in order", "is redriven"):
                await client.pop(FILTER, group=name, messages_max=1)

    summary = await checked(broker, edit=go_on)
    state = counted[0]
    expected = {
        "node": str(broker.node.admin),
        "position": state["log"]["appended"],
        "groups": 7,  # the deleted one has counters in the log
        "differing": 0,
        "certain": True,
        "differences": [],
    }
    assert (summary["node"], summary["ok"], summary["complete"]) == (expected, True, True)
    assert summary["log"]["end_position"] == state["log"]["appended"] < broker.node.store.log.written
    counters = {
        each["group"]: (each["in_flight"], each["returned_min"], each["returned_max"], each["dead"]) for each in state["groups"]
    }
    assert counters == {
        "holds": (2, 0, 0, 0),
        "waits": (2, 0, 0, 0),
        "came back": (0, 4, 4, 0),
        "in order": (0, 2, 6, 0),  # one of each topic came back; the others are parked behind them
        "gave up": (0, 0, 0, 1),
        "is redriven": (0, 0, 1, 0),
    }
    terminal.show(summary)
    assert (
        f"Node {broker.node.admin} at position {expected['position']:,}: the node agrees on 7 groups."
        in capsys.readouterr().out
    )
    assert "the node agrees on 7 groups at position" in page.render(summary)


async def test_a_disagreement_is_found(broker: Broker, capsys: pytest.CaptureFixture[str]) -> None:
    def edit(state: State) -> None:
        group_of(state, "holds")["in_flight"] -= 1
        group_of(state, "came back")["returned_max"] = 3
        group_of(state, "gave up")["dead"] += 1
        state["groups"].remove(group_of(state, "waits"))
        state["groups"].append({**group_of(state, "holds"), "id": 99, "group": "is unknown"})

    summary = await checked(broker, edit=edit)
    assert differences(summary) == [
        ("holds", "in_flight", 1, 1, 2),
        ("waits", "exists", 0, 0, 1),
        ("came back", "returned", 4, 3, 4),
        ("gave up", "dead_letters", 2, 2, 1),
        ("is unknown", "exists", 1, 1, 0),
    ]
    assert not summary["ok"]
    terminal.show(summary)
    for text in (capsys.readouterr().out, page.render(summary)):
        assert "NOT OK: the node differs in 5 of 8 groups" in text
        assert "in flight: 1 in the node, 2 in the log" in text
        assert "exists in the log and not in the node" in text
    only = await checked(broker, edit=edit, groups=("holds", "in order"))
    assert only["node"] is not None
    assert (differences(only), only["node"]["groups"]) == ([("holds", "in_flight", 1, 1, 2)], 2)


async def test_the_state_of_another_node_is_refused(broker: Broker, tmp_path: Path) -> None:
    """Its log is longer, or no record of this log ends where it does."""
    for moved in (10_000, -1):

        def edit(state: State, moved: int = moved) -> None:
            state["log"]["appended"] += moved
            state["log"]["end"] += moved

        with pytest.raises(NodeUnreadable, match="the node writes another log"):
            await checked(broker, edit=edit)
    with pytest.raises(NodeUnreadable, match="is following in its cluster"):
        await checked(broker, edit=lambda state: state.update(replication={"role": "following"}))
    with pytest.raises(NodeUnreadable, match="has no 'returned_min', so it is of another version"):
        await checked(broker, edit=lambda state: group_of(state, "holds").pop("returned_min"))
    assert not (tmp_path / "out").exists()


def test_a_difference_proves_nothing_where_records_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every_outcome().save(tmp_path / "data")  # it begins at position 5,000, and nothing says what was open there
    end = every_outcome().end
    state = {"listen": {"admin": "127.0.0.1:8080"}, "log": {"appended": end, "end": end}, "groups": []}
    summary = reconciled(tmp_path / "data", lambda: state)
    assert [each[:2] for each in differences(summary)] == [("pumps", "in_flight"), ("pumps", "exists")]
    assert summary["complete"] is False
    terminal.show(summary)
    assert "have different counts in 2 of 2 groups, but records are missing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["--check", "--admin", "127.0.0.1:1"], 7, "No admin listener of a node answers on 127.0.0.1:1"),
        (["--check", "--at", "2026-01-01"], 2, "leave out --check or --at"),
        (["--check", "--topic", "a/#"], 2, "leave out --check or --topic"),
        (["--topic", "a/#/b"], 2, "has '#' before its last level"),
    ],
)
def test_what_can_not_be_checked_has_a_status_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, words: str
) -> None:
    every_outcome().save(tmp_path)
    assert main(["reconcile", "--data-dir", str(tmp_path), "--engine", "duckdb", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("penstock reconcile: ")
    assert words in captured.err
