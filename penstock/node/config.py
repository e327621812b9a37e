"""The configuration of a node: every part's options in one TOML file, checked before anything starts."""

from __future__ import annotations

import json
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from penstock.gateway.options import GatewayOptions
from penstock.node.errors import ConfigError
from penstock.pop.options import PopOptions
from penstock.store.options import HostPort, OptionInvalid, StoreOptions, bounds_of, check_options, describe_allowed, option
from penstock.timer.options import TimerOptions

__all__ = ["AdminOptions", "Config", "ConfigError", "HostPort", "LogOptions", "document_options", "load_config"]

COMMENT_COLUMNS = 100
"""Width of the comments that `document_options` writes."""

Options = TypeVar("Options")


@dataclass(frozen=True, slots=True)
class AdminOptions:
    """The section `[admin]`."""

    listen: HostPort = option(
        HostPort("127.0.0.1", 8080),
        "Address of the HTTP listener for health, metrics and the JSON API. Port 0 picks a free one. It asks for no password: "
        "keep it where only operators reach it.",
    )


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The section `[log]`. The node's own log goes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = option(
        "info",
        "The least severe events that are logged.",
    )
    format: Literal["auto", "console", "json"] = option(
        "auto",
        '"json" for one JSON object a line, "console" for lines to read; "auto" is "console" on a terminal, else "json".',
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All options of a node."""

    data_dir: Path = option(
        Path("penstock-data"),
        "Directory of all that the node stores. It is made when it is missing; one node at a time uses it.",
    )
    store: StoreOptions = StoreOptions()
    mqtt: GatewayOptions = GatewayOptions()
    pop: PopOptions = PopOptions()
    timer: TimerOptions = TimerOptions()
    admin: AdminOptions = AdminOptions()
    log: LogOptions = LogOptions()


def _sections(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give the options dataclasses within one, and those within these, by their full names."""
    for name, hint in get_type_hints(options).items():
        if is_dataclass(hint) and hint is not HostPort:
            yield prefix + name, hint
            yield from _sections(hint, f"{prefix}{name}.")


SECTIONS: dict[str, Any] = dict(_sections(Config))
"""The options dataclass of each section, by the section's name."""


def load_config(path: Path | None = None, overrides: Mapping[str, Any] | None = None) -> Config:
    """Read a configuration.

    Args:
        path: a TOML file, or None for the defaults.
        overrides: values that count more than the file's, by full name: `{"mqtt.listen": "127.0.0.1:0"}`. They are of the
            types that TOML gives, or of the option's own. Those that are None are left out, as a command line's are that
            weren't given.

    Raises:
        ConfigError: the file can't be read, a name is unknown, or a value doesn't fit its option.
    """
    values = dict(_flatten(_read_file(path))) if path else {}
    values |= {name: value for name, value in (overrides or {}).items() if value is not None}
    known = _option_names()
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown option {name}; the nearest known one is {_nearest(name, [*known, *SECTIONS])}")
    try:
        return _build(Config, values, "")
    except OptionInvalid as error:
        raise ConfigError(str(error)) from error


def document_options(config: Config | None = None) -> str:
    """Return a configuration (or the defaults) as TOML in which a comment explains every option: it loads back as the same."""
    config = config or Config()
    lines = [*_document(config, Config())]
    for name, section in SECTIONS.items():
        lines += [f"[{name}]", *_document(attrgetter(name)(config), section(), name)]
    return "\n".join(lines).rstrip() + "\n"


def _option_names() -> list[str]:
    names = [declared.name for declared in fields(Config) if declared.name not in SECTIONS]
    for name, section in SECTIONS.items():
        names += [full for declared in fields(section) if (full := f"{name}.{declared.name}") not in SECTIONS]
    return names


def _nearest(name: str, known: list[str]) -> str:
    return get_close_matches(name, known, n=1, cutoff=0.0)[0]


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the configuration {path} can't be read: {error.strerror}") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"the configuration {path} is not TOML: {error}") from error


def _flatten(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Give the options of a TOML document by their full names. A dash in one counts as an underscore."""
    for key, value in document.items():
        name = prefix + key.replace("-", "_")
        if name in SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(f"{name} is {value!r}, but must be a section, [{name}]")
            yield from _flatten(value, f"{name}.")
        elif not prefix and isinstance(value, dict):
            raise ConfigError(f"unknown section [{name}]; the nearest known one is [{_nearest(name, list(SECTIONS))}]")
        else:
            yield name, value


def _build(options: type[Options], values: Mapping[str, Any], section: str) -> Options:
    """Return an options dataclass with those of the `values` that are its own, each checked."""
    arguments: dict[str, Any] = {}
    for name, hint in get_type_hints(options).items():
        full_name = f"{section}.{name}" if section else name
        if full_name in SECTIONS:
            arguments[name] = _build(hint, values, full_name)
        elif full_name in values:
            arguments[name] = _from_toml(hint, values[full_name], full_name)
    built = options(**arguments)
    check_options(built, section)
    if hasattr(built, "check"):
        built.check(section)
    return built


def _build_element(options: type[Options], table: Mapping[str, Any], element: str) -> Options:
    """Return an options dataclass from a table in a list."""
    values = {f"{element}.{key.replace('-', '_')}": value for key, value in table.items()}
    known = [f"{element}.{declared.name}" for declared in fields(options)]  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown option {name}; the nearest known one is {_nearest(name, known)}")
    return _build(options, values, element)


def _from_toml(hint: Any, value: Any, name: str) -> Any:
    """Return a value that TOML has no type for as the option's type. Whatever doesn't fit is left to `check_options`."""
    if hint is HostPort and isinstance(value, str):
        try:
            return HostPort.parse(value)
        except OptionInvalid as error:
            raise OptionInvalid(name, value, error.allowed) from error
    if hint is Path and isinstance(value, str):
        return Path(value)
    if get_origin(hint) is tuple and isinstance(value, list):
        listed = get_args(hint)[0]
        if isinstance(listed, type) and is_dataclass(listed) and all(isinstance(table, dict) for table in value):
            return tuple(_build_element(listed, table, f"{name}[{number}]") for number, table in enumerate(value))
        return tuple(value)
    return value


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
        default = _to_toml(getattr(defaults, declared.name))
        allowed = describe_allowed(hint, bounds)
        at_most = f", at most {bounds.at_most}" if bounds.at_most else ""
        for sentence in (bounds.doc, f"{allowed[0].upper()}{allowed[1:]}{at_most}. Default: {default}"):
            yield from textwrap.wrap(sentence, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ")
        # TOML has no value for what isn't given.
        yield f"{declared.name} = {_to_toml(value)}" if value is not None else f"# {declared.name} = {{}}"
        yield ""
    for declared in lists:  # last: whatever follows a table of a list belongs to it
        yield from _document_list(options, declared, get_args(hints[declared.name])[0], f"{prefix}{declared.name}")


def _document_list(options: Any, declared: Any, listed: Any, name: str) -> Iterator[str]:
    """Give the tables of a list; where there are none, one in comments, with the defaults."""
    tables = getattr(options, declared.name)
    for table in tables:
        yield f"[[{name}]]"
        yield from _document(table, listed(), name)
    if not tables:
        yield from textwrap.wrap(bounds_of(declared).doc, COMMENT_COLUMNS, initial_indent="# ", subsequent_indent="# ")
        lines = (f"[[{name}]]", *_document(listed(), listed(), name))
        yield from (line if line.startswith("#") or not line else f"# {line}" for line in lines)


def _to_toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_to_toml, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_to_toml(str(key))} = {_to_toml(inner)}" for key, inner in value.items()) + "}"
    if value is None:
        return "none"
    # A JSON string is a TOML string, but for DEL, which TOML wants escaped.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")
