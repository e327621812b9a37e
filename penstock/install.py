"""How to install the optional parts of Penstock. This module imports nothing, so that every package may import it."""

from __future__ import annotations

INSTALL_COMMAND = "pip install '.[{extra}]'"
"""Works in the folder of a checkout. Until the first release, the package index has no distribution of Penstock."""


def install_hint(extra: str) -> str:
    """Return the sentence that tells an operator how to install an extra of pyproject.toml, such as `spark`.

    The brackets are markup to rich. Print the hint with `markup=False` there.
    """
    return f"run {INSTALL_COMMAND.format(extra=extra)} in a checkout of Penstock"
