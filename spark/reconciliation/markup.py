"""HTML and SVG from strings that anyone on the network may have chosen: everything is escaped that is not `Markup`."""

from __future__ import annotations

from html import escape

NAME_CHARS_MAX = 48
"""Maximum length of a name on the page. The whole of a longer one is in its `title`."""

NAME_END_CHARS = 16
"""How much of the end of a long name stays: the levels of a topic differ there."""


class Markup(str):
    """Text that is well-formed HTML already."""

    __slots__ = ()


def element(tag: str, *content: str | None, **attributes: str | float | None) -> Markup:
    """Return an element with its content and attributes, except those that are None.

    `class_` is the attribute `class`, and `aria_label` is `aria-label`.
    """
    written = "".join(
        f' {name.rstrip("_").replace("_", "-")}="{_escaped(str(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>{join(*content)}</{tag}>")


def join(*content: str | None) -> Markup:
    """Return content in a row. None is nothing."""
    return Markup("".join(each if isinstance(each, Markup) else _escaped(each) for each in content if each is not None))


def name(text: str) -> Markup:
    """Return a name that is not ours, such as a topic: isolated from the direction of the text around it, and shortened."""
    if len(text) <= NAME_CHARS_MAX:
        return element("bdi", text)
    return element("bdi", f"{text[: NAME_CHARS_MAX - NAME_END_CHARS - 1]}…{text[-NAME_END_CHARS:]}", title=text)


def _escaped(text: str) -> str:
    """Return text for a page. Control characters, and those that turn the direction of text, become their escapes."""
    if not text.isprintable():
        text = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
    return escape(text)
