"""`penstock timer`."""

from __future__ import annotations

import sys
from typing import Any

from penstock import Timer
from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.output import cells_of, print_line, print_row, print_rows, time_of
from penstock.cli.actions.popclient import sync_client_of

_COLUMNS = ("deliver_at", "topic", "key", "size", "from", "recall_handle")


def list_timers(
    node: Endpoint,
    filter: str,
    *,
    key: str,
    from_ms: int,
    before_ms: int,
    user: str,
    client_id: str,
    limit: int,
    page_token: str,
    as_json: bool,
) -> None:
    """Print pending messages in order of delivery time, and on stderr the token of the next page. See `TimerCalls.list`."""
    with sync_client_of(node) as client:
        page = client.timers.list(
            filter,
            key=key,
            from_ms=from_ms,
            before_ms=before_ms,
            user=user,
            client_id=client_id,
            limit=limit,
            page_token=page_token,
        )
    rows = [_row(timer) for timer in page.timers]
    print_rows(
        rows,
        [cells_of({**row, "from": _sender(timer)}, _COLUMNS) for row, timer in zip(rows, page.timers, strict=True)],
        _COLUMNS,
        as_json=as_json,
        out=sys.stdout,
    )
    if page.next_page_token:
        print_line(f"more follow: --page-token {page.next_page_token}", out=sys.stderr)


def count_timers(node: Endpoint, *, as_json: bool) -> None:
    """Print how many messages are pending, how many of them are due soon, and when the next one is delivered."""
    with sync_client_of(node) as client:
        found = client.timers.count()
    row = {
        "pending": found.pending,
        "due_minute": found.due_minute,
        "due_hour": found.due_hour,
        "due_day": found.due_day,
        "next_ms": found.next_ms,
        "next": time_of(found.next_ms),
    }
    columns = [name for name in row if name != "next_ms"]
    print_rows([row], [cells_of(row, columns)], columns, as_json=as_json, out=sys.stdout)


def find(node: Endpoint, handle: str, topic: str, key: str) -> None:
    """Print a pending message, which is named by its handle, or by its topic and key."""
    with sync_client_of(node) as client:
        print_row(_row(client.timers.find(handle, topic=topic, key=key)), as_json=True)


def cancel(node: Endpoint, handle: str, topic: str, key: str) -> None:
    """Cancel a pending message."""
    with sync_client_of(node) as client:
        client.timers.cancel(handle, topic=topic, key=key)
    print_line("cancelled")


def cancel_all(node: Endpoint, filter: str, *, key: str, from_ms: int, before_ms: int, user: str, client_id: str) -> None:
    """Cancel all pending messages that a listing has, and print how many. See `TimerCalls.cancel_all`."""
    with sync_client_of(node) as client:
        cancelled = client.timers.cancel_all(
            filter, key=key, from_ms=from_ms, before_ms=before_ms, user=user, client_id=client_id
        )
    print_line(f"{cancelled} cancelled")


def reschedule(node: Endpoint, handle: str, topic: str, key: str, *, delay_ms: int, deliver_at_ms: int) -> None:
    """Let a pending message be delivered at another time, and print it with its new handle."""
    with sync_client_of(node) as client:
        moved = client.timers.reschedule(handle, topic=topic, key=key, delay_ms=delay_ms, deliver_at_ms=deliver_at_ms)
    print_row(_row(moved), as_json=True)


def _sender(timer: Timer) -> str:
    return " ".join(name for name in (timer.user, timer.source, timer.client_id) if name)


def _row(timer: Timer) -> dict[str, Any]:
    return {
        "recall_handle": timer.recall_handle,
        "message_id": timer.message_id,
        "topic": timer.topic,
        "key": timer.key,
        "deliver_at_ms": timer.deliver_at_ms,
        "deliver_at": time_of(timer.deliver_at_ms),
        "size": timer.size,
        "user": timer.user,
        "source": timer.source,
        "client_id": timer.client_id,
    }
