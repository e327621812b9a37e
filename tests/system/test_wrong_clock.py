"""A node as a process, while the time of day that it sees jumps."""

from __future__ import annotations

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock import OutgoingMessage, SyncClient
from tests.system.processes import NodeProcess, run_penstock
from tests.system.timeofday import TimeOfDay, missing_for_time_of_day

pytestmark = [pytest.mark.nightly, pytest.mark.skipif(bool(missing_for_time_of_day()), reason=missing_for_time_of_day())]

DAY_S = 24 * 3600
MESSAGES = 3_000
BODY = bytes(1_024)

CONFIG = """
[store]
segment_bytes = 1048576
retention = "1h"

[tables]
enabled = "off"
"""


@pytest.fixture
def day(tmp_path: Path) -> TimeOfDay:
    return TimeOfDay(tmp_path)


@pytest.fixture
def node(tmp_path: Path, day: TimeOfDay, monkeypatch: pytest.MonkeyPatch) -> Iterator[NodeProcess]:
    for name, value in day.environment.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "penstock.toml").write_text(CONFIG)
    process = NodeProcess(tmp_path / "data").start("--config", str(tmp_path / "penstock.toml"))
    yield process
    if process.is_running():
        process.stop()


def state(node: NodeProcess) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://{node.addresses['admin']}/api/v1/state", timeout=10) as response:
        found: dict[str, Any] = json.load(response)
    return found


def wait_for(condition: Callable[[], object]) -> None:
    """Return when `condition()` holds."""
    deadline_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come true within 20 s"
        time.sleep(0.05)


def clock(node: NodeProcess, *arguments: str) -> dict[str, Any]:
    ended = run_penstock("clock", *arguments, "--data-dir", str(node.data_dir), "--json")
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout)
    return found


def test_a_time_of_day_that_is_thirty_days_ahead_for_some_seconds_deletes_nothing_also_across_a_kill(
    node: NodeProcess, day: TimeOfDay, tmp_path: Path
) -> None:
    with SyncClient(node.addresses["pop"]) as client:
        client.groups.create("late", "plant/#")
        for _ in range(MESSAGES // 100):
            client.send_batch([OutgoingMessage(topic="plant/1", body=BODY)] * 100)
        client.send("other/1", b"later", delay=DAY_S)
        client.groups.create("other", "other/#")
    began_ms = state(node)["clock"]["now_ms"]
    day.set_ahead(30 * DAY_S)
    wait_for(lambda: not state(node)["clock"]["confirmed"])
    node.kill()
    node.start("--config", str(tmp_path / "penstock.toml"))
    assert not clock(node)["confirmed"]
    day.set_ahead(0)
    wait_for(lambda: state(node)["clock"]["confirmed"])
    found = state(node)
    assert found["log"]["start"] == 0
    assert found["timers_pending"] == 1
    assert found["clock"]["now_ms"] - began_ms < 60_000
    with SyncClient(node.addresses["pop"]) as client:
        taken = client.pop("plant/#", group="late", messages_max=1, invisible=0.5)
        assert [message.attempt for message in taken] == [1]
        (again,) = client.pop("plant/#", group="late", messages_max=1, wait=5.0)
        assert again.body == BODY


def test_an_operator_accepts_a_time_of_day_that_jumped(node: NodeProcess, day: TimeOfDay) -> None:
    refused = run_penstock("clock", "accept", "--data-dir", str(node.data_dir))
    assert refused.returncode == 1
    assert "nothing to accept" in refused.stderr
    day.set_ahead(DAY_S)
    wait_for(lambda: not state(node)["clock"]["confirmed"])
    shown = run_penstock("clock", "--data-dir", str(node.data_dir))
    assert "has jumped, and nobody has confirmed it" in shown.stdout
    assert "(+86,4" in shown.stdout or "(+86,399.9" in shown.stdout
    accepted = clock(node, "accept")
    assert accepted["confirmed"]
    assert abs(accepted["time_of_day_ahead_ms"]) < 1_000
    assert "Both agree." in run_penstock("clock", "--data-dir", str(node.data_dir)).stdout


def test_a_command_says_that_no_node_runs(tmp_path: Path) -> None:
    ended = run_penstock("clock", "--data-dir", str(tmp_path))
    assert ended.returncode == 1
    assert "no node listens" in ended.stderr
