"""`penstock top`."""

from __future__ import annotations

import argparse

from penstock.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_node,
    count,
    duration,
    endpoint,
    login,
)
from penstock.cli.listing import RATES

SORTS = {
    "visible": "visible",
    "oldest": "oldest_s",
    "in-flight": "in_flight",
    "dead": "dead",
    "acked": "acked_per_s",
}
"""Columns by which the groups are sorted, by the value of `--sort`."""

INTERVAL_MS_MIN = 100
"""Shortest time between two views. A view costs the node a few milliseconds."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "top",
        "Show what a running node does, and what somebody should look at. `q` ends it.",
    )
    add_node(command, "admin")
    command.add_argument(
        "--interval", type=_interval, default=2000, metavar="TIME", help="Time between two views, such as 500ms (2s)."
    )
    command.add_argument(
        "--count", type=count, default=0, help="Number of views after which to end; 0 never ends (%(default)s)."
    )
    command.add_argument(
        "--groups", type=count, default=0, metavar="N", help="Number of groups to show (what the terminal has room for)."
    )
    command.add_argument(
        "--sort", choices=tuple(SORTS), default="visible", help="Show the groups with the most of this first (%(default)s)."
    )
    command.add_argument(
        "--sort-clients", choices=RATES, default=RATES[0], help="Show the clients with most of this first (%(default)s)."
    )
    add_json(command)
    command.set_defaults(run=_run)


def _interval(text: str) -> int:
    found = duration(text)
    if found < INTERVAL_MS_MIN:
        raise argparse.ArgumentTypeError(f"{text!r} is too short: give at least {INTERVAL_MS_MIN}ms.")
    return found


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.topscreen import top

    top(
        endpoint(options, "admin"),
        login(options, "admin"),
        interval_s=options.interval / 1000,
        count=options.count,
        groups=options.groups,
        sort=SORTS[options.sort],
        order=options.sort_clients,
        as_json=options.json,
    )
    return 0
