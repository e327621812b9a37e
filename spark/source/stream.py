"""Follows a log as a stream of Spark: the driver finds what a node has appended, and workers read it."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxBytes, SupportsTriggerAvailableNow

from penstock.spark import segments
from penstock.spark.errors import LogMissing, ReadOptionInvalid, RecordsLost
from penstock.spark.source.filters import RecordFilter
from penstock.spark.source.options import FAR, LATEST, StreamOptions
from penstock.spark.source.places import position_of
from penstock.spark.source.reader import LogPartition, RowReader, piece_size, pieces

PIECE_BYTES_MIN = 256 * 1024
"""A smaller batch is not split for `minPartitions`: its tasks would do nothing but start."""


class LogStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Follows a table of the log.

    Spark keeps one of these in a process of the driver while a query runs. It remembers the end that it has found, so it reads
    each part of the log once to find the next batch, and never what is before the stream's offset. A batch is cut between
    records, so the offset of a batch is a position at which a record begins, or the end of the log. Beside the `position` an
    offset has `skipped_bytes`: what retention had deleted before the stream read it, since the stream has begun.

    Retention copies old messages forward that are still needed. They are not read again: a stream has each message where it
    was published.

    Needs PySpark 4.2, whose streams tell a source where they are and how much they want (`latestOffset(start, limit)`).
    """

    def __init__(self, options: StreamOptions, names: Sequence[str]) -> None:
        self._options = options
        self._rows = RowReader(options.table, tuple(names), options.topic, RecordFilter())
        self._known = 0
        """The log is whole up to here."""
        self._begin: int | None = None
        """Where a query without a checkpoint begins."""
        self._is_of_log = False
        """Whether the offset of the query is known to be one of this log."""
        self._target: int | None = None
        """Where a query ends that reads what is available now."""
        self._batch: list[LogPartition] = []
        """The inputs of the batch that was planned last."""

    # --- on the driver ----------------------------------------------------------------------------------------------

    def initialOffset(self) -> dict[str, Any]:
        """Return where a query without a checkpoint begins. Raises ReadOptionInvalid if the log has not got there.

        Spark asks twice, for the end of the first batch and for its inputs, and `latest` is further on the second time.
        """
        if self._begin is None:
            end = self._end()
            self._check_start(end)
            listed = segments.survey_until(self._options.path, end)
            self._begin = position_of(self._options.start, listed) if listed else end
        return {"position": self._begin, "skipped_bytes": 0}

    def getDefaultReadLimit(self) -> ReadLimit:
        """Return how much a batch may read."""
        return ReadMaxBytes(self._options.bytes_per_trigger)

    def prepareForTriggerAvailableNow(self) -> None:
        """Let the query end where the log ends now."""
        self._target = self._end()

    def reportLatestOffset(self) -> dict[str, Any] | None:
        """Return the end of the log, for the progress of the query."""
        return {"position": self._known} if self._known else None

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:
        """Return where the next batch ends, which begins at `start`.

        Raises:
            RecordsLost: retention has deleted records after `start`, or the log has lost its end.
            RecordCorrupt: the log is damaged.
        """
        position, skipped = start["position"], start["skipped_bytes"]
        end = self._end() if self._target is None else self._target
        if end < position:
            raise RecordsLost(
                f"The stream has read up to position {position}, but the log ends at position {end}: it is of another node, or "
                f"has lost its end. Begin again with a new checkpoint."
            )
        room = limit.max_bytes if isinstance(limit, ReadMaxBytes) else FAR
        first, self._batch = self._planned(position, end, room)
        skipped += first - position
        return {"position": self._batch[-1].stop if self._batch else end, "skipped_bytes": skipped}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the inputs of a batch. After a restart Spark asks for that of a batch which another process had planned."""
        position = start["position"] + end["skipped_bytes"] - start["skipped_bytes"]
        stop = end["position"]
        if not self._batch or (self._batch[0].start, self._batch[-1].stop) != (position, stop):
            _, self._batch = self._planned(position, stop, FAR)
        return self._batch

    def _check_start(self, end: int) -> None:
        """Refuse to begin later than now: the stream would have records before that place. Raises ReadOptionInvalid."""
        start = self._options.start
        if end < start.position < FAR:
            raise ReadOptionInvalid(
                f"startingOffsets is {start.position}, but the log ends at position {end}. Use {LATEST}, or one before that."
            )
        if start.at_ms is not None and start.at_ms > time.time() * 1000:
            at = datetime.fromtimestamp(start.at_ms / 1000, UTC).isoformat()
            raise ReadOptionInvalid(
                f"startingOffsets is {at}, which is in the future. Use {LATEST}, and a filter on the column `time`."
            )

    def _check_offset(self, position: int, end: int) -> None:
        """Refuse an offset that a checkpoint has, and at which no record begins. Raises RecordsLost."""
        if self._is_of_log:
            return
        for segment in segments.survey_until(self._options.path, end):
            if segment.base < position < segment.stop and not segments.is_record(segment, position):
                raise RecordsLost(
                    f"The stream has read up to position {position}, but no record of the log begins there: the checkpoint is "
                    f"of another node, or the record is damaged. Begin again with a new checkpoint, or run `penstock verify`."
                )
        self._is_of_log = True

    def _planned(self, position: int, end: int, room: int) -> tuple[int, list[LogPartition]]:
        """Return where the log goes on from a position, and its pieces from there on that fit into `room`.

        Raises:
            RecordsLost: it does not go on at the position itself, or no record begins there.
            RecordCorrupt: the log is damaged.
        """
        while True:
            begin = min(segments.begin_of(self._options.path), end)
            if begin > position:
                self._lost(position, begin)
                position = begin
            if position >= end:
                return position, []
            with suppress(LogMissing):  # retention has deleted more meanwhile
                self._check_offset(position, end)
                batch = self._cut(position, end, min(room, end - position))
                if batch and batch[0].start == position:
                    return position, batch

    def _cut(self, position: int, end: int, room: int) -> list[LogPartition]:
        """Return pieces of the log from a position on: as many as fit into `room`, but at least one."""
        listed = segments.survey_until(self._options.path, end)
        per_task = max(room // self._options.partitions_min, PIECE_BYTES_MIN)
        piece_bytes = min(per_task, room, piece_size(listed, position, position + room))
        chosen: list[LogPartition] = []
        for piece in pieces(listed, position, end, piece_bytes):
            if chosen and piece.stop - position > room:
                break
            chosen.append(piece)
        return chosen

    def _end(self) -> int:
        self._known = segments.end_of(self._options.path, self._known)
        return self._known

    def _lost(self, position: int, until: int) -> None:
        """Fail because records are lost, or say so."""
        lost = f"Retention has deleted the log from position {position} to {until} before the stream read it"
        if self._options.fails_on_data_loss:
            raise RecordsLost(
                f"{lost}. Set failOnDataLoss to false to go on after them, or begin again with a new checkpoint. Let the "
                f"retention of the node last longer than the stream may stand still."
            )
        print(f"{lost}: the stream goes on after these {until - position} bytes.", file=sys.stderr)

    # --- on a worker ------------------------------------------------------------------------------------------------

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the record batches of a partition."""
        assert isinstance(partition, LogPartition)
        try:
            yield from self._rows.read(partition)
        except LogMissing as error:
            if self._options.fails_on_data_loss:
                raise RecordsLost(
                    f"Retention has deleted the log from position {partition.start} to {partition.stop} while the stream read "
                    f"it. Set failOnDataLoss to false to go on after them, or begin again with a new checkpoint."
                ) from error
            print(f"{error} The stream goes on after position {partition.stop}.", file=sys.stderr)
