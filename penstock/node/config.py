"""The configuration of a node: the options of every part, read from one TOML file and checked before anything starts."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from penstock.access.options import AccessControlOptions
from penstock.cluster.options import ReplicationOptions
from penstock.gateway.options import GatewayOptions
from penstock.node.adminoptions import AdminOptions
from penstock.node.errors import ConfigError
from penstock.node.removedoptions import describe_removed
from penstock.node.tablesoptions import TablesOptions
from penstock.node.variables import ALL_OPTIONS, most_similar, read_variables, variable_of
from penstock.pop.options import PopOptions
from penstock.store.options import (
    ClockOptions,
    HostPort,
    Option,
    OptionInvalid,
    StoreOptions,
    check_options,
    option,
    options_of,
)
from penstock.store.space.quotaoptions import QuotaOptions
from penstock.timer.options import TimerOptions
from penstock.tracing.options import TracingOptions

Options = TypeVar("Options")

Origin = Literal["file", "variable", "argument", "default"]
"""Where the value of an option came from. An argument is one of `penstock serve`, or of the caller of `load_config`."""

LogLevel = Literal["debug", "info", "warning", "error"]
"""How severe an event of the node's own log is."""


@dataclass(frozen=True, slots=True)
class LogOptions:
    """The section `[log]`. The node writes its own log to stderr."""

    level: LogLevel = option(
        "info",
        "Least severe events that the node logs.",
    )
    format: Literal["auto", "console", "json"] = option(
        "auto",
        'Format of the log: JSON objects, or text for people ("console"). "auto" is "console" on a terminal.',
    )


@dataclass(frozen=True, slots=True)
class Config:
    """All options of a node."""

    data_dir: Path = option(
        Path("penstock-data"),
        "Directory where the node stores everything. Only one node at a time can use it.",
    )
    drain_ms: int = option(
        0,
        "Time that a node takes at most between SIGTERM and its end to send its clients away and to let consumers finish; 0 to "
        "stop at once. `penstock drain` names its own.",
        minimum=0,
    )
    store: StoreOptions = StoreOptions()
    clock: ClockOptions = ClockOptions()
    mqtt: GatewayOptions = GatewayOptions()
    pop: PopOptions = PopOptions()
    timer: TimerOptions = TimerOptions()
    access: AccessControlOptions = AccessControlOptions()
    quotas: QuotaOptions = QuotaOptions()
    tables: TablesOptions = TablesOptions()
    admin: AdminOptions = AdminOptions()
    tracing: TracingOptions = TracingOptions()
    replication: ReplicationOptions = ReplicationOptions()
    log: LogOptions = LogOptions()
    origins: Mapping[str, Origin] = field(default_factory=dict, compare=False, repr=False)
    """Where the values came from, by the full names of the options. Those that are not in it have their defaults."""

    def check(self, _section: str) -> None:
        """Raise OptionInvalid if options of several sections contradict each other."""
        backup_dir = self.admin.backup_dir
        if backup_dir and Path(backup_dir).resolve().is_relative_to(self.data_dir.resolve()):
            raise OptionInvalid("admin.backup_dir", backup_dir, f"a directory outside of the data directory {self.data_dir}")


def _sections(options: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options dataclasses inside another one, at any depth, with their full names."""
    for name, hint in get_type_hints(options).items():
        if is_dataclass(hint) and hint is not HostPort:
            yield prefix + name, hint
            yield from _sections(hint, f"{prefix}{name}.")


SECTIONS: dict[str, Any] = dict(_sections(Config))
"""The options dataclass of each section, by the section's name."""

OPTION_SECTIONS: dict[str, Any] = {name: section for name, section in SECTIONS.items() if options_of(section)}
"""The sections that have options, and not only bounds: those that operators know."""


def load_config(
    path: Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Config:
    """Read a configuration.

    Args:
        path: a TOML file, or None for the defaults.
        overrides: values that replace those of the file and of variables, by full name: `{"mqtt.listen": "127.0.0.1:0"}`. A
            value has the type that TOML gives it, or the option's own type; a duration is text such as "7d", a timedelta, or 0.
            Values that are None are ignored.
        environment: variables, of which those such as PENSTOCK_STORE__RETENTION replace values of the file. None for none.

    Raises:
        ConfigError: the file can't be read, a name is unknown, or a value doesn't fit its option.
    """
    known = known_options()
    values = dict(_flatten(_read_file(path))) if path else {}
    of_variables = read_variables(environment or {}, known, partial(describe_removed, sections=SECTIONS))
    of_caller = {name: value for name, value in (overrides or {}).items() if value is not None}
    origins: dict[str, Origin] = dict.fromkeys(values, "file")
    origins |= dict.fromkeys(of_variables, "variable")
    origins |= dict.fromkeys(of_caller, "argument")
    values |= of_variables | of_caller
    for name in values:
        if name not in known:
            raise ConfigError(_unknown(name, [*known, *OPTION_SECTIONS], ALL_OPTIONS))
    try:
        return replace(_build(Config, values, ""), origins=origins)
    except OptionInvalid as error:
        name, *element = error.name.split("[", 1)
        if name in of_variables and name not in of_caller:
            error = OptionInvalid("[".join((variable_of(name), *element)), error.value, error.allowed)
        raise ConfigError(str(error)) from error


def known_options() -> dict[str, Option]:
    """Return all options by their full names. Those of tables in lists belong to the option that is the list."""
    known = {declared.name: declared for declared in options_of(Config)}
    for name, section in SECTIONS.items():
        known |= {f"{name}.{declared.name}": declared for declared in options_of(section)}
    return known


def _unknown(name: str, known: list[str], otherwise: str) -> str:
    """Return what to tell an operator about an option that does not exist.

    Args:
        name: full name of the option.
        known: full names of the options that exist there.
        otherwise: the sentence that follows if none of them is similar.
    """
    if removed := describe_removed(name, SECTIONS):
        return f"The option {name} does not exist any more: {removed}."
    similar = most_similar(name, known)
    return f"The option {name} does not exist. {f'The most similar name is {similar}.' if similar else otherwise}"


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"The configuration {path} can't be read: {error.strerror}.") from error
    except ValueError as error:  # not UTF-8, or not TOML
        raise ConfigError(f"The configuration {path} is not valid TOML: {error}.") from error


def _flatten(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the options of a TOML document with their full names. A dash in a name counts as an underscore."""
    for key, value in document.items():
        name = prefix + key.replace("-", "_")
        if name in SECTIONS:
            if not isinstance(value, dict):
                raise ConfigError(f"{name} is {value!r}, but it must be a section, [{name}].")
            yield from _flatten(value, f"{name}.")
        elif not prefix and isinstance(value, dict):
            similar = most_similar(name, OPTION_SECTIONS)
            raise ConfigError(
                f"The section [{name}] does not exist. {f'The most similar name is [{similar}].' if similar else ALL_OPTIONS}"
            )
        else:
            yield name, value


def _build(options: type[Options], values: Mapping[str, Any], section: str) -> Options:
    """Return an options dataclass with the values that belong to it, each checked."""
    prefix = f"{section}." if section else ""
    arguments: dict[str, Any] = {
        name: _build(SECTIONS[prefix + name], values, prefix + name)
        for name in get_type_hints(options)
        if prefix + name in SECTIONS
    }
    for declared in options_of(options):
        if (full_name := prefix + declared.name) in values:
            arguments[declared.field] = _read(declared, values[full_name], full_name)
    built = options(**arguments)
    check_options(built, section)
    if hasattr(built, "check"):
        built.check(section)
    return built


def _read(declared: Option, value: Any, name: str) -> Any:
    """Return a value of TOML as the option's type. `check_options` judges values that don't fit."""
    if is_dataclass(declared.listed) and isinstance(value, list) and all(isinstance(table, dict) for table in value):
        return tuple(_build_element(declared.listed, table, f"{name}[{number}]") for number, table in enumerate(value))
    return declared.read(value, name)


def _build_element(options: Any, table: Mapping[str, Any], element: str) -> Any:
    """Return an options dataclass from a table in a list."""
    values = {f"{element}.{key.replace('-', '_')}": value for key, value in table.items()}
    known = [f"{element}.{declared.name}" for declared in options_of(options)]
    for name in values:
        if name not in known:
            names = ", ".join(declared.name for declared in options_of(options))
            raise ConfigError(_unknown(name, known, f"The options of {element} are {names}."))
    return _build(options, values, element)
