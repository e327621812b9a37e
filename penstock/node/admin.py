"""The admin listener: health, metrics and state of a node, and the admin API, over HTTP or HTTPS.

`penstock.node.adminaccess` decides which requests are served.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any

import orjson
from aiohttp import hdrs, web
from aiohttp.typedefs import Handler
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from penstock.access.control import AccessControl
from penstock.gateway.transport.certificates import certificates_of
from penstock.node.adminaccess import AdminAccess, AdminRefused
from penstock.node.adminconnection import AdminConnection, name_server
from penstock.node.adminoptions import AdminOptions
from penstock.node.adminsockets import AdminSockets
from penstock.node.api.dispatch import BODY_BYTES_MAX, SUBJECT, AdminApi, answered, role_of
from penstock.node.api.operation import ApiRole
from penstock.node.api.streaming import IS_ALLOWED
from penstock.node.errors import AdminUnavailable
from penstock.node.metrics.exposition import exposition
from penstock.store.errors import TopicInvalid
from penstock.store.watchedfiles import WatchedFiles
from penstock.timer.errors import ListingInvalid

SHUTDOWN_S = 1.0
"""Seconds that `stop` waits for responses in progress, each of which takes milliseconds."""

PATHS = {
    "/healthz": "200 while the process is alive",
    "/readyz": "200 when the node accepts clients, else 503",
    "/metrics": "metrics for Prometheus",
    "/api/v1/state": "the node's state",
    "/api/v1/timers": "pending delayed messages",
}


@dataclass(frozen=True, slots=True)
class NodeViews:
    """What the admin listener shows of a node. No function may block, because all run on the event loop."""

    registry: CollectorRegistry
    """The metrics that `/metrics` shows."""
    ready: Callable[[], bool]
    """Returns whether the node accepts clients."""
    state: Callable[[], dict[str, Any]]
    """Returns the state that `/api/v1/state` shows, of types that orjson can encode."""
    timers: Callable[[Mapping[str, str]], Awaitable[dict[str, Any]]]
    """Returns what `/api/v1/timers` shows for the parameters of a request. It raises ListingInvalid or TopicInvalid if they are
    not valid."""
    level: Callable[[], str] = lambda: "open"
    """Returns how much the node may store: open, read_only or exhausted. A node that isn't open is still ready, because its
    consumers free the disk."""
    prepare: Callable[[], Awaitable[None]] | None = None
    """Is awaited before the metrics are collected."""


class Admin:
    """The HTTP server on `admin.listen`. `start` opens its listener.

    Parameters:
        options: address, certificates, and who may read what.
        access: knows users, roles and tokens.
        views: what it shows.
        api: the admin API; None for a listener without.
        connections_max: the maximum number of open connections. One more closes the oldest.
    """

    def __init__(
        self,
        options: AdminOptions,
        access: AccessControl,
        views: NodeViews,
        api: AdminApi | None = None,
        connections_max: int = 32,
    ) -> None:
        self._options = options
        self._api = api
        self._access = AdminAccess(options, access, lambda: self._sockets is None or self._sockets.is_local)
        self._views = views
        self._connections_max = connections_max
        self._runner: web.AppRunner | None = None
        self._sockets: AdminSockets | None = None
        self.certificates: WatchedFiles[ssl.SSLContext] | None = None
        """Its certificate, once it has started with TLS."""

    async def start(self) -> int:
        """Open the listener, and return its port.

        Raises:
            AdminUnavailable: the address is in use, or isn't an address of this machine, or the certificate can't be used.
        """
        if self._options.certificate_file:
            try:
                self.certificates = certificates_of(self._options, "admin", "http/1.1")
            except OSError as error:
                raise AdminUnavailable(f"The certificate of the admin listener can't be used: {error}.") from error
        app = web.Application(middlewares=[self._checked], client_max_size=BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/", self._index),
                web.get("/healthz", self._healthz),
                web.get("/readyz", self._readyz),
                web.get("/metrics", self._metrics),
                web.get("/api/v1/state", self._show_state),
                web.get("/api/v1/timers", self._show_timers),
                *(self._api.routes() if self._api is not None else ()),
            ]
        )
        app.on_response_prepare.append(name_server)
        # Nobody works for a caller that has hung up.
        runner = web.AppRunner(app, shutdown_timeout=SHUTDOWN_S, handler_cancellation=True)
        await runner.setup()
        server = runner.server
        assert server is not None
        make = partial(AdminConnection, server, loop=asyncio.get_running_loop())
        listen = self._options.listen
        streams = self._api.streams if self._api is not None else ()
        sockets = AdminSockets(make, self._connections_max, self._context, streams)
        try:
            port = await sockets.start(listen.host, listen.port)
        except OSError as error:
            await runner.cleanup()
            raise AdminUnavailable(
                f"The admin listener can't listen on {listen}: {error.strerror or error}. "
                "Free the address, or set admin.listen to another one. Port 0 picks a free port."
            ) from error
        self._runner, self._sockets = runner, sockets
        if self.certificates is not None:
            self.certificates.watch(asyncio.get_running_loop())
        return port

    async def stop(self) -> None:
        """Close the listener and its connections. It does nothing if the listener isn't open."""
        if self.certificates is not None:
            self.certificates.close()
        runner, self._runner = self._runner, None
        if self._sockets is not None:
            self._sockets.close()
        if runner is not None:
            await runner.cleanup()

    def reload(self) -> None:
        """Read the certificate again."""
        if self.certificates is not None:
            self.certificates.reload()

    def _context(self) -> ssl.SSLContext | None:
        return self.certificates.content if self.certificates is not None else None

    @property
    def closed_early(self) -> int:
        """Number of connections that were closed because there were too many."""
        return self._sockets.closed_early if self._sockets is not None else 0

    @web.middleware
    async def _checked(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            role = role_of(request)
            request[SUBJECT] = await self._access.check(request, role)
            request[IS_ALLOWED] = lambda: self._is_allowed(request, role)
        except AdminRefused as error:
            return error.response()
        return await answered(request, handler)

    async def _is_allowed(self, request: web.Request, role: ApiRole) -> bool:
        """Return whether a request would be served now."""
        try:
            await self._access.check(request, role)
        except AdminRefused:
            return False
        return True

    async def _index(self, _request: web.Request) -> web.Response:
        api = {} if self._api is None else {"/api/v1/openapi.json": "the admin API, as an OpenAPI document"}
        return _json({"name": "penstock", "paths": PATHS | api})

    async def _healthz(self, _request: web.Request) -> web.Response:
        return _json({"alive": True})

    async def _readyz(self, _request: web.Request) -> web.Response:
        ready = self._views.ready()
        return _json({"ready": ready, "store": self._views.level()}, HTTPStatus.OK if ready else HTTPStatus.SERVICE_UNAVAILABLE)

    async def _metrics(self, request: web.Request) -> web.Response:
        encode, content_type = choose_encoder(request.headers.get(hdrs.ACCEPT, ""))
        if self._views.prepare is not None:
            await self._views.prepare()
        body = await exposition(self._views.registry, encode)
        return web.Response(body=body, headers={hdrs.CONTENT_TYPE: content_type})

    async def _show_state(self, _request: web.Request) -> web.Response:
        return _json(self._views.state())

    async def _show_timers(self, request: web.Request) -> web.Response:
        try:
            return _json(await self._views.timers(request.query))
        except (ListingInvalid, TopicInvalid) as error:
            return _json({"error": str(error)}, HTTPStatus.BAD_REQUEST)


def _json(value: object, status: HTTPStatus = HTTPStatus.OK) -> web.Response:
    headers = {hdrs.CACHE_CONTROL: "no-store"}
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json", headers=headers)
