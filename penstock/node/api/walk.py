"""Pages of what can be read in order from any name on, so that a page costs no look at the names before it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Final, TypeVar

from penstock.node.api.operation import SLICE_S, PageQuery

LOOKED_MAX: Final = 20_000
"""Names that one request looks at. A page for which more would have to be looked at ends early, and has a cursor."""

CHARS_MAX: Final = 256 * 1024
"""Characters of the names of one page. A page with longer names ends early, and has a cursor."""

READ_AT_ONCE: Final = 64
"""Names that are read between two looks at the time."""

Item = TypeVar("Item")
Row = TypeVar("Row")

Read = Callable[[str, int], Sequence[tuple[str, Item]]]
"""Returns up to a number of things from a name on, in the order of the names, each with its name."""


async def page_in_order(
    query: PageQuery,
    read: Read[Item],
    row_of: Callable[[str, Item], Row | None],
    *,
    prefix: str = "",
) -> tuple[list[Row], str | None]:
    """Return a page of things in the order of their names, and the cursor of the next page; None if there is none.

    A request looks at `LOOKED_MAX` names, in slices between other work. So a page may have fewer rows than asked for, or none,
    although it has a cursor. Things that come or go meanwhile may be on the page or not; all others are on exactly one page.

    Args:
        query: which page.
        read: reads the things. Fewer may come than asked for although more follow; none come if none follow.
        row_of: returns what the page shows of a thing, or None if it is not listed.
        prefix: with which all names that are listed begin.
    """
    page, cursor = await _page_in_order(query, read, row_of, prefix)
    if len(page) > READ_AT_ONCE:
        await asyncio.sleep(0)  # a long page is encoded in a turn of its own
    return page, cursor


async def _page_in_order(
    query: PageQuery, read: Read[Item], row_of: Callable[[str, Item], Row | None], prefix: str
) -> tuple[list[Row], str | None]:
    rows: list[Row] = []
    start = max(query.after + "\0", prefix) if query.after else prefix
    last = ""
    looked = chars = 0
    until_s = perf_counter() + SLICE_S
    while items := read(start, READ_AT_ONCE):
        for name, item in items:
            if not name.startswith(prefix):
                return rows, None
            if len(rows) == query.limit or looked == LOOKED_MAX or chars > CHARS_MAX:
                return rows, last
            row = row_of(name, item)
            if row is not None:
                rows.append(row)
                chars += len(name)
            last = name
            looked += 1
        start = last + "\0"
        if perf_counter() > until_s:
            await asyncio.sleep(0)
            until_s = perf_counter() + SLICE_S
    return rows, None
