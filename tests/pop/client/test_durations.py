"""Durations are seconds or timedeltas, and reach the node in whole milliseconds."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from penstock import Exponential, RetryLater, group_settings
from penstock.pop.client.durations import milliseconds


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, 0),
        (0.0, 0),
        (timedelta(), 0),
        (1, 1_000),
        (0.0015, 2),
        (0.0004, 1),
        (timedelta(microseconds=1), 1),
        (timedelta(days=365), 31_536_000_000),
    ],
)
def test_a_duration_is_rounded_to_the_nearest_millisecond_and_never_to_none(value: float | timedelta, expected: int) -> None:
    assert milliseconds(value, "delay") == expected


@pytest.mark.parametrize(
    ("value", "error", "says"),
    [
        (True, TypeError, "delay is True: give a number of seconds, or a timedelta"),
        ("5s", TypeError, "delay is '5s': give a number of seconds, or a timedelta"),
        (None, TypeError, "delay is None: give a number of seconds, or a timedelta"),
        (-0.5, ValueError, "delay is -0.5 seconds: use 0 or more"),
        (timedelta(seconds=-1), ValueError, "delay is -1 seconds: use 0 or more"),
        (float("nan"), ValueError, "delay is not a number: give a number of seconds, or a timedelta"),
        (float("inf"), ValueError, "delay is inf seconds, which is more than a hundred years"),
        (1_764_000_000_000, ValueError, r"delay is 1.764e\+12 seconds, which is more than a hundred years"),
        (10**400, ValueError, "delay is an integer without bounds, which is more than a hundred years"),
    ],
)
def test_what_is_no_duration_is_refused_with_the_name_of_its_parameter(value: Any, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        milliseconds(value, "delay")


def test_settings_and_errors_take_both_forms_and_have_seconds() -> None:
    hour = timedelta(hours=1)
    assert RetryLater(hour).delay == 3_600.0
    for growing in (Exponential(1, hour), Exponential(timedelta(seconds=1), 3_600)):
        assert group_settings(backoff=growing).encoded().backoff.exponential.max_ms == 3_600_000
    assert list(group_settings(backoff=(0.5, hour)).encoded().backoff.list_ms) == [500, 3_600_000]
    with pytest.raises(ValueError, match="a wait of backoff is -1 seconds"):
        group_settings(backoff=(-1,))
    with pytest.raises(ValueError, match="max is -1 seconds"):
        Exponential(1, -1)
