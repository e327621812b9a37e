"""A configuration as TOML, with a comment that explains each option."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, get_args, get_origin, get_type_hints

from penstock.node.config import SECTIONS, Config
from penstock.store.options import bounds_of, describe_allowed

COMMENT_COLUMNS = 100
"""Width of the comments."""


def document_options(config: Config | None = None) -> str:
    """Return a configuration as TOML in which a comment explains every option.

    Args:
        config: the configuration; None for the defaults. `load_config` reads an equal one from the text.
    """
    config = config or Config()
    lines = [*_document(config, Config())]
    for name, section in SECTIONS.items():
        lines += [f"[{name}]", *_document(attrgetter(name)(config), section(), name)]
    return "\n".join(lines).rstrip() + "\n"


def _document(options: Any, defaults: Any, section: str = "") -> Iterator[str]:
    hints = get_type_hints(type(options))
    prefix = f"{section}." if section else ""
    lists: list[Any] = []
    for declared in fields(options):
        hint, value = hints[declared.name], getattr(options, declared.name)
        if prefix + declared.name in SECTIONS:
            continue
        if get_origin(hint) is tuple and is_dataclass(get_args(hint)[0]):
            lists.append(declared)
            continue
        bounds = bounds_of(declared)
        default = toml_of(getattr(defaults, declared.name))
        allowed = describe_allowed(hint, bounds)
        at_most = f", at most {bounds.at_most}" if bounds.at_most else ""
        for sentence in (bounds.doc, f"{allowed[0].upper()}{allowed[1:]}{at_most}. Default: {default}"):
            yield from textwrap.wrap(sentence, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ")
        # TOML has no value for "none".
        yield f"{declared.name} = {toml_of(value)}" if value is not None else f"# {declared.name} = {{}}"
        yield ""
    for declared in lists:  # last, because options after a table of a list would belong to that table
        yield from _document_list(options, declared, get_args(hints[declared.name])[0], f"{prefix}{declared.name}")


def _document_list(options: Any, declared: Any, listed: Any, name: str) -> Iterator[str]:
    """Yield the tables of a list, or if it is empty, one table in comments with the defaults."""
    tables = getattr(options, declared.name)
    for table in tables:
        yield f"[[{name}]]"
        yield from _document(table, listed(), name)
    if not tables:
        yield from textwrap.wrap(bounds_of(declared).doc, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ")
        lines = (f"[[{name}]]", *_document(listed(), listed(), name))
        yield from (line if line.startswith("#") or not line else f"# {line}" for line in lines)


def toml_of(value: Any) -> str:
    """Return a value as TOML writes it; `none`, which TOML doesn't have, for None."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml_of, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{toml_of(str(key))} = {toml_of(inner)}" for key, inner in value.items()) + "}"
    if value is None:
        return "none"
    # A JSON string is a valid TOML string, except that TOML requires DEL to be escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
