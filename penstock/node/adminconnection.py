"""A connection of the admin listener: what aiohttp's own lacks against clients that don't read, and errors as JSON."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Final, cast

from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.web_protocol import RequestHandler

from penstock.node.api.dispatch import error_response
from penstock.node.api.operation import LINE_BYTES_MAX, ApiError

KEEP_ALIVE_S: Final = 75.0
"""Seconds that a connection may take to send the head of a request, the first one and each further one. Prometheus, which
asks every minute by default, keeps its connection."""

SERVER: Final = "penstock"
"""What answers call the server. aiohttp's own text would name its version and that of Python."""


def _is_failure(record: logging.LogRecord) -> bool:
    """Return whether a line of aiohttp tells of a failure of the node, and not of bytes that are no HTTP."""
    return not (record.exc_info and isinstance(record.exc_info[1], HttpProcessingError | web.RequestPayloadError))


_failures = logging.getLogger("aiohttp.server.admin")
_failures.addFilter(_is_failure)  # By itself aiohttp logs a traceback for each request that it answers with 400.


class AdminConnection(RequestHandler):
    """A connection of the admin listener, and its requests one after the other.

    Parameters:
        manager: of aiohttp, which serves the requests.
        loop: of the node.
    """

    has_ended = False
    """Whether the connection is closed. One that is closing still holds what its client has not taken."""

    def __init__(self, manager: web.Server, *, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(
            manager,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_S,
            logger=_failures,
            access_log=cast(logging.Logger, None),  # scrapes and probes arrive every few seconds
            max_line_size=LINE_BYTES_MAX,
            auto_decompress=False,  # a body that is encoded is refused
        )
        # By itself aiohttp reads 32 requests ahead, whose first lines may have a MiB each.
        self._max_msg_queue_size, self._msg_queue_resume_size = 1, 0
        self._transport: asyncio.Transport | None = None

    @property
    def is_served(self) -> bool:
        """Whether a request is under way, up to its answer."""
        return self._current_request is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin."""
        self._transport = cast(asyncio.Transport, transport)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """End."""
        self.has_ended = True
        super().connection_lost(exc)

    def abort(self) -> None:
        """End the connection at once. `force_close` would wait until the client has taken what was written."""
        self.force_close()
        if self._transport is not None:
            self._transport.abort()

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = HTTPStatus.INTERNAL_SERVER_ERROR,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Log what aiohttp has found to be no HTTP, or a failure, and return the answer."""
        super().handle_error(request, status, exc, message)
        if status == HTTPStatus.INTERNAL_SERVER_ERROR:
            why = "the node has failed to serve this, which is a defect of Penstock; its log has the details"
        else:
            why = f"the request is no HTTP that the node reads: {' '.join((message or 'nothing more is known').split())[:200]}"
        response = error_response(ApiError(HTTPStatus(status), why))
        response.headers[hdrs.SERVER] = SERVER
        response.force_close()
        return response


async def name_server(_request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Let an answer name the server without versions. It is a signal of aiohttp, sent before each answer."""
    response.headers[hdrs.SERVER] = SERVER
