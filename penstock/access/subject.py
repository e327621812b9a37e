"""Who acts, as far as rules can tell."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_PATTERN: Final = re.compile(r"%[uc]")


def is_pattern(level: str) -> bool:
    """Return whether a level of a rule's topic stands for a name of the subject: it has `%u` or `%c`."""
    return _PATTERN.search(level) is not None


@dataclass(frozen=True, slots=True)
class Subject:
    """A client, user or service that wants to do something.

    Parameters:
        user: the user name that a password, a token or a certificate vouches for; empty for a client without one.
        roles: the roles that a token or a certificate states. The access file may give further ones.
        client_id: the client id of MQTT; empty over gRPC.
        address: the IP address; empty if it is not known, as with a Unix socket.
    """

    user: str = ""
    roles: frozenset[str] = frozenset()
    client_id: str = ""
    address: str = ""

    def text_of(self, level: str) -> str | None:
        """Return what a level with `%u` or `%c` stands for; None if the name can't be a part of one level.

        A name that is empty or has `/`, `+` or `#` in it would change the meaning of the rule, so no such rule fits its bearer.
        """
        unusable = False

        def name(found: re.Match[str]) -> str:
            nonlocal unusable
            text = self.user if found[0] == "%u" else self.client_id
            unusable = unusable or not text or any(character in text for character in "/+#")
            return text

        text = _PATTERN.sub(name, level)
        return None if unusable else text


class Texts(dict[str, str | None]):
    """What levels with `%u` or `%c` stand for, for one subject: found once for each level.

    Parameters:
        subject: whose names they are.
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self._subject = subject

    def __missing__(self, level: str) -> str | None:
        text = self[level] = self._subject.text_of(level)
        return text
