"""A CONNECT that waits for the plugins, and what they have said so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.gateway.auth.login import Login
from penstock.gateway.protocol.connect import Connect

if TYPE_CHECKING:
    from penstock.gateway.auth.client_session import ClientSession


class Candidate:
    """How far a CONNECT has got on its way past the plugins.

    Parameters:
        wish: the CONNECT.
        session: the client as the plugins see it.
        is_authenticated: whether the client needs no authentication by plugins.
    """

    __slots__ = ("is_authenticated", "is_unanswered", "login", "session", "topics", "wish")

    def __init__(self, wish: Connect, session: ClientSession, *, is_authenticated: bool) -> None:
        self.wish = wish
        self.session = session
        self.is_authenticated: bool | None = True if is_authenticated else None
        """Whether the client is who it says; None as long as the plugins have not said it."""
        self.login: Login | None = None
        """The question whether it is, as long as the plugins have not answered it."""
        self.topics: dict[tuple[str, str], bool] = {}
        """By action and topic or filter: whether the client may do it."""
        self.is_unanswered = False
        """Whether the plugins have given no answer to a question."""
