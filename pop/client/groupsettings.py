"""Settings of a group, as an argument of both clients."""

from __future__ import annotations

from penstock.pop.backoff import Backoff, Exponential
from penstock.pop.client.results import GroupSettings
from penstock.pop.proto import pop_pb2 as pb


def group_settings(
    *,
    attempts_max: int | None = None,
    backoff: Backoff | None = None,
    invisible_ms: int | None = None,
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
        backoff: Wait in ms from a failed attempt to the next: a tuple of up to 64 waits by attempt, or `Exponential`. Each wait
            is at most 30 days.
        invisible_ms: Invisible time in ms of pops that name none, 1 to `pop.invisible_ms_max`. 0: the node's
            `pop.invisible_ms_default`.
        in_flight_max: Maximum number of messages that consumers have in flight, 1 to 100,000,000. 0: the node's
            `pop.in_flight_max`. Messages that wait for their back-off do not count.
        fifo: Deliver the messages of one message group (or, without one, of one topic) in order, one at a time.
        tags: Deliver only messages with one of these tags, such as `alarm || reading`. `*` delivers all messages.
        sql: Deliver only messages whose properties satisfy this SQL-92 expression, such as `unit = 'C' and level > 3`.
        paused: Pops get nothing. Consumers may still settle what is in flight.

    Raises:
        ValueError: Both `tags` and `sql` are given.
    """
    if tags is not None and sql is not None:
        raise ValueError("a group filters by tags or by sql, not by both")
    settings = GroupSettings(
        attempts_max=attempts_max,
        invisible_ms=invisible_ms,
        in_flight_max=in_flight_max,
        fifo=fifo,
        paused=paused,
    )
    if isinstance(backoff, Exponential):
        rule = pb.Exponential(min_ms=backoff.min_ms, max_ms=backoff.max_ms, factor=backoff.factor)
        settings.backoff.CopyFrom(pb.Backoff(exponential=rule))
    elif backoff is not None:
        settings.backoff.CopyFrom(pb.Backoff(list_ms=backoff))
    if tags is not None:
        settings.expression, settings.expression_type = tags, pb.TAG
    elif sql is not None:
        settings.expression, settings.expression_type = sql, pb.SQL
    return settings
