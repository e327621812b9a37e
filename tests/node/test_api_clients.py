"""Clients, subscriptions and stored sessions over the admin API of a node."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest

from bench.crowd import CONNECTIONS, crowd
from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.protocol.properties import Property
from penstock.node.api import clienttraffic
from penstock.store.sortednames import SortedNames
from tests.gateway.certificates import Authority
from tests.gateway.wire import CLEAN, WILL, Broker
from tests.node.adminapi import Api, api, audited, broker
from tests.waiting import until

__all__ = ["api", "broker"]

CLIENTS = 100_000

LASTS = {Property.SESSION_EXPIRY_S: 3600}


def ids(items: list[dict[str, Any]]) -> list[str]:
    return [item["client_id"] for item in items]


async def test_one_client_is_shown_with_what_it_has_sent_and_received(broker: Broker, api: Api) -> None:
    odd = "gerät/№ 1"
    client = await broker.connect_5(odd, flags=CLEAN, about=LASTS, keep_alive_s=20)
    await client.subscribe_with(("plant/#", 1 | 4), identifier=7)
    await client.subscribe_with(("$share/team/jobs", 2))
    other = await broker.connect("other")
    await other.publish("plant/1", b"71.5", 1)
    await client.message()
    await client.drained()
    shown = await api.get(f"/clients/{quote(odd, safe='')}")
    figures = {name: shown[name] for name in ("client_id", "listener", "protocol", "address", "subscriptions", "keep_alive_ms")}
    assert figures == {
        "client_id": odd,
        "listener": "mqtt",
        "protocol": "5.0",
        "address": "127.0.0.1",
        "subscriptions": 2,
        "keep_alive_ms": 20_000,
    }
    assert (shown["session_lasts"], shown["session_expiry_ms"], shown["will"], shown["tls"]) == (True, 3_600_000, None, None)
    assert (shown["messages_in"], shown["messages_out"], shown["in_flight_out"], shown["queued"]) == (0, 1, 0, 0)
    assert 0 < shown["connected_ms"] <= shown["last_packet_ms"] <= broker.node.store.now_ms()
    assert shown["subscribed"][0] == {
        "filter": "plant/#",
        "qos": 1,
        "no_local": True,
        "retain_as_published": False,
        "identifier": 7,
        "queued": 0,
    }
    publisher = await api.get("/clients/other")
    assert publisher["messages_in"] == 1
    assert publisher["bytes_in"] > publisher["bytes_out"] > 0
    broker.connection("other").pause_reading(PauseReason.THROTTLED)
    assert (await api.get("/clients/other"))["paused_for"] == ["throttled"]


async def test_all_reads_and_writes_of_a_connection_are_counted(broker: Broker, api: Api) -> None:
    """On the fast path and on the general one, and at each QoS."""
    client = await broker.connect("device")
    await client.subscribe(("own", 2))
    for qos in (0, 1, 2, 1, 0):
        await client.publish("own", b"x" * 100, qos)
        await client.message()
    listener = broker.listener("mqtt")
    shown = await api.get("/clients/device")
    assert (shown["messages_in"], shown["messages_out"]) == (5, 5)
    assert (shown["bytes_in"], shown["bytes_out"]) == (listener.bytes_in, listener.bytes_out)


async def test_the_tls_of_a_client_is_shown_with_the_names_in_its_certificate(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    listener = authority.listener("tls", client_certificates="required", username_from="cn")
    broker = await Broker(tmp_path / "data", {"listeners": (listener,)}).start()
    device = authority.issue_client("press-1.example", common_name="press-1")
    await broker.connect("press", listener="tls", context=authority.context(device))
    async with aiohttp.ClientSession(f"http://{broker.node.admin}") as session:
        shown = await Api(session).get("/clients/press")
    assert (shown["user"], shown["listener"]) == ("press-1", "tls")
    assert shown["tls"]["version"] in ("TLSv1.2", "TLSv1.3")
    assert shown["tls"]["certificate_names"] == ["press-1", "press-1.example"]
    await broker.stop()


async def test_clients_are_filtered_and_kicked_and_banned(broker: Broker, api: Api) -> None:
    for name in ("dev-1", "dev-2", "desk-1"):
        await broker.connect(name)
    assert ids(await api.pages("/clients", limit=1)) == ["desk-1", "dev-1", "dev-2"]
    assert ids(await api.pages("/clients", prefix="dev-")) == ["dev-1", "dev-2"]
    assert ids(await api.pages("/clients", contains="K-1")) == ["desk-1"]
    assert ids(await api.pages("/clients", address="127.0.0.0/8", prefix="dev-1")) == ["dev-1"]
    assert ids(await api.pages("/clients", address="10.0.0.1")) == []
    assert ids(await api.pages("/clients", user="nobody")) == []
    taken_over = broker.clients[-1]
    await broker.connect("desk-1")
    assert await taken_over.receive() == ()
    assert ids(await api.pages("/clients", limit=1)) == ["desk-1", "dev-1", "dev-2"]
    operator, admin = api("operator"), api("admin")
    assert (await operator.call("DELETE", "/api/v1/clients/dev-1"))[0] == 200
    assert ids(await api.pages("/clients")) == ["desk-1", "dev-2"]
    assert (await operator.call("DELETE", "/api/v1/clients/dev-1"))[0] == 404
    assert (await operator.call("POST", "/api/v1/clients/dev-2/ban", {}))[0] == 403
    status, ban = await admin.call("POST", "/api/v1/clients/dev-2/ban", {"for_ms": 60_000, "why": "floods"})
    assert (status, ban["kind"], ban["name"], ban["until_ms"] - ban["since_ms"]) == (200, "client", "dev-2", 60_000)
    assert ids(await api.pages("/clients")) == ["desk-1"]
    lines = [(line["event"], line["what"]) for line in audited(broker) if line["event"] in ("changed", "failed")]
    assert lines == [("changed", "kickClient"), ("failed", "kickClient"), ("changed", "ban")]


async def test_the_busiest_clients_are_found_by_what_they_do_now(
    broker: Broker, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clienttraffic, "LOOK_S", 3600.0)
    traffic = broker.node._client_traffic
    old, taken_over = await broker.connect("dev-old"), await broker.connect("dev-slow")
    for client in (old, taken_over):
        for _ in range(9):
            await client.publish("plant", b"x", 1)
    page = await api.get("/clients", order="messages_in")
    assert (page["items"], page["next"], page["rates_over_ms"]) == ([], None, None)
    assert (await api.get("/clients/dev-old"))["rates"] is None
    await until(lambda: traffic._last is not None)
    slow, fast = await broker.connect("dev-slow"), await broker.connect("a-fast")
    await slow.publish("plant", b"x", 1)
    await fast.subscribe(("plant", 0))
    for _ in range(3):
        await fast.publish("plant", b"x", 0)
    await fast.messages()
    await traffic.look()
    page = await api.get("/clients", order="messages_in")
    assert ids(page["items"]) == ["a-fast", "dev-slow"]
    assert page["rates_over_ms"] > 0
    rates = [each["rates"]["messages_in_per_s"] for each in page["items"]]
    assert rates[0] / rates[1] == pytest.approx(3, rel=0.01)
    assert ids((await api.get("/clients", order="bytes_in", limit=1))["items"]) == ["a-fast"]
    assert ids((await api.get("/clients", order="bytes_in", prefix="dev-"))["items"]) == ["dev-slow"]
    assert (await api.get("/clients/a-fast"))["rates"]["messages_out_per_s"] == pytest.approx(rates[0])
    idle = {each["client_id"]: each["rates"] for each in await api.pages("/clients", limit=1)}["dev-old"]
    assert set(idle.values()) == {0.0}
    traffic.stop()
    await until(lambda: traffic._task is None)
    assert {each["rates"] for each in await api.pages("/clients")} == {None}
    monkeypatch.setattr(clienttraffic, "IDLE_S", -1.0)
    traffic.ask()
    await until(lambda: traffic._task is None)


async def test_sessions_of_absent_clients_are_listed_shown_and_deleted(broker: Broker, api: Api) -> None:
    fields = (b"gone", b"left early")
    away = await broker.connect_5("away", *fields, flags=CLEAN | WILL, about=LASTS, will={Property.WILL_DELAY_S: 60})
    await away.subscribe_with(("plant/#", 1), ("$share/team/jobs", 1))
    here = await broker.connect_5("here", about=LASTS)
    await here.subscribe(("plant/#", 0), ("gone", 0))
    await broker.connect("clean")
    away.reset()
    await until(lambda: "away" not in broker.node.gateway.clients)
    await here.publish("plant/1", b"1", 1)
    listed = {item["client_id"]: item["is_connected"] for item in await api.pages("/sessions", limit=1)}
    assert listed == {"away": False, "here": True}
    assert ids(await api.pages("/sessions", state="away")) == ["away"]
    assert (await api.get("/sessions", prefix="h"))["total"] == 2
    shown = await api.get("/sessions/away")
    assert (shown["subscriptions"], shown["queued"], shown["has_will"]) == (2, 1, True)
    assert shown["will"] == {"topic": "gone", "qos": 0, "retain": False, "delay_ms": 60_000, "body_bytes": 10}
    assert shown["will_due_ms"] < shown["ends_ms"]
    subscriptions = await api.pages("/clients/away/subscriptions", limit=1)
    assert [(one["filter"], one["queued"]) for one in subscriptions] == [("$share/team/jobs", 0), ("plant/#", 1)]
    have_it = await api.pages("/subscriptions", filter="plant/#", limit=1)
    assert [(each["client_id"], each["is_connected"], each["subscription"]["qos"]) for each in have_it] == [
        ("away", False, 1),
        ("here", True, 0),
    ]
    assert ids(await api.pages("/subscriptions", filter="$share/team/jobs")) == ["away"]
    assert await api.pages("/subscriptions", filter="plant/+") == []
    admin = api("admin")
    assert (await api("operator").call("DELETE", "/api/v1/sessions/away"))[0] == 403
    assert (await admin.call("DELETE", "/api/v1/sessions/here"))[0] == 409
    assert (await admin.call("DELETE", "/api/v1/sessions/away"))[0] == 200
    assert (await admin.call("DELETE", "/api/v1/sessions/away"))[0] == 404
    assert ids(await api.pages("/sessions")) == ["here"]
    assert "gone" in [message.topic for message in await here.messages()]
    back = await broker.connect_5("away", flags=0, about=LASTS)
    assert not back.session_present


WRONG: tuple[tuple[tuple[str, str], int, str], ...] = (
    (("GET", "/clients?address=planet"), 400, "planet"),
    (("GET", "/clients?limit=1001"), 400, "limit"),
    (("GET", "/clients/nobody"), 404, "nobody"),
    (("GET", "/clients/nobody/subscriptions"), 404, "nobody"),
    (("GET", "/sessions/nobody"), 404, "nobody"),
    (("GET", "/sessions?state=asleep"), 400, "asleep"),
    (("GET", "/subscriptions"), 400, "filter"),
    (("GET", "/subscriptions?filter=a%23"), 400, "inside of the level"),
)


async def test_a_replica_that_follows_does_not_say_that_nobody_is_connected(
    broker: Broker, api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker.node.store, "replaying", True)
    for method, path in (("GET", "/clients"), ("GET", "/clients/device"), ("DELETE", "/clients/device")):
        status, why = await api("operator").refused(method, path)
        assert (status, why.endswith("; ask the leader")) == (409, True), path
    monkeypatch.undo()


async def test_what_is_wrong_is_said_in_a_sentence(api: Api) -> None:
    for (method, path), status, why in WRONG:
        answered, answer = await api.call(method, f"/api/v1{path}")
        assert answered == status, path
        assert why in answer["error"], path


async def test_a_hundred_thousand_clients_are_listed_and_searched(broker: Broker, api: Api) -> None:
    crowd(broker.node.gateway, CLIENTS)
    page = await api.get("/clients", limit=1000, after="device-049999")
    assert ids(page["items"]) == [f"device-{number:06}" for number in range(50_000, 51_000)]
    assert page["next"] == "device-050999"
    assert ids((await api.get("/clients", prefix="device-0999"))["items"]) == [f"device-{n:06}" for n in range(99_900, 100_000)]
    assert (await api.get("/clients", after="device-099999"))["next"] is None
    assert ids(await api.pages("/clients", contains="77777")) == ["device-077777"]
    expected = [f"device-{number:06}" for number in range(42, CLIENTS, CONNECTIONS)]
    assert ids(await api.pages("/clients", user="user-42")) == expected
    assert ids(await api.pages("/clients", address="10.0.0.42", limit=7)) == expected
    assert await api.pages("/subscriptions", filter="plant/#") == []
    traffic = broker.node._client_traffic
    await traffic.look()
    connection = broker.node.gateway.clients["device-000042"]
    connection.messages_in += 1
    broker.node.gateway.clients.leave("device-000042", connection)
    await traffic.look()
    assert ids((await api.get("/clients", order="messages_in", limit=7))["items"]) == expected[1:8]


def test_sorted_names_are_read_in_order_from_any_name_on_while_they_come_and_go() -> None:
    """More of them than a chunk takes, in an order that fills all chunks at once."""
    prime = 5003
    names = [f"{number * 1789 % prime:04}" for number in range(prime)]
    sorted_names = SortedNames()
    for name in names:
        sorted_names.add(name)
    for name in names[: prime // 2]:
        sorted_names.remove(name)
    read: list[str] = []
    while some := sorted_names.at_or_after(read[-1] + "\0" if read else "", 100):
        read += some
    assert read == sorted(names[prime // 2 :])
    assert sorted_names.at_or_after("9", 1) == []
    for name in read:
        sorted_names.remove(name)
    assert sorted_names.at_or_after("", 1) == []
