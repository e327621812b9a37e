"""Narrows a reconciliation to the deliveries of some groups, or of messages whose topics match.

The steps read views of the narrowed names instead of the tables. A run without a filter has none of these views.
"""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from penstock.spark.errors import ReadOptionInvalid
from penstock.spark.parquet.schema import (
    DAMAGES,
    DELIVERIES,
    ENDS,
    MESSAGES,
    SETTINGS,
    ColumnType,
    ParquetColumn,
    ParquetTable,
)
from penstock.spark.reconciliation.engines import Engine
from penstock.spark.reconciliation.inputs import OPEN_AFTER, OPEN_BEFORE, Inputs
from penstock.spark.reconciliation.summary import ReportFilter

NEAR_NAMES_MAX = 5
"""Maximum number of names that the error for an unknown group lists."""

_EVERY = "every_"
"""Prefix of the name of a table that has not been narrowed."""

_GROUPED = (DELIVERIES.name, ENDS.name, SETTINGS.name, OPEN_BEFORE)
"""The tables that between them name each group."""


def register_narrowed(engine: Engine, inputs: Inputs, groups: Sequence[str], topics: Sequence[str], scratch: Path) -> None:
    """Give the tables names that SQL can use, with only the rows of some groups, and of messages whose topics match.

    Ends that match no delivery have no topic, so a report of some topics has none of them.

    Args:
        engine: runs the SQL.
        inputs: the tables.
        groups: names of groups; empty for all.
        topics: valid topic filters; empty for all topics.
        scratch: a directory for the names and levels that the queries look for.

    Raises:
        ReadOptionInvalid: the log knows no group of a name.
    """
    for each in inputs.tables:
        is_whole = each.table in (DAMAGES, MESSAGES)
        engine.register(each.table, each.name if is_whole else f"{_EVERY}{each.name}", each.files)
    conditions = []
    if groups:
        _choose_groups(engine, groups, scratch)
        conditions.append("group_id IN (SELECT group_id FROM chosen_groups)")
    _view(engine, SETTINGS.name, conditions)
    if topics:
        engine.register(MESSAGES, f"{_EVERY}{MESSAGES.name}", inputs.messages)
        choose_messages(engine, topics, scratch)
    chosen = ["message_position IN (SELECT position FROM chosen_messages)"] if topics else []
    for name in (DELIVERIES.name, OPEN_BEFORE, OPEN_AFTER):
        _view(engine, name, [*conditions, *chosen])
    if not topics:
        _view(engine, ENDS.name, conditions)
        return
    known = _query(ENDS.name, [*conditions, *chosen])
    begun = f"key IN (SELECT key FROM {DELIVERIES.name} UNION ALL SELECT key FROM {OPEN_BEFORE})"
    engine.view(ENDS.name, f"{known} UNION ALL {_query(ENDS.name, [*conditions, 'message_position IS NULL', begun])}")


def report_filter(engine: Engine, groups: Sequence[str], topics: Sequence[str]) -> ReportFilter:
    """Return what the summary says of a filter. The tables are narrowed by it."""
    unread = 0
    if topics:
        of_groups = ["group_id IN (SELECT group_id FROM chosen_groups)"] if groups else []
        as_of = "at_ms <= (SELECT as_of_ms FROM parameters)"
        begun = _query(DELIVERIES.name, ["stage = 'popped'", as_of, *of_groups], "message_position")
        before = _query(OPEN_BEFORE, ["stage <> 'queued'", *of_groups], "message_position")
        (row,) = engine.rows(
            f"SELECT CAST(count(*) AS BIGINT) AS deliveries FROM ({begun} UNION ALL {before}) d "
            f"LEFT JOIN {_EVERY}{MESSAGES.name} m ON d.message_position = m.position WHERE m.position IS NULL"
        )
        unread = row["deliveries"]
    return ReportFilter(groups=list(groups), topics=list(topics), unread=unread)


def filter_words(narrowed: ReportFilter) -> str:
    """Return what a report was narrowed to, in words."""
    parts = []
    if groups := narrowed["groups"]:
        parts.append(f"of the group{'s' if len(groups) > 1 else ''} {', '.join(groups)}")
    if narrowed["topics"]:
        parts.append(f"of messages whose topic matches {' or '.join(narrowed['topics'])}")
    if narrowed["unread"]:
        parts.append(f"without those whose topic was not read: {narrowed['unread']:,}")
    return f"Only deliveries {', '.join(parts)}"


def _query(name: str, conditions: Sequence[str], columns: str = "*") -> str:
    where = f" WHERE {' AND '.join(conditions)}" if conditions else ""
    return f"SELECT {columns} FROM {_EVERY}{name}{where}"


def _view(engine: Engine, name: str, conditions: Sequence[str]) -> None:
    engine.view(name, _query(name, conditions))


def _choose_groups(engine: Engine, groups: Sequence[str], scratch: Path) -> None:
    """Name the table of the ids that groups have, `chosen_groups`. A group has an id for each of its filters."""
    wanted = ParquetTable("wanted_groups", "", (ParquetColumn("group_name", ColumnType.STRING, ""),))
    path = scratch / "wanted_groups.parquet"
    pq.write_table(pa.table({"group_name": pa.array(groups, pa.string())}), path)
    engine.register(wanted, wanted.name, [path])
    every = " UNION ALL ".join(_query(name, [], "group_id, group_name") for name in _GROUPED)
    matching = (
        f"SELECT DISTINCT group_id, group_name FROM ({every}) named WHERE group_name IN (SELECT group_name FROM wanted_groups)"
    )
    engine.materialise("chosen_groups", matching, None)
    known = {row["group_name"] for row in engine.rows("SELECT group_name FROM chosen_groups")}
    for name in groups:
        if name not in known:
            names = {row["group_name"] for row in engine.rows(f"SELECT DISTINCT group_name FROM ({every}) named")}
            raise ReadOptionInvalid(f"What is read of the log has no group {name!r}. {_near(name, names)}")


def _near(name: str, names: set[str]) -> str:
    near = get_close_matches(name, sorted(names), NEAR_NAMES_MAX) or sorted(names)[:NEAR_NAMES_MAX]
    if not near:
        return "It has no groups at all."
    return f"It has {', '.join(map(repr, near))}{' and others' if len(names) > len(near) else ''}: name one of its groups."


def choose_messages(engine: Engine, topics: Sequence[str], scratch: Path) -> None:
    """Name the table of the positions of messages whose topics match a filter, `chosen_messages`.

    A message may have been stored before the part of the log that is read, so `every_messages` has all tables of messages.
    """
    levels = {_column(number, at): level for number, topic in enumerate(topics) for at, level in _named_levels(topic)}
    columns = {"filters": pa.array([len(topics)])} | {name: pa.array([level], pa.string()) for name, level in levels.items()}
    path = scratch / "wanted_levels.parquet"
    pq.write_table(pa.table(columns), path)
    shape = (ParquetColumn("filters", ColumnType.BIGINT, ""), *(ParquetColumn(each, ColumnType.STRING, "") for each in levels))
    engine.register(ParquetTable("wanted_levels", "", shape), "wanted_levels", [path])
    matching = " OR ".join(f"({_matches(number, topic)})" for number, topic in enumerate(topics))
    engine.materialise(
        "chosen_messages",
        f"SELECT DISTINCT m.position AS position FROM {_EVERY}{MESSAGES.name} m CROSS JOIN wanted_levels w WHERE {matching}",
        None,
    )


def _column(number: int, at: int) -> str:
    return f"filter_{number}_level_{at}"


def _named_levels(topic_filter: str) -> list[tuple[int, str]]:
    """Return the levels of a filter that are no wildcards, with their numbers, from 1."""
    return [(at, level) for at, level in enumerate(topic_filter.split("/"), 1) if level not in ("+", "#")]


def _matches(number: int, topic_filter: str) -> str:
    """Return the condition that a topic matches a filter, as `store.topics.matches` defines it."""
    levels = topic_filter.split("/")
    conditions = [f"split_part(m.topic, '/', {at}) = w.{_column(number, at)}" for at, _ in _named_levels(topic_filter)]
    count = "length(m.topic) - length(replace(m.topic, '/', '')) + 1"
    conditions.append(f"{count} >= {len(levels) - 1}" if levels[-1] == "#" else f"{count} = {len(levels)}")
    if levels[0] in ("+", "#"):
        conditions.append("substring(m.topic, 1, 1) <> '$'")
    return " AND ".join(conditions)
