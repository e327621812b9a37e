"""The lock of a data directory."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.node.lock import DataDirLock
from penstock.store.errors import DataDirLocked

HOLDER = """
import sys
from pathlib import Path
from penstock.node.lock import DataDirLock

lock = DataDirLock(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


def test_the_directory_is_created_and_the_lock_file_holds_the_pid(tmp_path: Path) -> None:
    data_dir = tmp_path / "new" / "data"
    with DataDirLock(data_dir):
        assert (data_dir / "lock").read_text() == f"{os.getpid()}\n"


def test_a_second_lock_in_the_same_process_is_refused(tmp_path: Path) -> None:
    with DataDirLock(tmp_path), pytest.raises(DataDirLocked, match=rf"{tmp_path} .* pid {os.getpid()}\."):
        DataDirLock(tmp_path)


def test_a_released_directory_can_be_locked_again(tmp_path: Path) -> None:
    lock = DataDirLock(tmp_path)
    lock.release()
    with DataDirLock(tmp_path):
        lock.release()  # a second release does nothing
        with pytest.raises(DataDirLocked):
            DataDirLock(tmp_path)


def test_a_refused_lock_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with DataDirLock(tmp_path):
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            with pytest.raises(DataDirLocked):
                DataDirLock(tmp_path)
        assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_shorter_pid_replaces_all_of_a_longer_one(tmp_path: Path) -> None:
    (tmp_path / "lock").write_text("99999999999\n")
    with DataDirLock(tmp_path), pytest.raises(DataDirLocked, match=rf"pid {os.getpid()}\."):
        DataDirLock(tmp_path)


def test_another_process_holds_the_directory_until_it_is_killed(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]) as holder:
        try:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"locked\n"
            with pytest.raises(DataDirLocked, match=rf"pid {holder.pid}\."):
                DataDirLock(tmp_path)
        finally:
            holder.send_signal(signal.SIGKILL)
            holder.wait()
        with DataDirLock(tmp_path):
            assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
