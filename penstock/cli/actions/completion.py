"""`penstock completion`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


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
