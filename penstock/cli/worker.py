"""`penstock worker`: runs the consumers of an application."""

from __future__ import annotations

import argparse
import logging

from penstock.cli.arguments import Commands, add_command, address, count
from penstock.store.options import HostPort


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
    return run(options.application, options.processes, reload=options.reload, health=options.health)


def run(name: str, processes: int, *, reload: bool, health: HostPort | None) -> int:
    """Run a worker until a signal; return the exit status.

    Args:
        name: of the worker, as `module:app`.
        processes: number of processes, at least 1.
        reload: whether to start again when a file changes.
        health: address of the health endpoint; None for none.

    Raises:
        ValueError: the name names no worker, or the number is 0.
    """
    if processes < 1:
        raise ValueError(f"--processes is {processes}: use 1 or more")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    listening = (health.host, health.port) if health is not None else None
    if processes > 1 or reload:
        from penstock.worker.processes import WorkerProcesses

        return WorkerProcesses(name, processes, reload=reload, health=listening).run()
    from penstock.worker.application import run_worker

    run_worker(name, listening)
    return 0
