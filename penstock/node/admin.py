"""The admin listener: health, metrics and state of a node over HTTP. It only answers questions, and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from penstock.node.errors import AdminUnavailable
from penstock.store.options import HostPort

SHUTDOWN_S = 1.0
"""How long `stop` waits for answers under way. Each takes milliseconds."""

PATHS = {
    "/healthz": "200 while the process is alive",
    "/readyz": "200 when the node accepts clients, else 503",
    "/metrics": "metrics for Prometheus",
    "/api/v1/state": "the node's state",
}


class Admin:
    """The HTTP server on `admin.listen`."""

    def __init__(
        self,
        listen: HostPort,
        *,
        registry: CollectorRegistry,
        ready: Callable[[], bool],
        state: Callable[[], dict[str, Any]],
        level: Callable[[], str] = lambda: "open",
    ) -> None:
        """Prepare the server; `start` opens it.

        Args:
            listen: where to listen. Port 0 picks a free one.
            registry: what `/metrics` shows.
            ready: tells whether the node accepts clients. Called on the event loop, so it must not block.
            level: tells how much may be stored: open, read_only or exhausted. A node that isn't open is ready all the same: its
                consumers are who frees it.
            state: what `/api/v1/state` shows, of types that orjson knows. Called on the event loop, so it must not block.
        """
        self._listen = listen
        self._registry = registry
        self._ready = ready
        self._state = state
        self._level = level
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Start to listen, and return the port.

        Raises:
            AdminUnavailable: the address is in use, or isn't one of this machine.
        """
        app = web.Application()
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/api/v1/state", self._show_state),
            ]
        )
        # No access log: scrapes and probes come every few seconds, for ever.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self._listen.host, self._listen.port).start()
        except OSError as error:
            await runner.cleanup()
            raise AdminUnavailable(
                f"the admin listener can't listen on {self._listen}: {error.strerror or error}; "
                "free the address, or set admin.listen to another (port 0 picks a free one)"
            ) from error
        self._runner = runner
        port: int = runner.addresses[0][1]
        return port

    async def stop(self) -> None:
        """Stop to listen, and close the connections. Does nothing when it isn't running."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _index(self, _request: web.Request) -> web.Response:
        return _json({"name": "penstock", "paths": PATHS})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _json({"alive": True})

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready = self._ready()
        return _json({"ready": ready, "store": self._level()}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        return web.Response(body=encode(self._registry), headers={hdrs.CONTENT_TYPE: content_type})

    async def _show_state(self, _request: web.Request) -> web.Response:
        return _json(self._state())


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    headers = {hdrs.CACHE_CONTROL: "no-store"}
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)
