"""Who somebody is, as a password, a token or a certificate proves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


class TokenInvalid(Exception):
    """Raised when a token proves nothing. The message says why, for the log; the client is not told."""


class KeysUnavailable(Exception):
    """Raised when nobody can tell whether a token proves something, because its authority has not been reached yet."""


@dataclass(frozen=True, slots=True)
class ProvenIdentity:
    """Who somebody is.

    Parameters:
        user: the user name.
        roles: the roles that come with it.
        expires_ms: until when it holds, in ms since 1970; None without end.
        password_hash: the hash of the password that was right; empty if a token or a certificate proved it.
    """

    user: str
    roles: frozenset[str] = frozenset()
    expires_ms: int | None = None
    password_hash: str = ""


def is_token(text: str) -> bool:
    """Return whether a text has the form of a signed token: three parts, of which the first is a JSON object in base64."""
    return text.startswith("eyJ") and text.count(".") == 2


Prove: TypeAlias = Callable[[str | None, str | None, bool], ProvenIdentity | bool | None]
"""See `AccessControl.prove`."""
