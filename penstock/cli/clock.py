"""`penstock clock`: compares a node's time with the time of day."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import orjson

from penstock.cli.arguments import Commands, add_command, add_node, data_dir_of
from penstock.cli.output import time_of
from penstock.node.controladdress import CLOCK


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
        "once (%(default)s).",
    )
    add_node(command, "data_dir")
    command.add_argument("--json", action="store_true", help="Print one JSON object.")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    action = accept_clock if options.action == "accept" else show_clock
    action(data_dir_of(options), as_json=options.json)
    return 0


def show_clock(data_dir: Path, *, as_json: bool) -> None:
    """Print the clock of the node on a data directory."""
    _print(_ask(data_dir, "GET", CLOCK), as_json)


def accept_clock(data_dir: Path, *, as_json: bool) -> None:
    """Confirm the jump of the time of day that the node sees, and print the clock.

    The node confirms only the jump that it has shown to this command.

    Raises:
        ControlRefused: there is no jump, or it is another one meanwhile.
    """
    seen = _ask(data_dir, "GET", CLOCK)
    _print(_ask(data_dir, "POST", f"{CLOCK}?offset_ms={seen['time_of_day_ahead_ms']}"), as_json)


def _ask(data_dir: Path, method: str, path: str) -> dict[str, Any]:
    from penstock.node.controlclient import Request

    with Request(data_dir, method, path) as request:
        return request.line()


def _print(found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(orjson.dumps(found).decode())
        return
    ahead_ms: int = found["time_of_day_ahead_ms"]
    print(f"node's time  {time_of(found['now_ms'])}")
    print(f"time of day  {time_of(found['now_ms'] + ahead_ms)}  ({ahead_ms / 1000:+,.3f} s)")
    print(_explained(found, ahead_ms))


def _explained(found: dict[str, Any], ahead_ms: int) -> str:
    from penstock.store.clock import SLEW_DIVISOR
    from penstock.store.timekeeping import SLEW_MS_MAX

    if not found["confirmed"]:
        then = (
            "the node's time is stepped"
            if ahead_ms > 0
            else f"the node's time runs slower by one part in {SLEW_DIVISOR} until both agree"
        )
        return (
            "The time of day has jumped, and nobody has confirmed it. The node's time goes on by itself, and retention by age "
            f"waits. If the jump lasts for another {found['confirmed_in_ms'] / 1000:,.0f} s, {then}. If the time of day is "
            "right, `penstock clock accept` does that at once. If it is wrong, set the machine's clock."
        )
    if found["slowed"]:
        return (
            f"A jump back was confirmed. The node's time runs slower by one part in {SLEW_DIVISOR} until both agree, in "
            f"{-ahead_ms * SLEW_DIVISOR / 1000:,.0f} s."
        )
    if abs(ahead_ms) > SLEW_MS_MAX:
        return "The time of day has just jumped, and the node looks at it once a second. Look again."
    return "Both agree."
