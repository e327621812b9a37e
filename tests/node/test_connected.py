"""`penstock clients` and `penstock sessions` on a running node, from this machine and from another one."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.apiclient import ApiClient, add_api
from penstock.cli.main import main
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from tests.gateway.wire import Broker
from tests.node.adminapi import audited, broker
from tests.waiting import until

__all__ = ["broker"]

LASTS = {Property.SESSION_EXPIRY_S: 600}


@pytest.fixture
def run(broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    async def run(*arguments: str, role: str = "") -> tuple[int, str]:
        """Run a command here or, as somebody with a role, from elsewhere; return its status and what it says."""
        node = ("--admin", str(broker.node.admin)) if role else ("--data-dir", str(broker.config.data_dir))
        monkeypatch.setenv("PENSTOCK_TOKEN", role)
        status = await asyncio.to_thread(main, [*arguments, *node])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


async def test_a_client_is_listed_shown_disconnected_and_banned(broker: Broker, run: Any) -> None:
    client = await broker.connect_5("sensor-7", about=LASTS)
    await client.subscribe(("plant/#", 1))
    await broker.connect_5("dash")
    _, listed = await run("clients", "list", role="viewer")
    assert [line.split()[0] for line in listed.splitlines()] == ["client_id", "dash", "sensor-7"]
    _, rows = await run("clients", "list", "--prefix", "sensor", "--json")
    assert json.loads(rows)["subscriptions"] == 1
    _, shown = await run("clients", "show", "sensor-7", role="viewer")
    assert "filter=plant/#" in shown
    assert await run("clients", "show", "nobody") == (1, "penstock clients: there is no connected client 'nobody'\n")
    status, said = await run("clients", "kick", "sensor-7", role="viewer")
    assert (status, "has no role operator or admin" in said) == (1, True)
    status, said = await run("clients", "kick", "sensor-7", role="operator")
    assert (status, said.splitlines()[-1]) == (0, "disconnected sensor-7")
    assert (await client.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    status, said = await run("clients", "ban", "sensor-7", "--for", "1h", "--why", "floods", role="admin")
    assert (status, said.splitlines()[-1].startswith("banned sensor-7 until 2")) == (0, True)
    assert (await (await broker.connect_5("sensor-7", accepted=False)).connack())[0] == ReasonCode.BANNED
    assert [(line["user"], line["what"]) for line in audited(broker) if line["event"] == "changed"][-2:] == [
        ("operator", "kickClient"),
        ("admin", "ban"),
    ]


async def test_a_session_is_listed_and_deleted_when_its_client_is_away(broker: Broker, run: Any) -> None:
    client = await broker.connect_5("sensor-7", about=LASTS)
    status, said = await run("sessions", "delete", "sensor-7")
    assert (status, "connected" in said) == (1, True)
    client.reset()
    await until(lambda: not broker.node.gateway.clients)
    _, rows = await run("sessions", "list", "--state", "away", "--json")
    assert json.loads(rows)["client_id"] == "sensor-7"
    assert await run("sessions", "delete", "sensor-7", role="admin") == (0, "deleted the session of sensor-7\n")
    assert await run("sessions", "list", "--json") == (0, "")


def test_a_listing_that_is_refused_in_the_middle_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def get(_api: ApiClient, path: str, *, after: str, **_: object) -> dict[str, Any]:
        if after:
            raise PermissionError(f"{path} is refused")
        return {"items": [{"name": "a"}, {"name": "b"}], "next": "b"}

    monkeypatch.setattr(ApiClient, "get", get)
    parser = argparse.ArgumentParser()
    add_api(parser)
    rows = ApiClient(parser.parse_args(["--data-dir", str(tmp_path)])).rows("/access/bans")
    assert [next(rows)["name"] for _ in range(2)] == ["a", "b"]
    with pytest.raises(PermissionError, match="ends early, after 2 rows: /access/bans is refused"):
        next(rows)
