"""Processes of `penstock` are forked, and behave as those that a shell starts."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.chaos.launching import Anew, Forks, Launcher
from tests.chaos.nodeprocess import ServeProcess, run_command
from tests.waiting import until

pytestmark = pytest.mark.nightly


@pytest.fixture(params=[Anew, Forks])
async def launcher(request: pytest.FixtureRequest) -> AsyncIterator[Launcher]:
    made: Launcher = request.param()
    yield made
    await made.close()


async def test_a_command_says_what_it_has_to_say_and_how_it_ended(tmp_path: Path, launcher: Launcher) -> None:
    status, said = await run_command("repair", "--data-dir", str(tmp_path / "none"), launcher=launcher)
    assert status == 1
    assert said.startswith("penstock repair: ")
    status, said = await run_command("--version", launcher=launcher)
    assert (status, said.split()[0]) == (0, "penstock")
    assert (await run_command("repair", "--nonsense", launcher=launcher))[0] == 2


async def test_a_node_can_be_killed_started_again_and_stopped(tmp_path: Path, launcher: Launcher) -> None:
    (tmp_path / "penstock.toml").touch()
    node = ServeProcess(tmp_path / "data", tmp_path / "penstock.toml", tmp_path / "log", launcher)
    assert (await node.start()).is_ready
    assert node.sync_pid
    assert node.pid != os.getpid()
    node.signal(signal.SIGKILL)
    assert await node.ended() == -signal.SIGKILL
    node.descriptors = 700, 700
    assert (await node.start()).is_ready
    assert resource.prlimit(node.pid, resource.RLIMIT_NOFILE) == (700, 700)
    assert await node.stop() == 0
    assert "node.stopped" in (tmp_path / "log").read_text()


async def test_what_is_left_ends_with_the_process_that_forked_it(tmp_path: Path) -> None:
    (tmp_path / "penstock.toml").touch()
    forks = Forks()
    node = ServeProcess(tmp_path / "data", tmp_path / "penstock.toml", tmp_path / "log", forks)
    assert (await node.start()).is_ready
    await forks.close()
    await until(lambda: not is_alive(node.pid))


def is_alive(pid: int) -> bool:
    try:
        return b") Z " not in Path(f"/proc/{pid}/stat").read_bytes()
    except FileNotFoundError:
        return False
