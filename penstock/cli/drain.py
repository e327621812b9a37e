"""`penstock drain`."""

from __future__ import annotations

import argparse
import time

from penstock.cli.apiclient import ApiClient, add_api
from penstock.cli.arguments import Commands, add_command, duration
from penstock.cli.output import print_line
from penstock.node.errors import ControlRefused, NodeNotRunning

LOOK_S = 0.2
"""Seconds between two looks at the node."""

REFUSALS_MAX = 50
"""Looks without an answer, after which the command gives up."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "drain",
        "Let a node refuse new clients, send the others away at an even pace, let consumers finish, and stop.",
    )
    command.add_argument(
        "--grace", type=duration, default=30_000, metavar="TIME", help="The longest time that it may take, such as 2m (30s)."
    )
    command.add_argument("--no-wait", action="store_true", help="Return when the drain has begun.")
    add_api(command)
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    api = ApiClient(options)
    begun = api.call("POST", "/drain", body={"grace_ms": options.grace})
    print_line(f"draining: {begun['clients']} clients of MQTT, {begun['checkpoints']} batches that consumers have")
    if not options.no_wait:
        _wait(api)
    return 0


def _wait(api: ApiClient) -> None:
    """Return when the node has stopped, or answers no more. Raises ControlRefused if it goes on to refuse."""
    last: object = None
    refusals = 0
    while True:
        try:
            shown = api.get("/drain")
        except NodeNotRunning:
            print_line("the node has stopped")
            return
        except ConnectionError as error:
            is_closed = isinstance(error.__cause__, ConnectionRefusedError)
            how = "the node has stopped: nothing listens on its admin address any more"
            print_line(how if is_closed else f"the node answers no more, so look whether it has stopped: {error}")
            return
        except ControlRefused:  # a node that stops ends a request without an answer
            refusals += 1
            if refusals > REFUSALS_MAX:
                raise
            time.sleep(LOOK_S)
            continue
        if shown != last and last is not None:
            print_line(f"left: {shown['clients']} clients of MQTT, {shown['checkpoints']} batches that consumers have")
        last = shown
        time.sleep(LOOK_S)
