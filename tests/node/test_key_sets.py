"""The key set of an authority, fetched again and again: new keys, withdrawn ones, and an authority that is away."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from aiohttp import web
from cryptography.hazmat.primitives.asymmetric import ec

from penstock.access.control import AccessControl
from penstock.access.identity import KeysUnavailable, TokenInvalid
from penstock.access.options import AccessControlOptions, TokenOptions
from penstock.access.subject import Subject
from penstock.node.keysets import BYTES_MAX, KeySetFetcher
from tests.waiting import until

OLD, NEW = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
NOW_S = 1_800_000_000


class Authority:
    """An HTTP server with a key set."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {"1": OLD}
        self.answer: web.Response | None = None
        self.asked = 0
        self.url = ""
        self._runner: web.AppRunner

    async def __aenter__(self) -> Authority:
        app = web.Application()
        app.router.add_get("/keys", self._serve)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/keys"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _serve(self, _request: web.Request) -> web.Response:
        self.asked += 1
        algorithm = jwt.get_algorithm_by_name("ES256")
        rows = [{**algorithm.to_jwk(key.public_key(), as_dict=True), "kid": name} for name, key in self.keys.items()]
        return self.answer or web.json_response({"keys": rows})


@pytest.fixture
async def authority() -> AsyncIterator[Authority]:
    async with Authority() as authority:
        yield authority


@pytest.fixture
def access(authority: Authority, tmp_path: Path) -> AccessControl:
    tokens = TokenOptions(algorithms=("ES256",), keys=authority.url)
    return AccessControl(AccessControlOptions(jwt=tokens), tmp_path, lambda: NOW_S * 1000)


@pytest.fixture
async def fetcher(access: AccessControl, authority: Authority) -> AsyncIterator[KeySetFetcher]:
    fetcher = KeySetFetcher(access, authority.url, 0.01)
    yield fetcher
    fetcher.stop()


def verify(access: AccessControl, key: Any, key_id: str) -> str:
    assert access.tokens is not None
    return access.tokens.verify(jwt.encode({"sub": "ann", "exp": NOW_S + 60}, key, "ES256", {"kid": key_id})).user


async def fetched_anew(authority: Authority) -> None:
    seen = authority.asked
    await until(lambda: authority.asked > seen + 1)


async def test_the_node_follows_when_the_authority_changes_its_keys(
    access: AccessControl, authority: Authority, fetcher: KeySetFetcher
) -> None:
    with pytest.raises(KeysUnavailable, match="no keys have come"):
        verify(access, OLD, "1")
    fetcher.start()
    await fetched_anew(authority)
    assert verify(access, OLD, "1") == "ann"
    authority.keys = {"2": NEW}
    await fetched_anew(authority)
    assert verify(access, NEW, "2") == "ann"
    with pytest.raises(TokenInvalid, match="not known"):
        verify(access, OLD, "1")


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 500},
        {"status": 302, "headers": {"Location": "http://example.org/keys"}},
        {"text": "nonsense"},
        {"text": '{"keys": []}'},
        {"body": b" " * (BYTES_MAX + 1)},
    ],
)
async def test_the_keys_stay_while_the_authority_is_away(
    access: AccessControl, authority: Authority, fetcher: KeySetFetcher, answer: dict[str, Any]
) -> None:
    fetcher.start()
    await fetched_anew(authority)
    authority.answer = web.Response(**answer)
    seen = authority.asked
    await until(lambda: authority.asked > seen)
    assert verify(access, OLD, "1") == "ann"
    access.reload(Subject("test"))
    assert verify(access, OLD, "1") == "ann"
