"""`penstock clock`."""

from __future__ import annotations

import argparse

from penstock.cli.commands.arguments import Commands, add_command, add_data_dir


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands, "clock", "Compare a running node's time with the machine's time of day, and accept a time of day that jumped."
    )
    command.add_argument(
        "action",
        nargs="?",
        choices=("show", "accept"),
        default="show",
        help="show prints both times and what the node does about a difference. accept takes the time of day for right at "
        "once, without waiting for clock.confirm_ms (%(default)s).",
    )
    add_data_dir(command)
    command.add_argument("--json", action="store_true", help="Print one JSON object.")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.actions.clock import accept_clock, show_clock

    action = accept_clock if options.action == "accept" else show_clock
    action(options.data_dir, as_json=options.json)
    return 0
