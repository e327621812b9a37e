"""The admin listener: health, metrics and state of a node over HTTP. It is read-only."""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import hdrs, web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from penstock.node.adminsockets import AdminSockets
from penstock.node.errors import AdminUnavailable
from penstock.store.options import HostPort

SHUTDOWN_S = 1.0
"""Seconds that `stop` waits for responses in progress, each of which takes milliseconds."""

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
        connections_max: int = 32,
    ) -> None:
        """Create the server. `start` opens its listener.

        Args:
            listen: address of the listener. Port 0 picks a free port.
            registry: the metrics that `/metrics` shows.
            ready: returns whether the node accepts clients. It runs on the event loop, so it must not block.
            state: returns the state that `/api/v1/state` shows, of types that orjson can encode. It must not block either.
            level: returns how much the node may store: open, read_only or exhausted. A node that isn't open is still ready,
                because its consumers free the disk.
            connections_max: the maximum number of open connections. One more closes the oldest.
        """
        self._listen = listen
        self._registry = registry
        self._ready = ready
        self._state = state
        self._level = level
        self._connections_max = connections_max
        self._runner: web.AppRunner | None = None
        self._sockets: AdminSockets | None = None

    async def start(self) -> int:
        """Open the listener, and return its port.

        Raises:
            AdminUnavailable: the address is in use, or isn't an address of this machine.
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
        # No access log, because scrapes and probes arrive every few seconds.
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=SHUTDOWN_S)
        await runner.setup()
        server = runner.server
        assert server is not None
        sockets = AdminSockets(server, self._connections_max)
        try:
            port = await sockets.start(self._listen.host, self._listen.port)
        except OSError as error:
            await runner.cleanup()
            raise AdminUnavailable(
                f"The admin listener can't listen on {self._listen}: {error.strerror or error}. "
                "Free the address, or set admin.listen to another one. Port 0 picks a free port."
            ) from error
        self._runner, self._sockets = runner, sockets
        return port

    async def stop(self) -> None:
        """Close the listener and its connections. It does nothing if the listener isn't open."""
        runner, self._runner = self._runner, None
        if self._sockets is not None:
            self._sockets.close()
        if runner is not None:
            await runner.cleanup()

    @property
    def closed_early(self) -> int:
        """Number of connections that were closed because there were too many."""
        return self._sockets.closed_early if self._sockets is not None else 0

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
