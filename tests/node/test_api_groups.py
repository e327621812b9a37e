"""Groups, dead letters, messages and publishing over the admin API."""

from __future__ import annotations

import asyncio
from base64 import b64decode, b64encode
from typing import Any
from urllib.parse import quote

import pytest

from penstock.cli.main import main
from penstock.pop.core.group import ConsumerGroup
from penstock.pop.core.pops import PopResult
from penstock.pop.core.settings import DEFAULTS
from penstock.store.record import Kind
from tests.gateway.wire import Broker
from tests.node.adminapi import Api, api, audited, broker

__all__ = ["api", "broker"]

NAME = "préfet 価格"
"""A group whose name has to be encoded in a path."""


def message(topic: str, body: bytes = b"", **more: Any) -> dict[str, Any]:
    return {"topic": topic, "body_base64": b64encode(body).decode(), **more}


async def published(api: Api, *messages: dict[str, Any]) -> list[str]:
    """Publish messages, and return their ids."""
    answer = await api("operator").ok("POST", "/messages", {"messages": messages})
    assert answer["failed"] == 0, answer
    return [item["message_id"] for item in answer["items"]]


def created(broker: Broker, name: str, topic_filter: str = "plant/#") -> ConsumerGroup:
    return broker.node.pop.groups.create(name, topic_filter, "earliest", DEFAULTS)


def popped(broker: Broker, group: ConsumerGroup, count: int = 1) -> PopResult:
    """Pop messages that must be there."""
    broker.node.store.commit()
    result = broker.node.pop.popper.pop(group, count, 60_000, "", 1)
    assert result is not None
    return result


def settled(broker: Broker, kind: Kind, result: PopResult, detail: str = "") -> None:
    deliveries = [result.checkpoint.position << 16 | index for index in result.checkpoint.open_indexes()]
    assert broker.node.pop.deliveries.settle(kind, deliveries, detail) == len(deliveries)


async def test_groups_are_listed_in_pages_with_their_backlogs(broker: Broker, api: Api) -> None:
    for number in range(5):
        created(broker, f"g{number}")
    group = created(broker, NAME, "plant/+/é/#")
    await published(api, message("plant/1/é/x"), message("plant/2/é/x"))
    popped(broker, group)
    viewer = api("viewer")
    names: list[str] = []
    after: str | None = ""
    while after is not None:
        page = await viewer.ok("GET", f"/groups?limit=2&after={quote(after)}")
        names += [item["group"] for item in page["items"]]
        after = page["next"]
    assert names == [*(f"g{number}" for number in range(5)), NAME]
    (item,) = (await viewer.ok("GET", f"/groups?contains={quote('é/#')}"))["items"]
    assert (item["visible"], item["in_flight"], item["paused"], item["mqtt_members"]) == (1, 1, False, 0)
    assert item["oldest_age_ms"] >= 0


async def test_settings_change_under_their_version_and_a_pause_ends(broker: Broker, api: Api) -> None:
    created(broker, NAME)
    admin, path = api("admin"), f"/groups/{quote(NAME)}"
    shown = await admin.ok("GET", path)
    assert shown["items"][0]["settings"]["of_node"] == ["attempts_max", "backoff", "invisible_ms", "in_flight_max"]
    change = {"attempts_max": 3, "backoff": {"min_ms": 5, "max_ms": 50}}
    changed = await admin.ok("PATCH", path, change, **{"If-Match": f'"{shown["version"]}"'})
    assert changed["items"][0]["settings"]["attempts_max"] == 3
    assert changed["items"][0]["settings"]["backoff"]["max_ms"] == 50
    assert (await admin.refused("PATCH", path, change, **{"If-Match": f'"{shown["version"]}", "x"'}))[0] == 412
    conditions = (f'W/"{changed["version"]}"', '"x,y" , "{}"'.format(changed["version"]), "*", '"x"', "x", '"x', '"x" "y"')
    for condition, (match, none_match) in zip(
        conditions, ((200, 304), (200, 304), (200, 304), (412, 200), (400, 400), (400, 400), (400, 400)), strict=True
    ):
        assert await admin.status("PATCH", path, {}, **{"If-Match": condition}) == match, condition
        assert await admin.status("GET", path, **{"If-None-Match": condition}) == none_match, condition
    again = await admin.ok("PATCH", path, {"attempts_max": None, "backoff": {"list_ms": [1, 2]}})
    assert again["items"][0]["settings"]["of_node"] == ["attempts_max", "invisible_ms", "in_flight_max"]
    operator = api("operator")
    assert (await operator.refused("PATCH", path, change))[0] == 403
    assert (await operator.ok("POST", f"{path}/pause"))["items"][0]["paused"] is True
    await published(api, message("plant/1"))
    group = broker.node.pop.groups.get(NAME, "plant/#")
    assert group is not None
    assert broker.node.pop.popper.pop(group, 1, 1_000, "", 1) is None
    assert (await operator.ok("POST", f"{path}/resume?filter={quote('plant/#', safe='')}"))["items"][0]["paused"] is False
    popped(broker, group)
    assert [line["what"] for line in audited(broker) if line["event"] == "changed"][-1] == "resumeGroup"


async def test_a_group_is_created_once(api: Api) -> None:
    create = {
        "group": NAME,
        "filter": "plant/#",
        "start": "latest",
        "settings": {"attempts_max": 3, "backoff": {"list_ms": []}},
    }
    (item,) = (await api("operator").ok("POST", "/groups", create))["items"]
    assert (item["settings"]["attempts_max"], item["settings"]["of_node"]) == (3, ["invisible_ms", "in_flight_max"])
    await api("operator").ok("POST", "/groups", create)
    assert (await api("operator").refused("POST", "/groups", {**create, "settings": {}}))[0] == 409


async def test_a_group_is_reset_purged_and_deleted(broker: Broker, api: Api) -> None:
    group = created(broker, "billing")
    ids = await published(api, *(message("plant/1", b"%d" % number) for number in range(4)))
    popped(broker, group, 4)
    admin = api("admin")
    for reset, visible in (({"end": "earliest"}, 4), ({"message_id": ids[2]}, 2), ({"offset": 3}, 1), ({"time_ms": 1}, 4)):
        (item,) = (await admin.ok("POST", "/groups/billing/reset", reset))["items"]
        assert (item["visible"], item["in_flight"]) == (visible, 0), reset
    assert (await admin.ok("POST", "/groups/billing/purge"))["items"][0]["visible"] == 0
    assert (await admin.refused("DELETE", "/groups/billing", **{"If-Match": '"1234"'}))[0] == 412
    await admin.ok("DELETE", "/groups/billing")
    assert (await admin.refused("GET", "/groups/billing")) == (404, "there is no group 'billing'")


async def test_a_group_in_use_is_deleted_only_by_force(
    broker: Broker, api: Api, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "admin")

    async def delete(*arguments: str) -> tuple[int, str]:
        status = await asyncio.to_thread(main, ["group", "delete", *arguments, "--target", str(broker.node.grpc)])
        return status, capsys.readouterr().err

    group = created(broker, "billing")
    await published(api, message("plant/1"))
    popped(broker, group)
    client = await broker.connect_5("meter")
    await client.subscribe(("$share/shared/other/#", 1))
    admin = api("admin")
    for name, why in (("billing", "1 messages are in flight"), ("shared", "1 MQTT clients share it")):
        status, said = await admin.refused("DELETE", f"/groups/{name}")
        assert (status, why in said) == (409, True), said
        status, said = await delete(name)
        assert (status, f"The group '{name}' on " in said, "is in use" in said) == (1, True, True), said
        assert (await api("viewer").ok("GET", f"/groups/{name}"))["group"] == name
    assert (await delete("shared", "--force"))[0] == 0
    assert (await api("viewer").ok("GET", "/groups/shared"))["items"][0]["mqtt_members"] == 1, "it is created anew"
    await admin.ok("DELETE", "/groups/billing?force=true")
    assert (await admin.refused("GET", "/groups/billing"))[0] == 404


async def test_members_are_the_clients_that_share_a_subscription(broker: Broker, api: Api) -> None:
    client = await broker.connect_5("meter-ü")
    await client.subscribe(("$share/billing/plant/#", 1))
    members = await api("viewer").ok("GET", "/groups/billing/members")
    assert [(item["over"], item["client_id"]) for item in members["items"]] == [("mqtt", "meter-ü")]
    (item,) = (await api("viewer").ok("GET", "/groups"))["items"]
    assert (item["mqtt_members"], item["temporary"]) == (1, True)
    assert (await api("viewer").ok("GET", "/groups?temporary=false"))["items"] == []


async def test_dead_letters_are_listed_redriven_and_deleted(broker: Broker, api: Api) -> None:
    one, other = created(broker, "billing"), created(broker, "billing", "plant/1")
    ids = await published(api, *(message("plant/1", b"x", tag="t") for _ in range(3)))
    for group in (one, other):
        settled(broker, Kind.POP_DEAD_LETTER, popped(broker, group, 3), "no such order")
    path, viewer = "/groups/billing/dead-letters", api("viewer")
    listed: list[tuple[str, str]] = []
    after: str | None = ""
    while after is not None:
        page = await viewer.ok("GET", f"{path}?limit=1&after={after}")
        listed += [(item["message_id"], item["filter"]) for item in page["items"]]
        after = page["next"]
    assert listed == [(each, topic_filter) for each in ids for topic_filter in ("plant/#", "plant/1")]
    item = page["items"][0]
    assert (item["topic"], item["reason"], item["detail"]) == ("plant/1", "forwarded", "no such order")
    assert (await viewer.refused("POST", f"{path}/redrive", {"message_ids": None}))[0] == 403
    redriven = await api("operator").ok("POST", f"{path}/redrive", {"message_ids": [ids[0], "0" * 16]})
    assert redriven == {"dead_letters": 2, "more": False}
    popped(broker, one)
    assert (await api("admin").ok("POST", f"{path}/delete", {"message_ids": None})) == {"dead_letters": 4, "more": False}
    assert (await viewer.ok("GET", path)) == {"items": [], "next": None}


async def test_a_message_is_shown_with_its_deliveries(broker: Broker, api: Api) -> None:
    groups = {name: created(broker, name) for name in ("waiting", "open", "dead", "passed", "retry")}
    body = bytes(range(256)) * 1_000
    (message_id,) = await published(
        api, message("plant/é", body, tag="t", properties={"ключ": "значение"}, content_type="text/plain", retain=True)
    )
    viewer, operator, path = api("viewer"), api("operator"), f"/messages/{message_id}"
    shown = await operator.ok("GET", path)
    assert (shown["topic"], shown["flags"], shown["body_bytes"]) == ("plant/é", ["retained"], len(body))
    assert shown["properties"] == {
        "user": [{"name": "ключ", "value": "значение"}],
        "tag": "t",
        "content_type": "text/plain",
    }
    for secret in (path, f"{path}/body"):
        assert (await viewer.refused("GET", secret))[0] == 403
    read = await operator.ok("GET", f"{path}/body")
    assert (b64decode(read["body_base64"]), read["cut"], read["body_bytes"]) == (body[: 64 * 1024], True, len(body))
    pops = {name: popped(broker, groups[name]) for name in ("open", "dead", "passed", "retry")}
    settled(broker, Kind.POP_DEAD_LETTER, pops["dead"])
    settled(broker, Kind.POP_ACK, pops["passed"])
    settled(broker, Kind.POP_REVIVED, pops["retry"])
    deliveries = await viewer.ok("GET", f"{path}/deliveries")
    states = {item["group"]: item["state"] for item in deliveries["items"]}
    expected = dict.fromkeys(("waiting", "open", "passed", "retry"))
    assert states == {**{name: name for name in expected}, "dead": "dead_letter"}
    of_open = next(item for item in deliveries["items"] if item["group"] == "open")
    assert (of_open["attempt"], of_open["until_ms"]) == (1, pops["open"].checkpoint.deadline_ms)
    subscriber = await broker.connect_5("late")
    await subscriber.subscribe(("plant/#", 0))
    assert (await subscriber.message()).body == body


async def test_a_batch_is_published_with_an_answer_for_each_message(broker: Broker, api: Api) -> None:
    operator = api("operator")
    messages = [message("a"), message("a/#"), message("a", deduplication_id="1"), message("a", deduplication_id="1")]
    messages.append({"topic": "a", "body_base64": "?"})
    answer = await operator.ok("POST", "/messages", {"messages": messages})
    items = answer["items"]
    assert answer["failed"] == 2
    assert "a/#" in items[1]["error"]
    assert "base64" in items[4]["error"]
    assert (items[3]["message_id"], items[3]["repeated"]) == (items[2]["message_id"], True)
    assert audited(broker)[-1]["messages"] == 3


WRONG: tuple[tuple[tuple[Any, ...], int, str], ...] = (
    (("GET", "/groups/nobody"), 404, "nobody"),
    (("GET", "/groups?limit=1001"), 400, "limit"),
    (("GET", "/groups/g?filter=x"), 404, "'x'"),
    (("POST", "/groups", {"group": "a/b", "filter": "x"}), 400, "'a/b'"),
    (("POST", "/groups", {"group": "a", "filter": "x/#/y"}), 400, "x/#/y"),
    (("POST", "/groups", {"group": "a", "filter": "x", "start_at_ms": 2**60}), 400, "start_at_ms"),
    (("DELETE", "/groups/nobody"), 404, "nobody"),
    (("PATCH", "/groups/g", {"attempts_max": 0}), 400, "attempts_max is 0"),
    (("PATCH", "/groups/g", {"backoff": {"list_ms": [1], "min_ms": 1}}), 400, "backoff"),
    (("PATCH", "/groups/g", {"expression": "(", "expression_type": "sql"}), 400, "expression"),
    (("POST", "/groups/g/reset", {}), 400, "exactly one"),
    (("POST", "/groups/g/reset", {"offset": -1}), 400, "offset"),
    (("POST", "/groups/g/reset", {"message_id": "x"}), 400, "'x'"),
    (("GET", "/groups/nobody/dead-letters"), 404, "nobody"),
    (("GET", "/groups/g/dead-letters?after=zz"), 400, "begin without it"),
    (("POST", "/groups/g/dead-letters/redrive", {"message_ids": ["zz"]}), 400, "'zz'"),
    (("POST", "/groups/g/dead-letters/redrive", {}), 400, "message_ids"),
    (("GET", "/messages/zz"), 400, "'zz'"),
    (("GET", "/messages/0000000000000007"), 404, "0000000000000007"),
    (("GET", "/messages/00000000ffffffff/body"), 404, "00000000ffffffff"),
    (("GET", "/messages/ffffffffffffffff/deliveries"), 404, "ffffffffffffffff"),
    (("POST", "/messages", {"messages": []}), 400, "messages"),
    (("POST", "/messages", {"messages": [{"topic": "$SYS/x"}]}), 400, "$SYS"),
    (("POST", "/messages", {"messages": [{"topic": "a", "delay_ms": 1, "deliver_at_ms": 1}]}), 400, "give one"),
    (("POST", "/messages", {"messages": [{"topic": "a", "delay_ms": 2, "expire_after_ms": 1}]}), 400, "expires"),
    (("POST", "/messages", {"messages": [{"topic": "a", "delay_ms": 2, "retain": True}]}), 400, "retained"),
)


async def test_what_is_wrong_is_said_in_a_sentence(broker: Broker, api: Api) -> None:
    created(broker, "g")
    await published(api, message("plant/1", b"x" * 100))
    for call, status, why in WRONG:
        answered, sentence = await api("admin").refused(*call)
        assert (answered, why in sentence) == (status, True), (call, answered, sentence)
