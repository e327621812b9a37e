"""Writes sealed segments as tables, in order, a file per table and segment.

The files of a segment come first and the state after them. A writer that was killed in between writes the same files again from
the state before, so no segment is missing and none is there twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark import segments
from penstock.spark.errors import LogMissing, TablesInvalid
from penstock.spark.parquet import chains
from penstock.spark.parquet.chains import CAUSES, STAGE_DTYPE, STAGES, UNKNOWN, Chains
from penstock.spark.parquet.files import (
    BASE_KEY,
    DIRECTORY,
    STOP_KEY,
    TableFiles,
    locked,
    remove_unfinished,
    replacing,
    start_path,
    table_path,
)
from penstock.spark.parquet.properties import PropertyColumns
from penstock.spark.parquet.rows import MessageRows, SegmentRows, flag_columns, read_segment, replaced
from penstock.spark.parquet.schema import (
    DAMAGES,
    DELIVERIES,
    ENDS,
    MESSAGES,
    OPEN,
    SETTINGS,
    START,
    TABLES,
    Cause,
    ColumnType,
    DamageCause,
    ParquetTable,
)
from penstock.spark.parquet.snapshot import open_state
from penstock.spark.parquet.state import WriterState, extended, is_within, load_state, save_state
from penstock.spark.records import POPPED, Array
from penstock.spark.segments import LogSegment, LogSurvey
from penstock.store.log.segment import LOG_DIRECTORY
from penstock.store.log.syncmark import SyncMark
from penstock.store.record import HEADER_DTYPE

ARROW_TYPES = {
    ColumnType.BIGINT: pa.int64(),
    ColumnType.INT: pa.int32(),
    ColumnType.BOOLEAN: pa.bool_(),
    ColumnType.STRING: pa.string(),
    ColumnType.STRINGS: pa.list_(pa.string()),
    ColumnType.BINARY: pa.binary(),
    ColumnType.TIMESTAMP: pa.timestamp("ms", "UTC"),
}

_STAGES = pa.array(STAGES, pa.string())
_CAUSES = pa.array(CAUSES, pa.string())
_COUNTED = [CAUSES.index(cause) for cause in (Cause.NACKED, Cause.TIMED_OUT)]
_UNCOUNTED = [CAUSES.index(cause) for cause in (Cause.SUSPENDED, Cause.RETURNED)]


class WrittenSegment(NamedTuple):
    """A segment that the tables have now."""

    base: int
    stop: int
    rows: dict[str, int]
    """Number of rows, by table."""
    unknown: str = ""
    """Why it is not known what was open where the segment begins; empty if it is known, or if tables end there."""


def sealed_segments(data_dir: Path) -> list[LogSegment]:
    """Return the segments of a log that are complete and durable, in order.

    Raises:
        LogMissing: the directory holds no log.
        LogCorrupt: bytes are missing between two segments.
    """
    return _segments(data_dir)[0]


def _segments(data_dir: Path) -> tuple[list[LogSegment], list[int]]:
    """Return the sealed segments, and the positions at which segments begin, sealed or not."""
    if not (data_dir / LOG_DIRECTORY).is_dir():
        raise LogMissing(f"{data_dir} holds no CommitLog. Name the data directory of a node.")
    mark = SyncMark(data_dir).read()
    every = segments.survey_until(data_dir, chains.FAR)
    sealed = [each for each in every[:-1] if mark is None or each.stop <= mark.position]
    return sealed, [each.base for each in every]


def backfill(data_dir: Path, files: TableFiles | None = None, *, until: int = chains.FAR) -> Iterator[WrittenSegment]:
    """Write all sealed segments that the tables don't have; yield each when its files are durable.

    It holds the rows of one segment in memory.

    Args:
        data_dir: of the node.
        files: has the tables.
        until: position up to which the log may be written. What a replica has after it may be cut off.

    Raises:
        TablesInvalid: the tables are damaged or of another log, or another process writes them.
        LogMissing: there is no log, or retention has removed a segment during the read.
        LogCorrupt, RecordCorrupt: the log is damaged.
        OSError: a file can't be written. Run again; what is complete stays.
    """
    files = files or TableFiles()
    sealed, bases = _segments(data_dir)
    directory = data_dir / DIRECTORY
    files.make_directory(directory)
    with locked(directory):
        remove_unfinished(files, directory)
        state = load_state(directory)
        _check(directory, state, bases)
        for segment in sealed:
            if segment.base >= state.position and segment.stop <= until:
                unknown = ""
                if segment.base > max(state.position, 0):
                    state, unknown = _begun(files, directory, state, data_dir, segment.base)
                state, rows = _write(files, directory, state, segment)
                save_state(files, directory, state)
                yield WrittenSegment(segment.base, segment.stop, rows, unknown)


def follow(data_dir: Path, directory: Path, log: LogSurvey, files: TableFiles, begin: int = 0) -> int:
    """Write what the tables of a log lack, sealed or not, to another directory, for one query; return where the tables end.

    Args:
        data_dir: where log and tables are. Nothing is written there.
        directory: where to write. The files are like those of the tables.
        log: the extent of the log, up to which records are read.
        files: how to write.
        begin: segments that end before this position are left out. A query for a message needs none of them.

    Returns:
        Position after the last segment that the tables have; `UNKNOWN` if there are none.

    Raises:
        TablesInvalid: the tables are damaged or of another log.
        LogMissing: retention has removed a segment during the read.
        LogCorrupt, RecordCorrupt: the log is damaged.
    """
    tables = data_dir / DIRECTORY
    state = load_state(tables) if tables.is_dir() else WriterState()
    _check(tables, state, [each.base for each in log.segments])
    written = state.position
    for segment in log.segments:
        if segment.base >= state.position and segment.stop > max(segment.base, begin):
            if segment.base == log.start > max(state.position, 0):
                state, _ = _begun(files, directory, state, data_dir, segment.base)
            state, _ = _write(files, directory, state, segment)
    return written


def _check(directory: Path, state: WriterState, bases: list[int]) -> None:
    """Refuse a log that the tables are not of. `bases` are the positions at which its segments begin."""
    is_before = state.position < bases[0]  # there are no tables yet, or retention was faster
    if not (is_before or state.position in bases):
        raise TablesInvalid(
            f"{directory} has the log up to position {state.position}, where no segment of this log begins: the tables are of "
            f"another log, or of one that has lost its end since. Move them away, and run again."
        )


def _begun(files: TableFiles, directory: Path, state: WriterState, data_dir: Path, base: int) -> tuple[WriterState, str]:
    """Begin at the first segment of a log that retention has trimmed: return the state there, and why it is not known.

    What is known goes to the table `start`. Else the state is that at the end of the tables, if there are any.
    """
    path = start_path(directory, base)
    found, reason = open_state(data_dir, base)
    if found is None:
        if path.exists():  # a writer that was killed had read a snapshot that is not there any more
            files.remove(path)
        return state, reason
    at, is_known = chains.find(state.open["key"], found.open["key"])
    for name in ("delivery_id", "popped_ms", "stage"):  # a snapshot does not say them of every stage
        found.open[name][is_known] = state.open[name][at[is_known]]
    state = replace(state, open=found.open, queued=found.queued, group_names=found.group_names)
    with replacing(files, path) as file:
        write_parquet(file, START, [_table(START, _open_columns(state))], base, base)
    return state, ""


def _write(files: TableFiles, directory: Path, state: WriterState, segment: LogSegment) -> tuple[WriterState, dict[str, int]]:
    rows = read_segment(segment, state.anchor if state.position == segment.base else UNKNOWN)
    after, tables = segment_tables(rows, state, segment)
    first_ms = segments.first_ms(segment) or 0
    for table in TABLES:
        with replacing(files, table_path(directory, table.name, segment.base, first_ms)) as file:
            write_parquet(file, table, [tables[table.name]], segment.base, segment.stop)
    return after, {name: len(written) for name, written in tables.items()}


def arrow_schema(table: ParquetTable) -> Any:
    """Return the schema of a table."""
    return pa.schema([pa.field(each.name, ARROW_TYPES[each.type], each.is_nullable) for each in table.columns])


def write_parquet(file: Any, table: ParquetTable, row_groups: Iterable[Any], base: int, stop: int) -> None:
    """Write rows of a range of the log to a file of a table, given as an Arrow table for each row group."""
    dictionaries = [column.name for column in table.columns if column.type is ColumnType.STRING]
    dictionaries += [f"{column.name}.list.element" for column in table.columns if column.type is ColumnType.STRINGS]
    numbers = (ColumnType.BIGINT, ColumnType.INT, ColumnType.TIMESTAMP)
    with pq.ParquetWriter(
        file,
        arrow_schema(table).with_metadata({BASE_KEY: str(base), STOP_KEY: str(stop)}),
        compression="zstd",
        use_dictionary=dictionaries,
        column_encoding={column.name: "DELTA_BINARY_PACKED" for column in table.columns if column.type in numbers},
        write_statistics=[column.name for column in table.columns if column.type is not ColumnType.BINARY],
    ) as writer:
        for rows in row_groups:
            writer.write_table(rows, row_group_size=max(len(rows), 1))


def segment_tables(rows: SegmentRows, state: WriterState, segment: LogSegment) -> tuple[WriterState, dict[str, Any]]:
    """Return the tables of a segment as Arrow tables by name, and the state after it."""
    first_ms = segments.first_ms(segment) or 0
    messages = _unseen(rows.messages, state, segment)
    begun, begun_names = _joined(rows.begun), _texts(rows.begun_names)
    ended = _joined(rows.ended)
    resolved = chains.chained(state.open, begun, ended, rows.moves)
    expires = _expiring(messages)
    covered = extended(state.covered, segment.base, segment.stop)
    damages = [{**each, "cause": DamageCause.DAMAGED} for each in rows.damages]
    reached = max(state.position, 0)
    if reached < segment.base:
        gap = {"position": reached, "until_position": segment.base, "at_ms": first_ms, "cause": DamageCause.DROPPED}
        damages.insert(0, gap)
    copied = [each.position[each.copied_at != UNKNOWN] for each in messages]
    expiring = extended(state.expiring, segment.base, segment.stop) if len(expires) else state.expiring
    may_have_expired = _may_have_expired(resolved.ended, ended, expires, covered, expiring, segment)
    causes = chains.causes(resolved.ended, ended, ended["is_uncounted"].astype(bool), may_have_expired)
    queued = chains.queued(state.queued, resolved, ended, causes, rows.voids)
    after = WriterState(
        segment.stop,
        rows.anchor,
        covered,
        expiring,
        np.unique(np.concatenate([state.copied, *copied])),
        resolved.open,
        queued,
        _group_names(state.group_names, begun, begun_names, resolved.open, queued),
    )
    return after, {
        MESSAGES.name: _table(MESSAGES, _message_columns(messages, rows)),
        DELIVERIES.name: _table(DELIVERIES, _delivery_columns(begun, resolved.begun, begun_names)),
        ENDS.name: _table(ENDS, _end_columns(ended, resolved, causes, rows)),
        DAMAGES.name: _listed(DAMAGES, damages),
        SETTINGS.name: _listed(SETTINGS, rows.settings),
        OPEN.name: _table(OPEN, _open_columns(after)),
    }


def _unseen(messages: list[MessageRows], state: WriterState, segment: LogSegment) -> list[MessageRows]:
    """Return the messages without the copies of those that the tables have."""
    covered, copied = extended(state.covered, segment.base, segment.stop), state.copied
    unseen = []
    for each in messages:
        is_copy = each.copied_at != UNKNOWN
        if is_copy.any():
            is_first = np.zeros(len(is_copy), bool)
            is_first[np.unique(each.position, return_index=True)[1]] = True
            is_known = is_within(covered, each.position) | np.isin(each.position, copied)
            each = each.where(~is_copy | (is_first & ~is_known))
            copied = np.union1d(copied, each.position[each.copied_at != UNKNOWN])
        unseen.append(each)
    return unseen


def _expiring(messages: list[MessageRows]) -> Array:
    """Return the messages that expire, as pairs of position and time, by position."""
    found = [_NO_PAIRS]
    for each in messages:
        expires = each.properties.expires_at_ms
        has_some = expires.is_valid().to_numpy(zero_copy_only=False)
        times = expires.drop_null().to_numpy(zero_copy_only=False)
        found.append(np.column_stack([each.position[has_some], times]).astype(np.int64))
    pairs = np.concatenate(found)
    return pairs[np.argsort(pairs[:, 0])]


_NO_PAIRS = np.empty((0, 2), np.int64)


def _group_names(before: dict[int, str], begun: dict[str, Array], names: Any, *of_groups: Array) -> dict[int, str]:
    """Return the names of the groups that have rows in these arrays, given those before the segment and those in it."""
    wanted = set(np.unique(np.concatenate([each["group_id"] for each in of_groups])).tolist())
    known = {**before}
    if not wanted <= known.keys():
        groups, first = np.unique(begun["group_id"], return_index=True)
        known.update(zip(groups.tolist(), names.take(pa.array(first)).to_pylist(), strict=True))
    return {group_id: known[group_id] for group_id in wanted}


def _may_have_expired(
    over: Array, ended: dict[str, Array], expires: Array, covered: Array, expiring: Array, segment: LogSegment
) -> Array:
    """Return which acknowledgements may be the node's, for messages that had expired before a consumer saw them.

    Flags of the records tell that since some version of the node. An earlier one appends those right after the checkpoint. They
    are out of the question if something else is in between, or if the message is known not to have expired.
    """
    message = over["message_position"]
    is_next = (over["stage"] == POPPED) & (over["position"] == ended["anchor"])
    is_clear = is_within(covered, message) & ~is_within(expiring, message)
    is_here = (message >= segment.base) & (message < segment.stop)
    at, expires_here = chains.find(expires[:, 0], message)
    expires_here[expires_here] = expires[at[expires_here], 1] <= ended["at_ms"][expires_here]
    return np.asarray(is_next & ~is_clear & (expires_here | ~is_here))


def _joined(parts: list[dict[str, Array]]) -> dict[str, Array]:
    """Return the columns of all blocks, and free those of each block: a segment has many rows."""
    return {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}


# --- columns ----------------------------------------------------------------------------------------------------------


def _table(table: ParquetTable, columns: dict[str, Any]) -> Any:
    """Return an Arrow table. Columns are arrays of numpy or of Arrow; `time` is made from `at_ms`."""
    columns["time"] = columns["at_ms"]
    schema = arrow_schema(table)
    return pa.Table.from_arrays([_cast(columns[each.name], each.type) for each in schema], schema=schema)


def _cast(values: Any, to: Any) -> Any:
    array = pa.array(values) if isinstance(values, np.ndarray) else values
    return array if array.type == to else array.cast(to)


def _listed(table: ParquetTable, rows: list[dict[str, Any]]) -> Any:
    """Return an Arrow table of a few rows."""
    names = [column.name for column in table.columns if column.name != "time"]
    types = {column.name: ARROW_TYPES[column.type] for column in table.columns}
    return _table(table, {name: pa.array([row[name] for row in rows], types[name]) for name in names})


def _texts(parts: list[Any]) -> Any:
    return pa.chunked_array(parts, pa.string())


def _known(values: Array) -> Any:
    """Return an array in which what is `UNKNOWN` is null."""
    return pa.array(values, mask=values == UNKNOWN)


def _stages(stages: Array) -> Any:
    return _STAGES.take(_known(stages))


def _message_columns(messages: list[MessageRows], rows: SegmentRows) -> dict[str, Any]:
    header = np.concatenate([np.empty(0, HEADER_DTYPE), *(each.header for each in messages)])
    by_flags = flag_columns(header["flags"])
    position = np.concatenate([np.empty(0, np.int64), *(each.position for each in messages)])
    copied_at = np.concatenate([np.empty(0, np.int64), *(each.copied_at for each in messages)])
    discarded = np.concatenate([np.empty(0, np.int64), *rows.discarded, *map(replaced, messages)])
    routed = np.concatenate([np.empty(0, np.int64), *rows.routed])
    is_delayed, is_half = by_flags["delayed"], by_flags["half"]
    is_discarded, is_routed = np.isin(position, discarded), np.isin(position, routed)

    def fate(is_kind: Array) -> Any:
        """Return whether messages of a kind were discarded, null where the segment does not say it."""
        return pa.array(is_discarded & is_kind, mask=is_kind & ~is_discarded & ~is_routed)

    def chunked(name: str, kind: ColumnType) -> Any:
        return pa.chunked_array([getattr(each.properties, name) for each in messages], ARROW_TYPES[kind])

    properties = [column for column in MESSAGES.columns if column.name in PropertyColumns._fields]
    return {
        "position": position,
        "at_ms": header["store_ms"],
        "topic": _texts([each.topic for each in messages]),
        **by_flags,
        "recalled": fate(is_delayed & ~is_half),
        "rolled_back": fate(is_half),
        "copied_at": _known(copied_at),
        **{column.name: chunked(column.name, column.type) for column in properties},
        "body": pa.chunked_array([each.body for each in messages], pa.binary()),
    }


def _delivery_columns(begun: dict[str, Array], stages: Array, names: Any) -> dict[str, Any]:
    return {
        **begun,
        "delivery_id": stages["delivery_id"],
        "stage": _stages(stages["stage"]),
        "at_ms": begun["pop_ms"],
        "group_name": names,
        "retried": begun["source"] != 0,
    }


def _open_columns(after: WriterState) -> dict[str, Any]:
    rows = np.concatenate([after.open, after.queued])
    groups, owner = np.unique(rows["group_id"], return_inverse=True)
    names = pa.array([after.group_names[group_id] for group_id in groups.tolist()], pa.string())
    return {
        **{name: rows[name] for name in STAGE_DTYPE.names or ()},
        "stage": _stages(rows["stage"]),
        "popped_ms": _known(rows["popped_ms"]),
        "group_name": names.take(pa.array(owner)),
        "retried": rows["source"] != 0,
    }


def _end_columns(ended: dict[str, Array], resolved: Chains, causes: Array, rows: SegmentRows) -> dict[str, Any]:
    over = resolved.ended
    is_counted = np.isin(causes, _COUNTED)
    is_uncounted = np.isin(causes, _UNCOUNTED)
    is_timed_out = causes == CAUSES.index(Cause.TIMED_OUT)
    return {
        "delivery_id": over["delivery_id"],
        "key": ended["key"],
        "position": ended["position"],
        "at_ms": ended["at_ms"],
        "cause": _CAUSES.take(pa.array(causes)),
        "counted": pa.array(is_counted & ~(is_timed_out & ended["is_uncounted"]), mask=~(is_counted | is_uncounted)),
        "reason": _texts(rows.reasons),
        "repeated": resolved.is_repeated,
        "stage": _stages(over["stage"]),
        "popped_ms": _known(over["popped_ms"]),
        "deadline_ms": _known(over["deadline_ms"]),
        "group_id": ended["group_id"],
        "group_name": _texts(rows.ended_names),
        "message_position": _known(over["message_position"]),
        "attempt": _known(over["attempt"]),
    }
