"""`penstock demo` and `penstock reconcile` as a user runs them, with a small load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.spark.errors import JavaMissing
from penstock.spark.session import java_version
from tests.system.processes import NodeProcess, run_penstock


@pytest.fixture(autouse=True)
def _java() -> None:
    try:
        java_version()
    except JavaMissing as error:
        pytest.skip(str(error))


@pytest.mark.timeout(300)
def test_the_demo_accounts_for_every_reading(tmp_path: Path) -> None:
    ended = run_penstock("demo", "--dir", str(tmp_path / "demo"), "--devices", "40", "--readings", "8000", timeout_s=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    summary = json.loads((tmp_path / "demo/report/summary.json").read_bytes())
    (group,) = summary["groups"]
    assert group["messages_acked"] == group["messages"] == 8000
    assert group["outcomes"]["lost"] == 0
    assert group["outcomes"]["revived"] >= 64, "the killed consumer held a batch of 64"
    assert "1 consumer was killed" in " ".join(ended.stdout.split())
    assert "Every reading was acknowledged, and no delivery is lost." in ended.stdout


@pytest.mark.timeout(180)
def test_reconcile_reads_the_directory_of_a_live_node(node: NodeProcess, tmp_path: Path) -> None:
    node.start()
    assert run_penstock("pub", "a/b", "job", "--count", "5", "--mqtt", node.addresses["mqtt"]).returncode == 0
    pop = ["pop", "a/#", "--group", "g", "--pop", node.addresses["pop"]]
    assert run_penstock(*pop, "--count", "3").returncode == 0
    assert run_penstock(*pop, "--count", "1", "--no-ack").returncode == 0
    out = tmp_path / "report"
    ended = run_penstock("reconcile", "--data-dir", str(node.data_dir), "--out", str(out), "--json", timeout_s=150)
    assert ended.returncode == 0, ended.stderr
    summary = json.loads(ended.stdout)
    outcomes = summary["totals"]["outcomes"]
    assert (outcomes["acked_in_time"], outcomes["in_flight"], outcomes["lost"]) == (3, 1, 0)
    assert summary == json.loads((out / "summary.json").read_bytes())
    assert list((out / "deliveries").glob("*.parquet"))
