"""The signal that a packet has to wait for an answer of the plugins."""

from __future__ import annotations

from collections.abc import Callable


class AuthorizationPending(Exception):
    """Raised when a packet can't be handled before the plugins have answered. It is no error.

    The connection stops reading, keeps what it has read, calls `ask`, and continues with the same packet when the answer has
    come.

    Parameters:
        ask: asks the plugins. It takes a function that it calls when the answer has come.
    """

    def __init__(self, ask: Callable[[Callable[[], None]], None]) -> None:
        self.ask = ask
        super().__init__("The plugins have not answered yet.")
