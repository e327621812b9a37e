"""`penstock context`: names for nodes, with what a command needs to connect with each of them."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from penstock.cli.arguments import NODE, Commands, add_command, add_json, add_setting
from penstock.cli.output import print_line, print_rows
from penstock.settings import DEFAULTS, NAMES, read_contexts

COLUMNS = ("name", "in use", *DEFAULTS)
"""Columns of the list: the names, and the settings that name a node."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "context", "Name nodes, and choose the one that commands, clients and workers use.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    action = add_command(actions, "add", "Add a context, or replace it. The first one is in use at once.")
    _add_name(action)
    group = action.add_argument_group(NODE, "What the context says.")
    for name in NAMES:
        if name != "token":
            add_setting(group, name)
    action.set_defaults(run=_add)

    action = add_command(actions, "use", "Use a context from now on.")
    _add_name(action)
    action.set_defaults(run=_use)

    action = add_command(actions, "list", "List the contexts.")
    add_json(action)
    action.set_defaults(run=_list)

    action = add_command(actions, "show", "Print the settings of a context.")
    action.add_argument("name", metavar="NAME", nargs="?", help="Name of the context (the one in use).")
    add_json(action)
    action.set_defaults(run=_show)

    action = add_command(actions, "remove", "Remove a context.")
    _add_name(action)
    action.set_defaults(run=_remove)


def _add_name(action: argparse.ArgumentParser) -> None:
    action.add_argument("name", metavar="NAME", help="Name of the context.")


def _add(options: argparse.Namespace) -> int:
    settings = {name: _stored(value) for name in NAMES if (value := getattr(options, name, None)) is not None}
    if not settings.keys() & DEFAULTS.keys():
        raise ValueError(f"The context {options.name!r} names no node: give at least --target, --mqtt, --admin or --data-dir.")
    if not options.name.strip() or not options.name.isprintable():
        raise ValueError(f"The name {options.name!r} can't be used: give one of printable characters.")
    contexts = read_contexts()
    replaced = contexts.by_name.get(options.name)
    contexts.by_name[options.name] = settings
    contexts.current = contexts.current or options.name
    contexts.save()
    dropped = ", ".join(sorted((replaced or {}).keys() - settings.keys()))
    done = "added" if replaced is None else "replaced"
    print_line(f"{done} {options.name}" + (f", which no longer has {dropped}" if dropped else ""))
    return 0


def _stored(value: object) -> str:
    """Return a value as a context has it. Files have their whole path, since commands run in any directory."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value.absolute() if isinstance(value, Path) else value)


def _use(options: argparse.Namespace) -> int:
    contexts = read_contexts()
    contexts.checked(options.name)
    contexts.current = options.name
    contexts.save()
    return 0


def _list(options: argparse.Namespace) -> int:
    contexts = read_contexts()
    rows = [
        {"name": name, "in_use": name == contexts.current, **settings} for name, settings in sorted(contexts.by_name.items())
    ]
    cells = [
        [str(row["name"]), "yes" if row["in_use"] else "no", *(str(row.get(name, "default")) for name in DEFAULTS)]
        for row in rows
    ]
    print_rows(rows, cells, COLUMNS, as_json=options.json, out=sys.stdout)
    return 0


def _show(options: argparse.Namespace) -> int:
    contexts = read_contexts()
    settings = contexts.settings(options.name)
    if not settings:
        raise ValueError("No context is in use: name one, or choose one with `penstock context use NAME`.")
    shown = {name: "(hidden)" if name == "token" else value for name, value in settings.items()}
    print_rows([shown], shown.items(), ("setting", "value"), as_json=options.json, out=sys.stdout)
    return 0


def _remove(options: argparse.Namespace) -> int:
    contexts = read_contexts()
    contexts.checked(options.name)
    del contexts.by_name[options.name]
    if contexts.current == options.name:
        contexts.current = ""
        print_line("No context is in use now. `penstock context use NAME` chooses one.", out=sys.stderr)
    contexts.save()
    return 0
