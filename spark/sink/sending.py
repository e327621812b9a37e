"""The calls of a task: one at a time, in the order of its rows, and again where the node could not answer."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, cast

import grpc

from penstock.pop.client.channel import sync_channel
from penstock.pop.client.retrydelays import RetryDelays
from penstock.pop.client.statuses import error_of_call, error_of_status
from penstock.pop.client.unreached import why_unanswered_sync
from penstock.pop.errors import DeduplicationIdReused, DeduplicationWindowPassed, NodeUnavailable, Overloaded, PopError
from penstock.pop.proto import pop_pb2 as pb
from penstock.spark.errors import PublishFailed
from penstock.spark.sink.options import SinkOptions
from penstock.spark.sink.requests import RowsRequest
from penstock.store.durations import format_duration

logger = logging.getLogger("penstock.spark")

SEND: Final = f"/{pb.DESCRIPTOR.services_by_name['PopService'].full_name}/Send"

_REMEDIES: Final[tuple[tuple[type[PopError], str], ...]] = (
    (
        DeduplicationWindowPassed,
        "If this is the first try of the batch, it has more rows than the node remembers ids: raise "
        "pop.deduplication_ids_max, a fifth of which a topic may have, and publish it again; rows that are stored are not "
        "stored twice. If the batch was tried before, that was too long ago: look in the log which of its rows are stored, and "
        "publish the others with new ids.",
    ),
    (
        DeduplicationIdReused,
        "Give each row an id of its own. A batch that is executed again must have the same rows: their bodies must not depend "
        "on the time of day, on random numbers, or on the order of rows.",
    ),
)
"""What to do about the refusal of a row, where the node can't know it."""


@dataclass(slots=True)
class SentRows:
    """Numbers of rows that the node has answered.

    Parameters:
        rows: rows that are durable.
        repeated: how many of them the node had before.
    """

    rows: int = 0
    repeated: int = 0


class RowSender:
    """Sends requests to a node. While the node works on one, the caller's iterator makes the next one, and no more.

    So the node slows a task down, and what is not answered has at most the bytes of two requests. A request is sent again, with
    growing delays, while the node can't be reached or has reached a limit, for up to `SinkOptions.retry_ms`.

    Parameters:
        options: the options of the write.

    Raises:
        WriteOptionInvalid: a file of the options can't be read.
    """

    def __init__(self, options: SinkOptions) -> None:
        self._options = options
        security = options.security()
        self._metadata = security.metadata
        self._channel = sync_channel(options.target, security)
        self._method: grpc.UnaryUnaryMultiCallable[bytes, pb.SendResponse] = self._channel.unary_unary(
            SEND, request_serializer=None, response_deserializer=pb.SendResponse.FromString
        )

    def __enter__(self) -> RowSender:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._channel.close()

    def send(self, requests: Iterable[RowsRequest]) -> SentRows:
        """Send all requests; return when all of their rows are durable.

        Raises:
            PublishFailed: the node refused a row or a call, or did not answer for `SinkOptions.retry_ms`.
        """
        sent = SentRows()
        pending: tuple[RowsRequest, Any] | None = None
        for request in requests:
            if pending is not None:
                self._finish(*pending, sent)
            pending = request, self._begin(request)
        if pending is not None:
            self._finish(*pending, sent)
        return sent

    def _begin(self, request: RowsRequest) -> Any:
        """Begin a call; return its future. The call may reach the node at any time before its timeout, and ages say so."""
        encoded = request.encoded(_now_ms() + self._options.timeout_ms)
        return self._method.future(
            encoded, timeout=self._options.timeout_ms / 1000, metadata=self._metadata, wait_for_ready=True
        )

    def _finish(self, request: RowsRequest, call: Any, sent: SentRows) -> None:
        """Return when the rows of a request are durable."""
        delays = RetryDelays()
        first_s = time.monotonic()
        while True:
            try:
                response = call.result()
                break
            except grpc.RpcError as error:
                failure = self._failure(cast(grpc.Call, error))
                if not isinstance(failure, NodeUnavailable | Overloaded):
                    raise PublishFailed(f"The node refused rows of a task, such as {request.row(0)}: {failure}.") from error
                if time.monotonic() - first_s >= self._options.retry_ms / 1000:
                    raise PublishFailed(
                        f"The task gives up after {format_duration(self._options.retry_ms)} (retry) at {request.row(0)}: "
                        f"{failure}. Publish the batch again: rows that are stored are not stored twice."
                    ) from error
            wait_s = delays.next_s()
            logger.warning("%s; the task sends %d rows again in %.2f s", failure, len(request.heads), wait_s)
            time.sleep(wait_s)
            call = self._begin(request)
        _check_stored(request, response)
        sent.rows += len(request.heads)
        sent.repeated += sum(result.repeated for result in response.results)

    def _failure(self, call: grpc.Call) -> PopError:
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            return NodeUnavailable(why_unanswered_sync(self._channel, self._options.target))
        return error_of_call(call)


def _check_stored(request: RowsRequest, response: pb.SendResponse) -> None:
    """Check that the node has stored each row of a request. Raises PublishFailed."""
    if len(response.results) != len(request.heads):
        raise PublishFailed(
            f"The node answered {len(request.heads)} rows with {len(response.results)} results: update Penstock."
        )
    for index, result in enumerate(response.results):
        if result.status.code:
            error = error_of_status(result.status)
            remedy = next((f" {text}" for kind, text in _REMEDIES if isinstance(error, kind)), "")
            raise PublishFailed(f"The node refused {request.row(index)} with {type(error).__name__}: {error}.{remedy}")


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
