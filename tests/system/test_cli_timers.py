"""Pending delayed messages by the command line."""

from __future__ import annotations

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.processes import NodeProcess, run_penstock


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path / "data").start()
    yield made
    made.close()


def test_pending_messages_by_hand(node: NodeProcess) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_penstock(*arguments, "--target", node.addresses["pop"])

    named = ("--topic", "orders/7", "--key", "7")
    first = json.loads(run("send", "orders/7", "x", "--delay", "15min", "--key", "7", "--json").stdout)
    second = json.loads(run("send", "orders/7", "y", "--delay", "15min", "--key", "7", "--json").stdout)
    found = json.loads(run("timer", "find", *named).stdout)
    assert (found["message_id"], found["recall_handle"]) == (second["message_id"], second["recall_handle"])
    assert "recalled before" in run("timer", "cancel", first["recall_handle"]).stderr
    moved = json.loads(run("timer", "reschedule", *named, "--delay", "30min").stdout)
    assert moved["deliver_at_ms"] > found["deliver_at_ms"] + 800_000
    assert (moved["key"], moved["topic"]) == ("7", "orders/7")
    assert run("timer", "cancel", *named).stdout == "cancelled\n"
    ended = run("timer", "find", *named)
    assert (ended.returncode, "is pending" in ended.stderr) == (1, True)
    assert run("timer", "reschedule", *named).returncode == 2
    assert "a recall handle, or a topic and a key" in run("timer", "find").stderr


def test_pending_messages_are_listed_and_counted(node: NodeProcess) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_penstock(*arguments, "--target", node.addresses["pop"])

    def ask(query: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"http://{node.addresses['admin']}/api/v1/timers{query}", timeout=10) as response:
            found: dict[str, Any] = json.load(response)
            return found

    for number in (3, 1, 2):
        run("send", f"orders/{number}", "x", "--delay", f"{10 * number}min", "--key", str(number))
    run("send", "plant/1", "x", "--delay", "1440min")
    rows = [json.loads(line) for line in run("timer", "list", "orders/#", "--json").stdout.splitlines()]
    assert [row["topic"] for row in rows] == ["orders/1", "orders/2", "orders/3"]
    assert json.loads(run("timer", "find", rows[0]["recall_handle"]).stdout) == rows[0]
    first = run("timer", "list", "--limit", "3")
    assert [line.split()[1] for line in first.stdout.splitlines()] == ["topic", "orders/1", "orders/2", "orders/3"]
    token = first.stderr.split()[-1]
    assert "plant/1" in run("timer", "list", "--page-token", token).stdout
    late = run("timer", "list", "orders/+", "--from", rows[2]["deliver_at"], "--before", "2999-01-01", "--json")
    assert json.loads(late.stdout) == rows[2]
    assert json.loads(run("timer", "list", "--key", "2", "--json").stdout) == rows[1]
    assert run("timer", "list", "--from", "tomorrow").returncode == 2
    counted = json.loads(run("timer", "count", "--json").stdout)
    assert (counted["pending"], counted["due_minute"], counted["due_hour"]) == (4, 0, 3)
    assert counted["next_ms"] == rows[0]["deliver_at_ms"]
    assert "pending" in run("timer", "count").stdout

    shown = ask("")
    assert (shown["pending"], shown["due_hour"], len(shown["timers"])) == (4, 3, 4)
    assert shown["timers"][0] == {name: rows[0][name] for name in rows[0] if name not in ("recall_handle", "deliver_at")}
    page = ask("?filter=orders/%2B&limit=2")
    assert [timer["key"] for timer in page["timers"]] == ["1", "2"]
    assert [timer["key"] for timer in ask(f"?filter=orders/%2B&page_token={page['next_page_token']}")["timers"]] == ["3"]
    wrong = {"filter=a/%23/b": "a/#/b", "limit=0": "page of 0", "limit=x": "limit is 'x'", "topic=a": "'topic'"}
    for query, error in wrong.items():
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(f"?{query}")
        assert refused.value.code == 400
        assert error in json.load(refused.value)["error"]

    node.stop()
    node.start()
    again = [json.loads(line) for line in run("timer", "list", "orders/#", "--json").stdout.splitlines()]
    assert again == rows
    assert (
        run("timer", "cancel-all", "orders/+", "--before", rows[2]["deliver_at"], "--client-id", "x").stdout == "0 cancelled\n"
    )
    assert run("timer", "cancel-all", "orders/+", "--before", rows[2]["deliver_at"]).stdout == "2 cancelled\n"
    assert [line.split()[1] for line in run("timer", "list").stdout.splitlines()] == ["topic", "orders/3", "plant/1"]
    assert run("timer", "cancel-all").returncode == 2, "it needs a filter"
