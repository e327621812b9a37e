"""`penstock timer`."""

from __future__ import annotations

from penstock import SyncClient, Timer
from penstock.cli.actions.endpoint import Endpoint
from penstock.cli.actions.output import print_line, print_row, time_of
from penstock.cli.actions.security import security_of


def find(node: Endpoint, handle: str, topic: str, key: str) -> None:
    """Print a pending message, which is named by its handle, or by its topic and key."""
    with SyncClient(str(node.address), security=security_of(node)) as client:
        _print(client.timers.find(handle, topic=topic, key=key))


def cancel(node: Endpoint, handle: str, topic: str, key: str) -> None:
    """Cancel a pending message."""
    with SyncClient(str(node.address), security=security_of(node)) as client:
        client.timers.cancel(handle, topic=topic, key=key)
    print_line("cancelled")


def reschedule(node: Endpoint, handle: str, topic: str, key: str, *, delay_ms: int, deliver_at_ms: int) -> None:
    """Let a pending message be delivered at another time, and print it with its new handle."""
    with SyncClient(str(node.address), security=security_of(node)) as client:
        _print(client.timers.reschedule(handle, topic=topic, key=key, delay_ms=delay_ms, deliver_at_ms=deliver_at_ms))


def _print(timer: Timer) -> None:
    row = {
        "recall_handle": timer.recall_handle,
        "message_id": timer.message_id,
        "topic": timer.topic,
        "key": timer.key,
        "deliver_at_ms": timer.deliver_at_ms,
        "deliver_at": time_of(timer.deliver_at_ms),
    }
    print_row(row, as_json=True)
