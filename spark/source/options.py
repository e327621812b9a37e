"""The options of the source `format("penstock")`, as Spark passes them: strings by names without upper and lower case."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.parquet.schema import DELIVERIES, ENDS, MESSAGES, SETTINGS, SOURCE_TABLES, ColumnType, ParquetTable
from penstock.store.errors import TopicInvalid
from penstock.store.topics import check_filter

BATCH_OPTIONS = ("path", "table", "topic", "group", "from", "until")
STREAM_OPTIONS = ("path", "table", "topic", "startingOffsets", "maxBytesPerTrigger", "minPartitions", "failOnDataLoss")
WITH_TOPICS = (MESSAGES.name, "records")
WITH_GROUPS = (DELIVERIES.name, ENDS.name, SETTINGS.name)

BYTES_PER_TRIGGER = 1024 * 1024 * 1024
"""Bytes of the log that a batch of a stream reads at most. They bound what a failed batch has to repeat, above all that of a
stream that begins with the whole log."""

EARLIEST, LATEST = "earliest", "latest"

FAR = 2**63 - 1
"""Stands for the end of the log."""

_UNITS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}

_REMEDY = "Call load(path) with one data directory, or its folder `commitlog`."


class Place(NamedTuple):
    """A place in the log: a position, or the first record that was stored at a time or after it."""

    position: int = 0
    at_ms: int | None = None


@dataclass(frozen=True, slots=True)
class BatchOptions:
    """What is read once.

    Parameters:
        path: a data directory, or its folder `commitlog`. `load(path)` sets it.
        table: one of `SOURCE_TABLES`.
        topic: a topic filter of MQTT, of `messages` and `records`. None is all topics.
        group: the name of a consumer group, of `deliveries`, `ends` and `settings`. None is all groups.
        start: option `from`. Rows of earlier positions are left out.
        stop: option `until`. Rows from this position on are left out.
    """

    path: str
    table: ParquetTable
    topic: str | None
    group: str | None
    start: Place
    stop: Place

    @classmethod
    def of(cls, options: Mapping[str, str]) -> BatchOptions:
        """Return the options that Spark passes. Raises ReadOptionInvalid."""
        given = _named(options, BATCH_OPTIONS, "read", STREAM_OPTIONS, "A stream has")
        table = table_of(options)
        return cls(
            path=_path(given),
            table=table,
            topic=_topic(given, table),
            group=_group(given, table),
            start=place("from", given.get("from", EARLIEST)),
            stop=place("until", given.get("until", LATEST)),
        )


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """What a stream follows.

    Parameters:
        path: as in `BatchOptions`.
        table: `messages` or `records`.
        topic: as in `BatchOptions`.
        start: option `startingOffsets`: where a query begins that has no checkpoint.
        bytes_per_trigger: option `maxBytesPerTrigger`: bytes of the log that a batch reads at most, or one record.
        partitions_min: option `minPartitions`: tasks of a batch, unless it is small.
        fails_on_data_loss: option `failOnDataLoss`: whether records that retention deleted before the stream read them are an
            error. Else the stream goes on after them, and its offset counts their bytes.
    """

    path: str
    table: ParquetTable
    topic: str | None
    start: Place
    bytes_per_trigger: int
    partitions_min: int
    fails_on_data_loss: bool

    @classmethod
    def of(cls, options: Mapping[str, str]) -> StreamOptions:
        """Return the options that Spark passes. Raises ReadOptionInvalid."""
        given = _named(options, STREAM_OPTIONS, "readStream", BATCH_OPTIONS, "A read that is no stream has")
        table = table_of(options)
        if table.name not in WITH_TOPICS:
            raise ReadOptionInvalid(
                f"A stream reads {' or '.join(WITH_TOPICS)}, but table is {table.name!r}: its rows depend on what was open "
                f"before. Read that table with penstock.spark, or with read instead of readStream."
            )
        loss = given.get("failOnDataLoss", "true").lower()
        if loss not in ("true", "false"):
            raise ReadOptionInvalid(f"failOnDataLoss is {loss!r}, but must be true or false.")
        return cls(
            path=_path(given),
            table=table,
            topic=_topic(given, table),
            start=place("startingOffsets", given.get("startingOffsets", EARLIEST)),
            bytes_per_trigger=_bytes("maxBytesPerTrigger", given.get("maxBytesPerTrigger", str(BYTES_PER_TRIGGER))),
            partitions_min=_bytes("minPartitions", given.get("minPartitions", "1")),
            fails_on_data_loss=loss == "true",
        )


def table_of(options: Mapping[str, str]) -> ParquetTable:
    """Return the table that the option `table` names, `messages` without it. Raises ReadOptionInvalid."""
    name = options.get("table", MESSAGES.name)
    if name not in SOURCE_TABLES:
        raise ReadOptionInvalid(f"The table {name!r} does not exist. The tables are {', '.join(SOURCE_TABLES)}.")
    return SOURCE_TABLES[name]


def chosen_columns(table: ParquetTable, wanted: Iterable[tuple[str, str]]) -> list[str]:
    """Return the names of the columns that a schema has, given as pairs of name and SQL type.

    Raises:
        ReadOptionInvalid: the table does not have such a column, or the schema has none. Rows without columns are not counted.
    """
    types = {column.name: column.type for column in table.columns}
    names: list[str] = []
    for name, sql in wanted:
        if name not in types:
            raise ReadOptionInvalid(
                f"The schema has the column {name!r}, but the columns of {table.name} are {', '.join(types)}."
            )
        if sql != types[name]:
            raise ReadOptionInvalid(f"The schema has the column {name} as {sql}, but it is {ColumnType(types[name])}.")
        names.append(name)
    if not names:
        raise ReadOptionInvalid(f"The schema has no columns. Name at least one of {', '.join(types)}.")
    return names


def place(option: str, text: str) -> Place:
    """Return the place that an option names: `earliest`, `latest`, a position, or a time in ISO 8601 (UTC without a zone).

    Raises:
        ReadOptionInvalid: it is none of these.
    """
    if text.lower() == EARLIEST:
        return Place()
    if text.lower() == LATEST:
        return Place(FAR)
    if text.isdecimal() and int(text) <= FAR:
        return Place(int(text))
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ReadOptionInvalid(
            f"{option} is {text!r}, but must be {EARLIEST}, {LATEST}, a position, or a time such as 2026-11-28T12:00:00+01:00."
        ) from None
    return Place(at_ms=round((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp() * 1000))


def _named(
    options: Mapping[str, str], names: tuple[str, ...], call: str, other_names: tuple[str, ...], other: str
) -> dict[str, str]:
    """Return the options by the names in the documentation. Refuse others."""
    by_lower = {name.lower(): name for name in names}
    given = {}
    for key, text in options.items():
        if key.lower() == "paths":
            raise ReadOptionInvalid(f"There are several paths, {text}, but a log has one directory. {_REMEDY}")
        name = by_lower.get(key.lower())
        if name is None:
            foreign = {each.lower(): each for each in other_names}.get(key.lower())
            likely = get_close_matches(key.lower(), by_lower, 1)
            hint = f" Did you mean {by_lower[likely[0]]}?" if likely else ""
            hint = f" {other} it." if foreign else hint
            raise ReadOptionInvalid(f"The option {key!r} does not exist for {call}.{hint} The options are {', '.join(names)}.")
        given[name] = text
    return given


def _path(given: Mapping[str, str]) -> str:
    path = given.get("path", "")
    if not path:
        raise ReadOptionInvalid(f"The path is missing. {_REMEDY}")
    if "://" in path or path.startswith("file:"):
        raise ReadOptionInvalid(
            f"The path {path!r} is a URL, but a log is read from a directory that all workers see. {_REMEDY}"
        )
    if any(sign in path for sign in "*?[{") and not Path(path).exists():
        raise ReadOptionInvalid(f"The path {path!r} is a pattern, but a log has one directory. {_REMEDY}")
    return path


def _topic(given: Mapping[str, str], table: ParquetTable) -> str | None:
    topic = given.get("topic")
    if topic is not None:
        if table.name not in WITH_TOPICS:
            raise ReadOptionInvalid(f"The table {table.name} has no topics. Leave the option topic out.")
        try:
            check_filter(topic)
        except TopicInvalid as error:
            raise ReadOptionInvalid(f"topic is no filter of MQTT: {error}.") from error
    return topic


def _group(given: Mapping[str, str], table: ParquetTable) -> str | None:
    group = given.get("group")
    if group is not None and table.name not in WITH_GROUPS:
        raise ReadOptionInvalid(f"The table {table.name} has no groups. The option group is for {', '.join(WITH_GROUPS)}.")
    return group


def _bytes(option: str, text: str) -> int:
    digits = text.rstrip("kmgKMG")
    unit = _UNITS.get(text[len(digits) :].lower())
    if unit is None or not digits.isdecimal() or int(digits) < 1:
        raise ReadOptionInvalid(f"{option} is {text!r}, but must be a whole number of at least 1, such as 8 or 64m.")
    return int(digits) * unit
