"""The back-off of a group, as an argument and a result of both clients."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.pop.client.durations import Duration, milliseconds


@dataclass(frozen=True, slots=True)
class Exponential:
    """A back-off that grows from attempt to attempt.

    Parameters:
        min: Wait after the first failed attempt, in seconds or as a timedelta.
        max: Longest wait, in the same form.
        factor: Each wait is the one before it times this, 1 to 100.

    Raises:
        TypeError, ValueError: A wait is no duration.
    """

    min: Duration
    max: Duration
    factor: float = 2.0

    def __post_init__(self) -> None:
        milliseconds(self.min, "min")
        milliseconds(self.max, "max")


Backoff = tuple[Duration, ...] | Exponential
"""Durations from a failed attempt to the next: a list by attempt, or a rule. The last wait of a list holds for all later
attempts; with an empty list the message is visible again at once."""
