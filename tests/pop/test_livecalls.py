"""Calls that go on: how they end when their callers may no longer do what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, cast

import grpc
import pytest

from penstock.access.subject import Subject
from penstock.pop.access.caller import AccessDenied
from penstock.pop.access.livecalls import LiveCall, LiveCalls

DENIED = AccessDenied(grpc.StatusCode.PERMISSION_DENIED, "not any more")


class Served:
    """A call that waits, and may keep its cancellation to itself, as `asyncio.wait_for` does when both ends come together."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self.is_allowed = True
        self.live = LiveCalls(self._check, lambda _: Subject())
        self.call = LiveCall(cast(Any, None))
        self.waits = asyncio.Event()
        self.closed = False

    def _check(self, _: LiveCall) -> None:
        if not self.is_allowed:
            raise DENIED

    async def response(self) -> str:
        self.waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            if not self._keeps:
                raise
        return "secret"

    async def responses(self) -> AsyncGenerator[str, None]:
        try:
            yield await self.response()
        finally:
            self.closed = True


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_call_that_loses_its_right_has_no_response(keeps: bool) -> None:
    served = Served(keeps=keeps)

    async def ask() -> None:
        with pytest.raises(AccessDenied):
            await served.live.run(served.call, served.response(), None)
        task = asyncio.current_task()
        assert task is not None
        assert not task.cancelling()

    asked = asyncio.create_task(ask())
    await served.waits.wait()
    served.is_allowed = False
    served.live.check()
    await asked


@pytest.mark.parametrize("keeps", [False, True])
async def test_a_stream_that_loses_its_right_has_no_further_response(keeps: bool) -> None:
    served = Served(keeps=keeps)
    written: list[object] = []

    async def write(response: object) -> None:
        written.append(response)

    async def write_all() -> None:
        write_allowed = served.call.while_allowed(write)
        async with aclosing(served.responses()) as responses:
            async for response in responses:
                await write_allowed(response)

    async def ask() -> None:
        await served.live.run(served.call, write_all(), None)

    asked = asyncio.create_task(ask())
    await served.waits.wait()
    served.is_allowed = False
    served.live.check()
    with pytest.raises(AccessDenied):
        await asked
    assert written == []
    assert served.closed
