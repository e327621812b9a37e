"""The notebook runs as a script, on the readings of the demo's devices."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")
pytest.importorskip("matplotlib", reason="the notebook draws with matplotlib, which is part of the extra `dev`")

from penstock.demo.fleet import simulate
from tests.spark.log_writer import LogWriter
from tests.system.processes import ROOT


@pytest.mark.nightly
@pytest.mark.usefixtures("java")
def test_the_notebook_draws_its_plots_and_prints_its_figures(tmp_path: Path) -> None:
    """Each message is popped after 5 ms and acknowledged after 7 ms."""
    log = LogWriter()
    log.group(1, "billing", "plant/#")
    for reading in simulate(seed=1, devices=4, readings=400):
        log.now_ms += 10
        message = log.message(reading.topic, reading.body)
        log.now_ms += 5
        checkpoint = log.checkpoint(1, "billing", [message], deadline_ms=log.now_ms + 1_000)
        log.now_ms += 2
        log.ack(1, "billing", [(checkpoint, 0)])
    log.save(tmp_path / "data")
    command = [sys.executable, "examples/notebook.py", str(tmp_path / "data"), str(tmp_path / "out")]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    printed = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True).stdout
    for line in (
        "400 messages\n",
        "from publish to first pop: half within 5 ms, 99 % within 5 ms\n",
        "from publish to acknowledgement: half within 7 ms, 99 % within 7 ms\n",
        " unusual readings\n",
        "|device-0003|",
        "|plant/line-01|",
        "400 readings in Parquet\n",
        "400 deliveries: {'acked': 400}\n",
    ):
        assert line in printed
    for name, title in (
        ("traffic", "Readings stored, by line"),
        ("latency", "Time since the publish"),
        ("temperature", "plant/line-01/device-"),
    ):
        assert title in (tmp_path / "out" / f"{name}.svg").read_text()
