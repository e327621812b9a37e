"""`penstock timer`."""

from __future__ import annotations

import argparse

from penstock.cli.commands.arguments import Commands, add_command, add_pop_address, count, pop_endpoint


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "timer", "Find, cancel or reschedule a delayed message that is pending.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in (
        ("find", "Print a pending message, as JSON."),
        ("cancel", "Cancel a pending message."),
        ("reschedule", "Let a pending message be delivered at another time, and print it with its new handle, as JSON."),
    ):
        action = add_command(actions, name, summary)
        action.add_argument("handle", nargs="?", default="", help="Recall handle of the message.")
        action.add_argument("--topic", default="", help="Topic of the message, in place of a handle.")
        action.add_argument("--key", default="", help="Key of the message, with --topic.")
        if name == "reschedule":
            when = action.add_mutually_exclusive_group(required=True)
            when.add_argument("--delay-ms", type=count, default=0, metavar="MS", help="Deliver it after so many milliseconds.")
            when.add_argument("--deliver-at-ms", type=count, default=0, metavar="MS", help="Deliver it then, in ms since 1970.")
        add_pop_address(action)
        action.set_defaults(run=_act)


def _act(options: argparse.Namespace) -> int:
    from penstock.cli.actions import timers

    names = (pop_endpoint(options), options.handle, options.topic, options.key)
    if options.action == "find":
        timers.find(*names)
    elif options.action == "cancel":
        timers.cancel(*names)
    else:
        timers.reschedule(*names, delay_ms=options.delay_ms, deliver_at_ms=options.deliver_at_ms)
    return 0
