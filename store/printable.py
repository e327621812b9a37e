"""Text from outside, such as client ids, topics, user names and reasons, as it may be shown to people.

Control characters would let a client write lines of its own into a log, or steer a terminal. Marks of direction such as U+202E
would let a name look like another one.
"""

from __future__ import annotations

from unicodedata import category


def printable(text: str, *, keep: str = "") -> str:
    r"""Return a text with escapes in place of characters that people can't see, such as `\u202e`. Spaces of all kinds stay.

    A text in JSON stays JSON with the same values.

    Args:
        text: any text, also with lone surrogates.
        keep: characters that stay in any case, such as line feeds.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in keep or category(each) == "Zs" else _escape(each) for each in text)


def _escape(character: str) -> str:
    """Return the escape of a character as JSON has it: two of them beyond U+FFFF."""
    units = character.encode("utf-16-be", errors="surrogatepass")
    return "".join(f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2))
