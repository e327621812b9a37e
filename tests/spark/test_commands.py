"""The example that turns unusual readings into commands, beside a node, and killed in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("pyspark", reason="Spark's part needs the extra `spark`")

from penstock import OutgoingMessage, SyncClient
from tests.system.processes import ROOT, NodeProcess

TOPIC = "plant/1/press/temperature"
COMMAND_S = 240

pytestmark = [pytest.mark.nightly, pytest.mark.usefixtures("java")]


def started(node: NodeProcess, directory: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ROOT / "examples/spark_commands.py"), str(node.data_dir), node.addresses["pop"]]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, env=environment, start_new_session=True)
    assert process.stdout is not None
    assert process.stdout.readline() == b"1 topics are known\n"
    return process


def test_each_unusual_reading_becomes_one_command_also_after_a_kill(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data").start()
    commands: Counter[float] = Counter()
    with SyncClient(node.addresses["pop"]) as client:
        client.send_batch([OutgoingMessage(topic=TOPIC, body=b"%d" % (70 + number % 3)) for number in range(60)])
        unusual = 1_000

        def take() -> None:
            for message in client.pop("commands/#", group="commands", wait=1.0):
                assert message.topic == f"commands/{TOPIC}"
                commands[json.loads(message.body)["value"]] += 1
                message.ack()

        for _ in range(2):
            process = started(node, tmp_path)
            try:
                before, until_s = len(commands), time.monotonic() + COMMAND_S
                while len(commands) == before:  # the stream begins some time after its first line
                    assert time.monotonic() < until_s
                    unusual += 1
                    client.send_batch([OutgoingMessage(topic=TOPIC, body=body) for body in (b"71", b"%d" % unusual)])
                    take()
            finally:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        process = started(node, tmp_path)
        try:
            while unusual not in commands:  # the last reading before the kill, and those that it left behind
                take()
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    node.stop()
    assert set(commands.values()) == {1}
    assert set(commands) == set(range(int(min(commands)), unusual + 1)), "every reading since the stream began"
