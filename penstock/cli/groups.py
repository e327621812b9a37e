"""`penstock group`: creates, lists, changes and deletes groups."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from penstock.cli.arguments import (
    Commands,
    add_command,
    add_json,
    add_node,
    count,
    duration,
    endpoint,
    instant,
    message_id,
)
from penstock.cli.output import print_rows, row_of, shown_seconds
from penstock.pop.client.backoff import Backoff, Exponential

if TYPE_CHECKING:
    from penstock import GroupDescription, GroupSettings
    from penstock.cli.endpoint import Endpoint
    from penstock.store.queues.lightqueue import Start


ACTIONS = {
    "list": "Show the settings and the backlog of all groups, or of one.",
    "create": "Create a group on a topic filter.",
    "update": "Change settings of a group. Settings that are not named stay as they are.",
    "pause": "Pause a group: its consumers get no messages.",
    "resume": "Resume a paused group.",
    "reset": "Move a group to another place in its queue. All handles of the group become invalid.",
    "delete": "Delete a group that nobody uses, and its dead letters unless another group consumes them.",
}
"""Summary of each action, by name."""


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "group", "Create, list, change, pause, reset and delete groups.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, summary in ACTIONS.items():
        action = add_command(actions, name, summary)
        _add_target(action, name)
        add_node(action, "target")
        add_json(action)
        if name in ("create", "update"):
            _add_settings(action)
        if name == "create":
            action.add_argument(
                "--start",
                type=start,
                default="earliest",
                help="Where the group begins: earliest, latest, or an instant (%(default)s).",
            )
        if name == "delete":
            action.add_argument(
                "--force",
                action="store_true",
                help="Delete it although it has consumers or messages in flight. One that MQTT clients share is created anew.",
            )
        if name == "reset":
            to = action.add_mutually_exclusive_group(required=True)
            to.add_argument("--to", choices=("earliest", "latest"), help="Begin with the oldest message, or after the newest.")
            to.add_argument(
                "--time",
                type=instant,
                metavar="INSTANT",
                dest="time_ms",
                help="Begin with messages stored at this time.",
            )
            to.add_argument("--message-id", type=message_id, help="Begin with this message, or the next one if it is gone.")
        action.set_defaults(run=_run)


def _add_target(action: argparse.ArgumentParser, name: str) -> None:
    if name == "list":
        action.add_argument("group", nargs="?", default="", help="Name of the group (all groups).")
    else:
        action.add_argument("group", help="Name of the group.")
    if name == "create":
        action.add_argument("filter", help="Topic filter that the group consumes, such as 'plant/#'.")
    else:
        action.add_argument("filter", nargs="?", default="", help="One of the group's topic filters (all of them).")


def _add_settings(action: argparse.ArgumentParser) -> None:
    action.add_argument(
        "--attempts-max", type=count, help="Deliveries of a message before it becomes a dead letter; 0 is the node's default."
    )
    action.add_argument(
        "--backoff",
        type=backoff,
        help="Wait before another attempt: none, a list such as 1s,5s, or exponential:MIN:MAX[:FACTOR].",
    )
    action.add_argument(
        "--invisible",
        type=duration,
        metavar="TIME",
        dest="invisible_ms",
        help="Invisible time of pops that name none, such as 5m. 0 is the node's default.",
    )
    action.add_argument(
        "--in-flight-max", type=count, help="Maximum number of messages in flight at a time; 0 is the node's default."
    )
    action.add_argument(
        "--fifo", action=argparse.BooleanOptionalAction, help="Deliver the messages of a message group one at a time, in order."
    )
    expression = action.add_mutually_exclusive_group()
    expression.add_argument("--tags", help="Deliver only messages with these tags: 'a || b', or '*' for all.")
    expression.add_argument("--sql", help="Deliver only messages whose properties fit: \"level > 3 AND unit = 'degC'\".")


def _run(options: argparse.Namespace) -> int:
    return run(endpoint(options, "target"), options)


def start(text: str) -> Start:
    """Return where a group begins: `earliest`, `latest`, or a time in ms since 1970."""
    return "earliest" if text == "earliest" else "latest" if text == "latest" else instant(text)


def backoff(text: str) -> Backoff:
    """Return the back-off that is written as `none`, as `1s,5s`, or as `exponential:MIN:MAX[:FACTOR]`."""
    if text == "none":
        return ()
    try:
        if text.startswith("exponential:"):
            minimum, maximum, *factor = text.removeprefix("exponential:").split(":")
            return Exponential(duration(minimum) / 1000, duration(maximum) / 1000, *map(float, factor))
        return tuple(duration(step) / 1000 for step in text.split(","))
    except (argparse.ArgumentTypeError, ValueError, TypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is not a back-off. Write none, 1s,5s or exponential:1s:1m:2.") from None


def run(node: Endpoint, options: argparse.Namespace) -> int:
    """Run an action of `penstock group` and return its exit status."""
    from penstock import group_settings
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        action: str = options.action
        if action == "list":
            _print_groups(client.groups.describe(options.group, options.filter), options.json)
        elif action == "create":
            created = client.groups.create(options.group, options.filter, start=options.start, settings=_settings(options))
            _print_groups([created], options.json)
        elif action == "update":
            updated = client.groups.update(options.group, _settings(options), topic_filter=options.filter)
            _print_groups(updated, options.json)
        elif action in ("pause", "resume"):
            settings = group_settings(paused=action == "pause")
            _print_groups(client.groups.update(options.group, settings, topic_filter=options.filter), options.json)
        elif action == "reset":
            reset = client.groups.reset(
                options.group,
                topic_filter=options.filter,
                end=options.to,
                time_ms=options.time_ms,
                message_id=options.message_id,
            )
            _print_groups(reset, options.json)
        else:
            if not options.force:
                _check_unused(client.groups.describe(options.group, options.filter))
            client.groups.delete(options.group, topic_filter=options.filter)
    return 0


def _check_unused(groups: list[GroupDescription]) -> None:
    """Raise GroupBusy if a group has consumers or messages in flight."""
    from penstock import GroupBusy

    for group in groups:
        if group.waiting or group.in_flight:
            raise GroupBusy(
                f"The group {group.group!r} on {group.filter!r} is in use: {group.waiting} consumers wait for messages, "
                f"{group.in_flight} messages are in flight. Stop its consumers, or give --force."
            )


def _settings(options: argparse.Namespace) -> GroupSettings:
    from penstock import group_settings

    return group_settings(
        attempts_max=options.attempts_max,
        backoff=options.backoff,
        invisible=options.invisible_ms / 1000 if options.invisible_ms is not None else None,
        in_flight_max=options.in_flight_max,
        fifo=options.fifo,
        tags=options.tags,
        sql=options.sql,
    )


def _print_groups(groups: list[GroupDescription], as_json: bool) -> None:
    from penstock.pop.client.results import received_of

    names = ("visible", "retries", "in_flight", "delayed", "parked", "dead", "waiting")
    print_rows(
        [row_of(received_of(group), is_full=True) for group in groups],
        [
            [group.group, group.filter, _state(group.settings), *(str(getattr(group, n)) for n in names), _oldest(group)]
            for group in groups
        ],
        ("group", "filter", "state", *names, "oldest"),
        as_json=as_json,
        out=sys.stdout,
    )


def _oldest(group: GroupDescription) -> str:
    """Return the age of the oldest message that was not handed out."""
    return shown_seconds(group.oldest) if group.oldest is not None else ""


def _state(settings: GroupSettings) -> str:
    return " ".join(name for name in ("paused", "shared") if getattr(settings, name)) or "active"
