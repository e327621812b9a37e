"""gRPC statuses, and statuses of single messages and handles, as the exceptions of `penstock.pop.errors`."""

from __future__ import annotations

import grpc
import grpc.aio

from penstock.pop.client.unreached import CHECK, explained
from penstock.pop.errors import (
    CallFailed,
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

_UNAVAILABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
)

UNREACHED = f"the node did not answer in time: {CHECK}"

_CALL_ERRORS: dict[grpc.StatusCode, type[PopError]] = {
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.INVALID_ARGUMENT: RequestInvalid,
    grpc.StatusCode.NOT_FOUND: GroupUnknown,
    grpc.StatusCode.ALREADY_EXISTS: GroupExists,
    grpc.StatusCode.FAILED_PRECONDITION: GroupBusy,
    grpc.StatusCode.UNAUTHENTICATED: NotAuthenticated,
    grpc.StatusCode.PERMISSION_DENIED: NotPermitted,
}

_STATUS_ERRORS: dict[int, type[StatusError]] = {pb.Code.Value(error.code): error for error in StatusError.__subclasses__()}


def error_of_call(error: grpc.aio.AioRpcError | grpc.Call) -> PopError:
    """Return the exception for a call that ended with a gRPC status other than OK."""
    detail = error.details() or error.code().name
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        return NodeUnavailable(UNREACHED)
    if error.code() in _UNAVAILABLE:
        return NodeUnavailable(f"the node did not answer: {explained(detail)}")
    known = _CALL_ERRORS.get(error.code())
    return known(detail) if known is not None else CallFailed(f"the call failed with {error.code().name}: {detail}")


def error_of_status(status: pb.Status) -> StatusError | None:
    """Return the exception for the status of one message or handle, or None if the status is OK."""
    if status.code == pb.OK:
        return None
    known = _STATUS_ERRORS.get(status.code)
    if known is None:
        return StatusError(f"the node answered with code {status.code}, which this client does not know: {status.detail}")
    return known(status.detail)
