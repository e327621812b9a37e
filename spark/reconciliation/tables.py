"""The tables of a report. The steps make them; the reference page describes them; a test compares both.

The steps are plain SQL in files, run in the order of their names, on the tables and the steps before. Rules, so that Spark and
DuckDB run the same text with the same result: BIGINT milliseconds; no functions of dates, no division, no structs; no reserved
or quoted names; joins by equality, CASE and GROUP BY; sums and counts are cast; parameters are a table of one row; no QUALIFY
and no approximate quantiles. A step that is kept has no WITH: Spark would not find it in its cache."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from penstock.spark.parquet.schema import ColumnType, ParquetColumn, ParquetTable
from penstock.spark.reconciliation import tables as steps


class SqlStep(NamedTuple):
    """A step: the name of its table, and its query."""

    name: str
    sql: str
    is_view: bool
    """Whether the rows are not kept, but made again by each step that reads them."""


OUTCOMES, MESSAGE_OUTCOMES, STRAYS = "outcomes", "message_outcomes", "strays"
TALLIES, MESSAGE_TALLIES, STRAY_TALLIES, GROUP_TALLIES = "tallies", "message_tallies", "stray_tallies", "group_tallies"
STANDING = "standing"
"""Names of steps that the report reads."""

KEPT = (OUTCOMES, MESSAGE_OUTCOMES, STRAYS, TALLIES, MESSAGE_TALLIES)
"""The steps whose tables stay in the report."""


def load() -> list[SqlStep]:
    """Return all steps in order. Files are named `NN_NAME.sql`, or `NN_NAME.view.sql`."""
    found = [each for each in (files(__package__) / "sql").iterdir() if each.name.endswith(".sql")]
    return [_step(each.name, each.read_text()) for each in sorted(found, key=lambda each: each.name)]


def _step(file_name: str, sql: str) -> SqlStep:
    name = file_name.removesuffix(".sql").partition("_")[2]
    return SqlStep(name.removesuffix(".view"), sql, name.endswith(".view"))


_GROUP_ID = ParquetColumn("group_id", ColumnType.BIGINT, "Id of the group.")
_GROUP_NAME = ParquetColumn("group_name", ColumnType.STRING, "Name of the group.")
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
        "One row per delivery that was not acknowledged in time, for its last stage. The others are rows of `ends` whose "
        "cause is `acked`. In rows whose stage is `waiting` nobody had the message at the end.",
        (
            ParquetColumn("key", ColumnType.BIGINT, "Key of the last stage, as in `deliveries`."),
            ParquetColumn("delivery_id", ColumnType.BIGINT, "Key of the first stage."),
            ParquetColumn("stage", ColumnType.STRING, "`popped`, `extended` or `waiting`."),
            _GROUP_ID,
            _GROUP_NAME,
            _MESSAGE,
            ParquetColumn("attempt", ColumnType.INT, "Attempt, from 1."),
            ParquetColumn("popped_ms", ColumnType.BIGINT, "When it was popped."),
            ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline at the end."),
            ParquetColumn("return_ms", ColumnType.BIGINT, "Deadline plus back-off."),
            ParquetColumn("ended_ms", ColumnType.BIGINT, "When it ended; null if it is open.", is_nullable=True),
            ParquetColumn("cause", ColumnType.STRING, "As in `ends`.", is_nullable=True),
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
            ParquetColumn("acks", ColumnType.BIGINT, "Deliveries with the outcome `acked`."),
            ParquetColumn("first_popped_ms", ColumnType.BIGINT, "First pop.", is_nullable=True),
            ParquetColumn("last_ended_ms", ColumnType.BIGINT, "Last end of a delivery.", is_nullable=True),
            _OUTCOME,
        ),
    ),
    ParquetTable(
        steps.STRAYS,
        "One row per end that is no first end of a known stage.",
        (
            ParquetColumn("key", ColumnType.BIGINT, "Key of the stage that it ends."),
            ParquetColumn("delivery_id", ColumnType.BIGINT, "Earliest known key of the delivery."),
            ParquetColumn("position", ColumnType.BIGINT, "Position of the record."),
            ParquetColumn("at_ms", ColumnType.BIGINT, "Its store time."),
            ParquetColumn("cause", ColumnType.STRING, "As in `ends`."),
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
            ParquetColumn("hour_ms", ColumnType.BIGINT, "Begin of the hour of the pop."),
            _OUTCOME,
            ParquetColumn("attempt", ColumnType.INT, "Attempt, from 1."),
            ParquetColumn(
                "bucket_ms",
                ColumnType.BIGINT,
                "Of `acked` and `acked_late` the ms from the pop to the acknowledgement, of `revived` from the deadline. "
                "Above 1 s rounded down to three digits.",
                is_nullable=True,
            ),
            ParquetColumn("deliveries", ColumnType.BIGINT, "How many."),
            ParquetColumn("duplicate_acks", ColumnType.BIGINT, "Acknowledgements after the first ones."),
            ParquetColumn("first_popped_ms", ColumnType.BIGINT, "The earliest pop."),
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
                "The earliest pop; null for plain `acked` ones.",
                is_nullable=True,
            ),
        ),
    ),
)
