"""The status codes of errors and outcomes."""

from __future__ import annotations

import pytest

from penstock.pop.core.deliveries import AckOutcome
from penstock.pop.core.sender import Refusal, SendRefused
from penstock.pop.core.transactions import EndOutcome
from penstock.pop.errors import ExpressionInvalid, GroupBusy, GroupInvalid, GroupUnknown, Overloaded, RequestInvalid
from penstock.pop.rocketmq.status import (
    OUTCOME_CODES,
    RECALL_CODES,
    Code,
    Refused,
    code_of,
    detail_of,
    end_code,
    overall_code,
    refusal,
)
from penstock.pop.rocketmq.stubs import SERVICE, pb, service_pb
from penstock.store.errors import DiskFull, LimitExceeded, RecordTooLarge, TopicInvalid
from penstock.timer.delayed import Recalled


def test_the_codes_are_those_of_the_protocol() -> None:
    assert {code.name: code.value for code in Code}.items() <= dict(pb.Code.items()).items()


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Refused(Code.ILLEGAL_TOPIC, "x"), Code.ILLEGAL_TOPIC),
        (GroupInvalid("x"), Code.ILLEGAL_CONSUMER_GROUP),
        (ExpressionInvalid("x"), Code.ILLEGAL_FILTER_EXPRESSION),
        (RequestInvalid("x"), Code.BAD_REQUEST),
        (TopicInvalid("x"), Code.ILLEGAL_TOPIC),
        (GroupUnknown("x"), Code.CONSUMER_GROUP_NOT_FOUND),
        (GroupBusy("x"), Code.PRECONDITION_FAILED),
        (RecordTooLarge("x"), Code.MESSAGE_BODY_TOO_LARGE),
        (LimitExceeded("x"), Code.TOO_MANY_REQUESTS),
        (Overloaded("x"), Code.TOO_MANY_REQUESTS),
        (DiskFull("x"), Code.TOO_MANY_REQUESTS),
        (SendRefused(Refusal.INVALID_DELIVERY_TIME, "x"), Code.ILLEGAL_DELIVERY_TIME),
    ],
)
def test_each_error_has_a_code_and_a_detail(error: Exception, code: Code) -> None:
    assert (code_of(error), detail_of(error)) == (code, "x")


def test_a_client_gets_no_details_of_a_defect() -> None:
    error = KeyError("secret")
    assert code_of(error) is Code.INTERNAL_SERVER_ERROR
    assert "secret" not in detail_of(error)


def test_every_outcome_has_a_code() -> None:
    assert set(OUTCOME_CODES) == set(AckOutcome)
    assert set(RECALL_CODES) == set(Recalled)
    # Clients do not treat this code as an error.
    assert Code.MESSAGE_NOT_FOUND not in [code for code, _ in RECALL_CODES.values()]


@pytest.mark.parametrize(
    ("ended", "commit", "code"),
    [
        (EndOutcome.OK, True, Code.OK),
        (EndOutcome.ALREADY_COMMITTED, True, Code.OK),
        (EndOutcome.ALREADY_COMMITTED, False, Code.PRECONDITION_FAILED),
        (EndOutcome.ALREADY_ROLLED_BACK, False, Code.OK),
        (EndOutcome.ALREADY_ROLLED_BACK, True, Code.PRECONDITION_FAILED),
        (EndOutcome.UNKNOWN_TRANSACTION, True, Code.INVALID_TRANSACTION_ID),
    ],
)
def test_ending_a_transaction_twice_is_right_unless_the_ends_differ(ended: EndOutcome, commit: bool, code: Code) -> None:
    assert end_code(ended, commit=commit) is code


def test_a_batch_has_the_code_of_its_parts_if_they_agree() -> None:
    assert overall_code([Code.OK, Code.OK]) is Code.OK
    assert overall_code([Code.ILLEGAL_TOPIC]) is Code.ILLEGAL_TOPIC
    assert overall_code([Code.OK, Code.ILLEGAL_TOPIC]) is Code.MULTIPLE_RESULTS


@pytest.mark.parametrize("method", [method.name for method in SERVICE.methods])
def test_a_refusal_is_a_valid_response_of_every_method(method: str) -> None:
    response = getattr(service_pb, SERVICE.methods_by_name[method].output_type.name)
    status = response.FromString(refusal(Code.FORBIDDEN, "no entry ✋")).status
    assert (status.code, status.message) == (Code.FORBIDDEN, "no entry ✋")
