"""The story of a message: what happened to it, in order, from the tables and from the end of the log that they lack."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.fs
import pyarrow.parquet as pq

from penstock.spark import segments
from penstock.spark.errors import MessageUnknown, TablesInvalid
from penstock.spark.parquet.files import DIRECTORY, SegmentFiles, TransientFiles, reading, segment_files
from penstock.spark.parquet.schema import (
    DAMAGES,
    DELIVERIES,
    ENDS,
    MESSAGES,
    OPEN,
    SETTINGS,
    Cause,
    Change,
    DamageCause,
    ParquetTable,
    Stage,
)
from penstock.spark.parquet.writer import follow
from penstock.spark.segments import LogSurvey

BATCH_BYTES = 8 * 1024 * 1024
BATCH_ROWS_MAX = 65_536
"""How much is decoded at once. A table of messages is as large as their bodies."""

BUFFER_BYTES = 1024 * 1024
"""How much of a column is loaded at once."""

_Row = dict[str, Any]

_PARQUET, _LOCAL = ds.ParquetFileFormat(), pa.fs.LocalFileSystem()


class State(StrEnum):
    """What a message is to a group at the end of the log."""

    IN_FLIGHT = "in_flight"
    """A consumer has it."""
    WAITING = "waiting"
    """It was nacked or suspended, and its wait is not over."""
    QUEUED = "queued"
    """It came back, and waits for its next delivery."""
    ENDED = "ended"
    """The group gets it no more, unless an operator redrives it or resets the group."""
    UNKNOWN = "unknown"
    """The records that say it are missing, or do not say it."""


_STATES = {
    Stage.POPPED: State.IN_FLIGHT,
    Stage.EXTENDED: State.IN_FLIGHT,
    Stage.WAITING: State.WAITING,
    Stage.QUEUED: State.QUEUED,
}

_FINAL = {Cause.ACKED, Cause.EXPIRED, Cause.DEAD_LETTERED, Cause.RESET, Cause.DELETED, Cause.LAST_MEMBER_LEFT}
"""Causes after which a group does not get a message again."""

_RETURNING = {Cause.TIMED_OUT, Cause.RETURNED, Cause.WAITED}
"""Causes after which a message is queued for its next delivery."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedMessage:
    """What a message is. The fields are those of the table `messages`."""

    at_ms: int
    topic: str
    qos: int
    body_bytes: int
    retain: bool
    delayed: bool
    recalled: bool | None
    half: bool
    rolled_back: bool | None
    copied_at: int | None
    tag: str | None
    keys: list[str] | None
    message_group: str | None
    content_type: str | None
    deliver_at_ms: int | None
    expires_at_ms: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened to a message in a group."""

    at_ms: int
    position: int
    """Position of the record."""
    event: str
    """`popped`, or the `Cause` for which a stage of a delivery ended. A group that is reset or deleted forgets a message that
    is queued: then it is `reset` or `deleted`, too. It is `extended` or `waiting` for a stage whose delivery is unknown."""
    delivery_id: int | None
    """Null where no delivery ended: the message was queued."""
    attempt: int | None
    after_ms: int | None = None
    """Time since the pop; null of the pop itself."""
    deadline_ms: int | None = None
    return_ms: int | None = None
    """The deadline from now on, and the time by which the message is back after it; null of what ends a delivery."""
    counted: bool | None = None
    reason: str | None = None
    """As in the table `ends`."""
    repeated: bool = False
    """Whether the stage had already ended, so that this changes nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """What a group waits for: a row of the table `open`."""

    since_ms: int
    attempt: int
    deadline_ms: int | None
    return_ms: int | None
    """Null of a message that is queued."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStory:
    """What happened to a message in a group, in order."""

    group_id: int
    group: str
    state: State
    pending: Pending | None
    """Null unless the state is `in_flight`, `waiting` or `queued`."""
    events: list[Event]


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingRange:
    """A range of the log, at or after the message, whose records are missing: what happened in it is in no story."""

    position: int
    until_position: int
    at_ms: int
    cause: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """What happened to a message up to the end of the log."""

    position: int
    message: PublishedMessage | None
    """Null if the record of the message is missing, and its deliveries are not."""
    groups: list[GroupStory]
    """In the order of their first deliveries."""
    damages: list[MissingRange]
    start_position: int
    end_position: int
    """Range that the tables and the log cover, except for the damages."""
    end_ms: int
    """Store time of the last record."""


def read_story(data_dir: Path, position: int, scratch: Path, group: str | None = None) -> Story:
    """Return the story of a message. The node may be running.

    It reads the files of the segment that has the message and of later ones, and only the rows of the message in them.

    Args:
        data_dir: the data directory of a node.
        position: position of the message, which is its id.
        scratch: an empty directory, for the end of the log that the tables lack.
        group: name of the only group whose deliveries are wanted; None for all.

    Raises:
        MessageUnknown: neither the tables nor the log have the message, or anything that happened to it.
        LogMissing: the directory holds no log, or retention has removed a segment during the read.
        LogCorrupt, RecordCorrupt: the log is damaged.
        TablesInvalid: the tables are damaged, or of another log.
    """
    with reading(data_dir / DIRECTORY):
        return _read(data_dir, position, scratch, group)


def _read(data_dir: Path, position: int, scratch: Path, group: str | None) -> Story:
    log = segments.survey(data_dir)
    tables = data_dir / DIRECTORY
    written = follow(data_dir, scratch, log, TransientFiles(), position)
    files = [*segment_files(tables, written), *segment_files(scratch, log.end)]
    start = min([log.start, *(each.base for each in files[:1])])
    own = bisect_right([each.base for each in files], position) - 1
    later = files[max(own, 0) :]
    damages = [
        MissingRange(**row)
        for row in _rows(
            later, DAMAGES, ["position", "until_position", "at_ms", "cause"], pc.field("until_position") > position
        )
    ]
    message = _message(later, position) if position < log.end else None
    groups = _groups(later, position, group)
    if message is None and not (groups or (group is not None and _groups(later, position, None))):
        raise MessageUnknown(_why_unknown(position, start, log, damages))
    return Story(
        position=position,
        message=message,
        groups=groups,
        damages=damages,
        start_position=start,
        end_position=log.end,
        end_ms=log.last_ms,
    )


def _why_unknown(position: int, start: int, log: LogSurvey, damages: list[MissingRange]) -> str:
    covered = f"The tables and the log cover the positions from {start} to {log.end}"
    missing = next((each for each in damages if each.position <= position), None)
    if position >= log.end:
        reason = f"and position {position} is after them. The id is of another node, or the log has lost its end."
    elif position < start:
        reason = f"and position {position} is before them. Retention had dropped it before it was in the tables."
    elif missing is not None:
        gap = f"{position} is in a gap, from {missing.position} to {missing.until_position}"
        is_dropped = missing.cause == DamageCause.DROPPED
        cause = "retention had dropped it before it was in the tables" if is_dropped else "`penstock repair` set it aside"
        reason = f"but position {gap}: {cause}."
    else:
        reason = f"but no message begins at position {position}. Compare the id with the one that was printed."
    return f"There is no message {position:016x}. {covered}, {reason}"


# --- rows of the tables -----------------------------------------------------------------------------------------------


def _rows(files: Iterable[SegmentFiles], table: ParquetTable, columns: list[str], condition: Any) -> Iterator[_Row]:
    """Yield the rows of a table that fulfil a condition. The columns include those of the condition.

    Arrow skips a file by its statistics, and reads only the columns of the condition until it has found a row.
    """
    for each in files:
        path = each.path(table.name)
        try:
            count = _PARQUET.make_fragment(str(path), _LOCAL).count_rows(filter=condition)
            found = _found(path, columns, condition, count) if count else []
        except (pa.ArrowInvalid, OSError) as error:
            raise TablesInvalid(
                f"{path} is damaged ({error}). Delete {each.directory}, and run `penstock tables backfill` to make the tables "
                f"of what the log still has."
            ) from error
        yield from found


def _found(path: Path, columns: list[str], condition: Any, count: int) -> list[_Row]:
    """Return the rows of a file that fulfil a condition, given how many they are."""
    found: list[_Row] = []
    # Datasets and `read` would decode the whole file at once.
    with pq.ParquetFile(path, buffer_size=BUFFER_BYTES, pre_buffer=False) as file:
        group = file.metadata.row_group(0)
        batch_rows = min(max(BATCH_BYTES * group.num_rows // group.total_byte_size, 1), BATCH_ROWS_MAX)
        for batch in file.iter_batches(batch_rows, columns=columns, use_threads=False):
            found += pa.Table.from_batches([batch]).filter(condition).to_pylist()
            if len(found) == count:
                break
    return found


def _message(files: list[SegmentFiles], position: int) -> PublishedMessage | None:
    """Return the message from the first file, or from a copy in a later one."""
    names = [name for name in PublishedMessage.__dataclass_fields__ if name != "body_bytes"]
    row = next(_rows(files, MESSAGES, [*names, "position", "body"], pc.field("position") == position), None)
    return None if row is None else PublishedMessage(**{name: row[name] for name in names}, body_bytes=len(row["body"]))


# --- groups -----------------------------------------------------------------------------------------------------------


_OF_BOTH = ["message_position", "group_id", "group_name", "stage", "position", "at_ms", "attempt"]
_OF_STAGES = [*_OF_BOTH, "deadline_ms", "return_ms"]
_OF_ENDS = [*_OF_BOTH, "delivery_id", "key", "cause", "counted", "reason", "repeated", "popped_ms"]


def _groups(files: list[SegmentFiles], position: int, name: str | None) -> list[GroupStory]:
    """Return what happened to a message in each group, or in the groups of one name."""
    is_wanted = pc.field("message_position") == position
    if name is not None:
        is_wanted &= pc.field("group_name") == name
    begun = [*_rows(files, DELIVERIES, [*_OF_STAGES, "delivery_id", "key"], is_wanted)]
    known = {row["key"]: row for row in begun}
    # Nothing names the message at an end whose stage is unknown, or had ended in an earlier segment.
    keys = pa.array(sorted(known.keys() | {row["delivery_id"] for row in begun}), pa.int64())
    is_end = is_wanted | (pc.field("stage").is_null() & pc.field("key").isin(keys))
    ended = [*_rows(files, ENDS, _OF_ENDS, is_end)]
    pending = {row["group_id"]: row for row in _rows(files[-1:], OPEN, _OF_STAGES, is_wanted)}
    names: dict[int, str] = {}
    by_group: dict[int, list[Event]] = {}
    for row in sorted([*begun, *ended, *pending.values()], key=lambda row: row["position"]):
        names.setdefault(row["group_id"], row["group_name"])
    for group_id, event in _events(begun, ended, known):
        by_group.setdefault(group_id, []).append(event)
    forgotten = {
        group_id
        for group_id, events in by_group.items()
        if group_id not in pending and (last := _last(events)) is not None and last.event in _RETURNING
    }
    if forgotten:
        _add_voids(files, by_group, forgotten)
    return [
        GroupStory(
            group_id=group_id,
            group=group_name,
            state=_state(by_group.get(group_id, []), pending.get(group_id)),
            pending=_pending(pending.get(group_id)),
            events=by_group.get(group_id, []),
        )
        for group_id, group_name in names.items()
    ]


def _events(begun: list[_Row], ended: list[_Row], known: dict[int, _Row]) -> Iterator[tuple[int, Event]]:
    """Yield the events of all groups with the ids of the groups, in the order of the log.

    A record that ends a stage and begins the next one is one event.
    """
    continued = {(row["position"], row["delivery_id"]): row for row in begun if row["stage"] != Stage.POPPED}
    popped_ms = {row["delivery_id"]: row["at_ms"] for row in begun if row["stage"] == Stage.POPPED}
    found: list[tuple[int, Event]] = []
    for row in ended:
        of = known.get(row["key"], row)
        following: _Row = continued.pop((row["position"], of["delivery_id"]), {})
        popped = popped_ms.get(of["delivery_id"], row["popped_ms"])
        event = Event(
            at_ms=row["at_ms"],
            position=row["position"],
            event=row["cause"],
            delivery_id=of["delivery_id"],
            attempt=of["attempt"],
            after_ms=None if popped is None else row["at_ms"] - popped,
            deadline_ms=following.get("deadline_ms"),
            return_ms=following.get("return_ms"),
            counted=row["counted"],
            reason=row["reason"],
            repeated=row["repeated"] or (row["stage"] is None and row["key"] in known),
        )
        found.append((row["group_id"], event))
    for row in [*(each for each in begun if each["stage"] == Stage.POPPED), *continued.values()]:
        event = Event(
            at_ms=row["at_ms"],
            position=row["position"],
            event=row["stage"],
            delivery_id=row["delivery_id"],
            attempt=row["attempt"],
            deadline_ms=row["deadline_ms"],
            return_ms=row["return_ms"],
        )
        found.append((row["group_id"], event))
    yield from sorted(found, key=lambda each: each[1].position)


def _add_voids(files: list[SegmentFiles], by_group: dict[int, list[Event]], forgotten: set[int]) -> None:
    """Add the reset or the deletion by which each of these groups has forgotten the message."""
    is_void = pc.field("change").isin([Change.RESET, Change.DELETED]) & pc.field("group_id").isin(sorted(forgotten))
    for row in _rows(files, SETTINGS, ["group_id", "position", "at_ms", "change"], is_void):
        events = by_group[row["group_id"]]
        last = _last(events)
        if last is not None and last.event in _RETURNING and row["position"] > last.position:
            void = Event(
                at_ms=row["at_ms"], position=row["position"], event=row["change"], delivery_id=None, attempt=last.attempt
            )
            events.append(void)


def _last(events: list[Event]) -> Event | None:
    """Return the last event that has changed something."""
    return next((event for event in reversed(events) if not event.repeated), None)


def _state(events: list[Event], pending: _Row | None) -> State:
    if pending is not None:
        return _STATES[Stage(pending["stage"])]
    last = _last(events)
    if last is None:
        return State.UNKNOWN
    # An end of a known stage is unrecorded if it is an acknowledgement, by a consumer or by the node.
    is_acknowledged = last.event == Cause.UNRECORDED and last.attempt is not None
    return State.ENDED if last.event in _FINAL or is_acknowledged else State.UNKNOWN


def _pending(row: _Row | None) -> Pending | None:
    if row is None:
        return None
    is_queued = row["stage"] == Stage.QUEUED
    return Pending(
        since_ms=row["at_ms"],
        attempt=row["attempt"],
        deadline_ms=None if is_queued else row["deadline_ms"],
        return_ms=None if is_queued else row["return_ms"],
    )
