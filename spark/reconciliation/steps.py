"""The steps of the reconciliation: plain SQL in files, run in the order of their names, on the tables and the steps before.

Rules, so that Spark and DuckDB run the same text with the same result: BIGINT milliseconds; no functions of dates, no division,
no structs; no reserved or quoted names; joins by equality, CASE and GROUP BY; sums and counts are cast; parameters are a table
of one row; no QUALIFY and no approximate quantiles. A step that is kept has no WITH: Spark would not find it in its cache.
"""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple


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
