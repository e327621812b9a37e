"""`penstock demo`."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.cli.arguments import Commands, add_command, count


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "demo",
        "Run a node, a fleet of devices and consumers that fail, then show that every delivery is accounted for.",
    )
    command.add_argument("--dir", type=Path, metavar="DIR", help="Directory for the demo's files (a new temporary directory).")
    command.add_argument(
        "--devices", type=count, default=200, help="Number of devices, with one MQTT connection each (%(default)s)."
    )
    command.add_argument(
        "--readings", type=count, default=20_000, help="Number of readings that all devices publish together (%(default)s)."
    )
    command.add_argument(
        "--seed", type=int, default=1, help="Seed of the readings: the same seed gives the same (%(default)s)."
    )
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.demo.demo import run_demo

    return run_demo(options.dir, devices=options.devices, readings=options.readings, seed=options.seed)
