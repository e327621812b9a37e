"""`penstock schedule`: lets the node send messages again and again."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.cli.arguments import (
    Commands,
    add_body,
    add_command,
    add_json,
    add_node,
    count,
    duration,
    duration_within,
    endpoint,
    instant,
    read_body,
)
from penstock.cli.output import body_fields, print_line, print_row, print_rows, row_of, time_of
from penstock.store.durations import format_duration

if TYPE_CHECKING:
    from penstock import ScheduleDescription
    from penstock.cli.endpoint import Endpoint


def add_to(commands: Commands) -> None:
    """Add the command."""
    command = add_command(commands, "schedule", "Let the node send messages again and again, by a rule.")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")

    create = add_command(actions, "create", "Create a schedule, and print when it occurs next.")
    create.add_argument("name", help="Names the schedule on this node.")
    create.add_argument("topic", help="MQTT topic of its messages.")
    add_body(create, is_required=False)
    rule = create.add_mutually_exclusive_group(required=True)
    rule.add_argument(
        "--every",
        type=interval,
        default=0,
        metavar="TIME",
        dest="every_ms",
        help="Occur again and again after this time, such as 10m.",
    )
    rule.add_argument("--cron", default="", metavar="FIELDS", help='Occur by a cron expression, such as "30 2 * * MON-FRI".')
    rule.add_argument("--rrule", default="", metavar="RULE", help="Occur by a rule of RFC 5545, such as FREQ=WEEKLY;BYDAY=MO.")
    create.add_argument("--zone", default="UTC", help="Time zone of --cron and --rrule, such as Europe/Berlin (%(default)s).")
    create.add_argument("--template", action="store_true", help="Fill in {{occurrence}} and the like in the body.")
    create.add_argument("--property", action="append", default=[], metavar="NAME=VALUE", help="Property of its messages.")
    create.add_argument("--tag", default="", help="Tag of its messages.")
    create.add_argument("--start", type=instant, default=0, metavar="INSTANT", help="Nothing occurs before (now).")
    create.add_argument("--end", type=instant, default=0, metavar="INSTANT", help="Nothing occurs after.")
    create.add_argument("--count", type=count, default=0, help="End after so many messages.")
    create.add_argument(
        "--missed",
        choices=("skip", "once", "all", "latest"),
        default="skip",
        help="What becomes of occurrences that the node could not send in time (%(default)s).",
    )
    create.add_argument(
        "--grace",
        type=duration,
        default=0,
        metavar="TIME",
        dest="grace_ms",
        help="How late is too late (1m).",
    )
    create.add_argument("--replace", action="store_true", help="Replace the schedule of this name.")
    add_node(create, "target")
    create.set_defaults(run=_create)

    listing = add_command(actions, "list", "List schedules by name.")
    listing.add_argument("prefix", nargs="?", default="", help="What their names begin with.")
    listing.add_argument("--after", default="", metavar="NAME", help="Begin after this schedule.")
    listing.add_argument("--limit", type=count, default=100, help="Maximum number of schedules (%(default)s).")
    add_json(listing)
    add_node(listing, "target")
    listing.set_defaults(run=_list)

    for name, summary in (
        ("show", "Print all about a schedule, as JSON."),
        ("pause", "Let a schedule send nothing until it is resumed."),
        ("resume", "Let a schedule go on with what comes next."),
        ("run", "Let a schedule send a message now, besides its occurrences."),
        ("delete", "Delete a schedule."),
    ):
        action = add_command(actions, name, summary)
        action.add_argument("name", help="Name of the schedule.")
        add_node(action, "target")
        action.set_defaults(run=_act)


def interval(text: str) -> int:
    """Return the time between occurrences in ms, which a node bounds."""
    from penstock.timer.options import YEAR_MS, TimerOptions

    return duration_within(text, TimerOptions().schedule_every_ms_min, 10 * YEAR_MS)


def _create(options: argparse.Namespace) -> int:
    properties: dict[str, str] = {}
    for pair in options.property:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"the property {pair!r} is not of the form NAME=VALUE")
        properties[name] = value
    create(
        endpoint(options, "target"),
        options.name,
        options.topic,
        read_body(options.body),
        every=options.every_ms / 1000,
        cron=options.cron,
        rrule=options.rrule,
        zone=options.zone,
        template=options.template,
        properties=properties,
        tag=options.tag,
        start_ms=options.start,
        end_ms=options.end,
        count=options.count,
        missed=options.missed,
        grace=options.grace_ms / 1000,
        replace=options.replace,
    )
    return 0


def _list(options: argparse.Namespace) -> int:
    list_schedules(endpoint(options, "target"), options.prefix, after=options.after, limit=options.limit, as_json=options.json)
    return 0


def _act(options: argparse.Namespace) -> int:
    ACTIONS[options.action](endpoint(options, "target"), options.name)
    return 0


def create(node: Endpoint, name: str, topic: str, body: bytes, **settings: Any) -> None:
    """Create a schedule, and print when it occurs next. The settings are those of `ScheduleCalls.create`."""
    from penstock.cli.popclient import sync_client_of
    from penstock.pop.errors import ScheduleExists

    with sync_client_of(node) as client:
        try:
            made = client.schedules.create(name, topic, body, **settings)
        except ScheduleExists as error:
            told = f"there is a schedule {name!r} already: add --replace, delete it, or choose another name"
            raise ScheduleExists(told) from error
    _print_upcoming(made)


def list_schedules(node: Endpoint, prefix: str, *, after: str, limit: int, as_json: bool) -> None:
    """Print schedules by name.

    Args:
        node: its gRPC listener.
        prefix: what their names begin with.
        after: name of the schedule after which to begin, or empty to begin with the first.
        limit: maximum number of schedules.
        as_json: print one JSON object a line in place of a table.
    """
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        found = client.schedules.list(prefix=prefix, after=after, limit=limit)
    print_rows(
        [_row(each) for each in found],
        [
            [
                each.schedule.name,
                each.schedule.topic,
                _rule(each),
                "paused" if each.paused else time_of(each.next_ms) or "ended",
                str(each.sent),
                each.error,
            ]
            for each in found
        ],
        ("name", "topic", "rule", "next", "sent", "error"),
        as_json=as_json,
        out=sys.stdout,
    )


def show(node: Endpoint, name: str) -> None:
    """Print all about a schedule, as JSON."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        found = client.schedules.describe(name)
    print_row(_row(found), as_json=True)


def pause(node: Endpoint, name: str) -> None:
    """Let a schedule send nothing until it is resumed."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        client.schedules.pause(name)
    print_line("paused")


def resume(node: Endpoint, name: str) -> None:
    """Let a schedule go on, and print when it occurs next."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        found = client.schedules.resume(name)
    _print_upcoming(found)


def run(node: Endpoint, name: str) -> None:
    """Let a schedule send a message now, and print its id."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        print_line(client.schedules.run(name))


def delete(node: Endpoint, name: str) -> None:
    """Delete a schedule."""
    from penstock.cli.popclient import sync_client_of

    with sync_client_of(node) as client:
        client.schedules.delete(name)
    print_line("deleted")


ACTIONS: dict[str, Callable[[Endpoint, str], None]] = {
    "show": show,
    "pause": pause,
    "resume": resume,
    "run": run,
    "delete": delete,
}
"""What each action does with one schedule."""


def _rule(found: ScheduleDescription) -> str:
    schedule = found.schedule
    if schedule.every:
        return f"every {format_duration(round(schedule.every * 1000))}"
    return f"{schedule.cron or schedule.rrule} ({schedule.zone})"


def _row(found: ScheduleDescription) -> dict[str, Any]:
    """Return a description as JSON. The body is as in other commands."""
    from penstock.pop.client.results import received_of

    row = row_of(received_of(found))
    row["schedule"] |= body_fields(found.schedule.body)
    return row


def _print_upcoming(found: ScheduleDescription) -> None:
    for ms in found.upcoming_ms:
        print_line(time_of(ms) or "")
    if not found.upcoming_ms:
        print_line("ended")
