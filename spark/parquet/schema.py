"""The tables: their columns, and what each of them holds. The writer, the reference page and the tests use this definition.

No column has a reserved word of SQL as its name, so that no query needs quotes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple


class ColumnType(StrEnum):
    """The types of columns, by their names in SQL."""

    BIGINT = "bigint"
    INT = "int"
    BOOLEAN = "boolean"
    STRING = "string"
    STRINGS = "array<string>"
    BINARY = "binary"
    TIMESTAMP = "timestamp"


class Stage(StrEnum):
    """How a row of `deliveries` began."""

    POPPED = "popped"
    EXTENDED = "extended"
    WAITING = "waiting"
    QUEUED = "queued"
    """Only in the table `open`: the message came back and has not been handed out again."""


class Cause(StrEnum):
    """Why a stage of a delivery ended."""

    ACKED = "acked"
    EXPIRED = "expired"
    NACKED = "nacked"
    SUSPENDED = "suspended"
    EXTENDED = "extended"
    TIMED_OUT = "timed_out"
    RETURNED = "returned"
    WAITED = "waited"
    DEAD_LETTERED = "dead_lettered"
    RESET = "reset"
    DELETED = "deleted"
    LAST_MEMBER_LEFT = "last_member_left"
    UNRECORDED = "unrecorded"


CAUSES = {
    Cause.ACKED: "a consumer acknowledged the message, or the node did for an MQTT client that got it",
    Cause.EXPIRED: "the message had expired before a consumer got it",
    Cause.NACKED: "its consumer returned the message as a failed attempt",
    Cause.SUSPENDED: "its consumer returned the message without counting the attempt",
    Cause.EXTENDED: "its consumer changed the invisible time and goes on",
    Cause.TIMED_OUT: "the deadline passed, and the message came back",
    Cause.RETURNED: "its consumer had gone or could not take the message, so the node returned it",
    Cause.WAITED: "the wait after `nacked` or `suspended` was over, and the message came back",
    Cause.DEAD_LETTERED: "the message became a dead letter",
    Cause.RESET: "the offset of the group was reset, also by a RocketMQ client that subscribed to a lite topic",
    Cause.DELETED: "an operator deleted the group. In records of earlier versions also `last_member_left`",
    Cause.LAST_MEMBER_LEFT: "the group ended with the last of the subscriptions that had created it",
    Cause.UNRECORDED: "the log does not say it: an earlier version of the node wrote the record, or the beginning of the "
    "delivery is unknown",
}


class Change(StrEnum):
    """What a row of `settings` says happened to the group."""

    CREATED = "created"
    CHANGED = "changed"
    RESET = "reset"
    DELETED = "deleted"


class DamageCause(StrEnum):
    """Why records are missing."""

    DAMAGED = "damaged"
    DROPPED = "dropped"


class ParquetColumn(NamedTuple):
    """A column of a table."""

    name: str
    type: ColumnType
    doc: str
    is_nullable: bool = False


class ParquetTable(NamedTuple):
    """A table, which is a folder of files."""

    name: str
    doc: str
    columns: tuple[ParquetColumn, ...]


_POSITION = ParquetColumn("position", ColumnType.BIGINT, "Position of the record in the log.")
_AT_MS = ParquetColumn("at_ms", ColumnType.BIGINT, "Store time of the record.")
_TIME = ParquetColumn("time", ColumnType.TIMESTAMP, "`at_ms` in UTC.")
_GROUP_ID = ParquetColumn("group_id", ColumnType.BIGINT, "Id of the group.")
_GROUP_NAME = ParquetColumn("group_name", ColumnType.STRING, "Name of the group.")

MESSAGES = ParquetTable(
    "messages",
    "One row per message. One that retention has copied forward has the row of its first place, else that of its copy.",
    (
        _POSITION._replace(doc="Id of the message."),
        _AT_MS._replace(doc="When the message was stored."),
        _TIME,
        ParquetColumn("topic", ColumnType.STRING, "Topic."),
        ParquetColumn("qos", ColumnType.INT, "QoS of the publisher."),
        ParquetColumn("flags", ColumnType.INT, "Flags of the record (`store.record.Flag`)."),
        ParquetColumn("retain", ColumnType.BOOLEAN, "Whether it was published with the flag RETAIN."),
        ParquetColumn("delayed", ColumnType.BOOLEAN, "Whether it was to be delivered later."),
        ParquetColumn(
            "recalled",
            ColumnType.BOOLEAN,
            "Whether it was recalled or replaced, as far as its segment says.",
            is_nullable=True,
        ),
        ParquetColumn("half", ColumnType.BOOLEAN, "Whether it was stored as a half of a transaction."),
        ParquetColumn(
            "rolled_back",
            ColumnType.BOOLEAN,
            "Whether the transaction was rolled back, as far as its segment says.",
            is_nullable=True,
        ),
        ParquetColumn("copied_at", ColumnType.BIGINT, "Position of the copy that the row was read from.", is_nullable=True),
        ParquetColumn("tag", ColumnType.STRING, "Tag.", is_nullable=True),
        ParquetColumn("keys", ColumnType.STRINGS, "Business keys.", is_nullable=True),
        ParquetColumn("message_group", ColumnType.STRING, "Message group.", is_nullable=True),
        ParquetColumn("content_type", ColumnType.STRING, "Content type.", is_nullable=True),
        ParquetColumn("deliver_at_ms", ColumnType.BIGINT, "Time of delivery of a delayed message.", is_nullable=True),
        ParquetColumn("expires_at_ms", ColumnType.BIGINT, "When the message expires.", is_nullable=True),
        ParquetColumn("user_names", ColumnType.STRINGS, "Names of the user properties.", is_nullable=True),
        ParquetColumn("user_values", ColumnType.STRINGS, "Their values.", is_nullable=True),
        ParquetColumn("body", ColumnType.BINARY, "Body."),
    ),
)

DELIVERIES = ParquetTable(
    "deliveries",
    "One row per stage of a delivery. A new stage with a new key begins when a consumer extends, nacks or suspends; all stages "
    "of a delivery have one `delivery_id`. Deliveries are the rows whose stage is `popped`.",
    (
        ParquetColumn("delivery_id", ColumnType.BIGINT, "Key of the first stage, or the earliest that is known."),
        ParquetColumn("key", ColumnType.BIGINT, "Position of its record plus the index in it."),
        ParquetColumn("stage", ColumnType.STRING, "`popped`, `extended` (its consumer goes on) or `waiting` (nobody has it)."),
        _POSITION,
        _AT_MS._replace(doc="When the stage began."),
        _TIME,
        ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline when the stage began."),
        ParquetColumn("return_ms", ColumnType.BIGINT, "Deadline plus back-off."),
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("message_position", ColumnType.BIGINT, "Position of the message."),
        ParquetColumn("message_bytes", ColumnType.INT, "Size of its record."),
        ParquetColumn("queue_offset", ColumnType.BIGINT, "Offset in the queue that it came from."),
        ParquetColumn("retried", ColumnType.BOOLEAN, "Whether that was the group's retry queue."),
        ParquetColumn("attempt", ColumnType.INT, "Attempt, from 1."),
    ),
)

ENDS = ParquetTable(
    "ends",
    "One row per stage that ended. A delivery without an end of its last stage is open, unless its end was in a range of "
    "`damages`.",
    (
        ParquetColumn("delivery_id", ColumnType.BIGINT, "As in `deliveries`."),
        ParquetColumn("key", ColumnType.BIGINT, "Key of the stage that ended."),
        _POSITION._replace(doc="Position of the record that ended the stage."),
        _AT_MS._replace(doc="When the stage ended."),
        _TIME,
        ParquetColumn("cause", ColumnType.STRING, "See below."),
        ParquetColumn(
            "counted",
            ColumnType.BOOLEAN,
            "Whether the attempt counts, where `cause` returns a message from its consumer.",
            is_nullable=True,
        ),
        ParquetColumn("reason", ColumnType.STRING, "Why the message is a dead letter.", is_nullable=True),
        ParquetColumn(
            "repeated",
            ColumnType.BOOLEAN,
            "Whether the stage had ended in the same segment before. If in an earlier one, `stage` is null.",
        ),
        ParquetColumn("stage", ColumnType.STRING, "Stage that ended, if its beginning is known.", is_nullable=True),
        ParquetColumn("popped_ms", ColumnType.BIGINT, "When it was popped, if known.", is_nullable=True),
        ParquetColumn(
            "deadline_ms",
            ColumnType.BIGINT,
            "Deadline at the end, if known: a step of the clock may have moved it.",
            is_nullable=True,
        ),
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("message_position", ColumnType.BIGINT, "Position of the message, if known.", is_nullable=True),
        ParquetColumn("attempt", ColumnType.INT, "Attempt, if known.", is_nullable=True),
    ),
)

DAMAGES = ParquetTable(
    "damages",
    "One row per range of the log whose records are missing.",
    (
        _POSITION._replace(doc="Position of the first missing byte."),
        ParquetColumn("until_position", ColumnType.BIGINT, "Position after the last one."),
        _AT_MS._replace(doc="Store time of the record in its place, or after it."),
        _TIME,
        ParquetColumn(
            "cause",
            ColumnType.STRING,
            "`damaged`: set aside by `penstock repair`. `dropped`: deleted before it was in the tables.",
        ),
    ),
)

SETTINGS = ParquetTable(
    "settings",
    "One row per change of a group and wait of its back-off.",
    (
        _POSITION,
        _AT_MS,
        _TIME,
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("change", ColumnType.STRING, "`created`, `changed`, `reset` or `deleted`."),
        ParquetColumn("attempt", ColumnType.INT, "Attempt after which a message waits for `backoff_ms`."),
        ParquetColumn(
            "backoff_ms",
            ColumnType.BIGINT,
            "That wait. The last one holds for later attempts. Null: the node's option.",
            is_nullable=True,
        ),
        ParquetColumn("topic_filter", ColumnType.STRING, "Filter of a created group.", is_nullable=True),
        ParquetColumn("attempts_max", ColumnType.INT, "Null: the node's option.", is_nullable=True),
        ParquetColumn("settings", ColumnType.STRING, "Settings that are not at their defaults, as JSON."),
    ),
)

OPEN = ParquetTable(
    "open",
    "What is open at the end of each segment: one row per stage without an end, and per message that waits for its next "
    "delivery. A joined file has the state after its last segment.",
    (
        ParquetColumn("delivery_id", ColumnType.BIGINT, "As in `deliveries`."),
        ParquetColumn("key", ColumnType.BIGINT, "Key of the stage, or of the last one of a `queued` message."),
        ParquetColumn(
            "stage",
            ColumnType.STRING,
            "As in `deliveries`, or `queued`: the message came back.",
        ),
        _POSITION._replace(doc="Position of the record that began the stage, or brought the message back."),
        _AT_MS,
        _TIME,
        ParquetColumn("popped_ms", ColumnType.BIGINT, "When it was popped, if known.", is_nullable=True),
        ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline in force."),
        ParquetColumn("return_ms", ColumnType.BIGINT, "Deadline plus back-off."),
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("message_position", ColumnType.BIGINT, "Position of the message."),
        ParquetColumn("retried", ColumnType.BOOLEAN, "Whether it came from the group's retry queue."),
        ParquetColumn("attempt", ColumnType.INT, "Attempt, from 1."),
    ),
)

TABLES = (MESSAGES, DELIVERIES, ENDS, DAMAGES, SETTINGS, OPEN)

START = OPEN._replace(
    name="start",
    doc="What was open where the tables begin after position 0, or again after a gap, in the columns of `open`. The position "
    "is the name of the file; there is none where nothing is known. A delivery that was extended or returned has the key of "
    "its last stage as `delivery_id`. `key`, `position` and the times of a `queued` message only say that it came back before.",
)
"""A table of a few files, which are not of segments."""

RECORDS = ParquetTable(
    "records",
    "One row per record of any kind. No files have this table: only the source reads it.",
    (
        _POSITION,
        ParquetColumn("size", ColumnType.INT, "Bytes of the record in the log."),
        ParquetColumn("kind", ColumnType.STRING, "Name of `store.record.Kind`, or KIND_ and a number that is not known here."),
        ParquetColumn("flags", ColumnType.INT, "Flags of the record (`store.record.Flag`)."),
        _AT_MS,
        _TIME,
        ParquetColumn("topic", ColumnType.STRING, "Topic of a message, or name of a group."),
        ParquetColumn("group_id", ColumnType.BIGINT, "Id of the group, in a record of one.", is_nullable=True),
        ParquetColumn("epoch", ColumnType.BIGINT, "Epoch of the group.", is_nullable=True),
        ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline of a checkpoint.", is_nullable=True),
        ParquetColumn("properties", ColumnType.STRING, "Properties as JSON."),
        ParquetColumn("body", ColumnType.BINARY, "Body."),
    ),
)

SOURCE_TABLES = {table.name: table for table in (MESSAGES, DELIVERIES, ENDS, SETTINGS, DAMAGES, RECORDS)}
"""What `format("penstock")` reads from the log itself."""
