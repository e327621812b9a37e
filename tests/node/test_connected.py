"""`penstock clients` and `penstock sessions` on a running node, from this machine and from another one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import drain
from penstock.cli.apiclient import ApiClient, add_api
from penstock.cli.main import main
from penstock.gateway.protocol.properties import Property
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.node.api import clienttraffic
from tests.gateway.wire import Broker
from tests.node.adminapi import audited, broker, run
from tests.waiting import until

__all__ = ["broker", "run"]

LASTS = {Property.SESSION_EXPIRY_S: 600}


async def test_a_client_is_listed_shown_disconnected_and_banned(
    broker: Broker, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clienttraffic, "LOOK_S", 3600.0)
    client = await broker.connect_5("sensor-7", about=LASTS)
    await client.subscribe(("plant/#", 1))
    await broker.connect_5("dash")
    _, listed = await run("clients", "list", role="viewer")
    assert [line.split()[0] for line in listed.splitlines()] == ["client_id", "dash", "sensor-7"]
    _, rows = await run("clients", "list", "--prefix", "sensor", "--json")
    assert json.loads(rows)["subscriptions"] == 1
    _, shown = await run("clients", "show", "sensor-7", role="viewer")
    assert "filter=plant/#" in shown
    _, rows = await run("clients", "subscriptions", "sensor-7", "--json", role="viewer")
    assert (json.loads(rows)["filter"], json.loads(rows)["qos"]) == ("plant/#", 1)
    assert await run("clients", "show", "nobody") == (1, "penstock clients: there is no connected client 'nobody'\n")
    assert "rates  -" in shown
    status, said = await run("clients", "list", "--order", "messages_in", role="viewer")
    assert (status, "the node has no rates yet" in said) == (0, True)
    await client.publish("plant/1", b"x", 1)
    await broker.node._client_traffic.look()
    _, said = await run("clients", "list", "--order", "messages_in", "--address", "127.0.0.1", role="viewer")
    assert [line.split()[0] for line in said.splitlines()] == ["client_id", "sensor-7"]
    _, said = await run("clients", "show", "sensor-7", "--json")
    assert json.loads(said)["rates"]["messages_in_per_s"] > 0
    status, said = await run("clients", "kick", "sensor-7", role="viewer")
    assert (status, "has no role operator or admin" in said) == (1, True)
    assert said.endswith(". Give --token-file FILE or --user NAME of somebody who may do this.\n")
    status, said = await run("clients", "kick", "sensor-7", role="stranger")
    assert (status, "the token is not known" in said and "Check the token or the password: " in said) == (1, True)
    status, said = await run("clients", "kick", "sensor-7", role="operator")
    assert (status, said.splitlines()[-1]) == (0, "disconnected sensor-7")
    assert (await client.disconnected())[0] == ReasonCode.ADMINISTRATIVE_ACTION
    status, said = await run("clients", "ban", "sensor-7", "--for", "1h", "--why", "floods", role="admin")
    assert (status, said.splitlines()[-1].startswith("banned sensor-7 until 2")) == (0, True)
    assert (await (await broker.connect_5("sensor-7", accepted=False)).connack())[0] == ReasonCode.BANNED
    assert [
        (line["user"], line["what"], line["over"], line["address"]) for line in audited(broker) if line["event"] == "changed"
    ][-2:] == [
        ("operator", "kickClient", "admin", "127.0.0.1"),
        ("admin", "ban", "admin", "127.0.0.1"),
    ]


def test_commands_say_what_is_missing_where_they_name_no_node_or_no_client(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["clients", "list", "--data-dir", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.endswith("start it, or give its data directory (--data-dir), or the address of its admin listener (--admin)\n")
    assert main(["clients", "kick", "", "--data-dir", str(tmp_path)]) == 1
    assert capsys.readouterr().err == (
        "penstock clients: the name is empty, as that of a variable of the shell that is not set; give one\n"
    )


def test_a_drain_from_elsewhere_ends_when_nothing_listens_any_more(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_api(parser)
    drain._wait(ApiClient(parser.parse_args(["--admin", "127.0.0.1:1"])))
    assert capsys.readouterr().out == "the node has stopped: nothing listens on its admin address any more\n"


async def test_top_has_the_busiest_clients_as_soon_as_rates_are_known(
    broker: Broker, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clienttraffic, "LOOK_S", 3600.0)
    once = ("top", "--count", "1", "--interval", "100ms", "--json", "--admin", str(broker.node.admin))
    _, said = await run(*once, role="viewer")
    assert json.loads(said)["clients"]["busiest"] is None
    client = await broker.connect("sensor-7")
    await client.publish("plant", b"x", 1)
    await broker.node._client_traffic.look()
    _, said = await run(*once, role="viewer")
    (busy,) = json.loads(said)["clients"]["busiest"]
    assert (busy["client_id"], busy["address"], busy["messages_in_per_s"] > 0) == ("sensor-7", "127.0.0.1", True)


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
