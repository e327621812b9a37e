"""Groups and dead letters managed by the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.system.processes import ROOT, NodeProcess, run_penstock
from tests.waiting import PROCESS_S


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path / "data").start()
    yield made
    made.close()


def run(node: NodeProcess, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    address = () if arguments[0] == "inspect" else ("--target", node.addresses["pop"])
    return run_penstock(*arguments, *address, text=text)


def rows(ended: subprocess.CompletedProcess[str]) -> list[dict]:
    assert ended.returncode == 0, ended.stderr
    return [json.loads(line) for line in ended.stdout.splitlines()]


def test_groups_and_dead_letters_by_hand(node: NodeProcess) -> None:
    created = rows(
        run(node, "group", "create", "g", "a/#", "--attempts-max", "1", "--backoff", "exponential:10ms:1s", "--fifo", "--json")
    )
    assert created[0]["settings"]["fifo"]
    assert run(node, "group", "create", "since", "a/#", "--start", "1700000000000").returncode == 0
    assert run(node, "group", "create", "since", "a/#", "--start", "yesterday").returncode == 2
    for number in range(4):
        run(node, "send", f"a/{number}", str(number))
    answered = run(node, "pop", "a/#", "--group", "g", "--count", "4", "--ask", "--json", text="a\nn\nd\n\n")
    assert len(rows(answered)) == 4
    listed = run(node, "group", "list", "g", "--json")
    assert (rows(listed)[0]["in_flight"], rows(listed)[0]["dead"]) == (1, 2)
    letters = rows(run(node, "dlq", "list", "g", "--json"))
    assert {letter["topic"] for letter in letters} == {"a/1", "a/2"}
    assert "forwarded" in run(node, "dlq", "list", "g").stdout
    (dead,) = rows(run(node, "pop", "$dlq/g", "--group", "operators", "--json"))
    assert (dead["dead_letter_of"], dead["attempt"]) == ("g", 1)
    (shown,) = rows(run(node, "dlq", "show", "g", letters[0]["message_id"], "--json"))
    assert (shown["message_id"], shown["reason"], shown["group"]) == (letters[0]["message_id"], "attempts_exhausted", "g")
    assert f"body  {shown['body']}" in run(node, "dlq", "show", "g", letters[0]["message_id"]).stdout
    assert "is no dead letter of the group 'g'" in run(node, "dlq", "show", "g", "0" * 16).stderr
    assert run(node, "dlq", "redrive", "g", letters[0]["message_id"]).stdout == "1 sent back\n"
    assert run(node, "dlq", "purge", "g", "--all").stdout == "1 purged\n"
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
    assert 'penstock_pop_group_ack_latency_seconds_count{filter="a/#",group="g"} 1.0' in metrics
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


def test_a_name_of_no_group_is_an_error(node: NodeProcess) -> None:
    run(node, "group", "create", "g", "a/#", "--invisible", "10min")
    assert run(node, "dlq", "list", "g").returncode == 0
    data = ("--data-dir", str(node.data_dir))
    for command in (("dlq", "list", "bg"), ("dlq", "redrive", "bg", "--all"), ("dlq", "redrive", "bg", "82")):
        ended = run(node, *command)
        assert (ended.returncode, "no group 'bg'" in ended.stderr) == (1, True)
    assert node.stop() == 0
    assert rows(run(node, "inspect", "groups", "--group", "g", "--json", *data))[0]["settings"]["invisible_ms"] == 600_000
    for command, what in ((("groups", "--group", "bg"), "no group 'bg'"), (("sessions", "--client", "bg"), "no session of")):
        ended = run(node, "inspect", *command, *data)
        assert (ended.returncode, what in ended.stderr) == (1, True)


def test_ids_are_accepted_in_both_notations(node: NodeProcess) -> None:
    run(node, "group", "create", "g", "a/#", "--attempts-max", "1")
    ids = [rows(run(node, "send", "a/1", str(number), "--json"))[0]["message_id"] for number in range(2)]
    rows(run(node, "pop", "a/#", "--group", "g", "--count", "2", "--ask", "--json", text="d\nd\n"))
    first, second = (int(each, 16) for each in ids)
    letters = rows(run(node, "dlq", "list", "g", "--after", str(first), "--json"))
    assert [letter["message_id"] for letter in letters] == [ids[1]]
    ended = run(node, "dlq", "redrive", "g", str(second), "77")
    assert (ended.returncode, ended.stdout) == (1, "1 sent back\n")
    assert "1 of the ids are no dead letters" in ended.stderr
    data = ("--data-dir", str(node.data_dir), "--json", "--limit", "1")
    for at in (ids[1], str(second)):
        (row,) = rows(run(node, "inspect", "log", "--from", at, *data))
        assert (row["position"], row["message_id"]) == (second, ids[1])
    assert run(node, "group", "reset", "g", "--message-id", str(second)).returncode == 0


def test_a_reader_that_has_read_enough_is_no_error(node: NodeProcess) -> None:
    for number in range(5):
        run(node, "send", "a/1", str(number) * 20_000)
    command = f"{sys.executable} -m penstock inspect log --data-dir {node.data_dir} --json | head -c 10 >&2"
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert len(ended.stderr) == 10


@pytest.mark.parametrize("backoff", ["", "x", "exponential:1s", "exponential:1s:2s:3:4", "1s,,2s", "1000"])
def test_a_back_off_that_makes_no_sense_is_refused(node: NodeProcess, backoff: str) -> None:
    ended = run(node, "group", "create", "g", "a/#", "--backoff", backoff)
    assert (ended.returncode, "back-off" in ended.stderr) == (2, True)
