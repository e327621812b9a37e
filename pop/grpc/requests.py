"""Reading the fields of requests, with their defaults and bounds."""

from __future__ import annotations

import re
from collections.abc import Sized

from penstock.pop.errors import RequestInvalid
from penstock.pop.proto import pop_pb2 as pb
from penstock.store.queues.lightqueue import End, Start

HANDLES_MAX = 16_384
"""Maximum number of handles in one request."""

_MESSAGE_ID = re.compile(r"[0-9a-fA-F]{16}")


def position_of(message_id: str) -> int:
    """Return the position that the id of a message names.

    Raises:
        RequestInvalid: it isn't an id.
    """
    if not _MESSAGE_ID.fullmatch(message_id):
        raise RequestInvalid(f"{message_id[:40]!r} is not the id of a message: give 16 hexadecimal digits")
    return int(message_id, 16)


def end_of(end: pb.Start.ValueType) -> End:
    """Return the end of a queue that a request names.

    Raises:
        RequestInvalid: the number names no end.
    """
    if end not in (pb.EARLIEST, pb.LATEST):
        raise RequestInvalid(f"start is {end}: use EARLIEST (0) or LATEST (1)")
    return "latest" if end == pb.LATEST else "earliest"


def start_of(end: pb.Start.ValueType, at_ms: int) -> Start:
    """Return where a new group begins: at the time `at_ms`, or at an end of the queue if that is 0.

    Raises:
        RequestInvalid: the request gives both, or a value that is not valid.
    """
    start = end_of(end)
    if at_ms and start == "latest":
        raise RequestInvalid("give start or start_at_ms, not both")
    return bounded("start_at_ms", at_ms, 0) or start


def bounded(name: str, value: int, default: int, maximum: int | None = None) -> int:
    """Return `value`, or `default` if it is 0.

    Raises:
        RequestInvalid: the value is negative, or above `maximum`.
    """
    if value < 0:
        raise RequestInvalid(f"{name} is {value}: it can't be negative")
    if maximum is not None and value > maximum:
        raise RequestInvalid(f"{name} is {value}: the maximum of this node is {maximum}")
    return value or default


def check_count(what: str, items: Sized, maximum: int = HANDLES_MAX) -> None:
    """Check that a request doesn't have too many items. `what` says what a client may do, as in "recall at most 5 messages".

    Raises:
        RequestInvalid: it has more than `maximum`.
    """
    if len(items) > maximum:
        verb, _, noun = what.partition(" ")
        raise RequestInvalid(f"{verb} at most {maximum} {noun} a call, not {len(items)}")
