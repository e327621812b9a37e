"""The options of the node over the admin API: what each is, and where its value came from."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

from penstock.node.api.operation import ApiCall, ApiRole, Operation, PageQuery, not_found
from penstock.node.api.pages import page_by_name
from penstock.node.config import OPTION_SECTIONS, Config, Origin
from penstock.node.privacy import secret_files
from penstock.node.variables import variable_of
from penstock.store.options import HostPort, Option, describe_allowed, options_of

MASKED: Final = "(masked)"
"""Stands for a value that is a secret, or names a file with secrets."""


OPTIONS_AT_ONCE: Final = 16
"""Options that are described in one slice."""


class NodeOption(msgspec.Struct, kw_only=True):
    """An option of the node, as operators write it: durations have their unit."""

    name: str
    value: Any
    default: Any
    origin: Annotated[
        Literal["file", "variable", "argument", "default"], msgspec.Meta(description="Where the value came from.")
    ]
    variable: Annotated[str, msgspec.Meta(description="The variable of the environment that sets it.")]
    allowed: str
    description: str
    masked: Annotated[bool, msgspec.Meta(description=f"Whether a part of the value is {MASKED!r}, because it is a secret.")]


class NodeOptionPage(msgspec.Struct):
    """A page of options, in the order of their names."""

    items: list[NodeOption]
    next: str | None


class NodeOptionOperations:
    """Serves the options, which are those that the node has begun with.

    Parameters:
        config: of the node.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._options: dict[str, NodeOption] | None = None

    def operations(self) -> Iterator[Operation]:
        """Yield the operations."""
        yield Operation(
            "listOptions",
            "GET",
            "/options",
            ApiRole.VIEWER,
            "List the options of the node with their values.",
            self.page,
            NodeOptionPage,
            PageQuery,
        )
        yield Operation(
            "getOption", "GET", "/options/{name}", ApiRole.VIEWER, "Show an option of the node.", self.show, NodeOption
        )

    async def page(self, call: ApiCall) -> NodeOptionPage:
        """Return a page of options."""
        items, after = await page_by_name(await self._by_name(), call.query)
        return NodeOptionPage([option for _, option in items], after)

    async def show(self, call: ApiCall) -> NodeOption:
        """Return an option."""
        option = (await self._by_name()).get(call.path["name"])
        if option is None:
            raise not_found("option", call.path["name"])
        return option

    async def _by_name(self) -> Mapping[str, NodeOption]:
        if self._options is None:
            options: dict[str, NodeOption] = {}
            for option in options_shown(self._config):
                options[option.name] = option
                if len(options) % OPTIONS_AT_ONCE == 0:
                    await asyncio.sleep(0)
            self._options = options
        return self._options


def options_shown(config: Config) -> Iterator[NodeOption]:
    """Yield all options of a configuration. Those of tables in lists are part of the option that is the list."""
    secrets, defaults = secret_files(config), Config()
    sections = [("", config, defaults)]
    sections += [(f"{name}.", attrgetter(name)(config), attrgetter(name)(defaults)) for name in OPTION_SECTIONS]
    for prefix, values, default_values in sections:
        for declared in options_of(type(values)):
            name = prefix + declared.name
            value, was_masked = _shown(declared, getattr(values, declared.field), secrets)
            origin: Origin = config.origins.get(name, "default")
            yield NodeOption(
                name=name,
                value=value,
                default=_shown(declared, getattr(default_values, declared.field), frozenset())[0],
                origin=origin,
                variable=variable_of(name),
                allowed=describe_allowed(declared),
                description=declared.bounds.doc,
                masked=was_masked,
            )


def _shown(declared: Option, value: Any, secrets: frozenset[str]) -> tuple[Any, bool]:
    """Return a value as JSON has it, without secrets, and whether it had any."""
    if is_dataclass(declared.listed):
        tables = [_table(each, secrets) for each in value]
        return [table for table, _ in tables], any(was_masked for _, was_masked in tables)
    if isinstance(value, dict):  # only a library knows what is in such a table, and it may be a password
        return dict.fromkeys(value, MASKED), bool(value)
    if isinstance(value, str | Path) and str(value) in secrets:
        return MASKED, True
    if isinstance(value, str) and _has_password(value):
        return MASKED, True
    written = declared.written(value)
    if isinstance(written, tuple):
        return [_plain(each) for each in written], False
    return _plain(written), False


def _table(options: Any, secrets: frozenset[str]) -> tuple[dict[str, Any], bool]:
    """Return a table of a list as JSON has it, without secrets, and whether it had any."""
    shown = {
        declared.name: _shown(declared, getattr(options, declared.field), secrets) for declared in options_of(type(options))
    }
    return {name: value for name, (value, _) in shown.items()}, any(was_masked for _, was_masked in shown.values())


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path | HostPort) else value


def _has_password(text: str) -> bool:
    """Return whether a text is a URL that may have a secret in it: a user, a password, or parameters."""
    if "://" not in text:
        return False
    try:
        parts = urlsplit(text)
        return bool(parts.username or parts.password or parts.query)
    except ValueError:  # not a URL
        return False
