"""`penstock completion`: prints scripts that complete commands and options in a shell."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from penstock.cli.arguments import Commands, add_command


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "completion",
        "Print a script that completes commands and options in a shell, for example for "
        "/etc/bash_completion.d/penstock. It needs the extra `completion`.",
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="The shell.")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.main import build_parser

    sys.stdout.write(completion_script(build_parser(), options.shell))
    return 0


def completion_script(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return a script for a shell that completes the commands and options of a parser, and the names of files.

    Raises:
        ModuleNotFoundError: shtab is not installed.
    """
    import shtab  # type: ignore[import-not-found, unused-ignore]  # an extra, and this module must load without it

    _mark_files(parser, shtab.FILE, shtab.DIRECTORY)
    script: str = shtab.complete(parser, shell)
    return script


def _mark_files(parser: argparse.ArgumentParser, file: object, directory: object) -> None:
    """Tell the library which arguments are files and directories."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark_files(command, file, directory)
        elif action.type is Path:
            marked: Any = action
            marked.complete = directory if "DIR" in str(action.metavar) else file
