"""Jobs on other masters than a local one: what executors need of Penstock, and that Connect is enough."""

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
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

import pyspark

from penstock.spark import messages
from penstock.spark.parquet.writer import backfill
from penstock.spark.reconciliation.engines import DuckEngine
from penstock.spark.reconciliation.reconcile import reconcile
from penstock.spark.reconciliation.summary import Summary
from tests.spark.logs import every_outcome, random_log
from tests.spark.rows import rows, rows_of_tables
from tests.system.processes import ROOT

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPARK_HOME = Path(pyspark.__file__).parent
START_S = 120

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("java")]


@contextmanager
def running(log: Path, *arguments: str, **more: str) -> Iterator[Callable[[str], str]]:
    """Run a class of Spark, whose Python can't run; give a function that waits for a line in its output.

    `more` are variables of its environment.
    """
    environment = {
        **os.environ,
        "PYSPARK_PYTHON": "/bin/false",
        "SPARK_HOME": str(SPARK_HOME),
        "SPARK_NO_DAEMONIZE": "1",
    } | more
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


@contextmanager
def cluster(directory: Path) -> Iterator[str]:
    """Run a master and two workers; give the URL of the master."""
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
        "--work-dir",
        str(directory / "work"),
    )
    with running(directory / "master.txt", *master) as wait_for:
        url = wait_for(r"Starting Spark master at (spark://\S+)")
        with (
            running(directory / "first.txt", *worker, url) as first,
            running(directory / "second.txt", *worker, url) as second,
        ):
            for each in (first, second):
                each(r"(Successfully registered)")
            yield url


@contextmanager
def connect_server(log: Path, **environment: str) -> Iterator[str]:
    """Run a server of Spark Connect; give its URL."""
    pytest.importorskip("grpc_status", reason="Connect needs pyspark[connect]")
    server = ("org.apache.spark.deploy.SparkSubmit", "--class", "org.apache.spark.sql.connect.service.SparkConnectServer")
    settings = ("--master", "local[1]", "--conf", "spark.connect.grpc.binding.port=0", "spark-internal")
    with running(log, *server, *settings, **environment) as wait_for:
        port = wait_for(r"Spark Connect server started at: \S+?:(\d+)")
        yield f"sc://127.0.0.1:{port}"


def python_without_penstock(directory: Path) -> Path:
    """Make an environment that has all that Penstock depends on; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", directory], check=True)
    (site,) = (directory / "lib").glob("*/site-packages")
    for entry in SPARK_HOME.parent.iterdir():
        if "penstock" not in entry.name:
            (site / entry.name).symlink_to(entry)
    return directory / "bin" / "python"


def read_rows(python: Path | str, *arguments: object, **environment: str) -> dict[str, list[str]]:
    """Run `tests.spark.rows` with a Python; return what it prints."""
    command = [str(python), "-m", "tests.spark.rows", *map(str, arguments)]
    ended = subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: dict[str, list[str]] = json.loads(ended.stdout)
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A log whose tables have all segments but the last."""
    path = tmp_path / "log"
    random_log(3, 2_000).save(path)
    list(backfill(path))
    return path


def test_workers_without_penstock_reconcile_a_log(tmp_path: Path) -> None:
    every_outcome().save(tmp_path)
    with cluster(tmp_path) as url:
        summary = run_command(tmp_path, url)
    assert summary["totals"] == by_duckdb(tmp_path)["totals"]


def test_workers_get_penstock_from_the_session_and_need_no_python_for_the_history(
    log: Path, spark: SparkSession, tmp_path: Path
) -> None:
    python = python_without_penstock(tmp_path / "python")
    with cluster(tmp_path) as url:
        found = read_rows(python, url, log, tmp_path)
        history = read_rows(sys.executable, url, log, tmp_path, "--history", PYSPARK_PYTHON="/bin/false")
    assert "penstock_spark.zip" in found.pop("imported_from")
    stream = found.pop("stream")
    assert found == rows_of_tables(spark, log)
    assert history == rows_of_tables(spark, log, tail=False) != found
    assert stream == rows(messages(spark, log).select("position", "body"))


def test_connect_reads_tables_and_log_and_follows_the_log(log: Path, spark: SparkSession, tmp_path: Path) -> None:
    with connect_server(tmp_path / "server.txt", PYSPARK_PYTHON=sys.executable, PYTHONPATH=str(ROOT)) as url:
        found = read_rows(sys.executable, url, log, tmp_path)
    assert found.pop("stream") == rows(messages(spark, log).select("position", "body"))
    assert found == rows_of_tables(spark, log)


def test_connect_reconciles_a_log(tmp_path: Path) -> None:
    every_outcome().save(tmp_path)
    with connect_server(tmp_path / "server.txt") as url:
        summary = run_command(tmp_path, url)
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
