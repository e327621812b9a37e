"""The code of the guide on FastStream and taskiq runs as it stands there."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from taskiq import InMemoryBroker
from taskiq.receiver import Receiver

from penstock import Client
from tests.pop.wiring import Node
from tests.waiting import WAIT_S_MAX, until

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "frameworks.md"


def modules(target: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """Return the modules of the guide by their names. A block without a name belongs to the module before it."""
    texts: dict[str, str] = {}
    name = ""
    for block in re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text("utf-8"), re.MULTILINE | re.DOTALL):
        if named := re.match(r"# (\w+)\.py\n", block):
            name = named[1]
        texts[name] = texts.get(name, "") + block.replace("127.0.0.1:8081", target)
    found: dict[str, ModuleType] = {}
    for name, text in texts.items():
        path = folder / f"{name}.py"
        path.write_text(text)
        module = found[name] = ModuleType(f"guide_{name}")
        monkeypatch.setitem(sys.modules, module.__name__, module)
        exec(compile(text, path, "exec"), module.__dict__)
    return found


@pytest.fixture
def guide(node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = modules(node.target, tmp_path, monkeypatch)
    assert list(found) == ["billing", "shop", "jobs"]
    return found


async def test_the_faststream_application(
    node: Node, client: Client, guide: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    billing = guide["billing"]
    running = asyncio.create_task(billing.app.run())
    await client.send("plant/7/temperature", b'{"celsius": 21.5}')
    (bill,) = await client.pop("bills/+", group="bills", wait=60.0)
    assert bill.body == b'{"press":"7","price":43.0,"attempt":1}'
    await until(lambda: node.core.counters.acked == 2)
    assert "21.5 plant/7/temperature" in capsys.readouterr().out
    billing.app.exit()
    await asyncio.wait_for(running, WAIT_S_MAX)


async def test_publishing_and_testing_with_faststream(client: Client, guide: dict[str, Any]) -> None:
    billing = guide["billing"]
    await billing.send()
    assert [message.body for message in await client.pop("counts", group="test", wait=60.0, messages_max=3)]
    await billing.test_a_reading_is_billed()


async def test_the_fastapi_application(node: Node, guide: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    app = guide["shop"].app
    async with app._lifespan_context(guide["shop"].api):
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as http:
            assert (await http.post("/orders/ada", json={"number": 3})).status_code == 200
        await until(lambda: node.core.counters.acked == 1)
    assert "order 3 of ada" in capsys.readouterr().out


async def test_the_taskiq_application(node: Node, guide: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    jobs = guide["jobs"]
    broker = jobs.broker.with_result_backend(InMemoryBroker().result_backend)
    await jobs.send()
    finish = asyncio.Event()
    listening = asyncio.create_task(Receiver(broker, max_async_tasks=4).listen(finish))
    await until(lambda: node.core.counters.acked == 1)
    node.advance(61_000)
    await until(lambda: node.core.counters.acked == 2)
    finish.set()
    await listening
    await broker.shutdown()
    assert capsys.readouterr().out.count("meter 7: 21.5") == 2
