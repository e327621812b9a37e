"""Delayed messages, schedules and transactions over the admin API."""

from __future__ import annotations

from base64 import b64encode
from typing import Any
from urllib.parse import quote

from penstock.pop.core.sender import message_id
from penstock.store.properties import Properties, encode_properties
from penstock.store.record import Flag
from tests.gateway.wire import Broker
from tests.node.adminapi import Api, api, audited, broker

__all__ = ["api", "broker"]

HOUR_MS = 3_600_000


async def delayed(api: Api, *topics: str, **more: Any) -> list[str]:
    """Publish a message for each topic, due in an hour and later, in this order; return their ids."""
    messages = [{"topic": topic, "delay_ms": HOUR_MS + number, **more} for number, topic in enumerate(topics)]
    answer = await api("operator").ok("POST", "/messages", {"messages": messages})
    return [item["message_id"] for item in answer["items"]]


async def test_delayed_messages_are_listed_moved_and_cancelled(broker: Broker, api: Api) -> None:
    ids = await delayed(api, "a/é", "b/1", "a/2", timer_key="k")
    viewer, operator = api("viewer"), api("operator")
    page = await viewer.ok("GET", "/delayed-messages?limit=2")
    assert [item["message_id"] for item in page["items"]] == ids[:2]
    assert (page["pending"], page["due_day"], page["items"][0]["user"]) == (3, 3, "operator")
    page = await viewer.ok("GET", f"/delayed-messages?limit=2&after={quote(page['next'])}")
    assert ([item["message_id"] for item in page["items"]], page["next"]) == (ids[2:], None)
    page = await viewer.ok("GET", f"/delayed-messages?filter={quote('a/#')}&key=k&user=operator")
    assert [item["topic"] for item in page["items"]] == ["a/é", "a/2"]
    path = f"/delayed-messages/{ids[0]}"
    due_ms = (await viewer.ok("GET", path))["deliver_at_ms"] + HOUR_MS
    moved = await operator.ok("POST", f"{path}/reschedule", {"deliver_at_ms": due_ms})
    assert (moved["topic"], moved["key"], moved["deliver_at_ms"]) == ("a/é", "k", due_ms)
    assert audited(broker)[-1]["replaced_by"] == moved["message_id"]
    assert (await operator.refused("DELETE", path))[0] == 409
    assert (await viewer.refused("GET", path))[0] == 409
    await operator.ok("DELETE", f"/delayed-messages/{moved['message_id']}")
    assert (await operator.refused("POST", "/delayed-messages/cancel", {}))[0] == 403
    assert await api("admin").ok("POST", "/delayed-messages/cancel", {"filter": "b/+"}) == {"cancelled": 1, "next": None}
    assert (await viewer.ok("GET", "/delayed-messages"))["pending"] == 1


async def test_a_schedule_is_put_paused_run_and_deleted(broker: Broker, api: Api) -> None:
    operator, viewer, name = api("operator"), api("viewer"), "night/ü 夜"
    path = f"/schedules/{quote(name, safe='')}"
    source = {"topic": "plant/é", "body_base64": b64encode(b"x").decode(), "cron": "0 3 * * *", "zone": "Europe/Berlin"}
    put = await operator.ok("PUT", path, source)
    assert (put["name"], len(put["upcoming_ms"]), put["rule"]["cron"]) == (name, 5, "0 3 * * *")
    for number in range(3):
        await operator.ok("PUT", f"/schedules/other{number}", {**source, "every_ms": 60_000, "cron": ""})
    page = await viewer.ok("GET", "/schedules?limit=2")
    page = await viewer.ok("GET", f"/schedules?limit=2&after={page['next']}")
    assert ([item["name"] for item in page["items"]], page["next"]) == (["other1", "other2"], None)
    assert [item["name"] for item in (await viewer.ok("GET", "/schedules?prefix=night"))["items"]] == [name]
    assert (await viewer.refused("GET", f"{path}/definition"))[0] == 403
    defined = await operator.ok("GET", f"{path}/definition")
    assert {name: defined["definition"][name] for name in source} == source
    assert (await operator.ok("POST", f"{path}/pause"))["paused"] is True
    stale = {"If-Match": f'"{put["version"]}"'}
    assert (await operator.refused("PUT", path, source, **stale))[0] == 412
    resumed = await operator.ok("POST", f"{path}/resume")
    again = await operator.ok("PUT", path, defined["definition"], **{"If-Match": f'"{resumed["version"]}"'})
    assert again["version"] != resumed["version"]
    run = await operator.ok("POST", f"{path}/run")
    shown = await api("operator").ok("GET", f"/messages/{run['message_id']}")
    assert (shown["topic"], shown["flags"]) == ("plant/é", ["scheduled"])
    assert (await viewer.ok("GET", path))["sent"] == 1
    assert (await operator.refused("DELETE", path))[0] == 403
    await api("admin").ok("DELETE", path)
    assert (await operator.refused("PUT", path, source, **stale))[0] == 412


async def test_transactions_are_listed_committed_and_rolled_back(broker: Broker, api: Api) -> None:
    store, half = broker.node.store, encode_properties(Properties(producer="shop"))
    routes = [store.router.route(b"orders/%d" % number) for number in range(3)]
    ids = [message_id(store.append_message(route, b"x", half, 1 | Flag.HALF)) for route in routes]
    viewer, admin = api("viewer"), api("admin")
    page = await viewer.ok("GET", "/transactions?limit=2&producer=shop")
    assert [item["topic"] for item in page["items"]] == ["orders/0", "orders/1"]
    page = await viewer.ok("GET", f"/transactions?limit=2&after={page['next']}")
    assert ([item["message_id"] for item in page["items"]], page["next"]) == (ids[2:], None)
    assert page["items"][0]["stored_ms"] > 0
    assert (await viewer.ok("GET", "/transactions?producer=bank"))["items"] == []
    assert (await api("operator").refused("POST", f"/transactions/{ids[0]}/commit"))[0] == 403
    await admin.ok("POST", f"/transactions/{ids[0]}/commit")
    await admin.ok("POST", f"/transactions/{ids[1]}/rollback")
    assert (await admin.refused("POST", f"/transactions/{ids[0]}/rollback"))[0] == 409
    assert (broker.node.transactions.committed, broker.node.transactions.rolled_back) == (1, 1)


WRONG: tuple[tuple[tuple[Any, ...], int, str], ...] = (
    (("GET", "/delayed-messages?after=zz"), 400, "page"),
    (("GET", "/delayed-messages?filter=a%23"), 400, "a#"),
    (("GET", "/delayed-messages?from_ms=-1"), 400, "from_ms"),
    (("GET", "/delayed-messages/zz"), 400, "'zz'"),
    (("DELETE", "/delayed-messages/0000000000000001"), 404, "0000000000000001"),
    (("POST", "/delayed-messages/0000000000000001/reschedule", {}), 400, "either"),
    (("POST", "/delayed-messages/0000000000000001/reschedule", {"delay_ms": 1}), 404, "0000000000000001"),
    (("GET", "/schedules/none"), 404, "none"),
    (("PUT", "/schedules/s", {"topic": "a"}), 400, "no rule"),
    (("PUT", "/schedules/s", {"topic": "a/#", "every_ms": 60_000}), 400, "a/#"),
    (("PUT", "/schedules/s", {"topic": "a", "cron": "x"}), 400, "cron"),
    (("PUT", "/schedules/s", {"topic": "a", "every_ms": 60_000, "body_base64": "?"}), 400, "base64"),
    (("PUT", "/schedules/s", {"topic": "a", "every_ms": 60_000, "tag": "x" * 70_000}), 400, "65535"),
    (("GET", "/transactions?after=zz"), 400, "'zz'"),
    (("POST", "/transactions/zz/commit"), 400, "'zz'"),
    (("POST", "/transactions/0000000000000001/commit"), 404, "0000000000000001"),
)


async def test_what_is_wrong_is_said_in_a_sentence(broker: Broker, api: Api) -> None:
    for call, status, why in WRONG:
        answered, sentence = await api("admin").refused(*call)
        assert (answered, why in sentence) == (status, True), (call, answered, sentence)
