"""What a reconciliation reads: the tables of the sealed segments, and the tail of the log, which it writes as tables itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from penstock.spark import segments
from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.parquet.files import DIRECTORY, SUFFIX, SegmentFiles, TransientFiles, segment_files
from penstock.spark.parquet.schema import DAMAGES, MESSAGES, OPEN, TABLES, ParquetTable, Stage
from penstock.spark.parquet.writer import arrow_schema, follow
from penstock.spark.segments import LogSurvey

LAST = "last"

OPEN_BEFORE, OPEN_AFTER = "open_before", "open_after"
"""Names of the table `open` at the beginning and at the end of what is read."""


class LogRange(NamedTuple):
    """The part of a log that is read."""

    start: int
    """Position at which the log and its tables begin."""
    begin: int
    """Position at which the reading begins: the start, or a seal after it."""
    end: int
    """Position after the last whole record."""
    sealed: int
    """The last seal before the end. The next run may begin there."""
    first_ms: int
    last_ms: int
    """Store times of the first record after `begin` and of the last one."""
    torn: bool
    """Whether an incomplete record follows the end."""


class InputTable(NamedTuple):
    """A table that SQL reads."""

    name: str
    """What SQL calls it."""
    table: ParquetTable
    files: list[Path]
    """At least one, which may have no rows."""


class Inputs(NamedTuple):
    """The files of a reconciliation."""

    range: LogRange
    tables: list[InputTable]
    messages: list[Path]
    """All files of the table `messages`, also of segments before `LogRange.begin`. At least one."""
    damages: list[dict[str, Any]]
    """The rows of the table `damages`."""
    known: frozenset[int]
    """Positions after missing records at which a snapshot says what was open."""


def prepare(log: LogSurvey, scratch: Path, since: str | int | None = None, sealed_before: int | None = None) -> Inputs:
    """Choose the files of the tables, and write what they lack to `scratch`. The caller must hold `files.reading`.

    Args:
        log: the extent of the log, up to which records are read. The node may be running.
        scratch: an empty directory.
        since: where to begin: a position, a date as YYYY-MM-DD, or "last", which is `sealed_before`. The reading begins at the
            last seal that is not after it, or where the file begins that has it among others. None is the beginning of the
            tables.
        sealed_before: `LogRange.sealed` of the run before.

    Raises:
        LogMissing: retention has removed a segment meanwhile.
        LogCorrupt, RecordCorrupt: the log is damaged.
        TablesInvalid: the tables are damaged, or of another log.
        ReadOptionInvalid: `since` is not one of these, or there is no run before.
    """
    data_dir = log.directory.parent
    tables, tail = data_dir / DIRECTORY, scratch / "tail"
    written = follow(data_dir, tail, log, TransientFiles())
    parts = [*segment_files(tables, written), *segment_files(tail, log.end)]
    at = _begin(parts, since, sealed_before)
    chosen = parts[at:]
    empty = _write_empty(scratch / "empty")
    known = frozenset(each.base for each in chosen if each.start.exists())
    named = [
        InputTable(table.name, table, [each.path(table.name) for each in chosen] or [empty[table.name]])
        for table in TABLES
        if table is not OPEN
    ]
    before = [_open_before(parts, at) or empty[OPEN.name]]
    named.append(InputTable(OPEN_BEFORE, OPEN, before))
    named.append(InputTable(OPEN_AFTER, OPEN, [parts[-1].path(OPEN.name) if parts else empty[OPEN.name]]))
    damages = [row for each in chosen for row in pq.ParquetFile(each.path(DAMAGES.name)).read().to_pylist()]
    start = parts[0].base if parts else log.start
    begin = chosen[0].base if chosen else start
    restarts = [each for each in chosen[1:] if each.base in known]
    before += _begun_in_gaps(restarts, before[0], begin, damages, scratch)
    first_ms = _first_ms(log, begin)
    found = LogRange(start, begin, log.end, log.segments[-1].base, first_ms, log.last_ms, log.torn)
    messages = [each.path(MESSAGES.name) for each in parts] or [empty[MESSAGES.name]]
    return Inputs(found, named, messages, damages, known)


def _open_before(parts: list[SegmentFiles], at: int) -> Path | None:
    """Return the file that says what was open before a part, if there is one."""
    if at < len(parts) and parts[at].start.exists():
        return parts[at].start
    return parts[at - 1].path(OPEN.name) if at else None


def _begun_in_gaps(
    restarts: list[SegmentFiles], before: Path, begin: int, damages: list[dict[str, Any]], scratch: Path
) -> list[Path]:
    """Write what was open after each gap that retention has left, and began where nothing was read. Return the files.

    A stage that began in a part that was read has a row in `deliveries`.
    """
    unread = [(0, begin), *((row["position"], row["until_position"]) for row in damages)]
    known = pq.read_table(before, columns=["key"])["key"]
    paths = []
    for restart in restarts:
        rows = pq.ParquetFile(restart.start).read()
        is_unread = pc.equal(rows["stage"], Stage.QUEUED)
        for start, stop in unread:
            is_unread = pc.or_(is_unread, pc.and_(pc.greater_equal(rows["key"], start), pc.less(rows["key"], stop)))
        rows = rows.filter(pc.and_not(is_unread, pc.is_in(rows["key"], known)))
        paths.append(scratch / f"start-{restart.base}{SUFFIX}")
        pq.write_table(rows, paths[-1])
        known = pa.chunked_array([*known.chunks, *rows["key"].chunks])
    return paths


def _begin(parts: list[SegmentFiles], since: str | int | None, sealed_before: int | None) -> int:
    """Return the index of the part at which the reading begins."""
    if since is None:
        return 0
    if since == LAST:
        if sealed_before is None:
            raise ReadOptionInvalid("There is no report of an earlier run to go on from. Run without `since` first.")
        since = sealed_before
    if isinstance(since, str) and since.isdecimal():
        since = int(since)
    if isinstance(since, int):
        return max(sum(each.base <= since for each in parts) - 1, 0)
    try:
        day = f"date={_date(since)}"
    except ValueError:
        raise ReadOptionInvalid(f"since is {since!r}: give a position, a date as YYYY-MM-DD, or {LAST!r}.") from None
    return max(sum(each.date < day for each in parts) - 1, 0)  # the segment before may contain midnight


def _date(text: str) -> str:
    from datetime import date

    return date.fromisoformat(text).isoformat()


def _first_ms(log: LogSurvey, begin: int) -> int:
    return next((segments.first_ms(each) or log.first_ms for each in log.segments if each.base == begin), log.first_ms)


def _write_empty(directory: Path) -> dict[str, Path]:
    """Write each table without rows, for what has no file."""
    directory.mkdir()
    paths = {}
    for table in TABLES:
        paths[table.name] = directory / f"{table.name}{SUFFIX}"
        pq.write_table(arrow_schema(table).empty_table(), paths[table.name])
    return paths
