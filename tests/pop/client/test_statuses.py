"""Statuses of the protocol as errors, and the delays between tries."""

from __future__ import annotations

import pytest

from penstock.pop.client.retrydelays import RETRY_MS_MAX, RETRY_MS_MIN, RetryDelays
from penstock.pop.client.statuses import error_of_status
from penstock.pop.errors import (
    StatusError,
)
from penstock.pop.proto import pop_pb2 as pb


@pytest.mark.parametrize("code", [code for code in pb.Code.values() if code != pb.OK])
def test_each_code_of_the_api_has_an_error_of_its_own(code: pb.Code.ValueType) -> None:
    error = error_of_status(pb.Status(code=code, detail="why"))
    assert error is not None
    assert (type(error) is not StatusError, error.code, str(error)) == (True, pb.Code.Name(code), "why")


def test_a_code_of_a_newer_node_is_a_status_error() -> None:
    error = error_of_status(pb.Status(code=99, detail="why"))  # type: ignore[arg-type]
    assert type(error) is StatusError
    assert "99" in str(error)
    assert error_of_status(pb.Status()) is None


def test_retry_delays_double_up_to_a_bound_and_differ_among_clients() -> None:
    first, second = RetryDelays(), RetryDelays()
    waits = [first.next_s() * 1000 for _ in range(12)]
    bounds = [min(RETRY_MS_MIN * 2**n, RETRY_MS_MAX) for n in range(12)]
    assert all(bound / 2 <= wait <= bound for wait, bound in zip(waits, bounds, strict=True))
    assert waits != [second.next_s() * 1000 for _ in range(12)]
    first.reset()
    assert first.next_s() * 1000 <= RETRY_MS_MIN
