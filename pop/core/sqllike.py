"""LIKE: patterns with `%` for any characters and `_` for one character."""

from __future__ import annotations

from penstock.pop.core.sqlvalues import Value
from penstock.pop.errors import ExpressionInvalid


def text_of(value: Value) -> str:
    """Return a value as text, as LIKE compares it."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else str(value)
    return str(value)


ANY_ONE = "\0"
"""Stands for any one character (`_`) in the parts of a pattern. No property contains U+0000 (MQTT 5.0, 1.5.4)."""


def like_parts(pattern: str, escape: str) -> list[str]:
    """Return the parts of a pattern between its `%`, with `ANY_ONE` for each `_`.

    Raises:
        ExpressionInvalid: the escape character is before a character that needs no escape.
    """
    parts = [""]
    characters = iter(pattern)
    for character in characters:
        if escape and character == escape:
            character = next(characters, "")
            if character not in ("%", "_", escape) or not character:
                raise ExpressionInvalid(f"in LIKE {pattern[:40]!r}, {escape!r} must be before '%', '_' or itself")
            parts[-1] += character
        elif character == "%":
            parts.append("")
        else:
            parts[-1] += ANY_ONE if character == "_" else character
    return parts


def is_like(value: str, parts: list[str]) -> bool:
    """Return whether a value matches the parts of a pattern.

    Each part is matched at the first place after the part before it. This takes at most O(n * m), unlike a regular expression.
    """
    if len(parts) == 1:
        return len(value) == len(parts[0]) and _fits(value, 0, parts[0])
    first, *middle, last = parts
    stop = len(value) - len(last)
    if not (_fits(value, 0, first) and len(first) <= stop and _fits(value, stop, last)):
        return False
    at = len(first)
    for part in middle:
        while at + len(part) <= stop and not _fits(value, at, part):
            at += 1
        if at + len(part) > stop:
            return False
        at += len(part)
    return True


def _fits(value: str, at: int, part: str) -> bool:
    if ANY_ONE not in part:
        return value.startswith(part, at)
    return at + len(part) <= len(value) and all(a in (ANY_ONE, b) for a, b in zip(part, value[at:], strict=False))
