"""The node's clock on the control socket: `penstock clock` shows it, and `penstock clock accept` confirms a jump."""

from __future__ import annotations

from typing import Any

import orjson
from aiohttp import web

from penstock.node.control import Routes
from penstock.node.controladdress import CLOCK
from penstock.node.errors import ControlRefused
from penstock.store.errors import ClockDiffers
from penstock.store.store import Store


def clock_of(store: Store) -> dict[str, Any]:
    """Return the state of a store's clock, of types that orjson can encode."""
    keeping = store.timekeeping
    return {
        "now_ms": store.now_ms(),
        "time_of_day_ahead_ms": keeping.offset_ms,
        "confirmed": keeping.is_confirmed,
        "confirmed_in_ms": keeping.confirmed_in_ms,
        "slowed": keeping.is_slowed,
        "jumps": keeping.jumps,
        "steps": keeping.steps,
    }


class ClockControl:
    """Shows and confirms the clock of a store.

    Parameters:
        store: of the node.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def routes(self) -> Routes:
        """Return the routes for the control socket."""
        return {("GET", CLOCK): self._show, ("POST", CLOCK): self._accept}

    async def _show(self, _request: web.Request) -> web.Response:
        return self._answer()

    async def _accept(self, request: web.Request) -> web.Response:
        offset = request.query.get("offset_ms", "")
        if not offset.removeprefix("-").isdecimal():
            raise ControlRefused(f"offset_ms is {offset!r}, but must be a whole number of milliseconds")
        try:
            self._store.timekeeping.accept(int(offset))
        except ClockDiffers as error:
            raise ControlRefused(str(error)) from error
        await self._store.durable()
        return self._answer()

    def _answer(self) -> web.Response:
        return web.Response(body=orjson.dumps(clock_of(self._store)) + b"\n", content_type="application/json")
