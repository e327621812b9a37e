"""`penstock schedule`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from penstock import ScheduleDescription
from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.output import print_line, print_row, print_rows, time_of
from penstock.cli.actions.popclient import sync_client_of
from penstock.cli.actions.protorow import row_of


def create(node: Endpoint, name: str, topic: str, body: bytes, **settings: Any) -> None:
    """Create a schedule, and print when it occurs next. The settings are those of `ScheduleCalls.create`."""
    with sync_client_of(node) as client:
        made = client.schedules.create(name, topic, body, **settings)
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
    with sync_client_of(node) as client:
        found = client.schedules.describe(name)
    print_row(_row(found), as_json=True)


def pause(node: Endpoint, name: str) -> None:
    """Let a schedule send nothing until it is resumed."""
    with sync_client_of(node) as client:
        client.schedules.pause(name)
    print_line("paused")


def resume(node: Endpoint, name: str) -> None:
    """Let a schedule go on, and print when it occurs next."""
    with sync_client_of(node) as client:
        found = client.schedules.resume(name)
    _print_upcoming(found)


def run(node: Endpoint, name: str) -> None:
    """Let a schedule send a message now, and print its id."""
    with sync_client_of(node) as client:
        print_line(client.schedules.run(name))


def delete(node: Endpoint, name: str) -> None:
    """Delete a schedule."""
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
    if schedule.every_ms:
        return f"every {schedule.every_ms} ms"
    return f"{schedule.cron or schedule.rrule} ({schedule.zone})"


def _row(found: ScheduleDescription) -> dict[str, Any]:
    """Return a description as JSON. The body is text, as in other commands."""
    row = row_of(found)
    row["schedule"]["body"] = found.schedule.body.decode(errors="backslashreplace")
    return row


def _print_upcoming(found: ScheduleDescription) -> None:
    for ms in found.upcoming_ms:
        print_line(time_of(ms) or "")
    if not found.upcoming_ms:
        print_line("ended")
