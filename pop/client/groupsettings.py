"""Settings of a group, as an argument of both clients."""

from __future__ import annotations

from penstock.pop.client.backoff import Backoff
from penstock.pop.client.durations import Duration
from penstock.pop.client.results import GroupSettings


def group_settings(
    *,
    attempts_max: int | None = None,
    backoff: Backoff | None = None,
    invisible: Duration | None = None,
    in_flight_max: int | None = None,
    fifo: bool | None = None,
    tags: str | None = None,
    sql: str | None = None,
    paused: bool | None = None,
) -> GroupSettings:
    """Return settings to create or update a group with.

    A setting that is None keeps its value in an update, and the node's default in a new group. The node checks the bounds.

    Args:
        attempts_max: Deliveries of a message before it becomes a dead letter, 1 to 65,535. 0: the node's `pop.attempts_max`.
        backoff: Wait from a failed attempt to the next: a tuple of up to 64 waits by attempt, or `Exponential`. Each wait is
            in seconds or a timedelta, and at most 30 days.
        invisible: Invisible time of pops that name none, in seconds or as a timedelta, up to 12 hours. 0: the
            node's `pop.invisible_default`.
        in_flight_max: Maximum number of messages that consumers have in flight, 1 to 100,000,000. 0: the node's
            `pop.in_flight_max`. Messages that wait for their back-off do not count.
        fifo: Deliver the messages of one message group (or, without one, of one topic) in order, one at a time.
        tags: Deliver only messages with one of these tags, such as `alarm || reading`. `*` delivers all messages.
        sql: Deliver only messages whose properties satisfy this SQL-92 expression, such as `unit = 'C' and level > 3`.
        paused: Pops get nothing. Consumers may still settle what is in flight.

    Raises:
        ValueError: Both `tags` and `sql` are given.
        TypeError, ValueError: `invisible` or a wait of `backoff` is no duration.
    """
    return GroupSettings(
        attempts_max=attempts_max,
        backoff=backoff,
        invisible=invisible,
        in_flight_max=in_flight_max,
        fifo=fifo,
        tags=tags,
        sql=sql,
        paused=paused,
    )
