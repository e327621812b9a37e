"""The back-off of a group: how long a message whose attempt failed waits for its next attempt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExponentialBackoff:
    """A back-off that grows from attempt to attempt.

    Parameters:
        min_ms: wait after the first failed attempt.
        max_ms: longest wait.
        factor: each wait is the one before it times this, 1 to 100.
    """

    min_ms: int
    max_ms: int
    factor: float = 2.0

    def wait_ms(self, attempt: int) -> int:
        """Return how long a message waits after its attempt `attempt`, counted from 1, has failed."""
        try:
            grown = self.min_ms * self.factor ** (attempt - 1)
        except OverflowError:
            return self.max_ms
        return int(min(grown, self.max_ms))


SCRAMBLER = 0x9E37_79B9_7F4A_7C15
"""An odd number of 64 bits whose multiples look random (Knuth, The Art of Computer Programming, 6.4)."""


def jittered_ms(wait_ms: int, jitter: float, seed: int) -> int:
    """Return a wait that is shorter by up to the part `jitter` (0 to 1) of it. The same seed always has the same wait."""
    return wait_ms - int(wait_ms * jitter * ((seed * SCRAMBLER >> 32 & 0xFFFF_FFFF) / 2**32))


Backoff = tuple[int, ...] | ExponentialBackoff
"""Milliseconds from a failed attempt to the next: a list by attempt, or a rule. The last wait of a list holds for all later
attempts; with an empty list the message is visible again at once."""


def backoff_ms(backoff: Backoff, attempt: int) -> int:
    """Return how long a message waits after its attempt `attempt`, counted from 1, has failed."""
    if isinstance(backoff, ExponentialBackoff):
        return backoff.wait_ms(attempt)
    return backoff[min(attempt, len(backoff)) - 1] if backoff else 0
