"""The admin API of a node, as tests call it: with one token for each role."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import structlog
from yarl import URL

from penstock.cli import listing
from penstock.cli.main import main
from tests.gateway.wire import Broker

ROLES = ("viewer", "operator", "admin")

ACCESS = "".join(
    f"""
[[principal]]
name = "{role}"
token_sha256 = "{sha256(role.encode()).hexdigest()}"
roles = ["{role}"]
"""
    for role in ROLES
)


class Api:
    """Calls the admin API of a node as somebody with a role; as nobody without one."""

    def __init__(self, session: aiohttp.ClientSession, role: str = "") -> None:
        self._session = session
        self._headers = {"Authorization": f"Bearer {role}"} if role else {}

    def __call__(self, role: str) -> Api:
        return Api(self._session, role)

    async def call(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Return the status and the answer of a call."""
        json_body = {"json": body} if body is not None else {}
        async with self._session.request(method, path, headers={**self._headers, **headers}, **json_body) as response:
            return response.status, json.loads(await response.read())

    async def ok(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """Return the answer of a call that succeeds. The path is below `/api/v1`."""
        status, answer = await self.call(method, f"/api/v1{path}", body, **headers)
        assert status == 200, (method, path, status, answer)
        return answer

    async def refused(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, str]:
        """Return the status and the sentence of a call that fails. The path is below `/api/v1`."""
        status, answer = await self.call(method, f"/api/v1{path}", body, **headers)
        return status, answer["error"]

    async def status(self, method: str, path: str, body: Any = None, **headers: str) -> int:
        """Return the status of a call, also of one whose answer has no body. The path is below `/api/v1`."""
        json_body = {"json": body} if body is not None else {}
        url, headers = URL(f"/api/v1{path}", encoded=True), {**self._headers, **headers}
        async with self._session.request(method, url, headers=headers, **json_body) as response:
            return response.status

    async def get(self, path: str, **parameters: str | int) -> Any:
        """Return the answer of a GET that succeeds, with parameters in its query."""
        async with self._session.get(f"/api/v1{path}", headers=self._headers, params=parameters) as response:
            answer = json.loads(await response.read())
            assert response.status == 200, answer
            return answer

    async def pages(self, path: str, **parameters: str | int) -> list[Any]:
        """Return the items of all pages of a listing."""
        page = await self.get(path, **parameters)
        items = list(page["items"])
        while page["next"] is not None:
            page = await self.get(path, **parameters, after=page["next"])
            items += page["items"]
        return items


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[Broker]:
    """A node that knows a caller with each role, and restricts nobody else."""
    broker = await start_broker(tmp_path)
    yield broker
    await broker.stop()


async def start_broker(tmp_path: Path, **options: Any) -> Broker:
    """Start that node with options of `Broker`."""
    access = tmp_path / "access.toml"
    access.write_text('no_match = "allow"\n' + ACCESS)
    access.chmod(0o600)
    control = {"audit_file": str(tmp_path / "audit.log")}
    return await Broker(tmp_path / "data", {"access_file": str(access), "control": control, **options}).start()


@pytest.fixture
async def api(broker: Broker) -> AsyncIterator[Api]:
    """The admin API of that node."""
    async with aiohttp.ClientSession(f"http://{broker.node.admin}") as session:
        yield Api(session)


@pytest.fixture
def run(broker: Broker, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(listing, "TRY_S", 0.0)

    async def run(*arguments: str, role: str = "") -> tuple[int, str]:
        """Run a command here or, as somebody with a role, from elsewhere; return its status and what it says."""
        node = ("--admin", str(broker.node.admin)) if role else ("--data-dir", str(broker.config.data_dir))
        monkeypatch.setenv("PENSTOCK_TOKEN", role)
        status = await asyncio.to_thread(main, [*arguments, *node])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    return run


@pytest.fixture
def loggers() -> Iterator[None]:
    """Restore what a test changes of the loggers of its process."""
    level, configured = logging.getLogger().level, structlog.get_config()
    yield
    logging.getLogger().setLevel(level)
    structlog.configure(**configured)


def audited(broker: Broker) -> list[dict[str, Any]]:
    """Return the lines of the audit log about changes, and about those that were refused."""
    lines = map(json.loads, Path(broker.config.access.audit_file).read_text().splitlines())
    return [line for line in lines if line["event"] in ("changed", "failed", "denied", "refused")]
