"""The signal that a packet has to wait for an answer of the plugins, and when to ask again if there is none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

RETRY_S_MIN: Final = 0.1
RETRY_S_MAX: Final = 5.0
"""Bounds of the time after which the plugins are asked again, in seconds."""


class AuthorizationPending(Exception):
    """Raised when a packet can't be handled before the plugins have answered. It is no error.

    The connection stops reading, keeps what it has read, calls `ask`, and continues with the same packet when the answer has
    come.

    Parameters:
        ask: asks the plugins. It takes a function that it calls with whether they have answered.
    """

    def __init__(self, ask: Callable[[Callable[[bool], None]], None]) -> None:
        self.ask = ask
        super().__init__("The plugins have not answered yet.")


def retry_s(waited_s: float) -> float:
    """Return the seconds after which to ask the plugins again, if they have given no answer for `waited_s` seconds.

    That is as long as it has been already, so the intervals double, between `RETRY_S_MIN` and `RETRY_S_MAX`.
    """
    return min(max(waited_s, RETRY_S_MIN), RETRY_S_MAX)
