"""How calls end that are not served: what the caller is told, and how long it waits for that.

A refusal costs the node nearly as much as a call that is served. A caller that is refused, and at once calls again, would slow
down everybody. So each source gets its refusals at a bounded rate.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

import grpc
import grpc.aio

from penstock.pop.access.caller import address_of, note_peer
from penstock.store.space.causer import source_of

AT_ONCE: Final = 100
"""Refusals that a source gets without waiting, if it had none for some time."""

PER_S: Final = 100
"""Refusals a second that a source gets in the long run."""

WAIT_S_MAX: Final = 5.0
"""Seconds that a caller waits at most to hear that its call is refused."""

WAITING_MAX: Final = 1_000
"""Refusals that wait at a time, because each keeps its call in memory. A further one is told at once."""

SOURCES_MAX: Final = 10_000
"""Sources whose refusals are remembered. The one that was refused last the longest ago is forgotten first."""


class CallRefused(Exception):
    """Raised to end a call that is not served. The message is for the caller.

    Parameters:
        status: the gRPC status of the call.
        detail: what the caller is told.
        response: sent as the only response, with the status OK, where the protocol states errors in responses.
    """

    def __init__(self, status: grpc.StatusCode = grpc.StatusCode.OK, detail: str = "", response: Any = None) -> None:
        super().__init__(detail)
        self.status = status
        self.response = response


class Refusals:
    """Tells callers that their calls are refused: see `CallRefused`."""

    def __init__(self) -> None:
        self._paid_s: OrderedDict[str, float] = OrderedDict()
        """When the refusals of a source so far would have been told, one by one at `PER_S`, by the clock of the loop."""
        self._waiting = 0
        self.delayed = 0
        """Refusals that had to wait."""

    def told(self, handler: Any) -> Any:
        """Return the gRPC handler of a method that tells its callers of refusals.

        Whatever the call holds, such as room for its request, must be given back before the error reaches this handler.
        """
        if handler.response_streaming:
            return handler._replace(stream_stream=self._stream_stream(handler.stream_stream))
        return handler._replace(stream_unary=self._stream_unary(handler.stream_unary))

    def wait_s(self, source: str, now_s: float) -> float:
        """Count a refusal of a source; return the seconds that it must wait."""
        paid_s = max(self._paid_s.pop(source, now_s), now_s) + 1 / PER_S
        wait_s = paid_s - now_s - AT_ONCE / PER_S
        self._paid_s[source] = min(paid_s, now_s + AT_ONCE / PER_S + WAIT_S_MAX)
        if len(self._paid_s) > SOURCES_MAX:
            self._paid_s.popitem(last=False)
        return min(max(wait_s, 0.0), WAIT_S_MAX)

    def _stream_unary(self, serve: Any) -> Any:
        async def called(requests: Any, context: Any) -> Any:
            note_peer(context)
            try:
                return await serve(requests, context)
            except CallRefused as error:
                refusal = _alone(error)
            return await self._tell(refusal, context)

        return called

    def _stream_stream(self, serve: Any) -> Any:
        async def called(requests: Any, context: Any) -> AsyncIterator[Any]:
            note_peer(context)
            try:
                async with aclosing(serve(requests, context)) as responses:
                    async for response in responses:
                        yield response
                return
            except CallRefused as error:
                refusal = _alone(error)
            yield await self._tell(refusal, context)

        return called

    async def _tell(self, refusal: CallRefused, context: Any) -> Any:
        """Return the response of a refused call, or end it with a status, when it is its turn."""
        wait_s = self.wait_s(source_of(address_of(context)), asyncio.get_running_loop().time())
        if wait_s > 0 and self._waiting < WAITING_MAX:
            self.delayed += 1
            self._waiting += 1
            try:
                await asyncio.sleep(wait_s)
            finally:
                self._waiting -= 1
        if refusal.response is not None:
            return refusal.response
        try:
            await context.abort(refusal.status, str(refusal))
        except grpc.aio.InternalError as error:
            # gRPC has ended the call itself, such as one whose request is too large. It would log a traceback for each.
            raise asyncio.CancelledError from error


def _alone(error: CallRefused) -> CallRefused:
    """Return an error without what led to it: tracebacks refer to the frames that served the call, and so to its request."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
