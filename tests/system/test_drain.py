"""`penstock drain` on a real node."""

from __future__ import annotations

from pathlib import Path

from tests.system.processes import NodeProcess, run_penstock


def test_a_drained_node_ends_in_order(tmp_path: Path) -> None:
    node = NodeProcess(tmp_path / "data").start()
    try:
        refused = run_penstock("drain", "--admin", node.addresses["admin"])
        assert (refused.returncode, "show a token" in refused.stderr) == (1, True), "a stranger drains nothing"
        drained = run_penstock("drain", "--grace", "5s", "--data-dir", str(tmp_path / "data"))
        assert (drained.returncode, drained.stderr) == (0, "")
        assert drained.stdout.splitlines()[::2][0] == "draining: 0 clients of MQTT, 0 batches that consumers have"
        assert drained.stdout.splitlines()[-1] == "the node has stopped"
        assert node.stop() == 0
    finally:
        node.close()
