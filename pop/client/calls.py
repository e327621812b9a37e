"""One unary call, for asyncio and for threads."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar, cast

import grpc
import grpc.aio

from penstock.pop.client.batcher import CLOSED
from penstock.pop.client.durations import Duration, positive_seconds
from penstock.pop.client.statuses import error_of_call
from penstock.pop.errors import ClientClosed, NodeUnavailable

Q = TypeVar("Q")
A = TypeVar("A")


async def call(
    method: grpc.aio.UnaryUnaryMultiCallable[Q, A],
    request: Q,
    timeout_s: float,
    why_unanswered: Callable[[], Awaitable[str]] | None = None,
) -> A:
    """Return the answer to a request. If the node can't be reached yet, wait for it within the same timeout.

    Args:
        method: The call.
        request: The request.
        timeout_s: Timeout in seconds.
        why_unanswered: Finds out why there was no answer in time.

    Raises:
        PopError: The call failed. `error_of_call` chooses the class.
    """
    try:
        return await method(request, timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and why_unanswered is not None:
            raise NodeUnavailable(await why_unanswered()) from error
        raise error_of_call(error) from error


class AsyncCalls:
    """The calls of one asyncio client.

    Parameters:
        timeout: Time for one call, including the wait for the node.
    """

    def __init__(self, timeout: Duration) -> None:
        self.timeout_s = positive_seconds(timeout, "timeout")
        self.closed = False
        self.why_unanswered: Callable[[], Awaitable[str]] | None = None
        """Finds out why a call was not answered in time."""

    def check_open(self) -> None:
        """Raise ClientClosed if the client was closed."""
        if self.closed:
            raise ClientClosed(CLOSED)

    async def __call__(self, method: grpc.aio.UnaryUnaryMultiCallable[Q, A], request: Q, wait_ms: int = 0) -> A:
        """Return the answer to a request that the node may hold for `wait_ms`. Raises as `call` does, and ClientClosed."""
        self.check_open()
        return await call(method, request, self.timeout_s + max(wait_ms, 0) / 1000, self.why_unanswered)


class SyncCalls:
    """The calls of one client for threads.

    Parameters:
        timeout: Time for one call, including the wait for the node.
        metadata: gRPC metadata of each call.
    """

    def __init__(self, timeout: Duration, metadata: tuple[tuple[str, str], ...]) -> None:
        self._timeout_s = positive_seconds(timeout, "timeout")
        self._metadata = metadata
        self.closed = False
        self.why_unanswered: Callable[[], str] | None = None
        """Finds out why a call was not answered in time."""

    def check_open(self) -> None:
        """Raise ClientClosed if the client was closed."""
        if self.closed:
            raise ClientClosed(CLOSED)

    def __call__(self, method: grpc.UnaryUnaryMultiCallable[Q, A], request: Q, wait_ms: int = 0) -> A:
        """Return the answer to a request that the node may hold for `wait_ms`. Raises as `call` does, and ClientClosed."""
        self.check_open()
        timeout_s = self._timeout_s + max(wait_ms, 0) / 1000
        try:
            return method(request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=True)
        except grpc.RpcError as error:
            # By gRPC's documentation each error of a call is also a `grpc.Call`. Its types do not say so.
            call = cast(grpc.Call, error)
            if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED and self.why_unanswered is not None:
                raise NodeUnavailable(self.why_unanswered()) from error
            raise error_of_call(call) from error
