"""Statuses: how a client is told that a call, or one message or handle of it, failed."""

from __future__ import annotations

import grpc

from penstock.pop.access.caller import AccessDenied
from penstock.pop.access.refusals import CallRefused
from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.transactions import EndOutcome
from penstock.pop.errors import GroupBusy, GroupExists, GroupUnknown, Overloaded, PopError, ScheduleExists, ScheduleUnknown
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.errors import DiskFull, LimitExceeded
from penstock.timer.delayed import Recalled

OK = pb.Status(code=pb.OK)


class SendCutShort(PopError):
    """Raised when the disk becomes full within a call: some of its messages are stored, and the caller can't know which."""


ACK_STATUS = {outcome: pb.Status(code=pb.Code.Value(outcome.name), detail=outcome.value) for outcome in AckOutcome}
ACK_STATUS[AckOutcome.OK] = OK

RECALL_STATUS = {
    Recalled.CANCELLED: OK,
    Recalled.ALREADY_FIRED: pb.Status(code=pb.ALREADY_FIRED, detail="the message was delivered before"),
    Recalled.ALREADY_CANCELLED: pb.Status(code=pb.ALREADY_RECALLED, detail="the message was recalled before"),
    Recalled.UNKNOWN: pb.Status(code=pb.UNKNOWN_MESSAGE, detail="the log holds no such delayed message"),
}

NO_RECALL_HANDLE = pb.Status(code=pb.INVALID_HANDLE, detail="this is not a recall handle that this node gave")

END_STATUS = {outcome: pb.Status(code=pb.Code.Value(outcome.name), detail=outcome.value) for outcome in EndOutcome}
END_STATUS[EndOutcome.OK] = OK

_GRPC_STATUS: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (SendCutShort, grpc.StatusCode.ABORTED),
    (Overloaded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (LimitExceeded, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (DiskFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (GroupUnknown, grpc.StatusCode.NOT_FOUND),
    (GroupExists, grpc.StatusCode.ALREADY_EXISTS),
    (ScheduleUnknown, grpc.StatusCode.NOT_FOUND),
    (ScheduleExists, grpc.StatusCode.ALREADY_EXISTS),
    (GroupBusy, grpc.StatusCode.FAILED_PRECONDITION),
)


def refusal(error: Exception) -> CallRefused:
    """Return what ends a call with the gRPC status of an error; INVALID_ARGUMENT for errors that have none of their own."""
    if isinstance(error, AccessDenied):
        return CallRefused(error.status, str(error))
    codes = (code for kind, code in _GRPC_STATUS if isinstance(error, kind))
    return CallRefused(next(codes, grpc.StatusCode.INVALID_ARGUMENT), str(error))
