"""What every call of the client needs: errors as exceptions, back-off, and many small wishes in one call."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import grpc
import grpc.aio

from penstock.pop.errors import (
    CallFailed,
    ClientClosed,
    GroupBusy,
    GroupExists,
    GroupUnknown,
    NodeUnavailable,
    NotAuthenticated,
    NotPermitted,
    Overloaded,
    PopError,
    RequestInvalid,
    StatusError,
)
from penstock.pop.proto import pop_pb2 as pb

Q = TypeVar("Q")
A = TypeVar("A")

BACKOFF_MS_MIN = 50
BACKOFF_MS_MAX = 5_000

CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", -1),  # the node bounds its answers; one message may be larger than gRPC's 4 MiB
    ("grpc.initial_reconnect_backoff_ms", BACKOFF_MS_MIN),
    ("grpc.min_reconnect_backoff_ms", BACKOFF_MS_MIN),
    ("grpc.max_reconnect_backoff_ms", BACKOFF_MS_MAX),
    # A node that vanished without a word, as behind a cut cable, is noticed after these two together.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """How a client shows who it is, and knows whom it talks to.

    Parameters:
        token: of a principal that the node knows; sent with each call. Over plain text anybody on the way can read it.
        root_certificates: PEM of the roots by which the node's certificate is checked. None: plain text, unless `tls`.
        tls: speak TLS; with no `root_certificates`, by the roots that gRPC ships.
        certificate, key: PEM of the client's own certificate and its key, for mTLS.
    """

    token: str = ""
    tls: bool = False
    root_certificates: bytes | None = None
    certificate: bytes | None = None
    key: bytes | None = None

    @property
    def credentials(self) -> grpc.ChannelCredentials | None:
        """Return the credentials of a channel; None for plain text."""
        if not (self.tls or self.root_certificates):
            return None
        return grpc.ssl_channel_credentials(self.root_certificates, self.key, self.certificate)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return what goes with each call."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()


PLAIN = Security()


class _Token:
    """Puts the token into each call's metadata."""

    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self._metadata = metadata

    def _with_token(self, details: grpc.aio.ClientCallDetails) -> grpc.aio.ClientCallDetails:
        metadata = grpc.aio.Metadata(*self._metadata, *(details.metadata or ()))
        return grpc.aio.ClientCallDetails(
            details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
        )


# One class for each: gRPC takes an interceptor for one kind of call only.
class _UnaryToken(_Token, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # generic in the stubs only
    async def intercept_unary_unary(self, continuation: Any, client_call_details: Any, request: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request)


class _StreamToken(_Token, grpc.aio.StreamStreamClientInterceptor):  # type: ignore[type-arg]
    async def intercept_stream_stream(self, continuation: Any, client_call_details: Any, request_iterator: Any) -> Any:
        return await continuation(self._with_token(client_call_details), request_iterator)


def channel_of(target: str, security: Security) -> grpc.aio.Channel:
    """Return a channel to a node."""
    credentials = security.credentials
    interceptors: Any = None
    if security.token:
        interceptors = [_UnaryToken(security.metadata), _StreamToken(security.metadata)]
    if credentials is None:
        return grpc.aio.insecure_channel(target, options=CHANNEL_OPTIONS, interceptors=interceptors)
    return grpc.aio.secure_channel(target, credentials, options=CHANNEL_OPTIONS, interceptors=interceptors)


_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED)
_STATUS_ERRORS: dict[int, type[StatusError]] = {pb.Code.Value(error.code): error for error in StatusError.__subclasses__()}


async def call(method: grpc.aio.UnaryUnaryMultiCallable[Q, A], request: Q, timeout_s: float) -> A:
    """Return the answer to `request`. Where the node can't be reached yet, waits for it within the same time.

    Raises:
        NodeUnavailable, Overloaded, RequestInvalid, CallFailed: as they say.
    """
    try:
        return await method(request, timeout=timeout_s, wait_for_ready=True)
    except grpc.aio.AioRpcError as error:
        raise error_of_call(error) from error


_ERRORS: dict[grpc.StatusCode, type[PopError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: RequestInvalid,
    grpc.StatusCode.NOT_FOUND: GroupUnknown,
    grpc.StatusCode.ALREADY_EXISTS: GroupExists,
    grpc.StatusCode.FAILED_PRECONDITION: GroupBusy,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
}


def error_of_call(error: grpc.aio.AioRpcError | grpc.Call) -> PopError:
    """Return the exception for a call that ended with a gRPC status."""
    detail = error.details() or error.code().name
    if error.code() in _PASSING:
        return NodeUnavailable(f"the node gave no answer: {detail}")
    known = _ERRORS.get(error.code())
    return known(detail) if known is not None else CallFailed(f"{error.code().name}: {detail}")


def error_of_status(status: pb.Status) -> StatusError | None:
    """Return the exception for the status of one message or handle; None where it is OK."""
    if status.code == pb.OK:
        return None
    known = _STATUS_ERRORS.get(status.code)
    return known(status.detail) if known else StatusError(f"code {status.code}, which a newer node must know: {status.detail}")


class Backoff:
    """Waiting times that double from `BACKOFF_MS_MIN` to `BACKOFF_MS_MAX`, each shortened at random by up to a half.

    The chance part keeps a thousand clients from coming back in step.
    """

    __slots__ = ("_next_ms",)

    def __init__(self) -> None:
        self._next_ms = BACKOFF_MS_MIN

    def next_s(self) -> float:
        """Return how many seconds to wait now."""
        wait_ms = self._next_ms
        self._next_ms = min(2 * wait_ms, BACKOFF_MS_MAX)
        return random.uniform(0.5, 1.0) * wait_ms / 1000

    def reset(self) -> None:
        """Begin anew: it worked."""
        self._next_ms = BACKOFF_MS_MIN


class Batched(Generic[Q, A]):
    """Sends wishes as few, large calls, one at a time. What comes while a call is under way goes out with the next one.

    There is no timer: a single wish leaves at the end of the loop's next turn, and a thousand that come in one turn leave
    together, unless another call takes them along before (`take`). Order is kept.

    Parameters:
        send: does one call; returns for each wish the answer, or the error of that one. Raises PopError for all of them.
        count_max: wishes of one call.
        bytes_max: bytes of one call, as told by `size_of`; one wish that is larger goes alone.
        size_of: tells the bytes of a wish.
    """

    def __init__(
        self,
        send: Callable[[list[Q]], Awaitable[list[A | PopError]]],
        *,
        count_max: int,
        bytes_max: int = 0,
        size_of: Callable[[Q], int] = lambda _: 0,
    ) -> None:
        self._send = send
        self._count_max = count_max
        self._bytes_max = bytes_max
        self._size_of = size_of
        self._waiting: deque[tuple[Q, asyncio.Future[A]]] = deque()
        self._sender: asyncio.Task[None] | None = None
        self._closed = False

    def submit(self, wish: Q) -> asyncio.Future[A]:
        """Take a wish; return the future of its answer.

        Raises:
            ClientClosed: `close` was called.
        """
        if self._closed:
            raise ClientClosed("the client was closed: make a new one")
        future: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._waiting.append((wish, future))
        self._begin()
        return future

    def _begin(self) -> None:
        if self._sender is None and self._waiting:
            self._sender = asyncio.get_running_loop().create_task(self._run())

    async def submit_all(self, wishes: Iterable[Q]) -> list[A | PopError]:
        """Take many wishes; return the answer or the error of each, in order."""
        futures = [self.submit(wish) for wish in wishes]
        if futures:
            await asyncio.wait(futures)
        answers: list[A | PopError] = []
        for future in futures:
            error = future.exception()
            answers.append(error if isinstance(error, PopError) else future.result())
        return answers

    def take(self) -> list[tuple[Q, asyncio.Future[A]]]:
        """Return what waits, as much as one call has, to go with another one. To be given to `answer` or `put_back`."""
        return self._next_batch() if self._waiting else []

    def put_back(self, batch: list[tuple[Q, asyncio.Future[A]]]) -> None:
        """Let wishes go out first that were taken, and got no answer."""
        if self._closed:
            _answer(batch, NodeUnavailable("the client was closed before the node answered"))
            return
        self._waiting.extendleft(reversed(batch))
        self._begin()

    def answer(self, batch: list[tuple[Q, asyncio.Future[A]]], answers: Iterable[A | PopError]) -> None:
        """Answer wishes, each with its answer or its error."""
        for (_, future), answer in zip(batch, answers, strict=True):
            if future.done():
                continue  # whoever waited was cancelled
            if isinstance(answer, PopError):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    async def close(self, within_s: float) -> None:
        """As `flush`, and take nothing any more."""
        self._closed = True
        await self.flush(within_s)

    async def flush(self, within_s: float) -> None:
        """Return when all is answered. What isn't within `within_s` seconds gets NodeUnavailable."""
        sender = self._sender
        if sender is None:
            return
        _, late = await asyncio.wait((sender,), timeout=within_s)
        if late:
            sender.cancel()
            await asyncio.wait(late)

    async def _run(self) -> None:
        try:
            await asyncio.sleep(0)  # first come those who may take them along
            while self._waiting:
                await self._run_once(self._next_batch())
        finally:
            self._sender = None
            # Nothing waits any more, unless the client was closed or the loop ends.
            _answer(self._waiting, NodeUnavailable("the client was closed before the node answered"))
            self._waiting.clear()

    def _next_batch(self) -> list[tuple[Q, asyncio.Future[A]]]:
        batch = [self._waiting.popleft()]
        size = self._size_of(batch[0][0])
        while self._waiting and len(batch) < self._count_max:
            size += self._size_of(self._waiting[0][0])
            if size > self._bytes_max > 0:
                break
            batch.append(self._waiting.popleft())
        return batch

    async def _run_once(self, batch: list[tuple[Q, asyncio.Future[A]]]) -> None:
        try:
            answers = await self._send([wish for wish, _ in batch])
        except PopError as error:
            _answer(batch, error)
            return
        except BaseException:
            _answer(batch, NodeUnavailable("the client was closed before the node answered"))
            raise
        self.answer(batch, answers)


def _answer(wishes: deque[tuple[Q, asyncio.Future[A]]] | list[tuple[Q, asyncio.Future[A]]], error: PopError) -> None:
    for _, future in wishes:
        if not future.done():
            future.set_exception(error)
