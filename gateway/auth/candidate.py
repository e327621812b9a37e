"""A CONNECT that is being authenticated, and what is known so far."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.access.identity import ProvenIdentity
from penstock.gateway.auth.login import Login
from penstock.gateway.auth.verified import Credential
from penstock.gateway.protocol.connect import Connect

if TYPE_CHECKING:
    from penstock.gateway.auth.client_session import ClientSession


class Candidate:
    """How far a CONNECT has got on its way past passwords, tokens and plugins.

    Parameters:
        connect: the CONNECT.
        session: the client as the plugins see it; None if there are none.
    """

    __slots__ = ("connect", "credential", "identity", "is_authenticated", "is_unanswered", "login", "session", "topics")

    def __init__(self, connect: Connect, session: ClientSession | None) -> None:
        self.connect = connect
        self.session = session
        self.is_authenticated: bool | None = None
        """Whether the client is who it says; None as long as nobody has said it."""
        self.login: Login | None = None
        """The question whether it is, as long as it is not answered."""
        self.identity: ProvenIdentity | None = None
        """Who the client is, if a password file or a token has proved it."""
        self.credential: Credential | None = None
        """The credentials of the client, if they were verified and are remembered."""
        self.topics: dict[tuple[str, str], bool] = {}
        """By action and topic or filter: whether the client may do it."""
        self.is_unanswered = False
        """Whether the plugins have given no answer to a question."""
