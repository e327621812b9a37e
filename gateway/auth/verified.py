"""The credentials that were verified lately: a client that comes back needs no new password hash.

The node keeps a keyed hash of user name and password in memory. The key is random and of this process alone. So the memory
holds no password, but whoever reads all of it can try passwords faster than against a password file.
"""

from __future__ import annotations

import hmac
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from math import inf
from secrets import token_bytes
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from penstock.access.identity import ProvenIdentity

KEY_BYTES: Final = 32
LENGTH_BYTES: Final = 8


class Verified(NamedTuple):
    """What is known of a client with verified credentials."""

    identity: ProvenIdentity | None = None
    """Who it is, if the node's password file has proved it."""
    username: str | None = None
    is_anonymous: bool = False
    attributes: Mapping[str, Any] = MappingProxyType({})
    """What plugins may have changed."""


class Credential:
    """Credentials that were verified.

    Parameters:
        name: by which they are found.
        verified: what is known of the client.
    """

    __slots__ = ("clients", "name", "until_s", "verified")

    def __init__(self, name: bytes, verified: Verified) -> None:
        self.name = name
        self.verified = verified
        self.clients = 0
        """Connected clients that have used it."""
        self.until_s = 0.0
        """Until when it is remembered, in monotonic seconds."""


class VerifiedCredentials:
    """The credentials that the node remembers. Only the node's loop changes them; other threads may look.

    Parameters:
        keep_s: seconds for which credentials are remembered.
        count_max: credentials that are remembered.
        while_connected: whether the seconds count from when the last client with these credentials has left. Otherwise they
            count from the verification.
    """

    def __init__(self, keep_s: float, count_max: int, *, while_connected: bool) -> None:
        self._keep_s = keep_s
        self._count_max = count_max
        self._while_connected = while_connected
        self._now_s: Callable[[], float]
        self._key = token_bytes(KEY_BYTES)
        self._credentials: dict[bytes, Credential] = {}
        self._ending: OrderedDict[bytes, Credential] = OrderedDict()
        """Those that no connected client keeps; the one that ends first comes first."""
        self.hits = 0
        """Logins that needed no verification. The caller counts them."""

    def __len__(self) -> int:
        """Return the number of credentials that are remembered."""
        return len(self._credentials)

    def start(self, now_s: Callable[[], float]) -> None:
        """Use this clock: it returns the monotonic time in seconds."""
        self._now_s = now_s

    def name_of(self, parts: Iterable[bytes]) -> bytes:
        """Return the name of credentials: a keyed hash of everything that the verification depends on."""
        text = b"".join(len(part).to_bytes(LENGTH_BYTES) + part for part in parts)
        return hmac.digest(self._key, text, "sha256")

    def find(self, name: bytes) -> Credential | None:
        """Return the credentials with a name, or None if they are not remembered. Any thread may call this."""
        found = self._credentials.get(name)
        return found if found is not None and found.until_s > self._now_s() else None

    def add(self, name: bytes, verified: Verified) -> Credential:
        """Remember credentials that were just verified. Forget the oldest ones if there are too many."""
        self._remove(name)
        while len(self._credentials) >= self._count_max:
            self._remove(next(iter(self._ending or self._credentials)))
        credential = self._credentials[name] = Credential(name, verified)
        self._end_later(credential)
        return credential

    def connected(self, credential: Credential) -> None:
        """Note that a client with these credentials was accepted."""
        credential.clients += 1
        if self._while_connected:
            credential.until_s = inf
            self._ending.pop(credential.name, None)

    def left(self, credential: Credential) -> None:
        """Note that a client with these credentials has left."""
        credential.clients -= 1
        if self._while_connected and not credential.clients and self._credentials.get(credential.name) is credential:
            self._end_later(credential)

    def expire(self) -> None:
        """Forget what is remembered no longer."""
        now_s = self._now_s()
        while self._ending and (first := next(iter(self._ending.values()))).until_s <= now_s:
            self._remove(first.name)

    def forget(self) -> None:
        """Forget everything, also what is being verified now: its name is of the old key."""
        self._key = token_bytes(KEY_BYTES)
        self._credentials.clear()
        self._ending.clear()

    def _end_later(self, credential: Credential) -> None:
        credential.until_s = self._now_s() + self._keep_s
        self._ending[credential.name] = credential

    def _remove(self, name: bytes) -> None:
        self._credentials.pop(name, None)
        self._ending.pop(name, None)
