"""`penstock story`."""

from __future__ import annotations

import argparse

from penstock.cli.arguments import Commands, add_command, add_node, data_dir_of, position


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(
        commands,
        "story",
        "Print what happened to a message, in order, from the tables and the log; the node may be running.",
    )
    command.add_argument("message", type=position, metavar="MESSAGE", help="Id of the message, or its position as a number.")
    add_node(command, "data_dir")
    command.add_argument("--group", metavar="GROUP", help="Only what happened in the group of this name.")
    command.add_argument("--json", action="store_true", help="Print the story as one JSON object.")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    from penstock.cli.storytext import print_story

    print_story(data_dir_of(options), options.message, group=options.group, as_json=options.json)
    return 0
