"""The tables of a report. The steps make them; the reference page describes them; a test compares both."""

from __future__ import annotations

from penstock.spark.parquet.schema import ColumnType, ParquetColumn, ParquetTable
from penstock.spark.reconciliation import steps

_GROUP_ID = ParquetColumn("group_id", ColumnType.BIGINT, "Id of the consumer group.")
_GROUP_NAME = ParquetColumn("group_name", ColumnType.STRING, "Name of the consumer group.")
_MESSAGE = ParquetColumn("message_position", ColumnType.BIGINT, "Position of the message.")
_OUTCOME = ParquetColumn("outcome", ColumnType.STRING, "One of the outcomes above.")

PARAMETERS = ParquetTable(
    "parameters",
    "What the steps are told, in one row.",
    (
        ParquetColumn("begin_position", ColumnType.BIGINT, "Where the reading begins."),
        ParquetColumn("damaged_until", ColumnType.BIGINT, "End of the last range whose records are missing; -1 without one."),
        ParquetColumn("as_of_ms", ColumnType.BIGINT, "Time at which deadlines are judged, in ms since 1970 UTC."),
        ParquetColumn("grace_ms", ColumnType.BIGINT, "How long after its time a delivery is not lost yet."),
    ),
)

REPORT_TABLES = (
    ParquetTable(
        steps.OUTCOMES,
        "One row per delivery that was not acknowledged in time, which is that of its last stage. The others are rows of the "
        "table `ends` of the log whose cause is `acked`. Rows whose stage is `waiting` are no deliveries: a consumer returned "
        "the message, and nobody had it at the end, or it became a dead letter after the wait.",
        (
            ParquetColumn("key", ColumnType.BIGINT, "Key of the last stage, as in the table `deliveries` of the log."),
            ParquetColumn("delivery_id", ColumnType.BIGINT, "Key of the first stage."),
            ParquetColumn("stage", ColumnType.STRING, "`popped`, `extended` or `waiting`."),
            _GROUP_ID,
            _GROUP_NAME,
            _MESSAGE,
            ParquetColumn("attempt", ColumnType.INT, "Number of the attempt, from 1."),
            ParquetColumn("popped_ms", ColumnType.BIGINT, "When the delivery was popped, in ms since 1970 UTC."),
            ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline in force at the end."),
            ParquetColumn("return_ms", ColumnType.BIGINT, "Time by which the message is back: deadline plus back-off."),
            ParquetColumn("ended_ms", ColumnType.BIGINT, "When it ended. Null if it is open.", is_nullable=True),
            ParquetColumn("cause", ColumnType.STRING, "Why it ended, as in the table `ends` of the log.", is_nullable=True),
            ParquetColumn("duplicate_acks", ColumnType.BIGINT, "Acknowledgements after the first one."),
            _OUTCOME,
        ),
    ),
    ParquetTable(
        steps.MESSAGE_OUTCOMES,
        "One row per message of a group for which one acknowledged delivery is not the whole story. All others are `acked`.",
        (
            _GROUP_ID,
            _GROUP_NAME,
            _MESSAGE,
            ParquetColumn("attempts", ColumnType.INT, "Highest number of an attempt."),
            ParquetColumn("acks", ColumnType.BIGINT, "How many of its deliveries have the outcome `acked`."),
            ParquetColumn("first_popped_ms", ColumnType.BIGINT, "First pop in ms since 1970 UTC.", is_nullable=True),
            ParquetColumn("last_ended_ms", ColumnType.BIGINT, "Last end of a delivery.", is_nullable=True),
            _OUTCOME,
        ),
    ),
    ParquetTable(
        steps.STRAYS,
        "One row per end that is no first end of a known stage: a second end, an orphan, or one of a delivery that began "
        "before what was read.",
        (
            ParquetColumn("key", ColumnType.BIGINT, "Key of the stage that it ends."),
            ParquetColumn("delivery_id", ColumnType.BIGINT, "Earliest known key of the delivery."),
            ParquetColumn("position", ColumnType.BIGINT, "Position of the record."),
            ParquetColumn("at_ms", ColumnType.BIGINT, "Its store time, in ms since 1970 UTC."),
            ParquetColumn("cause", ColumnType.STRING, "As in the table `ends` of the log."),
            _GROUP_ID,
            _GROUP_NAME,
        ),
    ),
    ParquetTable(
        steps.TALLIES,
        "Deliveries counted. All figures of a report are sums of these rows.",
        (
            _GROUP_ID,
            _GROUP_NAME,
            ParquetColumn("hour_ms", ColumnType.BIGINT, "Hour of the pop: its begin in ms since 1970 UTC."),
            _OUTCOME,
            ParquetColumn("attempt", ColumnType.INT, "Number of the attempt, from 1."),
            ParquetColumn(
                "bucket_ms",
                ColumnType.BIGINT,
                "Of `acked` and `acked_late` the time from the pop to the acknowledgement, of `revived` from the deadline to "
                "the revival. Exact below 1 s, else rounded down to three digits.",
                is_nullable=True,
            ),
            ParquetColumn("deliveries", ColumnType.BIGINT, "How many."),
            ParquetColumn("duplicate_acks", ColumnType.BIGINT, "Their acknowledgements after the first ones."),
            ParquetColumn("first_popped_ms", ColumnType.BIGINT, "The earliest of their pops."),
        ),
    ),
    ParquetTable(
        steps.MESSAGE_TALLIES,
        "Messages counted by group.",
        (
            _GROUP_ID,
            _GROUP_NAME,
            _OUTCOME,
            ParquetColumn("messages", ColumnType.BIGINT, "How many."),
            ParquetColumn(
                "first_popped_ms",
                ColumnType.BIGINT,
                "The earliest of their pops. Null for plain `acked` ones.",
                is_nullable=True,
            ),
        ),
    ),
)
