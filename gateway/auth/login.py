"""A login: the question whether a client is who it says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from penstock.access.identity import ProvenIdentity
from penstock.gateway.protocol.connect import Connect

if TYPE_CHECKING:
    from penstock.gateway.auth.client_session import ClientSession

Answer: TypeAlias = bool | str | None
"""Yes, no, the error of a plugin as text, or None if nobody can tell."""


class Login:
    """A login, which is answered at most once.

    Parameters:
        connect: the CONNECT.
        session: the client as plugins see it; None if there are none.
        source: where the client comes from: see `transport.sources`.
        credential: names the client's credentials among those that were verified before; None if these are not remembered.
        answered: gets the answer, and why there is none, if there is none: "timeout" or "overload".
    """

    __slots__ = ("_answered", "connect", "credential", "deadline_s", "identity", "is_done", "session", "source", "started_s")

    def __init__(
        self,
        connect: Connect,
        session: ClientSession | None,
        source: str,
        credential: bytes | None,
        answered: Callable[[Answer, str], None],
    ) -> None:
        self.connect = connect
        self.session = session
        self.source = source
        self.credential = credential
        self._answered = answered
        self.deadline_s = 0.0
        """Monotonic seconds by which the question must have been asked."""
        self.started_s = 0.0
        """When it was asked, in monotonic seconds; 0 while it waits."""
        self.identity: ProvenIdentity | None = None
        """Who the client is, if the node itself has proved it."""
        self.is_done = False
        """Whether it was answered, or nobody waits for the answer any more."""

    def answer(self, answer: Answer, outcome: str = "") -> None:
        """Give the answer, unless nobody waits for it any more."""
        if not self.is_done:
            answered = self._answered
            self.abandon()
            answered(answer, outcome)

    def abandon(self) -> None:
        """Want no answer any more. What would have got it is forgotten, because it may hold a connection that has gone."""
        self.is_done = True
        self._answered = _ignore


def _ignore(answer: Answer, outcome: str) -> None:
    """Nobody waits for the answer any more."""


def together(answers: Sequence[Answer]) -> Answer:
    """Return the answer of several that are asked: yes if all say yes, no if one says no, otherwise why there is none."""
    if False in answers:
        return False
    return next((answer for answer in answers if answer is not True), True)
