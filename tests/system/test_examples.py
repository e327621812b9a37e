"""Each example runs against a real node and succeeds."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.system.processes import ROOT, NodeProcess

OF_SPARK = {"notebook.py", "spark_commands.py"}
"""They have tests of their own, which start Spark: tests/spark/test_notebook.py and test_commands.py."""

EXAMPLES = sorted({path.name for path in (ROOT / "examples").glob("*.py")} - OF_SPARK)
RUN_S = 240

EXPECTED = {
    "native_asyncio.py": ["consumed 100", "streamed"],
    "native_sync.py": ["consumed 100"],
    "transaction.py": ["orders [1, 2, 4, 5, 7, 8], messages [1, 2, 4, 5, 7, 8]"],
    "order_timeout.py": ["order 2: paid", "closed: 1, 3", "order 3: the payment came too late"],
    "device_command.py": ["device: open, command 41, try 3", "confirmed after 3 tries; recalled: 2"],
    "nightly_reports.py": ["acme: 5 nights ahead in Europe/Berlin", "report of acme: report/acme", "schedules left: 0"],
    "fifo.py": ["5 accounts, all in order"],
    "rocketmq_client.py": ["received 1, 3, 5, 7, delayed"],
    "redrive.py": ["dead: raw/readings after 2 attempts, attempts_exhausted", "sent back: 1", "processed: twenty, attempt 1"],
}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeProcess]:
    made = NodeProcess(tmp_path / "data").start()
    yield made
    made.close()


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_it_promises(node: NodeProcess, tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(ROOT / "examples" / name), node.addresses["pop"]]
    # The RocketMQ client writes its log to HOME.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=False, env=environment)
    assert ended.returncode == 0, ended.stderr
    for line in EXPECTED.get(name, []):
        assert line in ended.stdout
    assert "Traceback" not in ended.stderr
