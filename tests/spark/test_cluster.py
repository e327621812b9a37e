"""The reconciliation on other masters than a local one: executors need nothing of Penstock, and Connect is enough."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

import pyspark

from penstock.spark.errors import JavaMissing
from penstock.spark.java import java_version
from penstock.spark.reconciliation.engines import DuckEngine
from penstock.spark.reconciliation.reconcile import reconcile
from penstock.spark.reconciliation.summary import Summary
from tests.spark.logs import every_outcome

SPARK_HOME = Path(pyspark.__file__).parent
START_S = 120

pytestmark = pytest.mark.nightly


@pytest.fixture(autouse=True)
def _java() -> None:
    try:
        java_version()
    except JavaMissing as error:
        pytest.skip(str(error))


@contextmanager
def running(log: Path, *arguments: str) -> Iterator[Callable[[str], str]]:
    """Run a class of Spark, whose Python can't run; give a function that waits for a line in its output."""
    environment = {**os.environ, "PYSPARK_PYTHON": "/bin/false", "SPARK_HOME": str(SPARK_HOME), "SPARK_NO_DAEMONIZE": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(SPARK_HOME / "bin" / "spark-class"), *arguments], stdout=output, stderr=output, env=environment
        )

    def wait_for(pattern: str) -> str:
        until_s = time.monotonic() + START_S
        while time.monotonic() < until_s:
            if found := re.search(pattern, log.read_text(errors="replace")):
                return found[1]
            assert process.poll() is None, log.read_text(errors="replace")
            time.sleep(0.2)
        raise AssertionError(f"no line with {pattern} in {log.read_text(errors='replace')}")

    try:
        yield wait_for
    finally:
        process.terminate()
        process.wait()


def by_duckdb(directory: Path) -> Summary:
    engine = DuckEngine(directory / "spilled")
    summary = reconcile(engine, directory, directory / "expected")
    engine.close()
    return summary


def run_command(directory: Path, master: str) -> Summary:
    """Run `penstock reconcile` in a process of its own with a relative path, as a user does."""
    ended = subprocess.run(
        [sys.executable, "-m", "penstock", "reconcile", "--data-dir", ".", "--out", "out", "--json", "--master", master],
        cwd=directory,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1, ended.stderr
    summary: Summary = json.loads(ended.stdout)
    assert summary == json.loads((directory / "out" / "summary.json").read_bytes())
    return summary


def test_workers_without_penstock_reconcile_a_log(tmp_path: Path) -> None:
    every_outcome().save(tmp_path)
    master = ("org.apache.spark.deploy.master.Master", "--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    worker = (
        "org.apache.spark.deploy.worker.Worker",
        "--host",
        "127.0.0.1",
        "--cores",
        "1",
        "--memory",
        "1g",
        "--webui-port",
        "0",
    )
    with running(tmp_path / "master.txt", *master) as wait_for:
        url = wait_for(r"Starting Spark master at (spark://\S+)")
        with (
            running(tmp_path / "first.txt", *worker, url) as first,
            running(tmp_path / "second.txt", *worker, url) as second,
        ):
            for each in (first, second):
                each(r"(Successfully registered)")
            summary = run_command(tmp_path, url)
    assert summary["totals"] == by_duckdb(tmp_path)["totals"]


def test_connect_reconciles_a_log(tmp_path: Path) -> None:
    pytest.importorskip("grpc_status", reason="Connect needs pyspark[connect]")
    every_outcome().save(tmp_path)
    server = ("org.apache.spark.deploy.SparkSubmit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer")
    settings = ("--master", "local[1]", "--conf", "spark.connect.grpc.binding.port=0", "spark-internal")
    with running(tmp_path / "server.txt", *server, *settings) as wait_for:
        port = wait_for(r"Spark Connect server started at: \S+?:(\d+)")
        summary = run_command(tmp_path, f"sc://127.0.0.1:{port}")
    assert summary["totals"] == by_duckdb(tmp_path)["totals"]


def test_another_master_is_an_error_that_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    every_outcome().save(tmp_path)
    ended = subprocess.run(
        [sys.executable, "-m", "penstock", "reconcile", "--data-dir", ".", "--out", "out", "--master", "foo"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 2
    assert "penstock reconcile: Spark can't use the master 'foo': " in ended.stderr
    assert "Traceback" not in ended.stderr
