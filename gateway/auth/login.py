"""A login: the question whether a client is who it says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from penstock.gateway.auth.client_session import ClientSession

Answer: TypeAlias = bool | str | None
"""Yes, no, the error of a plugin as text, or None if a plugin can't tell."""


class Login:
    """A login, which is answered at most once.

    Parameters:
        session: the client as the plugins see it.
        source: where the client comes from: see `transport.sources`.
        answered: gets the answer, and why there is none, if there is none: "timeout" or "overload".
    """

    __slots__ = ("_answered", "deadline_s", "is_done", "session", "source", "started_s")

    def __init__(self, session: ClientSession, source: str, answered: Callable[[Answer, str], None]) -> None:
        self.session = session
        self.source = source
        self._answered = answered
        self.deadline_s = 0.0
        """Monotonic seconds by which the plugins must have been asked."""
        self.started_s = 0.0
        """When the plugins were asked, in monotonic seconds; 0 while it waits."""
        self.is_done = False
        """Whether it was answered, or nobody waits for the answer any more."""

    def answer(self, answer: Answer, outcome: str = "") -> None:
        """Give the answer, unless nobody waits for it any more."""
        if not self.is_done:
            self.is_done = True
            self._answered(answer, outcome)
