"""Status codes of `apache.rocketmq.v2`, and the code for each error.

The protocol keeps the gRPC status OK and states errors in field 1 of each response. So a response that only states an error has
the same bytes for each method. The numbers are here, not taken from the stubs, because access control answers without stubs.
"""

from __future__ import annotations

from enum import IntEnum

import grpc
import structlog

from penstock.pop.access.caller import AccessDenied
from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.sender import Refusal, SendRefused
from penstock.pop.core.transactions import EndOutcome
from penstock.pop.errors import (
    ExpressionInvalid,
    GroupBusy,
    GroupInvalid,
    GroupUnknown,
    Overloaded,
    PopError,
    RequestInvalid,
)
from penstock.pop.proto.encoding import text, varint
from penstock.store.errors import DiskFull, LimitExceeded, RecordTooLarge, TopicInvalid
from penstock.timer.delayed import Recalled

logger = structlog.get_logger("pop.rocketmq")


class Code(IntEnum):
    """The codes of the protocol that this node uses."""

    OK = 20000
    MULTIPLE_RESULTS = 30000
    BAD_REQUEST = 40000
    ILLEGAL_ACCESS_POINT = 40001
    ILLEGAL_TOPIC = 40002
    ILLEGAL_CONSUMER_GROUP = 40003
    ILLEGAL_MESSAGE_TAG = 40004
    ILLEGAL_MESSAGE_KEY = 40005
    ILLEGAL_MESSAGE_GROUP = 40006
    ILLEGAL_MESSAGE_PROPERTY_KEY = 40007
    INVALID_TRANSACTION_ID = 40008
    ILLEGAL_FILTER_EXPRESSION = 40010
    ILLEGAL_INVISIBLE_TIME = 40011
    ILLEGAL_DELIVERY_TIME = 40012
    INVALID_RECEIPT_HANDLE = 40013
    MESSAGE_PROPERTY_CONFLICT_WITH_TYPE = 40014
    UNRECOGNIZED_CLIENT_TYPE = 40015
    MESSAGE_CORRUPTED = 40016
    CLIENT_ID_REQUIRED = 40017
    ILLEGAL_POLLING_TIME = 40018
    ILLEGAL_OFFSET = 40019
    ILLEGAL_LITE_TOPIC = 40020
    UNAUTHORIZED = 40100
    FORBIDDEN = 40300
    NOT_FOUND = 40400
    MESSAGE_NOT_FOUND = 40401
    CONSUMER_GROUP_NOT_FOUND = 40403
    OFFSET_NOT_FOUND = 40404
    MESSAGE_BODY_TOO_LARGE = 41301
    PRECONDITION_FAILED = 42800
    TOO_MANY_REQUESTS = 42900
    LITE_SUBSCRIPTION_QUOTA_EXCEEDED = 42902
    MESSAGE_PROPERTIES_TOO_LARGE = 43101
    INTERNAL_SERVER_ERROR = 50001
    NOT_IMPLEMENTED = 50100
    UNSUPPORTED = 50500
    FAILED_TO_CONSUME_MESSAGE = 60000


class Refused(PopError):
    """Raised for a request that the node does not serve. It becomes the status of the response."""

    def __init__(self, code: Code, detail: str) -> None:
        self.code = code
        super().__init__(detail)


_REFUSAL_CODES = {
    Refusal.MESSAGE_TOO_LARGE: Code.MESSAGE_BODY_TOO_LARGE,
    Refusal.INVALID_PROPERTY: Code.MESSAGE_PROPERTIES_TOO_LARGE,
    Refusal.INVALID_DELIVERY_TIME: Code.ILLEGAL_DELIVERY_TIME,
    Refusal.TOO_MANY_TIMERS: Code.TOO_MANY_REQUESTS,
    Refusal.INVALID_TRANSACTION: Code.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
    Refusal.TOO_MANY_TRANSACTIONS: Code.TOO_MANY_REQUESTS,
    # RocketMQ's messages have no deduplication ids.
    Refusal.DEDUPLICATION_ID_REUSED: Code.BAD_REQUEST,
    Refusal.DEDUPLICATION_WINDOW_PASSED: Code.BAD_REQUEST,
}

_DENIED_CODES = {
    grpc.StatusCode.UNAUTHENTICATED: Code.UNAUTHORIZED,
    grpc.StatusCode.PERMISSION_DENIED: Code.FORBIDDEN,
    grpc.StatusCode.UNAVAILABLE: Code.TOO_MANY_REQUESTS,
}

# The first match counts: ExpressionInvalid is a RequestInvalid, and RecordTooLarge is a LimitExceeded.
_ERROR_CODES: tuple[tuple[type[Exception], Code], ...] = (
    (GroupInvalid, Code.ILLEGAL_CONSUMER_GROUP),
    (ExpressionInvalid, Code.ILLEGAL_FILTER_EXPRESSION),
    (RequestInvalid, Code.BAD_REQUEST),
    (TopicInvalid, Code.ILLEGAL_TOPIC),
    (GroupUnknown, Code.CONSUMER_GROUP_NOT_FOUND),
    (GroupBusy, Code.PRECONDITION_FAILED),
    (RecordTooLarge, Code.MESSAGE_BODY_TOO_LARGE),
    (LimitExceeded, Code.TOO_MANY_REQUESTS),
    (Overloaded, Code.TOO_MANY_REQUESTS),
    (DiskFull, Code.TOO_MANY_REQUESTS),
)

OUTCOME_CODES = {
    AckOutcome.OK: Code.OK,
    AckOutcome.INVALID_HANDLE: Code.INVALID_RECEIPT_HANDLE,
    AckOutcome.HANDLE_EXPIRED: Code.INVALID_RECEIPT_HANDLE,
    AckOutcome.ALREADY_ACKED: Code.INVALID_RECEIPT_HANDLE,
    AckOutcome.HANDLE_REPLACED: Code.INVALID_RECEIPT_HANDLE,
    AckOutcome.INVALID_INVISIBLE_TIME: Code.ILLEGAL_INVISIBLE_TIME,
}
"""Code for each outcome of a handle. The protocol has one code for all faults of a handle, and the detail tells which."""

# Clients do not treat MESSAGE_NOT_FOUND as an error. They would take a recall that came too late for a successful one.
RECALL_CODES = {
    Recalled.CANCELLED: (Code.OK, ""),
    Recalled.ALREADY_FIRED: (Code.PRECONDITION_FAILED, "the message was delivered before"),
    Recalled.ALREADY_CANCELLED: (Code.PRECONDITION_FAILED, "the message was recalled before"),
    Recalled.UNKNOWN: (Code.NOT_FOUND, "the log holds no such delayed message"),
}


def end_code(ended: EndOutcome, *, commit: bool) -> Code:
    """Return the code for the end of a transaction.

    The same end twice is OK, because a producer that got no answer repeats its call.
    """
    if ended is EndOutcome.UNKNOWN_TRANSACTION:
        return Code.INVALID_TRANSACTION_ID
    if ended is EndOutcome.OK or (ended is EndOutcome.ALREADY_COMMITTED) == commit:
        return Code.OK
    return Code.PRECONDITION_FAILED


def code_of(error: Exception) -> Code:
    """Return the code for an error. An unforeseen error is a defect of the node, and is logged."""
    if isinstance(error, Refused):
        return error.code
    if isinstance(error, AccessDenied):
        return _DENIED_CODES[error.status]
    if isinstance(error, SendRefused):
        return _REFUSAL_CODES[error.refusal]
    for kind, code in _ERROR_CODES:
        if isinstance(error, kind):
            return code
    logger.error("rocketmq.failed", exc_info=error)
    return Code.INTERNAL_SERVER_ERROR


def detail_of(error: Exception) -> str:
    """Return the detail that tells a client of an error. The detail of a defect of the node stays in its log."""
    known = isinstance(error, (Refused, AccessDenied, SendRefused, *(kind for kind, _ in _ERROR_CODES)))
    return str(error) if known else "the node has a defect: see its log"


def overall_code(codes: list[Code]) -> Code:
    """Return the code of a batch: the code of its parts if all have the same, else MULTIPLE_RESULTS."""
    return codes[0] if len(set(codes)) == 1 else Code.MULTIPLE_RESULTS


def refusal(code: Code, detail: str) -> bytes:
    """Return the bytes of a response that only states an error. They are the same for each method: field 1 is the status."""
    status = b"\x08" + varint(code) + text(b"\x12", detail.encode())
    return text(b"\x0a", status)
