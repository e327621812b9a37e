"""The bytes of requests that are under way in all calls together.

gRPC knows a limit for one message and none for all. It reads and unpacks a request before any code of a unary method runs. So
unary methods are served as methods that read their request themselves, which is the same on the wire: before a call has room
for the largest request, nothing of it is read, and flow control holds up its sender.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from penstock.pop.access.caller import peer_of
from penstock.pop.access.refusals import CallRefused
from penstock.pop.errors import RequestInvalid
from penstock.store.options import MIB

if TYPE_CHECKING:
    from penstock.pop.grpc.calls import Call, Serve

EOF: Final[Any] = grpc.aio.EOF  # type: ignore[attr-defined]  # it is there
"""What gRPC returns in place of a request if there is none."""

WAIT_S: Final = 5.0
"""Seconds that a call waits for room. After that it is refused."""

READ_S: Final = 2.0
"""Seconds after which a call that still sends its request is refused, if others wait for its room."""

WAITING_MAX: Final = 10_000
"""Calls that wait for room. A further one is refused at once."""

OTHER_REQUEST_BYTES_MAX: Final = 4 * MIB
"""Maximum size of a request that sends no messages, and of each request of a stream, in bytes. The largest have thousands of
handles."""

OTHERS_SHARE: Final = 2
"""Requests that send no messages get one in so many bytes of the room. A call that waits for messages keeps its request for as
long as it waits, and must not keep those out that send."""


class RefusedFor(StrEnum):
    """Why a request was refused."""

    NO_ROOM = "no_room"
    """The requests of all calls together had too many bytes."""
    SLOW = "slow"
    """It came slowly while others waited."""
    TOO_LARGE = "too_large"
    """It sends no messages, and was larger than such a request may be."""


class RequestRefused(CallRefused):
    """Raised for a call whose request can't be read now. The message is for the caller."""

    def __init__(self, detail: str) -> None:
        super().__init__(grpc.StatusCode.RESOURCE_EXHAUSTED, detail)


class _Reading:
    """A call whose request is being read."""

    __slots__ = ("began_s", "is_given_up", "task")

    def __init__(self, task: asyncio.Task[Any] | None, began_s: float) -> None:
        self.task = task
        self.began_s = began_s
        self.is_given_up = False


class RequestBytes:
    """Room for the requests of all calls together.

    A call gets room for the largest request before its request is read, and keeps as much as the request has bytes until the
    call ends. Calls that wait for room get it in turn: one of each connection, then the next one of each.

    Parameters:
        request_max: the largest request, in bytes.
        all_max: the bytes of all requests together.
    """

    def __init__(self, request_max: int, all_max: int) -> None:
        self._request_max = request_max
        self._all_max = all_max
        self._free = all_max
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The calls that wait for room, by connection. The connection whose turn it is comes first."""
        self._waiting_count = 0
        self._reading: dict[_Reading, None] = {}
        """The calls whose requests are being read. The one that began first comes first."""
        self._timer: asyncio.TimerHandle | None = None
        self._others = 0
        """Bytes of the requests that send no messages."""
        self.refused: Counter[RefusedFor] = Counter()
        """Calls that were refused, by reason."""

    @property
    def used(self) -> int:
        """Bytes that calls have or may need."""
        return self._all_max - self._free

    async def hold(self, serve: Serve, call: Call) -> Any:
        """Serve a call whose requests are read within these bounds: a stage of `Calls`.

        Raises:
            CallRefused: as `read`, or there is no request, or it is no message of the method.
        """
        method = call.method
        if method.has_request_stream:
            call.request = self._parsed(call.request, method.parse)
            return await serve(call)
        raw = await self.read(call.context, is_send=method.is_send)
        if raw is EOF:
            raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, "the call has no request")
        size = len(raw)
        try:
            try:
                call.request = method.parse(raw)
            except RequestInvalid as error:
                raise CallRefused(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
            del raw
            return await serve(call)
        finally:
            call.request = None  # a call that waits to hear of its refusal keeps nothing of it
            self.done(size, is_send=method.is_send)

    async def _parsed(self, requests: AsyncIterator[bytes], parse: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        """Yield the requests of a stream. The method that reads them fails where one is too large, or is no message."""
        async for raw in requests:
            self._check_size(len(raw))
            yield parse(raw)

    async def read(self, context: Any, *, is_send: bool) -> Any:
        """Return the bytes of a call's request, for which the caller calls `done`; `EOF` if there is none.

        Raises:
            RequestRefused: there is no room, or the request comes too slowly while others wait, or is too large.
        """
        if self._waiting or self._free < self._request_max:
            await self._wait(peer_of(context))
        else:
            self._free -= self._request_max
        loop = asyncio.get_running_loop()
        reading = _Reading(asyncio.current_task(), loop.time())
        self._reading[reading] = None
        size = 0
        try:
            raw = await context.read()
            if raw is not EOF:
                if not is_send:
                    self._admit_other(len(raw))
                size = len(raw)
            return raw
        except asyncio.CancelledError:
            if not reading.is_given_up or reading.task is None:
                raise
            reading.task.uncancel()
            raise self._refusal(
                RefusedFor.SLOW, f"the request did not come within {READ_S:.0f} s, and other calls need its room"
            ) from None
        finally:
            del self._reading[reading]
            self._release(self._request_max - size)

    def done(self, size: int, *, is_send: bool) -> None:
        """Give back the room of a request that `read` returned."""
        if not is_send:
            self._others -= size
        self._release(size)

    def _admit_other(self, size: int) -> None:
        """Count a request that sends no messages. Raises RequestRefused if it is too large, or there are too many."""
        self._check_size(size)
        others_max = self._all_max // OTHERS_SHARE
        if self._others + size > others_max:
            raise self._refusal(
                RefusedFor.NO_ROOM,
                f"requests that send no messages have {self._others} bytes already, and {others_max} at most, which is half of "
                "the bytes of all requests (pop.memory_bytes_max); try again later, with a smaller request",
            )
        self._others += size

    def _check_size(self, size: int) -> None:
        if size > OTHER_REQUEST_BYTES_MAX:
            raise self._refusal(
                RefusedFor.TOO_LARGE,
                f"the request has {size} bytes; one that sends no messages may have {OTHER_REQUEST_BYTES_MAX}",
            )

    def _release(self, size: int) -> None:
        """Give room back, to the next calls that wait."""
        self._free += size
        while self._waiting and self._free >= self._request_max:
            peer, calls = next(iter(self._waiting.items()))
            del self._waiting[peer]
            call = calls.popleft()
            self._waiting_count -= 1
            if calls:
                self._waiting[peer] = calls
            if not call.done():
                self._free -= self._request_max
                call.set_result(None)

    async def _wait(self, peer: str) -> None:
        if self._waiting_count >= WAITING_MAX:
            raise self._no_room()
        loop = asyncio.get_running_loop()
        call: asyncio.Future[None] = loop.create_future()
        self._waiting.setdefault(peer, deque()).append(call)
        self._waiting_count += 1
        if self._timer is None:
            self._timer = loop.call_later(READ_S, self._give_up_slow)
        try:
            async with asyncio.timeout(WAIT_S):
                await call
        except BaseException as error:
            if call.done() and not call.cancelled():
                self._release(self._request_max)  # the room came at the same moment
            if isinstance(error, TimeoutError):
                raise self._no_room() from None
            raise

    def _give_up_slow(self) -> None:
        """Refuse the calls that take too long to send their requests, if others wait."""
        self._timer = None
        if not self._waiting:
            return
        loop = asyncio.get_running_loop()
        for reading in self._reading:
            if reading.began_s > loop.time() - READ_S:
                break
            if not reading.is_given_up and reading.task is not None:
                reading.is_given_up = True
                reading.task.cancel()
        self._timer = loop.call_later(READ_S, self._give_up_slow)

    def _no_room(self) -> RequestRefused:
        return self._refusal(
            RefusedFor.NO_ROOM,
            f"the requests of all calls together have {self._all_max} bytes already (pop.memory_bytes_max); try again later",
        )

    def _refusal(self, reason: RefusedFor, message: str) -> RequestRefused:
        self.refused[reason] += 1
        return RequestRefused(message)
