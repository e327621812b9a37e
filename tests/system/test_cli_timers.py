"""Pending delayed messages by the command line."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import NodeProcess, run_penstock


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path / "data").start()
    yield made
    made.close()


def test_pending_messages_by_hand(node: NodeProcess) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_penstock(*arguments, "--pop", node.addresses["pop"])

    named = ("--topic", "orders/7", "--key", "7")
    first = json.loads(run("send", "orders/7", "x", "--delay-ms", "900000", "--key", "7", "--json").stdout)
    second = json.loads(run("send", "orders/7", "y", "--delay-ms", "900000", "--key", "7", "--json").stdout)
    found = json.loads(run("timer", "find", *named).stdout)
    assert (found["message_id"], found["recall_handle"]) == (second["message_id"], second["recall_handle"])
    assert "recalled before" in run("timer", "cancel", first["recall_handle"]).stderr
    moved = json.loads(run("timer", "reschedule", *named, "--delay-ms", "1800000").stdout)
    assert moved["deliver_at_ms"] > found["deliver_at_ms"] + 800_000
    assert (moved["key"], moved["topic"]) == ("7", "orders/7")
    assert run("timer", "cancel", *named).stdout == "cancelled\n"
    ended = run("timer", "find", *named)
    assert (ended.returncode, "is pending" in ended.stderr) == (1, True)
    assert run("timer", "reschedule", *named).returncode == 2
    assert "a recall handle, or a topic and a key" in run("timer", "find").stderr
