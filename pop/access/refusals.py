"""How calls end that are not served: what the caller is told, and how long it waits for that.

A refusal costs the node nearly as much as a call that is served. A caller that is refused, and at once calls again, would slow
down everybody. So each source gets its refusals at a bounded rate.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import TYPE_CHECKING, Any, Final

import grpc
import grpc.aio

from penstock.pop.access.caller import address_of
from penstock.store.space.causer import source_of

if TYPE_CHECKING:
    from penstock.pop.grpc.calls import Call, Serve

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

    async def tell(self, serve: Serve, call: Call) -> Any:
        """Serve a call, and tell its caller if it is refused: a stage of `Calls`.

        Whatever the call holds, such as room for its request, must be given back before the error reaches this stage.
        """
        write = call.write  # as gRPC has it, without what later stages do with responses
        try:
            return await serve(call)
        except CallRefused as error:
            refusal = _alone(error)
        response = await self._response(refusal, call.context)
        if not call.method.has_response_stream:
            return response
        await write(response)
        return None

    def wait_s(self, source: str, now_s: float) -> float:
        """Count a refusal of a source; return the seconds that it must wait."""
        paid_s = max(self._paid_s.pop(source, now_s), now_s) + 1 / PER_S
        wait_s = paid_s - now_s - AT_ONCE / PER_S
        self._paid_s[source] = min(paid_s, now_s + AT_ONCE / PER_S + WAIT_S_MAX)
        if len(self._paid_s) > SOURCES_MAX:
            self._paid_s.popitem(last=False)
        return min(max(wait_s, 0.0), WAIT_S_MAX)

    async def _response(self, refusal: CallRefused, context: Any) -> Any:
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
