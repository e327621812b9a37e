"""Calls that go on: how they end when their callers may no longer do what they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

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
        self.live = LiveCalls()
        self.call = LiveCall(self._check, Subject)
        self.waits = asyncio.Event()
        self.closed = False

    def _check(self) -> None:
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

    found: list[object] = []

    async def ask() -> None:
        async for response in served.live.serve(served.call, served.responses(), None):
            found.append(response)

    asked = asyncio.create_task(ask())
    await served.waits.wait()
    served.is_allowed = False
    served.live.check()
    with pytest.raises(AccessDenied):
        await asked
    assert found == []
    assert served.closed
