"""`penstock worker`."""

from __future__ import annotations

import argparse

from penstock.cli.commands.arguments import Commands, add_command, address, count


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "worker", "Run the consumers of an application until SIGTERM.")
    command.add_argument("application", metavar="MODULE:NAME", help="The penstock.Worker, such as billing:app.")
    command.add_argument("--processes", type=count, default=1, metavar="N", help="Number of processes (%(default)s).")
    command.add_argument(
        "--reload", action="store_true", help="Start again when a Python file below the current directory changes."
    )
    command.add_argument(
        "--health",
        type=address,
        metavar="HOST:PORT",
        help="Answer GET /health and GET /metrics there. With several processes, each further one has the next port.",
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.actions.worker import run

    return run(options.application, options.processes, reload=options.reload, health=options.health)
