"""Which client library calls, and in which version: the node adapts some answers to what a version can read."""

from __future__ import annotations

import re
from typing import Final, NamedTuple, Self

_NUMBERS = re.compile(r"\d{1,6}")

VERSION_PARTS_MAX: Final = 3


class Agent(NamedTuple):
    """A client library.

    Parameters:
        language: Its language in upper case, as `pb.Language` names it; empty if the client does not say.
        version: Its version, for example `(5, 0, 7)`; empty if the client does not say.
    """

    language: str = ""
    version: tuple[int, ...] = ()

    @classmethod
    def of(cls, language: str, version: str) -> Self:
        """Return the agent with a language and the text of a version. Whatever follows the numbers is left out."""
        release = version.partition("-")[0]
        return cls(language.upper(), tuple(int(number) for number in _NUMBERS.findall(release)[:VERSION_PARTS_MAX]))

    def is_before(self, language: str, *version: int) -> bool:
        """Return whether this is a library of `language` that is older than `version`, or does not state its version."""
        return self.language == language and self.version < version
