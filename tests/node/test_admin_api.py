"""The admin API of a node: over the admin listener with a role, and on the control socket."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.node.api.httpheads import PARAMETERS_MAX
from penstock.node.api.operation import PageQuery
from penstock.node.api.pages import page_by_name
from penstock.node.controladdress import SOCKET
from tests.gateway.wire import Broker
from tests.node.adminapi import ROLES, Api, api, audited, broker
from tests.waiting import until

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
    assert (await admin.call("GET", "/api/v1/access/bans"))[1] == {"items": [ban], "next": None}
    assert (await admin.call("DELETE", "/api/v1/access/bans/user/mallory"))[0] == 200
    assert (await admin.call("DELETE", "/api/v1/access/bans/user/mallory"))[0] == 404
    network = {"kind": "address", "name": "10.0.0.0/8"}
    assert (await admin.call("POST", "/api/v1/access/bans", network))[0] == 200
    assert (await admin.call("DELETE", "/api/v1/access/bans/address/10.0.0.0%2F8"))[0] == 200
    lines = [(line["event"], line.get("user"), line["what"]) for line in audited(broker)]
    assert lines[:3] == [("changed", "admin", "ban"), ("changed", "admin", "lift"), ("failed", "admin", "liftBan")]


WRONG: tuple[tuple[tuple[Any, ...], int, str], ...] = (
    (("GET", "/api/v1/access/bans?limit=0"), 400, "limit"),
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


NO_UTF_8 = ("%", "%4", "%zz", "%FF", "%C3", "%C3%41", "%C0%80", "%E0%80%80", "%ED%A0%80", "%F4%90%80%80", "%80")


async def test_what_is_no_utf_8_in_percent_escapes_is_not_taken_literally(api: Api) -> None:
    viewer = api("viewer")
    assert await viewer.status("GET", "/groups/%C3%A9%E2%82%AC%F0%9F%98%80%25%00") == 404
    assert await viewer.status("GET", "/groups?contains=%41+%F4%8F%BF%BF") == 200
    for wrong in NO_UTF_8:
        for target in (f"/groups/x{wrong}!", f"/groups?contains={wrong}"):
            assert await viewer.status("GET", target) == 400, target


async def test_a_query_with_many_parameters_is_refused_before_they_are_decoded(api: Api) -> None:
    many = "&".join(f"p{number}" for number in range(PARAMETERS_MAX + 1))
    for path in ("/groups", "/timers", "/state"):
        status, why = await api("viewer").refused("GET", f"{path}?{many}")
        assert (status, f"more than {PARAMETERS_MAX} parameters" in why) == (400, True)


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
            content_type = "application/x-ndjson" if path.startswith("/api/v1/streams/") else "application/json"
            assert described["responses"]["200"]["content"][content_type]["schema"]


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


async def test_a_change_is_audited_though_its_caller_hangs_up(broker: Broker) -> None:
    reader, writer = await asyncio.open_unix_connection(str(broker.config.data_dir / SOCKET))
    body = json.dumps({"messages": [{"topic": "a"}]}).encode()
    head = "POST /api/v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head.encode() + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
    writer.transport.abort()
    await until(lambda: [line["what"] for line in audited(broker)] == ["publish"])
    assert (audited(broker)[0]["user"], audited(broker)[0]["over"]) == ("control socket", "control")
    del reader


async def test_no_flood_hides_a_change(broker: Broker, api: Api) -> None:
    admin = api("admin")
    calls = [admin.call("POST", "/api/v1/access/kick", {"kind": "user", "name": f"u{number}"}) for number in range(150)]
    for begin in range(0, len(calls), 10):  # fewer than the listener has connections
        assert {status for status, _ in await asyncio.gather(*calls[begin : begin + 10])} == {200}
    assert len({line["name"] for line in audited(broker)}) == 150


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        (b"Authorization: Bearer \xff\r\n", b"{}", 401),
        (b"Authorization: Bearer admin\r\nContent-Encoding: gzip\r\n", b"{}", 415),
        (b"Content-Encoding: gzip\r\n", b"{}", 401),
        (b"Authorization: Bearer admin\r\n", b'{"offset": 1' + b"0" * 30 + b"}", 400),
    ],
    ids=["a token that is no ASCII", "an encoded body", "an encoded body of nobody", "a number beyond 64 bits"],
)
async def test_odd_bytes_get_a_clear_answer(
    broker: Broker, headers: bytes, body: bytes, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection(broker.node.admin.host, broker.node.admin.port)
    head = b"POST /api/v1/groups/g/reset HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    writer.write(head + headers + length + body)
    answer = await reader.read()
    writer.close()
    assert int(answer.split()[1]) == status, answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert [record for record in caplog.records if record.exc_info] == []


async def test_pages_of_long_names_end_early() -> None:
    items = {f"{number:03}" + "x" * 60_000: number for number in range(20)}
    seen: list[int] = []
    after: str | None = ""
    while after is not None:
        page, after = await page_by_name(items, PageQuery(limit=1_000, after=after))
        assert 1 <= len(page) <= 5
        seen += [number for _, number in page]
    assert seen == list(range(20))
