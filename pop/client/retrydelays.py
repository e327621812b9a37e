"""Delays between the tries of a client."""

from __future__ import annotations

import random

RETRY_MS_MIN = 50
RETRY_MS_MAX = 5_000


class RetryDelays:
    """Delays that double from `RETRY_MS_MIN` to `RETRY_MS_MAX`, each shortened at random by up to a half.

    The random part keeps a thousand clients from retrying at the same moment.
    """

    __slots__ = ("_next_ms",)

    def __init__(self) -> None:
        self._next_ms = RETRY_MS_MIN

    def next_s(self) -> float:
        """Return the number of seconds to wait before the next try."""
        wait_ms = self._next_ms
        self._next_ms = min(2 * wait_ms, RETRY_MS_MAX)
        return random.uniform(0.5, 1.0) * wait_ms / 1000

    def reset(self) -> None:
        """Start again with the shortest delay, because a try succeeded."""
        self._next_ms = RETRY_MS_MIN
