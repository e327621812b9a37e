"""Room for the responses of all calls together: bytes that gRPC keeps until callers have read them.

A caller need not read what it asked for, and gRPC keeps a response until then, even if the call is cancelled on this side. So
the bytes of the responses that are not read are counted. Where they are too many, the caller that has most of them loses the
connection with its oldest response. A caller that reads is hardly ever that one, so nobody waits for others.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Hashable, Iterator
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from typing import Any, Final

import grpc
import structlog

from penstock.pop.access.caller import CALLER, address_of
from penstock.store.causer import source_of

logger = structlog.get_logger("pop")

COUNTED_FROM: Final = 4_096
"""Bytes from which a response counts. A smaller one takes no more than the call itself."""

ENDING_PERCENT: Final = 75
"""Percent of the room that may be in use after connections were closed, so that they are closed several at a time."""


class _Unread:
    """A response that its caller has not read, or what a stream keeps for it."""

    __slots__ = ("caller", "is_ended", "peer", "size")

    def __init__(self, caller: Hashable, peer: str, size: int) -> None:
        self.caller = caller
        self.peer = peer
        self.size = size
        self.is_ended = False
        """True once its connection is being closed."""


class Kept:
    """What a stream of responses keeps for its caller: the response that it sends, and those that come after it.

    Parameters:
        responses: counts it.
        context: of the call.
    """

    def __init__(self, responses: ResponseBytes, context: Any) -> None:
        self._responses = responses
        self._context = context
        self._unread: _Unread | None = None
        self.size = 0
        """Bytes that count."""

    def resize(self, size: int) -> None:
        """State how many bytes the stream keeps now."""
        self.size = size if size >= COUNTED_FROM else 0
        unread = self._unread
        if unread is not None:
            self._responses.resize(unread, self.size)
            if not self.size:
                self._unread = None
        elif self.size:
            self._unread = self._responses.add(_caller_of(self._context), self._context.peer(), self.size)


_KEPT: ContextVar[Kept | None] = ContextVar("kept", default=None)


def kept_by_call() -> Kept | None:
    """Return what the present call keeps; None outside of a stream of responses that is served by gRPC."""
    return _KEPT.get()


class ResponseBytes:
    """Counts the bytes of responses that are not read, and closes connections where they are too many.

    Parameters:
        all_max: the bytes of the responses of all calls together.
        close: closes the connections of peers.
    """

    def __init__(self, all_max: int, close: Callable[[Collection[str]], Coroutine[Any, Any, object]]) -> None:
        self._all_max = all_max
        self._close = close
        self._closing: set[asyncio.Task[object]] = set()
        self._unread: dict[Hashable, dict[_Unread, None]] = {}
        """Responses by caller, the oldest first."""
        self._bytes: dict[Hashable, int] = {}
        self.used = 0
        """Bytes that are not read."""
        self.ended = 0
        """Connections that were closed."""

    def bounded(self, handler: Any) -> Any:
        """Return the gRPC handler of a method, whose responses count."""
        deserialize, serialize = handler.request_deserializer, handler.response_serializer
        if handler.request_streaming:
            served = self._stream(handler.stream_stream)
            return grpc.stream_stream_rpc_method_handler(served, deserialize, serialize)
        if handler.response_streaming:
            served = self._stream(handler.unary_stream)
            return grpc.unary_stream_rpc_method_handler(served, deserialize, serialize)
        return grpc.unary_unary_rpc_method_handler(self._unary(handler.unary_unary), deserialize, serialize)

    def add(self, caller: Hashable, peer: str, size: int) -> _Unread:
        """Count a response, and close the connections for whose responses there is no more room."""
        unread = _Unread(caller, peer, size)
        self._unread.setdefault(caller, {})[unread] = None
        self._bytes[caller] = self._bytes.get(caller, 0) + size
        self.used += size
        if self.used > self._all_max:
            self._make_room()
        return unread

    def _make_room(self) -> None:
        peers: set[str] = set()
        while self.used > self._all_max * ENDING_PERCENT // 100:
            most = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(iter(self._unread[most]))
            peers.add(oldest.peer)
            for unread in [each for each in self._unread[most] if each.peer == oldest.peer]:
                self.remove(unread)
                unread.is_ended = True
        self.ended += len(peers)
        logger.warning(
            "grpc.unread", connections=len(peers), why="callers did not read their responses: pop.responses_bytes_max"
        )
        closing = asyncio.create_task(self._close(peers))
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    def remove(self, unread: _Unread) -> None:
        """Count a response no more. It may have been removed before."""
        of_caller = self._unread.get(unread.caller)
        if of_caller is None or unread not in of_caller:
            return
        del of_caller[unread]
        self.used -= unread.size
        self._bytes[unread.caller] -= unread.size
        if not of_caller:
            del self._unread[unread.caller], self._bytes[unread.caller]

    def resize(self, unread: _Unread, size: int) -> None:
        """Change the size of what is not read; 0 removes it. If its connection is being closed, it counts no more."""
        if unread.is_ended:
            return
        if not size:
            self.remove(unread)
            return
        grown = size - unread.size
        unread.size = size
        self._bytes[unread.caller] += grown
        self.used += grown
        if self.used > self._all_max:
            self._make_room()

    def _unary(self, serve: Any) -> Any:
        async def called(request: Any, context: Any) -> Any:
            response = await serve(request, context)
            size = _size_of(response)
            if size >= COUNTED_FROM:
                unread = self.add(_caller_of(context), context.peer(), size)
                context.add_done_callback(lambda _: self.remove(unread))
            return response

        return called

    def _stream(self, serve: Any) -> Any:
        async def called(request: Any, context: Any) -> AsyncIterator[Any]:
            kept = Kept(self, context)
            _KEPT.set(kept)
            try:
                async with aclosing(serve(request, context)) as responses:
                    async for response in responses:
                        with self._during(context, 0 if kept.size else _size_of(response)):
                            yield response  # returns when gRPC can take the next response
            finally:
                kept.resize(0)

        return called

    @contextmanager
    def _during(self, context: Any, size: int) -> Iterator[None]:
        if size < COUNTED_FROM:
            yield
            return
        unread = self.add(_caller_of(context), context.peer(), size)
        try:
            yield
        finally:
            self.remove(unread)


def _size_of(response: Any) -> int:
    return len(response) if isinstance(response, bytes) else int(response.ByteSize())


def _caller_of(context: Any) -> Hashable:
    rights = CALLER.get()
    return rights.subject.user if rights is not None else "", source_of(address_of(context))
