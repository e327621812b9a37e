"""Room for the responses of all calls together: bytes that gRPC keeps until callers have read them.

A caller need not read what it asked for, and gRPC keeps a response until then, even if the call is cancelled on this side. So
the bytes of the responses that are not read are counted. Where they are too many, the caller that has most of them loses the
connection with its oldest response. A caller that reads is hardly ever that one, so nobody waits for others. The caller gets no
further messages for a second: gRPC needs some turns of the loop to free what a closed connection has, and a caller that comes
again at once would cost the others more than its share.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import Counter
from collections.abc import Callable, Collection, Coroutine
from contextvars import ContextVar
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import structlog

from penstock.pop.access.caller import causer_of_call, peer_of
from penstock.pop.core.polls import Unsynced
from penstock.store.space.causer import NODE, Causer

if TYPE_CHECKING:
    from penstock.pop.grpc.calls import Call, Serve

logger = structlog.get_logger("pop")

COUNTED_FROM: Final = 4_096
"""Bytes from which a response counts. A smaller one takes no more than the call itself."""

HOLD_S: Final = 1.0
"""Seconds for which a caller gets no messages after a connection of it was closed."""

ENDING_PERCENT: Final = 75
"""Percent of the room that may be in use after connections were closed, so that they are closed several at a time."""


class _Unread:
    """A response that its caller has not read, or what a stream keeps for it."""

    __slots__ = ("caller", "peer", "size")

    def __init__(self, caller: Causer, peer: str, size: int) -> None:
        self.caller = caller
        self.peer = peer
        self.size = size


class StreamBytes:
    """What a stream of responses keeps for its caller: the response that it sends, and those that come after it.

    Parameters:
        responses: counts it.
        peer: of the call.
    """

    def __init__(self, responses: ResponseBytes, peer: str) -> None:
        self._responses = responses
        self._peer = peer
        self.caller = NODE
        """Who called."""
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
            self._unread = self._responses.add(self.caller, self._peer, self.size)


_STREAM: ContextVar[StreamBytes | None] = ContextVar("stream", default=None)


def bytes_of_stream() -> StreamBytes | None:
    """Return what the present call keeps; None outside of a stream of responses that is served by gRPC."""
    stream_bytes = _STREAM.get()
    if stream_bytes is not None:
        stream_bytes.caller = causer_of_call()
    return stream_bytes


class ResponseBytes:
    """Counts the bytes of responses that are not read, and closes connections where they are too many.

    Parameters:
        all_max: the bytes of the responses of all calls together.
        close: closes the connections of peers.
        unsynced: lets a caller wait while its connections are being closed.
    """

    def __init__(
        self, all_max: int, close: Callable[[Collection[str]], Coroutine[Any, Any, object]], unsynced: Unsynced
    ) -> None:
        self._all_max = all_max
        self._close = close
        self._unsynced = unsynced
        self._tasks: set[asyncio.Task[None]] = set()
        self._holds: Counter[Causer] = Counter()
        """By caller that waits: how many times connections of it were closed."""
        self._unread: dict[Causer, dict[_Unread, None]] = {}
        """Responses by caller, the oldest first."""
        self._bytes: dict[Causer, int] = {}
        self.used = 0
        """Bytes that are not read."""
        self.ended = 0
        """Connections that were closed."""

    async def count(self, serve: Serve, call: Call) -> Any:
        """Serve a call whose responses count: a stage of `Calls`."""
        if call.method.has_response_stream:
            return await self._count_stream(serve, call)
        response = await serve(call)
        size = _size_of(response)
        if size >= COUNTED_FROM:
            unread = self.add(causer_of_call(), peer_of(call.context), size)
            call.context.add_done_callback(lambda _: self.remove(unread))  # type: ignore[arg-type]  # it gets the context
        return response

    async def _count_stream(self, serve: Serve, call: Call) -> None:
        stream_bytes = StreamBytes(self, peer_of(call.context))
        _STREAM.set(stream_bytes)
        write = call.write

        async def counted(response: Any) -> None:
            size = _size_of(response)
            if stream_bytes.size or size < COUNTED_FROM:
                await write(response)
                return
            unread = self.add(causer_of_call(), peer_of(call.context), size)
            try:
                await write(response)
            finally:
                self.remove(unread)

        call.write = counted
        try:
            await serve(call)
        finally:
            stream_bytes.resize(0)

    def add(self, caller: Causer, peer: str, size: int) -> _Unread:
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
        callers: set[Causer] = set()
        while self.used > self._all_max * ENDING_PERCENT // 100:
            most = max(self._bytes, key=self._bytes.__getitem__)
            oldest = next(iter(self._unread[most]))
            peers.add(oldest.peer)
            for unread in [each for each in self._unread[most] if each.peer == oldest.peer]:
                self.remove(unread)
            if most not in callers:
                callers.add(most)
                self._holds[most] += 1
                self._unsynced.hold(most)
        self.ended += len(peers)
        logger.warning("grpc.unread", connections=len(peers), why="callers did not read their responses: pop.memory_bytes_max")
        task = asyncio.create_task(self._close_all(peers, callers))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close_all(self, peers: Collection[str], callers: Collection[Causer]) -> None:
        """Close connections, and let their callers go on later."""
        await self._close(peers)
        await asyncio.sleep(HOLD_S)
        for caller in callers:
            self._holds[caller] -= 1
            if not self._holds[caller]:
                del self._holds[caller]
                self._unsynced.release(caller)
        if not self._holds:
            await asyncio.to_thread(trim)

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
        """Change the size of what is not read; 0 removes it. If its connection was closed, it counts no more."""
        if not size:
            self.remove(unread)
        if unread not in self._unread.get(unread.caller, ()):
            return
        grown = size - unread.size
        unread.size = size
        self._bytes[unread.caller] += grown
        self.used += grown
        if self.used > self._all_max:
            self._make_room()


def _size_of(response: Any) -> int:
    return len(response) if isinstance(response, bytes) else int(response.ByteSize())


@cache
def _malloc_trim() -> Any:
    """Return the function of glibc, or None where the C library is another one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim.argtypes = [ctypes.c_size_t]
        trim.restype = ctypes.c_int
    return trim


def trim() -> bool:
    """Give free memory back to the system; return whether there was any.

    glibc frees large blocks of its own accord only at the end of the heap, see malloc_trim(3). It is called without the
    interpreter's lock. Other C libraries give memory back by themselves, and then this does nothing.
    """
    function = _malloc_trim()
    return function is not None and bool(function(0))
