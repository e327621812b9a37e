"""Chains of stages: a change of invisible time ends a stage of a delivery and begins the next one under a new key."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.spark.parquet.schema import Cause, Stage
from penstock.spark.records import CONTINUED, GIVEN_BACK, NACKED, POPPED, WAITING, Array
from penstock.store.record import CONSUMED, EXPIRED, LAST_MEMBER_LEFT, Kind

UNKNOWN = -1
"""Stands for a time, a position, a stage or an attempt that is not known."""

STAGE_DTYPE = np.dtype(
    [
        ("key", "<i8"),
        ("delivery_id", "<i8"),
        ("position", "<i8"),
        ("at_ms", "<i8"),
        ("popped_ms", "<i8"),
        ("deadline_ms", "<i8"),
        ("return_ms", "<i8"),
        ("group_id", "<i8"),
        ("message_position", "<i8"),
        ("attempt", "<i4"),
        ("source", "<i4"),
        ("stage", "<i4"),
    ]
)
"""A stage that has not ended, or a message that came back and waits for its next delivery."""

QUEUED = 3
"""Stage of a message that came back and has not been handed out again. `position` and `at_ms` are those of the record that
brought it back, and `key` is that of the stage which that record ended."""

FAR = np.iinfo(np.int64).max

STAGES = list(Stage)
CAUSES = list(Cause)
"""A stage or a cause is an index into its list while it is in an array."""

_OF_EVENT = {
    int(Kind.POP_ACK): Cause.ACKED,
    int(Kind.POP_INVISIBLE_CHANGED): Cause.EXTENDED,
    NACKED: Cause.NACKED,
    GIVEN_BACK: Cause.SUSPENDED,
    int(Kind.POP_REVIVED): Cause.UNRECORDED,
    int(Kind.POP_DEAD_LETTER): Cause.DEAD_LETTERED,
    int(Kind.GROUP_OFFSET_RESET): Cause.RESET,
    int(Kind.GROUP_DELETED): Cause.DELETED,
}


_RETURNING = [CAUSES.index(cause) for cause in (Cause.TIMED_OUT, Cause.RETURNED, Cause.WAITED)]
"""Causes after which a message waits for its next delivery."""


class ClockMove(NamedTuple):
    """A step of the node's clock (`store.clocksteps`). It moves deadlines that were set from `begin_ms` to `end_ms`."""

    position: int
    begin_ms: int
    end_ms: int
    step_ms: int


class GroupVoid(NamedTuple):
    """A reset or a deletion of a group."""

    position: int
    group_id: int


class Chains(NamedTuple):
    """The stages of a segment with what is known of their deliveries."""

    begun: Array
    """Of `STAGE_DTYPE`, one per stage that begins in the segment, in the order of the arguments."""
    ended: Array
    """Of `STAGE_DTYPE`, one per end: the stage that ended. Fields that are not known are `UNKNOWN`."""
    is_repeated: Array
    """Whether an end is of a stage that had already ended in the segment, one per end."""
    open: Array
    """Of `STAGE_DTYPE`: the stages that are open after the segment, by key."""


def chained(open_before: Array, begun: dict[str, Array], ended: dict[str, Array], moves: list[ClockMove]) -> Chains:
    """Resolve the chains of a segment.

    Args:
        open_before: the stages that were open before the segment, of `STAGE_DTYPE`, by key.
        begun: the columns of `records.handed_out`, and `parent`: the key that the stage continues, or `UNKNOWN`. By key.
        ended: the columns of `records.settled`, by position.
        moves: in the order of the log.
    """
    known = np.empty(len(open_before) + len(begun["key"]), STAGE_DTYPE)
    known[: len(open_before)] = open_before
    fresh = known[len(open_before) :]
    for name in ("key", "position", "deadline_ms", "return_ms", "group_id", "message_position", "attempt", "source"):
        fresh[name] = begun[name]
    fresh["at_ms"] = begun["pop_ms"]
    fresh["stage"] = begun["via"]
    is_popped = begun["via"] == POPPED
    fresh["delivery_id"] = np.where(is_popped, begun["key"], begun["parent"])
    fresh["popped_ms"] = np.where(is_popped, begun["pop_ms"], UNKNOWN)
    parents, has_parent = find(known["key"], begun["parent"])
    first = np.arange(len(known))
    own = np.arange(len(open_before), len(known))
    first[own[has_parent]] = parents[has_parent]
    if has_parent.any():  # most segments of most logs have no changes
        while not np.array_equal(further := first[first], first):
            first = further
        known["delivery_id"], known["popped_ms"] = known["delivery_id"][first], known["popped_ms"][first]

    at, is_known = find(known["key"], ended["key"])
    rows = np.arange(len(at))
    end = np.full(len(known), len(rows))  # the row that ends each stage: the first one of its key
    np.minimum.at(end, at[is_known], rows[is_known])
    ends_at = np.append(ended["position"], FAR)[end]
    is_repeated = is_known.copy()
    is_repeated[end[end < len(rows)]] = False
    for move in moves:
        is_set_before = (known["at_ms"] >= move.begin_ms) & (known["at_ms"] <= move.end_ms) & (known["key"] < move.position)
        is_moved = is_set_before & (known["deadline_ms"] > move.end_ms) & (ends_at > move.position)
        known["deadline_ms"][is_moved] += move.step_ms
        known["return_ms"][is_moved] += move.step_ms

    over = np.take(known, at) if len(known) else np.empty(len(at), STAGE_DTYPE)
    if not is_known.all():
        unknown = np.full(np.count_nonzero(~is_known), UNKNOWN, STAGE_DTYPE)
        unknown["key"] = unknown["delivery_id"] = ended["key"][~is_known]
        over[~is_known] = unknown
    return Chains(fresh, over, is_repeated, known[ends_at == FAR])


def queued(before: Array, chains: Chains, ended: dict[str, Array], found: Array, voids: list[GroupVoid]) -> Array:
    """Return the messages that wait for their next delivery after a segment, of `STAGE_DTYPE`, by group and message.

    A reset or a deletion of a group makes it forget them.

    Args:
        before: the messages that waited before the segment.
        chains: what `chained` returns.
        ended: the columns of `records.settled`.
        found: what `causes` returns.
        voids: the resets and deletions in the segment.
    """
    is_back = np.isin(found, _RETURNING) & (chains.ended["message_position"] != UNKNOWN) & ~chains.is_repeated
    back = chains.ended[is_back]
    back["position"], back["at_ms"], back["stage"] = ended["position"][is_back], ended["at_ms"][is_back], QUEUED
    came = np.concatenate([before, back])
    if not len(came):
        return came
    popped = chains.begun[chains.begun["stage"] == POPPED]
    taken = popped[find(np.unique(came["message_position"]), popped["message_position"])[1]]
    events = np.concatenate([came, taken])
    events = events[np.lexsort((events["position"], events["message_position"], events["group_id"]))]
    is_last = np.ones(len(events), bool)
    is_last[:-1] = (events["group_id"][:-1] != events["group_id"][1:]) | (
        events["message_position"][:-1] != events["message_position"][1:]
    )
    waiting: Array = events[is_last & (events["stage"] == QUEUED)]
    for void in voids:
        waiting = waiting[(waiting["group_id"] != void.group_id) | (waiting["position"] > void.position)]
    return waiting


def find(keys: Array, wanted: Array) -> tuple[Array, Array]:
    """Return the index of each wanted key among the sorted `keys`, and whether it is there."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64), np.zeros(len(wanted), bool)
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return at, keys[at] == wanted


def causes(over: Array, ended: dict[str, Array], is_uncounted: Array, may_have_expired: Array) -> Array:
    """Return the cause of each end, as an index into `CAUSES`.

    Args:
        over: the stages that ended, of `STAGE_DTYPE`.
        ended: the columns of `records.settled`, and `flags` of the records.
        is_uncounted: whether the record of a revival says that the attempt does not count.
        may_have_expired: whether an acknowledgement without a flag may be that of the node for an expired message.
    """
    found = np.empty(len(over), np.int8)
    for event, cause in _OF_EVENT.items():
        found[ended["event"] == event] = CAUSES.index(cause)
    is_revived = (ended["event"] == int(Kind.POP_REVIVED)) & (over["stage"] != UNKNOWN)
    is_wait = over["stage"] == WAITING
    is_early = is_uncounted & (ended["at_ms"] < over["deadline_ms"])
    found[is_revived] = CAUSES.index(Cause.TIMED_OUT)
    found[is_revived & is_early] = CAUSES.index(Cause.RETURNED)
    found[is_revived & is_wait] = CAUSES.index(Cause.WAITED)
    is_ack, flags = ended["event"] == int(Kind.POP_ACK), ended["flags"]
    found[is_ack & may_have_expired & ((flags & CONSUMED) == 0)] = CAUSES.index(Cause.UNRECORDED)
    found[is_ack & ((flags & EXPIRED) != 0)] = CAUSES.index(Cause.EXPIRED)
    is_unused = (ended["event"] == int(Kind.GROUP_DELETED)) & ((flags & LAST_MEMBER_LEFT) != 0)
    found[is_unused] = CAUSES.index(Cause.LAST_MEMBER_LEFT)
    return found


assert [STAGES[each] for each in (POPPED, CONTINUED, WAITING, QUEUED)] == [*Stage]
