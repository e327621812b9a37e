"""The client ids that clients may have (`mqtt.access.client_id`), and those that the server assigns."""

from __future__ import annotations

from secrets import token_hex
from typing import Final

USER: Final = "%u"
CERTIFICATE: Final = "%n"
ANY: Final = "*"
RANDOM_BYTES: Final = 8
"""Random bytes in a client id that the node assigns."""


class ClientIdPattern:
    """The pattern that client ids must match.

    Parameters:
        pattern: see `AccessOptions.client_id`.
    """

    def __init__(self, pattern: str) -> None:
        self._parts = pattern.split(ANY)
        self.is_open = not pattern.strip(ANY)
        """Whether every client id matches."""
        self.needs_certificate = CERTIFICATE in pattern
        self._needs_user = USER in pattern

    def matches(self, client_id: str, user: str, certificate: str) -> bool:
        """Return whether a client may have a client id.

        Args:
            client_id: of the client.
            user: its user name, if something vouches for it.
            certificate: the common name in its certificate; empty if it has none.
        """
        parts = self._filled(user, certificate)
        if parts is None:
            return False
        first, *others = parts
        if not others:
            return client_id == first
        *middle, last = others
        if len(client_id) < len(first) + len(last) or not (client_id.startswith(first) and client_id.endswith(last)):
            return False
        at, end = len(first), len(client_id) - len(last)
        for part in middle:  # The first place where each part fits leaves most room for those that follow.
            found = client_id.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True

    def assign(self, user: str, certificate: str) -> str | None:
        """Return a new client id for a client that sent none [MQTT-3.1.3-6]; None if it can have none."""
        if self.is_open:
            return assign_client_id()
        parts = self._filled(user, certificate)
        return token_hex(RANDOM_BYTES).join(parts) if parts is not None else None

    def _filled(self, user: str, certificate: str) -> list[str] | None:
        """Return what stands between the places where anything may; None if a name is needed that the client doesn't have."""
        if (self._needs_user and not user) or (self.needs_certificate and not certificate):
            return None
        return [_fill(part, user, certificate) for part in self._parts]


def _fill(part: str, user: str, certificate: str) -> str:
    """Return a part of the pattern with the names in it. A name that contains `%n` is not filled in itself."""
    return user.join(piece.replace(CERTIFICATE, certificate) for piece in part.split(USER))


def assign_client_id() -> str:
    """Return a new client id for a client that sent none [MQTT-3.1.3-6]."""
    return f"auto-{token_hex(RANDOM_BYTES)}"
