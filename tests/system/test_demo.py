"""`penstock demo` and `penstock reconcile` as a user runs them, with a small load."""

from __future__ import annotations

import asyncio
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from penstock.node.controladdress import SOCKET
from penstock.spark.errors import JavaMissing
from penstock.spark.java import java_version
from penstock.store.log.logreader import read_log
from penstock.store.log.syncmark import SyncMark
from penstock.store.options import KIB
from penstock.store.record import Kind
from tests.system.processes import NodeProcess, run_penstock
from tests.waiting import until

pytestmark = pytest.mark.nightly

STORED_BYTES_MIN = 300 * KIB
"""Bytes of the log after which the backup begins: about an eighth of the demo."""


@pytest.fixture(autouse=True)
def _java() -> None:
    try:
        java_version()
    except JavaMissing as error:
        pytest.skip(str(error))


class Demo(NamedTuple):
    """A run of the demo, and a backup that was made while its node was under load."""

    directory: Path
    ended: subprocess.CompletedProcess[str]
    backup: Path
    backed_up: dict[str, Any]
    """What `penstock backup` has printed."""


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    work = tmp_path_factory.mktemp("demo")
    data_dir, backup = work / "demo/data", work / "backup"
    with ThreadPoolExecutor() as threads:
        arguments = ("demo", "--dir", str(work / "demo"), "--devices", "40", "--readings", "8000")
        running = threads.submit(run_penstock, *arguments, timeout_s=280)
        asyncio.run(until(lambda: running.done() or stored_bytes(data_dir) > STORED_BYTES_MIN))
        backed_up = run_penstock("backup", str(backup), "--data-dir", str(data_dir), "--json")
        assert (data_dir / SOCKET).exists(), "the node still runs"
        ended = running.result()
    assert backed_up.returncode == 0, backed_up.stderr
    return Demo(work / "demo", ended, backup, json.loads(backed_up.stdout))


def stored_bytes(data_dir: Path) -> int:
    """Return the position up to which the log of a node is durable, as its sync mark says; 0 if it has none."""
    mark = SyncMark(data_dir).read()
    return mark.position if mark is not None else 0


@pytest.mark.timeout(300)
def test_the_demo_accounts_for_every_reading(demo: Demo) -> None:
    assert demo.ended.returncode == 0, demo.ended.stdout + demo.ended.stderr
    summary = json.loads((demo.directory / "report/summary.json").read_bytes())
    (group,) = summary["groups"]
    assert group["message_outcomes"]["acked"] == group["messages"] == 8000
    assert group["outcomes"]["lost"] == 0
    assert group["outcomes"]["revived"] > 0, "the killed consumer held a batch, of at most 64"
    assert "1 consumer was killed" in " ".join(demo.ended.stdout.split())
    assert "Every reading was acknowledged, and no delivery is lost." in demo.ended.stdout


@pytest.mark.timeout(300)
def test_a_backup_made_during_the_demo_has_its_readings_and_goes_on_from_there(
    demo: Demo, node: NodeProcess, tmp_path: Path
) -> None:
    assert demo.backed_up["durable"] >= STORED_BYTES_MIN
    verified = run_penstock("verify", str(demo.backup), "--json")
    assert verified.returncode == 0, verified.stdout
    assert run_penstock("restore", str(demo.backup), str(node.data_dir)).returncode == 0
    whole, restored = (
        [(record.position, record.body) for record in read_log(data_dir) if record.kind == Kind.MESSAGE]
        for data_dir in (demo.directory / "data", node.data_dir)
    )
    assert 0 < len(restored) <= len(whole)
    assert restored == whole[: len(restored)]
    node.start()
    popped: list[str] = []
    while len(popped) < len(restored):
        ended = run_penstock(
            "pop", "#", "--group", "again", "--count", "2000", "--wait", "9s", "--json", "--target", node.addresses["pop"]
        )
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout
        popped += [json.loads(line)["body"] for line in ended.stdout.splitlines()]
    assert sorted(popped) == sorted(body.decode() for _, body in restored)
    assert node.stop() == 0
    assert run_penstock("verify", str(node.data_dir)).returncode == 0


@pytest.mark.timeout(180)
def test_reconcile_reads_the_directory_of_a_live_node(node: NodeProcess, tmp_path: Path) -> None:
    node.start()
    assert run_penstock("pub", "a/b", "job", "--count", "5", "--mqtt", node.addresses["mqtt"]).returncode == 0
    pop = ["pop", "a/#", "--group", "g", "--target", node.addresses["pop"]]
    assert run_penstock(*pop, "--count", "3").returncode == 0
    assert run_penstock(*pop, "--count", "1", "--no-ack").returncode == 0
    out = tmp_path / "report"
    ended = run_penstock("reconcile", "--data-dir", str(node.data_dir), "--out", str(out), "--json", timeout_s=150)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    outcomes = summary["totals"]["outcomes"]
    assert (outcomes["acked"], outcomes["in_flight"], outcomes["lost"]) == (3, 1, 0)
    assert summary == json.loads((out / "summary.json").read_bytes())
    assert list((out / "outcomes").glob("*.parquet"))
