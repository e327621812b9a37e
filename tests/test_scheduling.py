"""Tests of how the tests are dealt out."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PROCESS_S

pytestmark = pytest.mark.nightly

CRASHING = """
import os
import pathlib

RUNS = pathlib.Path(__file__).with_name("runs")

def note(name):
    with RUNS.open("a") as runs:
        print(name, file=runs)

def test_before():
    note("before")

def test_crash():
    note("crash")
    os._exit(3)

def test_after():
    note("after")
"""

SCHEDULER = """
from tests.scheduling import Scheduling

def pytest_xdist_make_scheduler(config, log):
    return Scheduling(config, log)
"""


def _run(directory: Path) -> tuple[str, list[str]]:
    directory.joinpath("test_crashing.py").write_text(CRASHING)
    directory.joinpath("conftest.py").write_text(SCHEDULER)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "xdist",
        "-n2",
        "--rootdir",
        str(directory),
        "-p",
        "no:cacheprovider",
        str(directory),
    ]
    # What xdist tells its own processes would tell the inner ones that they are the outer ones.
    outer = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    ran = subprocess.run(
        command,
        cwd=Path(__file__).parents[1],
        env={**outer, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=PROCESS_S,
        check=False,
    )
    return ran.stdout, sorted(directory.joinpath("runs").read_text().split())


def test_a_test_that_ends_its_process_is_reported_once_and_not_run_again(tmp_path: Path) -> None:
    output, runs = _run(tmp_path)
    assert runs == ["after", "before", "crash"]
    assert "1 failed, 2 passed" in output
    assert "crashed while running" in output
