"""Who somebody is, as a password, a token or a certificate proves it."""

from __future__ import annotations

from dataclasses import dataclass


class TokenInvalid(Exception):
    """Raised when a token proves nothing. The message says why, for the log; the client is not told."""


@dataclass(frozen=True, slots=True)
class ProvenIdentity:
    """Who somebody is.

    Parameters:
        user: the user name.
        roles: the roles that come with it.
        expires_ms: until when it holds, in ms since 1970; None without end.
    """

    user: str
    roles: frozenset[str] = frozenset()
    expires_ms: int | None = None


def is_token(text: str) -> bool:
    """Return whether a text has the form of a signed token: three parts, of which the first is a JSON object in base64."""
    return text.startswith("eyJ") and text.count(".") == 2
