"""Durations: the form in which an application gives them, and the one in which the protocol has them."""

from __future__ import annotations

from datetime import timedelta

Duration = float | timedelta
"""A duration: seconds, or a timedelta."""

SECONDS_MAX = 100 * 366 * 86_400
"""Longest duration in seconds: a hundred years. A longer one is a mistake, such as a point in time."""


def seconds(value: Duration, name: str) -> float:
    """Return a duration in seconds.

    Args:
        value: The duration.
        name: Names the parameter in the error.

    Raises:
        TypeError: It is neither a number nor a timedelta.
        ValueError: It is negative, infinite, not a number, or longer than a hundred years.
    """
    if isinstance(value, timedelta):
        found = value.total_seconds()
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found = value
    else:
        raise TypeError(f"{name} is {value!r:.80}: give a number of seconds, or a timedelta")
    if not 0 <= found <= SECONDS_MAX:
        if found < 0:
            raise ValueError(f"{name} is {_shown(found)}: use 0 or more")
        if found != found:
            raise ValueError(f"{name} is not a number: give a number of seconds, or a timedelta")
        raise ValueError(f"{name} is {_shown(found)}, which is more than a hundred years: give a duration in seconds")
    return float(found)


def positive_seconds(value: Duration, name: str) -> float:
    """Return a duration above 0 in seconds. Raises as `seconds`, and ValueError if the duration is 0."""
    found = seconds(value, name)
    if not found:
        raise ValueError(f"{name} is 0: use more than 0 seconds")
    return found


def milliseconds(value: Duration, name: str) -> int:
    """Return a duration as the nearest number of milliseconds, which is at least 1 unless the duration is 0.

    Raises as `seconds`.
    """
    found = seconds(value, name)
    return max(round(found * 1000), 1) if found else 0


def _shown(found: float) -> str:
    try:
        return f"{found:g} seconds"
    except OverflowError:  # No float can hold the integer.
        return "an integer without bounds"
