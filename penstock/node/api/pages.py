"""Pages of listings, and work in slices, so that no request holds the loop for long.

`page_in_order` is for what can be read in order from any name on, so that a page costs no look at the names before it.
`page_by_name` is for mappings without order, of which it looks at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final, TypeVar

from penstock.node.api.operation import PageQuery
from penstock.node.loopshare import LoopShare

LOOKED_AT_ONCE: Final = 16
"""Items that a request looks at between two looks at the time."""

LOOKED_MAX: Final = 20_000
"""Names that one request looks at. A page for which more would have to be looked at ends early, and has a cursor."""

CHARS_MAX: Final = 256 * 1024
"""Characters of the names of one page. A page with longer names ends early, and has a cursor."""

READ_AT_ONCE: Final = 16
"""Names that are read between two looks at the time."""

T = TypeVar("T")
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
    share = LoopShare()
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
        await share.rest()
    return rows, None


async def in_slices(items: Iterable[T]) -> list[T]:
    """Return all items of an iterable that does some work for each, in slices between other work of the loop.

    The iterable must bear that other work goes on in between: a copy, or a generator that looks up anew.
    """
    done = [item async for item in sliced(items, LOOKED_AT_ONCE)]
    if len(done) > READ_AT_ONCE:
        await asyncio.sleep(0)  # a long page is encoded in a turn of its own
    return done


async def sliced(items: Iterable[T], at_once: int = 1) -> AsyncIterator[T]:
    """Yield items to a caller who does some work for each, in slices between other work of the loop.

    Args:
        items: bear that other work goes on in between, as those of `in_slices` must.
        at_once: items between two looks at the time.
    """
    share = LoopShare()
    for number, item in enumerate(items):
        yield item
        if number % at_once == 0:
            await share.rest()


async def page_by_name(
    items: Mapping[str, Item], query: PageQuery, wanted: Callable[[str, Item], bool] = lambda name, item: True
) -> tuple[list[tuple[str, Item]], str | None]:
    """Return a page of a mapping in the order of its names, and the cursor of the next one; None if there is none.

    The time is in proportion to the size of the mapping, in slices between other work. Items that come or go meanwhile may be
    on the page or not; all others are on exactly one page.

    Args:
        items: by name.
        query: which page.
        wanted: tells which items are listed.
    """
    after, limit = query.after, query.limit
    lowest: list[tuple[str, Item]] = []
    last = ""
    share = LoopShare()
    for number, (name, item) in enumerate(tuple(items.items())):
        if number % LOOKED_AT_ONCE == 0:
            await share.rest()
        if name <= after or (last and name >= last) or not wanted(name, item):
            continue
        lowest.append((name, item))
        if len(lowest) >= 2 * limit + 2:  # keep the lowest; what is above the last of them needs no look any more
            lowest.sort(key=_name)
            del lowest[limit + 1 :]
            last = lowest[-1][0]
    lowest.sort(key=_name)
    page = lowest[:limit]
    sizes = accumulate(len(name) for name, _ in page)
    del page[1 + sum(size <= CHARS_MAX for size in sizes) :]
    return page, page[-1][0] if len(lowest) > len(page) else None


def _name(entry: tuple[str, Any]) -> str:
    return entry[0]
