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
    Cause.ACKED: "a consumer acknowledged the message, or the node did for an MQTT client that got it: at QoS 0, or when the "
    "client could not acknowledge it any more",
    Cause.EXPIRED: "the message had expired before a consumer got it",
    Cause.NACKED: "its consumer returned the message as a failed attempt; a stage `waiting` begins",
    Cause.SUSPENDED: "its consumer returned the message without counting the attempt; a stage `waiting` begins",
    Cause.EXTENDED: "its consumer changed the invisible time and goes on; a stage `extended` begins",
    Cause.TIMED_OUT: "the deadline passed, and the message came back",
    Cause.RETURNED: "the node returned the message before the deadline, because its consumer had gone or could not take it",
    Cause.WAITED: "the wait of a message that was nacked or suspended was over, and the message came back",
    Cause.DEAD_LETTERED: "the message became a dead letter",
    Cause.RESET: "an operator reset the offset of the group, or a RocketMQ client did when it subscribed to a lite topic",
    Cause.DELETED: "an operator deleted the group. If an earlier version of the node wrote the record, the reason may be that "
    "the last subscription ended",
    Cause.LAST_MEMBER_LEFT: "the group was deleted because the last subscription ended of those that had created it",
    Cause.UNRECORDED: "the log does not say it. An acknowledgement right after its pop may be the node's, for a message that "
    "had expired, if an earlier version of the node wrote it. A message that came back had timed out, waited or been returned, "
    "but the beginning of its delivery is unknown",
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
_AT_MS = ParquetColumn("at_ms", ColumnType.BIGINT, "Store time of the record, in ms since 1970 UTC.")
_TIME = ParquetColumn("time", ColumnType.TIMESTAMP, "The same time as a timestamp in UTC.")
_GROUP_ID = ParquetColumn("group_id", ColumnType.BIGINT, "Id of the consumer group.")
_GROUP_NAME = ParquetColumn("group_name", ColumnType.STRING, "Name of the consumer group.")

MESSAGES = ParquetTable(
    "messages",
    "One row per message. A message that retention has copied forward has the row of its first place, or one of its copy if "
    "the tables don't have that place.",
    (
        _POSITION._replace(doc="Position of the message, which is its id."),
        _AT_MS._replace(doc="When the message was stored, in ms since 1970 UTC."),
        _TIME,
        ParquetColumn("topic", ColumnType.STRING, "Topic."),
        ParquetColumn("qos", ColumnType.INT, "QoS of the publisher."),
        ParquetColumn("flags", ColumnType.INT, "All flags of the record (`store.record.Flag`)."),
        ParquetColumn("retain", ColumnType.BOOLEAN, "Whether the message was published with the flag RETAIN."),
        ParquetColumn("delayed", ColumnType.BOOLEAN, "Whether the message was to be delivered at a later time."),
        ParquetColumn(
            "recalled",
            ColumnType.BOOLEAN,
            "Whether a delayed message was recalled or replaced. Null if the segment of the message does not say it.",
            is_nullable=True,
        ),
        ParquetColumn("half", ColumnType.BOOLEAN, "Whether the message was stored as a half of a transaction."),
        ParquetColumn(
            "rolled_back",
            ColumnType.BOOLEAN,
            "Whether the transaction was rolled back. Null if the segment of the message does not say it.",
            is_nullable=True,
        ),
        ParquetColumn(
            "copied_at", ColumnType.BIGINT, "Position of the copy that the row was read from, if any.", is_nullable=True
        ),
        ParquetColumn("tag", ColumnType.STRING, "Tag.", is_nullable=True),
        ParquetColumn("keys", ColumnType.STRINGS, "Business keys.", is_nullable=True),
        ParquetColumn("message_group", ColumnType.STRING, "Message group.", is_nullable=True),
        ParquetColumn("content_type", ColumnType.STRING, "Content type.", is_nullable=True),
        ParquetColumn("deliver_at_ms", ColumnType.BIGINT, "Time of delivery of a delayed message.", is_nullable=True),
        ParquetColumn("expires_at_ms", ColumnType.BIGINT, "When the message expires.", is_nullable=True),
        ParquetColumn("user_names", ColumnType.STRINGS, "Names of the user properties, in their order.", is_nullable=True),
        ParquetColumn("user_values", ColumnType.STRINGS, "Values of the user properties.", is_nullable=True),
        ParquetColumn("body", ColumnType.BINARY, "Body."),
    ),
)

DELIVERIES = ParquetTable(
    "deliveries",
    "One row per stage of a delivery. The log begins a new key when a consumer extends, nacks or suspends a delivery; all "
    "stages of a delivery have one `delivery_id`. Count the rows whose stage is `popped` to count deliveries.",
    (
        ParquetColumn(
            "delivery_id", ColumnType.BIGINT, "Key of the delivery's first stage, or the earliest key of it that is known."
        ),
        ParquetColumn("key", ColumnType.BIGINT, "Key of this stage: position of its record plus the index in it."),
        ParquetColumn("stage", ColumnType.STRING, "`popped`, `extended` (its consumer goes on) or `waiting` (nobody has it)."),
        _POSITION,
        _AT_MS._replace(doc="When the stage began, in ms since 1970 UTC."),
        _TIME,
        ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline, as it was when the stage began."),
        ParquetColumn("return_ms", ColumnType.BIGINT, "Time by which the message is back: the deadline plus the back-off."),
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("message_position", ColumnType.BIGINT, "Position of the message."),
        ParquetColumn("message_bytes", ColumnType.INT, "Size of the record of the message."),
        ParquetColumn("queue_offset", ColumnType.BIGINT, "Offset of the message in the queue that it came from."),
        ParquetColumn("retried", ColumnType.BOOLEAN, "Whether that was the retry queue of the group."),
        ParquetColumn("attempt", ColumnType.INT, "Number of the attempt, from 1."),
    ),
)

ENDS = ParquetTable(
    "ends",
    "One row per stage of a delivery that ended. A delivery without an end of its last stage is open, unless its end was in a "
    "range of `damages`.",
    (
        ParquetColumn("delivery_id", ColumnType.BIGINT, "As in `deliveries`."),
        ParquetColumn("key", ColumnType.BIGINT, "Key of the stage that ended."),
        _POSITION._replace(doc="Position of the record that ended the stage."),
        _AT_MS._replace(doc="When the stage ended, in ms since 1970 UTC."),
        _TIME,
        ParquetColumn("cause", ColumnType.STRING, "Why it ended; see below."),
        ParquetColumn(
            "counted",
            ColumnType.BOOLEAN,
            "Whether the attempt counts. Null for causes that return no message, and for `waited` and `unrecorded`.",
            is_nullable=True,
        ),
        ParquetColumn("reason", ColumnType.STRING, "Why the message is a dead letter, as the node says.", is_nullable=True),
        ParquetColumn(
            "repeated",
            ColumnType.BOOLEAN,
            "Whether the stage had already ended in the same segment. If it had in an earlier one, `stage` is null instead.",
        ),
        ParquetColumn("stage", ColumnType.STRING, "Stage that ended. Null if its beginning is unknown.", is_nullable=True),
        ParquetColumn("popped_ms", ColumnType.BIGINT, "When the delivery was popped, if known.", is_nullable=True),
        ParquetColumn(
            "deadline_ms",
            ColumnType.BIGINT,
            "Deadline in force at the end: a step of the node's clock may have moved it. Null if the beginning is unknown.",
            is_nullable=True,
        ),
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("message_position", ColumnType.BIGINT, "Position of the message, if known.", is_nullable=True),
        ParquetColumn("attempt", ColumnType.INT, "Number of the attempt, if known.", is_nullable=True),
    ),
)

DAMAGES = ParquetTable(
    "damages",
    "One row per range of the log whose records are missing.",
    (
        _POSITION._replace(doc="Position of the first missing byte."),
        ParquetColumn("until_position", ColumnType.BIGINT, "Position after the last one."),
        _AT_MS._replace(doc="Store time of the record in its place, or of the first one after it, in ms since 1970 UTC."),
        _TIME,
        ParquetColumn(
            "cause",
            ColumnType.STRING,
            "`damaged`: `penstock repair` set the range aside. `dropped`: retention deleted it before it was in the tables.",
        ),
    ),
)

SETTINGS = ParquetTable(
    "settings",
    "One row per change of a consumer group and wait of its back-off: its creation, a change of its settings, a reset of its "
    "offset, its deletion.",
    (
        _POSITION,
        _AT_MS,
        _TIME,
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("change", ColumnType.STRING, "`created`, `changed`, `reset` or `deleted`."),
        ParquetColumn("attempt", ColumnType.INT, "Attempt, from 1, after which a message waits for `backoff_ms`."),
        ParquetColumn(
            "backoff_ms",
            ColumnType.BIGINT,
            "That wait. The last one of a change holds for later attempts. Null if the group has the node's option.",
            is_nullable=True,
        ),
        ParquetColumn("topic_filter", ColumnType.STRING, "Filter of a group that is created.", is_nullable=True),
        ParquetColumn("attempts_max", ColumnType.INT, "Null if the group has the node's option.", is_nullable=True),
        ParquetColumn("settings", ColumnType.STRING, "All settings that are not at their defaults, as JSON."),
    ),
)

OPEN = ParquetTable(
    "open",
    "What is open at the end of each segment, so that a query can begin there: one row per stage of a delivery without an end, "
    "and per message that waits for its next delivery. The rows of a file are the state after its segment, or after "
    "the last one of those whose files were joined.",
    (
        ParquetColumn("delivery_id", ColumnType.BIGINT, "As in `deliveries`."),
        ParquetColumn("key", ColumnType.BIGINT, "Key of the stage; of a `queued` message, that of its last one."),
        ParquetColumn(
            "stage",
            ColumnType.STRING,
            "`popped`, `extended` or `waiting` as in `deliveries`, or `queued`: the message came back, and waits for its next "
            "delivery.",
        ),
        _POSITION._replace(doc="Position of the record that began the stage, or that brought a `queued` message back."),
        _AT_MS,
        _TIME,
        ParquetColumn("popped_ms", ColumnType.BIGINT, "When the delivery was popped, if known.", is_nullable=True),
        ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline in force."),
        ParquetColumn("return_ms", ColumnType.BIGINT, "Time by which the message is back: the deadline plus the back-off."),
        _GROUP_ID,
        _GROUP_NAME,
        ParquetColumn("message_position", ColumnType.BIGINT, "Position of the message."),
        ParquetColumn("retried", ColumnType.BOOLEAN, "Whether the delivery came from the retry queue of the group."),
        ParquetColumn("attempt", ColumnType.INT, "Number of the attempt, from 1."),
    ),
)

TABLES = (MESSAGES, DELIVERIES, ENDS, DAMAGES, SETTINGS, OPEN)

START = OPEN._replace(
    name="start",
    doc="What was open where the tables begin after position 0, and where they begin again after a gap that retention has "
    "left, in the columns of `open`. The position is the name of the file; there is none where it is not known what was open. "
    "Snapshots of the index say it, and not as much as the log: a delivery that was extended or returned has the key of its "
    "last stage as `delivery_id`, and `key`, `position` and the times of a `queued` message only say that it came back before.",
)
"""A table of a few files, which are not of segments."""

RECORDS = ParquetTable(
    "records",
    "One row per record of any kind. No files have this table: only the source reads it.",
    (
        _POSITION,
        ParquetColumn("size", ColumnType.INT, "Bytes of the record in the log."),
        ParquetColumn(
            "kind", ColumnType.STRING, "Name of `store.record.Kind`, or KIND_ and the number of a kind that is not known here."
        ),
        ParquetColumn("flags", ColumnType.INT, "All flags of the record (`store.record.Flag`)."),
        _AT_MS,
        _TIME,
        ParquetColumn("topic", ColumnType.STRING, "Topic of a message, or name of a consumer group."),
        ParquetColumn("group_id", ColumnType.BIGINT, "Id of the consumer group, if it is a record of one.", is_nullable=True),
        ParquetColumn("epoch", ColumnType.BIGINT, "Epoch of the consumer group, likewise.", is_nullable=True),
        ParquetColumn("deadline_ms", ColumnType.BIGINT, "Deadline of a checkpoint, likewise.", is_nullable=True),
        ParquetColumn("properties", ColumnType.STRING, "Properties as JSON."),
        ParquetColumn("body", ColumnType.BINARY, "Body."),
    ),
)

SOURCE_TABLES = {table.name: table for table in (MESSAGES, DELIVERIES, ENDS, SETTINGS, DAMAGES, RECORDS)}
"""What `format("penstock")` reads from the log itself."""
