"""`make cluster-demo`, small: it finds no loss where there is none, and finds one where there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clusterdemo import NODES, Fleet, audit, demo
from tests.system.clusternodes import cluster_of_nodes

pytestmark = pytest.mark.nightly


async def test_a_kill_of_the_leader_loses_nothing_and_a_loss_would_be_seen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with cluster_of_nodes(tmp_path, NODES) as cluster:
        assert await demo(cluster, devices=10, kills=1, seed=1) == 0
        assert "lost          0" in capsys.readouterr().out
        monkeypatch.setattr("tests.clusterdemo.AUDIT_S", 3.0)
        fleet = Fleet(acked={0: 1, 10: 1})  # there is no device 10
        assert (await audit(cluster, fleet, "another"))[0] == 1
