"""What a supervisor hears of a node, and which addresses and timeouts it may name."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import pytest

from penstock.node.supervisor import Supervisor


@pytest.mark.parametrize("is_abstract", [False, True])
async def test_a_supervisor_hears_each_state_and_pings_in_between(tmp_path: Path, is_abstract: bool) -> None:
    name = f"penstock-{os.getpid()}"
    path = tmp_path.parent / name  # the name of a socket may have 107 bytes
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0{name}" if is_abstract else str(path))
        heard.setblocking(False)
        address = f"@{name}" if is_abstract else str(path)
        supervisor = Supervisor({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "2000", "WATCHDOG_PID": str(os.getpid())})
        loop = asyncio.get_running_loop()
        supervisor.starting()
        supervisor.ready("serves clients")
        supervisor.watch(loop)
        supervisor.reloading()
        said = [(await loop.sock_recv(heard, 1000)).decode().split("\n") for _ in range(5)]
        assert said[:3] == [
            ["STATUS=recovers log and index"],
            ["READY=1", "STATUS=serves clients", "WATCHDOG_USEC=2000"],
            ["WATCHDOG=1"],
        ]
        assert said[3][0] == "RELOADING=1"
        assert int(said[3][1].removeprefix("MONOTONIC_USEC=")) <= loop.time() * 1e6
        assert said[4] == ["WATCHDOG=1"], "a later turn of the loop pings again"
        supervisor.close()
        supervisor.stopping("stops")


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"NOTIFY_SOCKET": "vsock:2:1234"},
        {"NOTIFY_SOCKET": "/nonexistent/notify"},
        {"WATCHDOG_USEC": "soon"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"},
    ],
)
async def test_a_node_without_a_supervisor_that_it_can_reach_goes_on(environment: dict[str, str]) -> None:
    supervisor = Supervisor(environment)
    supervisor.ready("serves clients")
    supervisor.watch(asyncio.get_running_loop())
    supervisor.close()
