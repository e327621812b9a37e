"""The index on a disk whose power fails: RocksDB keeps what `store/index/rocksdb.py` says of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.disk import missing_for_disks

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]


def cut(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Cut the power under RocksDB some times, in a process that has mounts of its own."""
    if why := missing_for_disks():
        pytest.skip(why)
    command = [sys.executable, "-m", "tests.chaos.indexcuts", str(directory), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_after_a_power_cut_the_index_has_all_writes_up_to_one_after_its_last_flush(tmp_path: Path) -> None:
    done = cut(tmp_path, "2")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    assert done.stdout.count("was flushed") == 2


def test_a_flush_that_does_nothing_would_be_noticed(tmp_path: Path) -> None:
    done = cut(tmp_path, "1", "--unflushed")
    assert done.returncode == 1, f"{done.stdout}\n{done.stderr}"
    assert "was flushed, and the database has only" in done.stdout
