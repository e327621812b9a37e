"""Who somebody is, as a password, a token or a certificate proves it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final, TypeAlias

NAME_BYTES: Final = 12
"""Bytes of the name that stands for a hash or a key."""

BY_PASSWORD: Final = "password:"
BY_KEY: Final = "key:"
"""What the proof of an identity begins with."""


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
        key_name: names the key that signed the token: see `name_of`; empty if a password or a certificate proved it.
    """

    user: str
    roles: frozenset[str] = frozenset()
    expires_ms: int | None = None
    password_hash: str = ""
    key_name: str = ""

    @property
    def proof(self) -> str:
        """What proves it, for `AccessControl.still_proves`; empty for a certificate."""
        if self.password_hash:
            return proof_by_password(self.password_hash)
        return proof_by_key(self.key_name) if self.key_name else ""


def name_of(secret: bytes) -> str:
    """Return a name for a password hash or a key. It does not tell what it names, so it may be stored."""
    return blake2b(secret, digest_size=NAME_BYTES).hexdigest()


def proof_by_password(password_hash: str) -> str:
    """Return the `ProvenIdentity.proof` of a user whose password has this hash."""
    return f"{BY_PASSWORD}{name_of(password_hash.encode())}"


def proof_by_key(key_name: str) -> str:
    """Return the `ProvenIdentity.proof` of a user whose token was signed with the key of this name."""
    return f"{BY_KEY}{key_name}"


def is_token(text: str) -> bool:
    """Return whether a text has the form of a signed token: three parts, of which the first is a JSON object in base64."""
    return text.startswith("eyJ") and text.count(".") == 2


Prove: TypeAlias = Callable[[str | None, str | None, bool], ProvenIdentity | bool | None]
"""See `AccessControl.prove`."""
