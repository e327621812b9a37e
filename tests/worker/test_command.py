"""`penstock worker` as a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from penstock import Client
from penstock.worker.application import GC_THRESHOLD, load
from tests.pop.wiring import FILTER, GROUP, Node
from tests.system.processes import ROOT
from tests.waiting import PROCESS_S, WAIT_S_MAX, until
from tests.worker.running import send

APPLICATION = """
import os, time
from penstock import Worker

app = Worker(grace=0.2)

@app.consumer("plant/#", group="billing", concurrency=2)
async def handle(body: bytes) -> None:
    if body == b"die":
        os._exit(3)

@app.consumer("slow/#", group="slow", concurrency=1)
def hang(body: bytes) -> None:
    time.sleep(3_600)
"""


@contextmanager
def worker(directory: Path, node: Node, *options: str, application: str = "billing:app") -> Iterator[subprocess.Popen[bytes]]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", "worker", application, *options],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": path, "PENSTOCK_TARGET": node.target},
        stderr=subprocess.PIPE,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        if process.stderr is not None:
            process.stderr.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "application").mkdir()
    (tmp_path / "application" / "billing.py").write_text(APPLICATION)
    return tmp_path / "application"


async def ended(process: subprocess.Popen[bytes]) -> int:
    return await asyncio.wait_for(asyncio.to_thread(process.wait), PROCESS_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_process_handles_messages_tells_its_health_and_stops_at_sigterm(
    node: Node, client: Client, directory: Path
) -> None:
    port = free_port()
    with worker(directory, node, "--health", f"127.0.0.1:{port}") as process:
        await send(client, [b"x"] * 20)
        await until(lambda: node.core.counters.acked == 20)
        health = await asyncio.to_thread(_get, port, "/health")
        assert health["healthy"]
        assert health["consumers"][f"{GROUP} on {FILTER}"]["handled"] == 20
        with pytest.raises(urllib.error.HTTPError, match="404"):
            await asyncio.to_thread(_get, port, "/metrics")
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.to_thread(process.communicate)
        assert process.returncode == 0
        assert f"the worker handles {GROUP} on {FILTER}" in log.decode()
    assert node.core.waiting == 0


def _get(port: int, path: str) -> dict:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=WAIT_S_MAX) as answer:
        return json.load(answer)


@pytest.mark.nightly
async def test_a_thread_that_hangs_does_not_keep_the_process_from_stopping(node: Node, client: Client, directory: Path) -> None:
    with worker(directory, node) as process:
        await client.send("slow/1", b"x")
        await until(lambda: node.core.counters.handed_out == 1)
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0
    (message,) = await client.pop("slow/#", group="slow", wait=60.0)
    assert message.attempt == 1


@pytest.mark.nightly
@pytest.mark.parametrize(("own", "expected"), [("", GC_THRESHOLD), ("gc.set_threshold(77)", 77)])
async def test_the_garbage_collector_is_spared_unless_the_application_sets_it(
    node: Node, client: Client, directory: Path, own: str, expected: int
) -> None:
    (directory / "collecting.py").write_text(f"""
import gc
from penstock import Worker

{own}
app = Worker()

@app.consumer("plant/#", group="billing")
async def handle(body: bytes) -> None:
    await app.client.send("threshold", b"%d %d" % (gc.get_threshold()[0], gc.get_freeze_count() > 0))
""")
    with worker(directory, node, application="collecting:app"):
        await send(client, [b"x"])
        (message,) = await client.pop("threshold", group="test", wait=60.0)
    assert message.body == b"%d %d" % (expected, not own)


@pytest.mark.nightly
async def test_a_process_that_dies_is_started_again(node: Node, client: Client, directory: Path) -> None:
    with worker(directory, node, "--processes", "2") as process:
        await until(lambda: node.core.waiting == 4)
        await client.groups.create(GROUP, FILTER)
        await send(client, [b"die"])
        await until(lambda: node.core.waiting == 2)
        await until(lambda: node.core.waiting == 4)
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0
    assert node.core.waiting == 0


@pytest.mark.nightly
async def test_with_reload_a_changed_file_starts_the_worker_again(node: Node, client: Client, directory: Path) -> None:
    with worker(directory, node, "--reload") as process:
        await until(lambda: node.core.waiting == 2)
        (directory / "billing.py").write_text(APPLICATION.replace("slow/#", "slower/#"))
        await until(lambda: node.core.groups.get("slow", "slower/#") is not None)
        process.send_signal(signal.SIGTERM)
        assert await ended(process) == 0


def test_a_name_that_names_no_worker_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(directory)
    monkeypatch.syspath_prepend(directory)
    for application, why in (
        ("billing", "names no worker: write MODULE:NAME"),
        ("absent:app", "there is no module 'absent'"),
        ("billing:absent", "there is no 'absent' in billing: name a penstock.Worker"),
        ("billing:handle", "it must be a penstock.Worker"),
    ):
        with pytest.raises(ValueError, match=why):
            load(application)
    sys.modules.pop("billing")


async def test_messages_of_a_process_that_is_killed_while_it_handles_them_go_to_the_next_worker(
    node: Node, client: Client, directory: Path
) -> None:
    (directory / "killed.py").write_text("""
import asyncio
from penstock import Worker

app = Worker()

@app.consumer("plant/#", group="billing", concurrency=1)
async def handle(body: bytes) -> None:
    if body == b"3":
        await app.client.send("begun", body)
        await asyncio.sleep(3_600)
""")
    node.create(backoff=())
    await send(client, (b"%d" % number for number in range(5)))
    with worker(directory, node, application="killed:app") as process:
        (message,) = await client.pop("begun", group="test", wait=60.0)
        assert message.body == b"3"
        process.kill()
        assert await ended(process) == -signal.SIGKILL
    await until(lambda: node.core.waiting == 0)  # its last poll would get what comes back
    left = node.core.counters.acked
    node.advance(31_000)
    rest: list[bytes] = []
    while popped := await client.pop(FILTER, group=GROUP, messages_max=10):
        rest += [message.body for message in popped]
        for message in popped:
            await message.ack()
    assert set(rest) >= {b"3", b"4"}
    assert len(rest) == 5 - left, "what it had acknowledged does not come again, and the rest does"


@pytest.mark.nightly
async def test_several_processes_of_a_worker_that_can_t_start_end_with_its_status(node: Node, directory: Path) -> None:
    with worker(directory, node, "--processes", "2", application="absent:app") as process:
        assert await ended(process) == 1
