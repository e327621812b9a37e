"""The access control of a node: the policy that is in force, and its replacement while the node runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from penstock.access.actions import CONSUME
from penstock.access.file import load_access_policy
from penstock.access.options import AccessControlOptions
from penstock.access.policy import AccessPolicy
from penstock.access.subject import Subject


class AccessControl:
    """What is in force now.

    Parameters:
        options: name the files.

    Raises:
        AccessInvalid: a file can't be read, or its content is invalid.
    """

    def __init__(self, options: AccessControlOptions) -> None:
        self._options = options
        self.on_change: Final[list[Callable[[], None]]] = []
        """Called after each change, to look again at what clients are doing."""
        self.policy: AccessPolicy | None = self._load()
        """Decides who may do what; None if nothing is restricted."""

    def _load(self) -> AccessPolicy | None:
        return load_access_policy(Path(self._options.file)) if self._options.file else None

    def may_share(self, user: str, group: str) -> bool:
        """Return whether an MQTT user may take messages from a group; `user` is empty for a client without a name."""
        return self.policy is None or self.policy.rights_of(Subject(user)).may(CONSUME, group)

    def reload(self) -> None:
        """Read the files again, and apply what they say to what clients are doing.

        Raises:
            AccessInvalid: a file can't be read, or its content is invalid. Then nothing has changed.
        """
        self.policy = self._load()
        for changed in self.on_change:
            changed()
