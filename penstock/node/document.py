"""A configuration as TOML, with a comment that explains each option."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Any

from penstock.node.config import OPTION_SECTIONS, Config
from penstock.store.options import Option, describe_allowed, options_of

COMMENT_COLUMNS = 100
"""Width of the comments."""


def document_options(config: Config | None = None) -> str:
    """Return a configuration as TOML in which a comment explains every option.

    Args:
        config: the configuration; None for the defaults. `load_config` reads an equal one from the text.
    """
    config = config or Config()
    lines = [*_document(config, Config())]
    for name, section in OPTION_SECTIONS.items():
        lines += [f"[{name}]", *_document(attrgetter(name)(config), section(), name)]
    return "\n".join(lines).rstrip() + "\n"


def _document(options: Any, defaults: Any, section: str = "") -> Iterator[str]:
    prefix = f"{section}." if section else ""
    lists: list[Option] = []
    for option in options_of(type(options)):
        if is_dataclass(option.listed):
            lists.append(option)
            continue
        value = option.written(getattr(options, option.field))
        for sentence in (option.bounds.doc, _allowed(option, getattr(defaults, option.field))):
            yield from textwrap.wrap(sentence, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ")
        # TOML has no value for "none".
        yield f"{option.name} = {toml_of(value)}" if value is not None else f"# {option.name} = {{}}"
        yield ""
    for option in lists:  # last, because options after a table of a list would belong to that table
        yield from _document_list(getattr(options, option.field), option, prefix + option.name)


def _allowed(option: Option, default: Any) -> str:
    allowed = describe_allowed(option)
    return f"{allowed[0].upper()}{allowed[1:]}. Default: {toml_of(option.written(default))}"


def _document_list(tables: Any, option: Option, name: str) -> Iterator[str]:
    """Yield the tables of a list, or if it is empty, one table in comments with the defaults."""
    listed = option.listed
    for table in tables:
        yield f"[[{name}]]"
        yield from _document(table, listed(), name)
    if not tables:
        yield from textwrap.wrap(option.bounds.doc, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ")
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
