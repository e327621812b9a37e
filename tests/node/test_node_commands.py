"""`penstock storage`, `penstock options` and `penstock log-level` on a running node."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.wire import Broker
from tests.node.adminapi import audited, broker, loggers, run

__all__ = ["broker", "loggers", "run"]


@pytest.mark.usefixtures("loggers")
async def test_a_node_says_what_it_stores_how_it_is_set_and_what_it_logs(broker: Broker, run: Any) -> None:
    status, said = await run("storage", role="viewer")
    lines = dict(line.strip().split("  ", 1) for line in said.splitlines())
    assert (status, list(lines)) == (0, ["disk", "log", "index", "kept", "kept longer by", "copies", "queues"])
    assert lines["disk"].endswith("everything can be stored")
    assert (lines["kept"], lines["kept longer by"]) == ("messages for 3d", "nothing")
    _, said = await run("storage", "--json")
    assert json.loads(said)["retention"]["enabled"] is True
    _, said = await run("storage", "--segments", role="viewer")
    assert [line.split()[0] for line in said.splitlines()] == ["start", "0"]

    _, said = await run("options", "store.ret", role="viewer")
    assert said.splitlines()[1].split() == ["store.retention", "3d", "default"]
    assert await run("options", "store.ret", "--changed", "--json") == (0, "")

    status, said = await run("log-level", "debug", role="operator")
    assert (status, "has no role admin" in said) == (1, True)
    _, said = await run("log-level", "warning", role="admin")
    assert "the node logs from warning on; log.level is info" in said
    _, said = await run("log-level", "--json", role="viewer")
    assert json.loads(said)["level"] == "warning"
    changes = [line for line in audited(broker) if line["event"] == "changed"]
    assert [(line["what"], line["level"]) for line in changes] == [("setLogLevel", "warning")]
