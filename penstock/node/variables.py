"""Options as variables of the environment: `PENSTOCK_STORE__RETENTION=7d` is `store.retention`."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Final, Literal, get_origin

from penstock.node.errors import ConfigError
from penstock.store.options import Option

PREFIX: Final = "PENSTOCK_"

SEPARATOR: Final = "__"
"""Stands for a dot in the name of an option. Variables without it are those of clients, such as PENSTOCK_TARGET."""


ALL_OPTIONS: Final = "`penstock serve --print-config` shows all options."
"""Follows an error about a name to which no other one is similar."""


def variable_of(name: str) -> str:
    """Return the variable of an option: `PENSTOCK_MQTT__LIMITS__HOLD_OFF` for `mqtt.limits.hold_off`."""
    return PREFIX + name.replace(".", SEPARATOR).upper()


def read_variables(
    environment: Mapping[str, str], options: Mapping[str, Option], describe_removed: Callable[[str], str]
) -> dict[str, Any]:
    """Return the values of the options that variables set, by full name.

    Args:
        environment: all variables.
        options: all options of a node, by full name.
        describe_removed: returns what takes the place of an option that a node no longer has, by its full name; empty for a
            name that never was one.

    Raises:
        ConfigError: a variable names no option, or is not TOML where its option needs that.
    """
    names = {variable_of(name): name for name in options}
    values = {}
    for variable, text in environment.items():
        if variable in names:
            values[names[variable]] = _value_of(variable, text, options[names[variable]])
        elif variable.startswith(PREFIX) and SEPARATOR in variable.removeprefix(PREFIX):
            name = variable.removeprefix(PREFIX).replace(SEPARATOR, ".").lower()
            if removed := describe_removed(name):
                raise ConfigError(f"The variable {variable} sets no option any more: {removed}.")
            similar = most_similar(name, options)
            advice = f"The most similar one is {variable_of(similar)}." if similar else ALL_OPTIONS
            raise ConfigError(f"The variable {variable} sets no option. {advice}")
    return values


def _value_of(variable: str, text: str, option: Option) -> Any:
    """Return the text of a variable as a value of TOML. Text, durations and addresses need no quotes."""
    is_text = option.hint in (str, Path) or option.is_address or get_origin(option.hint) is Literal
    if is_text or (option.unit_ms and not option.listed and text != "0"):
        return text
    try:
        document = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        document = {}
    if document.keys() != {"value"}:
        raise ConfigError(f"{variable} is {text!r}, but must be a value of TOML, such as {_example_of(option)}.")
    return document["value"]


def _example_of(option: Option) -> str:
    if option.hint is bool:
        return "true"
    if option.listed is int:
        return '["1s", "5s"]'
    if option.hint is int:
        return "100"
    if option.listed:
        return '["a", "b"]' if option.listed is str else '[{ name = "a" }]'
    return '{ "path.of.Class" = {} }'


def most_similar(name: str, known: Iterable[str]) -> str:
    """Return the full name that is most similar to another one; empty if none is.

    The last parts of the two names must be similar: names of one section, or of similar sections, have much in common anyway.
    """
    full_names = list(known)
    own = name.rpartition(".")[2]
    own_names = {full_name.rpartition(".")[2] for full_name in full_names}
    similar = set(get_close_matches(own, own_names, n=len(own_names)))
    candidates = [full_name for full_name in full_names if full_name.rpartition(".")[2] in similar]
    return next(iter(get_close_matches(name, candidates, n=1, cutoff=0.0)), "")
