"""The admin API of a node: over the admin listener with a role, and on the control socket."""

from __future__ import annotations

from typing import Any

import aiohttp
from hypothesis import given
from hypothesis import strategies as st

from penstock.node.api.operation import PageQuery, page_by_name
from penstock.node.controladdress import SOCKET
from tests.gateway.wire import Broker
from tests.node.adminapi import ROLES, Api, api, audited, broker

__all__ = ["api", "broker"]

BAN = {"kind": "user", "name": "mallory", "why": "floods"}


async def test_each_role_may_do_what_those_before_it_may(api: Api) -> None:
    async def statuses(*call: Any) -> list[int]:
        return [(await api(role).call(*call))[0] for role in ("", *ROLES)]

    assert await statuses("GET", "/api/v1/access/bans") == [200, 200, 200, 200]
    kick = {"kind": "user", "name": "mallory"}
    assert await statuses("POST", "/api/v1/access/kick", kick) == [401, 403, 200, 200]
    assert await statuses("POST", "/api/v1/access/bans", BAN) == [401, 403, 403, 200]


async def test_a_ban_is_made_listed_lifted_and_audited(broker: Broker, api: Api) -> None:
    admin = api("admin")
    status, ban = await admin.call("POST", "/api/v1/access/bans", BAN)
    assert (status, ban["kind"], ban["name"], ban["until_ms"]) == (200, "user", "mallory", 0)
    assert (await admin.call("GET", "/api/v1/access/bans"))[1] == {"items": [ban]}
    assert (await admin.call("DELETE", "/api/v1/access/bans/user/mallory"))[0] == 200
    assert (await admin.call("DELETE", "/api/v1/access/bans/user/mallory"))[0] == 404
    network = {"kind": "address", "name": "10.0.0.0/8"}
    assert (await admin.call("POST", "/api/v1/access/bans", network))[0] == 200
    assert (await admin.call("DELETE", "/api/v1/access/bans/address/10.0.0.0%2F8"))[0] == 200
    lines = [(line["event"], line.get("user"), line["what"]) for line in audited(broker)]
    assert lines[:3] == [("changed", "admin", "ban"), ("changed", "admin", "lift"), ("failed", "admin", "liftBan")]


WRONG: tuple[tuple[tuple[Any, ...], int, str], ...] = (
    (("GET", "/api/v1/access/bans?limit=3"), 400, "limit"),
    (("GET", "/api/v1/nothing"), 404, "there is no"),
    (("PUT", "/api/v1/access/bans"), 405, "takes no PUT"),
    (("POST", "/api/v1/access/bans", {"kind": "planet", "name": "x"}), 400, "planet"),
    (("POST", "/api/v1/access/bans", {"kind": "user", "name": "x", "more": 1}), 400, "more"),
    (("POST", "/api/v1/access/bans", {"kind": "user", "name": "x" * 5_000_000}), 413, "send less"),
    (("DELETE", "/api/v1/access/bans/planet/x"), 404, "planet"),
    (("GET", "/api/v1/access/test?action=fly&name=x"), 400, "fly"),
    (("GET", "/api/v1/access/test?action=pop&action=send&name=x"), 400, "more than once"),
)


async def test_what_is_wrong_is_said_in_a_sentence(api: Api) -> None:
    for call, status, why in WRONG:
        answered, answer = await api("admin").call(*call)
        assert answered == status, call
        assert why in answer["error"], call


async def test_a_body_that_is_no_json_is_refused(api: Api, broker: Broker) -> None:
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer admin"}) as session:
        url = f"http://{broker.node.admin}/api/v1/access/bans"
        async with session.post(url, data=b"\xff{") as response:
            assert response.status == 415
        async with session.post(url, data=b"\xff{", headers={"Content-Type": "application/json"}) as response:
            assert response.status == 400


async def test_the_control_socket_serves_the_api_to_the_user_of_the_node(broker: Broker) -> None:
    connector = aiohttp.UnixConnector(str(broker.config.data_dir / SOCKET))
    async with aiohttp.ClientSession("http://localhost", connector=connector) as session:
        assert (await Api(session).call("POST", "/api/v1/access/bans", BAN))[0] == 200
    assert audited(broker)[-1]["user"] == "control socket"


async def test_the_document_describes_each_operation(api: Api) -> None:
    status, document = await api.call("GET", "/api/v1/openapi.json")
    assert (status, document["openapi"]) == (200, "3.1.0")
    for path, methods in document["paths"].items():
        for method, described in methods.items():
            assert described["summary"].endswith("."), (path, method)
            assert described["responses"]["200"]["content"]["application/json"]["schema"]


@given(names=st.sets(st.text(min_size=1, max_size=3)), limit=st.integers(1, 5))
async def test_pages_have_each_name_once_and_in_order(names: set[str], limit: int) -> None:
    items = dict.fromkeys(names, 0)
    seen: list[str] = []
    after: str | None = ""
    while after is not None:
        page, after = await page_by_name(items, PageQuery(limit=limit, after=after))
        assert len(page) <= limit
        seen += [name for name, _ in page]
    assert seen == sorted(names)
