"""Sends streams: answers that go on, a line of JSON after another, until the caller hangs up or may see them no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Any, Final

import msgspec
from aiohttp import hdrs, web
from aiohttp.web_protocol import RequestHandler

from penstock.node.api.openapi import STREAM_TYPE
from penstock.node.api.operation import ApiError

STREAMS_MAX: Final = 8
"""Streams at a time. Each takes a part of the event loop, and a connection that makes way for no other one."""

CHECK_S: Final = 10.0
"""Seconds between two looks whether the caller may still see the stream: tokens expire, and people are banned."""

WRITE_S: Final = 30.0
"""Seconds that a caller may take to make room for a line. A slower one is disconnected."""

STREAM_HEADERS: Final = {hdrs.CONTENT_TYPE: STREAM_TYPE, hdrs.CACHE_CONTROL: "no-store", "X-Accel-Buffering": "no"}
"""Headers of a stream. Neither caches nor proxies may keep its lines back."""

IS_ALLOWED: Final = web.RequestKey[Callable[[], Awaitable[bool]]]("is_allowed")
"""Key of a request: returns whether whoever has sent it may still see the answer. Without it, the caller always may."""


class Streams:
    """The streams of a node.

    Parameters:
        streams_max: streams at a time.
    """

    def __init__(self, streams_max: int = STREAMS_MAX) -> None:
        self._streams_max = streams_max
        self._tasks: dict[RequestHandler, asyncio.Task[Any] | None] = {}
        """What sends each stream, by its connection."""
        self._is_closing = False

    def __contains__(self, connection: object) -> bool:
        """Whether a connection has a stream."""
        return connection in self._tasks

    @contextmanager
    def place(self, request: web.Request) -> Iterator[None]:
        """Keep a place for a stream within the context. Raises ApiError if there is none, or the node stops."""
        if self._is_closing:
            raise ApiError(HTTPStatus.SERVICE_UNAVAILABLE, "the node stops; ask another one, or this one when it is back")
        if len(self._tasks) >= self._streams_max:
            raise ApiError(
                HTTPStatus.TOO_MANY_REQUESTS, f"there are {self._streams_max} streams already; end one of them, and try again"
            )
        connection = request.protocol
        self._tasks[connection] = asyncio.current_task()
        try:
            yield
        finally:
            del self._tasks[connection]

    def close(self) -> None:
        """End all streams, and let none begin any more."""
        self._is_closing = True
        for task in self._tasks.values():
            if task is not None:
                task.cancel()

    async def send(self, request: web.Request, lines: AsyncIterator[Any]) -> web.StreamResponse:
        """Send lines within `place`, until one of the two sides ends, and return the response."""
        response = web.StreamResponse(headers=STREAM_HEADERS)
        await response.prepare(request)
        try:
            await self._send(request, response, lines)
        except TimeoutError:
            if request.transport is not None:
                request.transport.abort()  # what it has not read yet would wait for ever
        except asyncio.CancelledError:
            if not self._is_closing:
                raise
        return response

    async def _send(self, request: web.Request, response: web.StreamResponse, lines: AsyncIterator[Any]) -> None:
        now_s, encode, is_allowed = asyncio.get_running_loop().time, msgspec.json.Encoder().encode, request.get(IS_ALLOWED)
        check_s = now_s() + CHECK_S
        async for line in lines:
            if is_allowed is not None and now_s() > check_s:
                if not await is_allowed():
                    return
                check_s = now_s() + CHECK_S
            try:
                async with asyncio.timeout(WRITE_S):
                    await response.write(encode(line) + b"\n")
            except ConnectionError:
                return  # the caller has hung up, as one does to end a stream
