"""What newcomers want to do works as the guides print it: each task is the code of a page, against a real node.

`tests/contrib/test_frameworks_guide.py` has the same for FastStream, FastAPI and taskiq, `tests/clients/test_javascript.py` for
JavaScript, and `tests/worker/test_failures.py` kills the node below the worker.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from penstock import Client, SyncClient
from tests.system.processes import ROOT
from tests.waiting import until
from tests.worker.running import running

if TYPE_CHECKING:
    from penstock.testing.nodethread import NodeInThread

RUN = "\n\nasyncio.run(main())\n"
"""End of a program that asyncio runs. The tests run `main` on their own loop."""


def blocks_of(page: str, heading: str, node: NodeInThread) -> list[str]:
    """Return the Python code between a heading of a page and the next heading, with the addresses of a node."""
    text = (ROOT / page).read_text("utf-8")
    section = re.search(rf"^#+ {re.escape(heading)}$(.*?)(?=^#+ |\Z)", text, re.MULTILINE | re.DOTALL)
    assert section is not None, heading
    host, port = node.mqtt
    return [
        code.replace("127.0.0.1:8081", node.target).replace('"127.0.0.1", 1883', f'"{host}", {port}')
        for code in re.findall(r"^```python\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
    ]


def program(*blocks: str) -> ModuleType:
    """Return a module that has executed blocks of code, without the `main` at the end."""
    module = ModuleType("guide")
    for block in blocks:
        exec(compile(block.removesuffix(RUN), "<guide>", "exec", dont_inherit=True), module.__dict__)
    return module


async def execute(block: str, names: dict[str, Any]) -> None:
    """Execute lines that await, as `python -m asyncio` does at its prompt."""
    code = compile(block, "<guide>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    if (awaited := eval(code, names)) is not None:
        await awaited


@asynccontextmanager
async def beside(main: Callable[[], Any]) -> AsyncIterator[None]:
    """Run a program within the block that would never end by itself."""
    task = asyncio.create_task(main())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_worker_with_retries_and_a_hook_for_dead_letters(
    penstock_node: NodeInThread, penstock_client: SyncClient
) -> None:
    (billing,) = blocks_of("docs/guides/worker.md", "Worker", penstock_node)
    (shipping,) = blocks_of("docs/guides/worker.md", "Retries", penstock_node)
    lines: list[str] = []
    worker = program(billing, shipping)
    worker.print = lines.append  # type: ignore[attr-defined]
    groups = penstock_client.groups
    async with running(worker.app):
        await until(lambda: {"billing.on-dead-letter", "shipping.on-dead-letter"} <= {each.group for each in groups.describe()})
        penstock_client.send("plant/1/temperature", b'{"meter": 7, "value": 21.5}')
        penstock_client.send("plant/1/temperature", b"21.5 degrees")
        penstock_client.send("orders/7", b'{"paid": false}')
        await until(lambda: len(lines) == 3)
        penstock_client.send("orders/8", b'{"paid": null}')
        for _ in range(4):
            await until(lambda: groups.describe("shipping")[0].delayed)
            penstock_node.advance(20)
        await until(lambda: len(set(lines)) == 4)
    told = dict(line.split(": ", 1) for line in lines)
    assert told.pop("meter 7") == "21.5"
    assert [re.sub(r" \w{16} ", " ", dead) for dead in sorted(told, key=lambda key: key[-8:])] == [
        "dead letter of orders/7",
        "dead letter of orders/8",
        "dead letter of plant/1/temperature",
    ]
    reasons = "\n".join(told.values())
    for reason in ("is not valid", "the order was never paid", "the payment is not known yet"):
        assert reason in reasons


async def test_the_worker_of_the_readme(penstock_node: NodeInThread, penstock_client: SyncClient) -> None:
    (code,) = blocks_of("README.md", "Run it", penstock_node)
    lines: list[str] = []
    worker = program(code)
    worker.print = lines.append  # type: ignore[attr-defined]
    penstock_client.send("plant/1/press/temperature", b"71.5")
    async with running(worker.app):
        await until(lambda: lines == ["plant/1/press/temperature: 71.5"])


async def test_a_synchronous_producer(
    penstock_node: NodeInThread, penstock_client: SyncClient, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks_of("docs/guides/services.md", "Producer", penstock_node)
    program(code)
    (state,) = penstock_client.pop("plant/1/state", group="states", wait=60)
    assert capsys.readouterr().out.strip() == state.message_id
    penstock_client.groups.create("readings", "plant/1/temperature")
    await until(lambda: penstock_client.groups.describe("readings")[0].visible == 1_000)


async def test_an_outbox(
    penstock_node: NodeInThread, penstock_client: SyncClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sqlalchemy = pytest.importorskip("sqlalchemy", reason="the outbox needs the extra `sqlalchemy`")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks_of("docs/guides/outbox.md", "Outbox", penstock_node)
    shop = program(code)

    def rows() -> int:
        with shop.engine.connect() as connection:
            return int(connection.scalar(sqlalchemy.text("SELECT count(*) FROM penstock_outbox")))

    assert rows() == 1
    async with beside(shop.main):
        await until(lambda: rows() == 0)
    (order,) = penstock_client.pop("orders/+", group="shipping", wait=60)
    assert (order.topic, order.body, order.properties["level"]) == ("orders/7", b"placed", "3")
    shop.engine.dispose()


async def test_a_delay_that_is_cancelled(penstock_node: NodeInThread, penstock_client: SyncClient) -> None:
    (code, with_keys) = blocks_of("docs/guides/delayed.md", "Send one, and cancel it", penstock_node) + blocks_of(
        "docs/guides/delayed.md", "Give it a key", penstock_node
    )
    await program(code).main()
    async with Client(penstock_node.target) as client:
        await execute(with_keys, {"client": client})
    assert penstock_client.timers.count().pending == 0
    penstock_node.advance(timedelta(days=2))
    assert not penstock_client.pop("orders/#", group="orders")


async def test_a_cron_schedule(penstock_node: NodeInThread, penstock_client: SyncClient) -> None:
    (code,) = blocks_of("docs/guides/delayed.md", "Send again and again", penstock_node)
    await program(code).main()
    penstock_node.advance(timedelta(days=4))
    # One message for all occurrences that were missed. One more is on time if it is two o'clock in Berlin just now.
    report, *on_time = penstock_client.pop("reports/+", group="reports", wait=60)
    assert len(on_time) <= 1
    assert re.fullmatch(rb'\{"day": "20\d\d-\d\d-\d\d"\}', report.body)
    assert report.properties["schedule"] == "report/acme"


async def test_a_request_to_a_device(penstock_node: NodeInThread, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("aiomqtt")
    (code, with_paho) = blocks_of("docs/guides/devices.md", "Answer requests", penstock_node)
    (request,) = blocks_of("docs/guides/services.md", "Requests and replies", penstock_node)
    clients = penstock_node._node._running().gateway.clients
    async with beside(program(code).main), Client(penstock_node.target) as client:
        await until(lambda: any("plant/1/valve/set" in device.subscriptions.by_filter for device in clients.values()))
        await execute(request, {"client": client})
    assert capsys.readouterr().out.startswith("b'done: open'")
    device = program(with_paho).device
    assert device.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    device.disconnect()


async def test_tests_with_pytest(penstock_node: NodeInThread, penstock_client: SyncClient) -> None:
    plain, asynchronous = (program(code) for code in blocks_of("docs/guides/worker.md", "Tests", penstock_node))
    (test,) = (found for name, found in vars(plain).items() if name.startswith("test_"))
    assert [*inspect.signature(test).parameters] == ["penstock_node", "penstock_client"]
    test(penstock_node, penstock_client)
    (test,) = (found for name, found in vars(asynchronous).items() if name.startswith("test_"))
    await test()


async def test_messages_and_groups_at_the_prompt(penstock_node: NodeInThread) -> None:
    page = "docs/guides/services.md"
    async with Client(penstock_node.target) as client:
        for heading in ("Send", "Deduplication ids", "Groups"):
            for block in blocks_of(page, heading, penstock_node):
                await execute(block, {"client": client})
        assert [description.group for description in await client.groups.describe()] == ["billing"]
