"""Schedules by the command line."""

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


def test_schedules_by_hand(node: NodeProcess) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run_penstock("schedule", *arguments, "--target", node.addresses["pop"])

    night = ("report", "reports/acme", "{{occurrence:%Y}}", "--cron", "0 2 1 1 *", "--zone", "Europe/Berlin", "--template")
    refused = run("create", *night, "--start", "2040-06-01T00:00:00+02:00", "--end", "2040-07-01")
    assert refused.returncode == 1
    assert "no occurrence within ten years" in refused.stderr
    created = run("create", *night, "--missed", "once", "--property", "a=b")
    assert [line[4:] for line in created.stdout.splitlines()] == ["-01-01T01:00:00.000+00:00"] * 5
    assert "already: add --replace, delete it" in run("create", *night).stderr
    assert run("create", *night, "--replace", "--count", "1").stdout.count("\n") == 1
    assert run("create", "other", "a", "--every", "1min", "--property", "a").returncode == 1
    assert run("create", "other", "a", "--every", "1min", "--end", "tomorrow").returncode == 2
    assert run("create", "other", "a").returncode == 2
    listed = json.loads(run("list", "--json").stdout)
    assert (listed["schedule"]["name"], listed["schedule"]["body"]) == ("report", "{{occurrence:%Y}}")
    assert "0 2 1 1 * (Europe/Berlin)" in run("list", "rep").stdout
    assert run("create", "hourly", "a", "--every", "60min").returncode == 0
    assert "every 1h " in run("list", "hourly").stdout
    assert run("pause", "report").stdout == "paused\n"
    assert json.loads(run("show", "report").stdout)["paused"]
    assert run("resume", "report").stdout.endswith("-01-01T01:00:00.000+00:00\n")
    assert len(run("run", "report").stdout) == 17
    assert run("delete", "report").stdout == "deleted\n"
    assert "there is no schedule 'report'" in run("delete", "report").stderr
