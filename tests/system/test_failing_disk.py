"""A node on a real file system whose disk fails. `make test-chaos` plays the same under load, and much more."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.disk import missing_for_disks
from tests.system.processes import ROOT
from tests.waiting import PROCESS_S

pytestmark = pytest.mark.nightly


@pytest.mark.skipif(bool(missing_for_disks()), reason=missing_for_disks())
@pytest.mark.parametrize("scenario", ["failed-write", "unreadable"])
def test_what_was_acknowledged_outlives(tmp_path: Path, scenario: str) -> None:
    command = [sys.executable, "-m", "tests.system.failing_disk", scenario, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROCESS_S, check=False)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}\n{(tmp_path / 'log').read_text()[-3000:]}"
