"""Groups and dead letters managed by the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.system.processes import NodeProcess, run_penstock


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path / "data").start()
    yield made
    made.close()


def run(node: NodeProcess, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    address = () if arguments[0] == "inspect" else ("--pop", node.addresses["pop"])
    return run_penstock(*arguments, *address, text=text)


def rows(ended: subprocess.CompletedProcess[str]) -> list[dict]:
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_groups_and_dead_letters_by_hand(node: NodeProcess) -> None:
    created = rows(
        run(node, "group", "create", "g", "a/#", "--attempts-max", "1", "--backoff", "exponential:10:50", "--fifo", "--json")
    )
    assert created[0]["settings"]["fifo"]
    assert run(node, "group", "create", "since", "a/#", "--start", "1700000000000").returncode == 0
    assert run(node, "group", "create", "since", "a/#", "--start", "yesterday").returncode == 2
    for number in range(4):
        run(node, "send", f"a/{number}", str(number))
    answered = run(node, "pop", "a/#", "--group", "g", "--count", "4", "--ask", "--json", text="a\nn\nd\n\n")
    assert len(rows(answered)) == 4
    listed = run(node, "group", "list", "g", "--json")
    assert (rows(listed)[0]["in_flight"], rows(listed)[0]["dead"]) == ("1", "2")
    letters = rows(run(node, "dlq", "list", "g", "--json"))
    assert {letter["topic"] for letter in letters} == {"a/1", "a/2"}
    assert "forwarded" in run(node, "dlq", "list", "g").stdout
    (dead,) = rows(run(node, "pop", "$dlq/g", "--group", "operators", "--json"))
    assert (dead["dead_letter_of"], dead["attempt"]) == ("g", 1)
    assert run(node, "dlq", "redrive", "g", letters[0]["message_id"]).stdout == "1 sent back\n"
    assert run(node, "dlq", "redrive", "g", "--all").stdout == "1 sent back\n"
    assert run(node, "dlq", "redrive", "g", "--all").stdout == "0 sent back\n"
    assert run(node, "dlq", "redrive", "g").returncode != 0
    assert "paused" in run(node, "group", "pause", "g").stdout
    assert rows(run(node, "pop", "a/#", "--group", "g", "--json")) == []
    run(node, "group", "resume", "g")
    run(node, "group", "reset", "g", "--to", "earliest")
    run(node, "group", "update", "g", "--sql", "n > 3")
    assert rows(run(node, "group", "list", "g", "--json"))[0]["settings"]["expression"] == "n > 3"
    metrics = urlopen(f"http://{node.addresses['admin']}/metrics").read().decode()
    assert 'penstock_pop_group_visible{filter="a/#",group="g"}' in metrics
    assert 'penstock_pop_group_ack_latency_ms_count{filter="a/#",group="g"} 1.0' in metrics
    assert node.stop() == 0
    inspected = rows(run(node, "inspect", "groups", "--data-dir", str(node.data_dir), "--json"))
    assert next((row["group"], row["filter"], row["new"], row["dead"]) for row in inspected) == ("g", "a/#", 4, 0)
    assert "operators" in run(node, "inspect", "groups", "--data-dir", str(node.data_dir)).stdout


def test_a_group_is_deleted_by_hand(node: NodeProcess) -> None:
    run(node, "group", "create", "g", "a/#")
    assert run(node, "group", "delete", "g").returncode == 0
    assert rows(run(node, "group", "list", "--json")) == []
    ended = run(node, "group", "list", "g")
    assert (ended.returncode, "no group 'g'" in ended.stderr) == (1, True)


@pytest.mark.parametrize("backoff", ["", "x", "exponential:1", "exponential:1:2:3:4", "1,,2"])
def test_a_back_off_that_makes_no_sense_is_refused(node: NodeProcess, backoff: str) -> None:
    ended = run(node, "group", "create", "g", "a/#", "--backoff", backoff)
    assert (ended.returncode, "back-off" in ended.stderr) == (2, True)
