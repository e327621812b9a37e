"""`penstock completion`."""

from __future__ import annotations

import argparse
import sys

from penstock.cli.commands.arguments import EXIT_USAGE, Commands, add_command
from penstock.install import install_hint


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
    from penstock.cli.actions.completion import completion_script

    try:
        script = completion_script(options.parser, options.shell)
    except ModuleNotFoundError as error:
        print(f"penstock completion: {error.name} is not installed: {install_hint('completion')}", file=sys.stderr)
        return EXIT_USAGE
    sys.stdout.write(script)
    return 0
