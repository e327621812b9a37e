"""The control socket: a Unix socket in the data directory, on which commands of this machine ask the node to do something.

It speaks HTTP. Nobody needs a password, because the permissions of the socket's file say who may connect: the user whose node
it is, and root. The admin API is here too, and whoever may connect has the role admin.
"""

from __future__ import annotations

import asyncio
import socket
import stat
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from typing import Final

import orjson
import structlog
from aiohttp import web

from penstock.access.subject import Subject
from penstock.node.api.dispatch import BODY_BYTES_MAX, OVER, SUBJECT, AdminApi
from penstock.node.api.httpheads import check_target
from penstock.node.api.operation import LINE_BYTES_MAX, ApiError, ApiRole
from penstock.node.controladdress import SOCKET, address_of
from penstock.node.errors import ControlRefused

logger = structlog.get_logger("node")

SHUTDOWN_S = 1.0
"""Seconds that `stop` waits for responses in progress."""

OWNER: Final = Subject("control socket", frozenset((ApiRole.ADMIN,)))
"""Who asks on the control socket: the user whose node it is, or root."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

Routes = Mapping[tuple[str, str], Handler]
"""What the node does on request: handlers by method and path."""


class Control:
    """The HTTP server on the control socket.

    A handler may raise `ControlRefused`, whose text the command prints. It is cancelled when the command ends its connection.

    Parameters:
        data_dir: of the node, whose lock this process holds.
        routes: what the node does on request.
        api: the admin API; None for a socket without.
    """

    def __init__(self, data_dir: Path, routes: Routes, api: AdminApi | None = None) -> None:
        self._api = api
        self._data_dir = data_dir
        self._routes = routes
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Open the socket. Where that fails, log it: the node serves its clients all the same."""
        app = web.Application(middlewares=[_refusals], client_max_size=BODY_BYTES_MAX)
        app.add_routes(self._api.routes() if self._api is not None else ())
        for (method, path), handler in self._routes.items():
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=SHUTDOWN_S,
            handler_cancellation=True,
            max_line_size=LINE_BYTES_MAX,
            auto_decompress=False,  # a body that is encoded is refused
        )
        await runner.setup()
        try:
            await _ControlSite(runner, _bind(self._data_dir)).start()
        except OSError as error:
            await runner.cleanup()
            logger.error(
                "control.unavailable",
                path=str(self._data_dir / SOCKET),
                error=str(error),
                why="the node runs, but commands such as `penstock backup` can't reach it; see whether the file system of the "
                "data directory supports Unix sockets",
            )
            return
        self._runner = runner

    async def stop(self) -> None:
        """Close the socket and its connections, and delete its file. It does nothing if the socket isn't open."""
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()
            with suppress(FileNotFoundError):
                (self._data_dir / SOCKET).unlink()


class _ControlSite(web.BaseSite):
    """A listener on a socket that is bound already, which aiohttp offers for TCP only."""

    def __init__(self, runner: web.AppRunner, bound: socket.socket) -> None:
        super().__init__(runner)
        self._bound = bound

    @property
    def name(self) -> str:
        return SOCKET

    async def start(self) -> None:
        await super().start()
        server = self._runner.server
        assert server is not None
        self._server = await asyncio.get_running_loop().create_unix_server(server, sock=self._bound)


def _bind(data_dir: Path) -> socket.socket:
    """Return a bound socket that only this user can connect to, in place of a killed node's. Raises OSError."""
    path = data_dir / SOCKET
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(path.lstat().st_mode):
            raise FileExistsError(f"{path} is not a socket; move the file away")
        path.unlink()
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with address_of(data_dir) as address:
            bound.bind(address)
        path.chmod(0o600)  # nobody can connect before the server listens
    except BaseException:
        bound.close()
        raise
    return bound


@web.middleware
async def _refusals(request: web.Request, handler: Handler) -> web.StreamResponse:
    request[SUBJECT] = OWNER
    request[OVER] = "control"
    try:
        check_target(request)
        return await handler(request)
    except ApiError as error:
        return _error(str(error), error.status)
    except ControlRefused as error:
        return _error(str(error), HTTPStatus.CONFLICT)
    except web.HTTPException as error:  # an unknown path, for example from a command of a later version
        return _error(
            f"the node doesn't know {request.method} {request.path} ({error.status}); is it of another version?", error.status
        )


def _error(text: str, status: int) -> web.Response:
    return web.Response(body=orjson.dumps({"error": text}), status=status, content_type="application/json")
