"""How commands print their results: a row a line, or a table."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import starmap
from shutil import get_terminal_size
from typing import Any, TextIO

import orjson

from penstock.store.printable import printable

GAP = "  "
"""What stands between the columns of a table."""

_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|")
"""A cell that is aligned to the right. An empty one fits both sides."""


def text_of(body: bytes) -> str:
    """Return a body as text. Bytes that are not UTF-8 become escapes."""
    return body.decode(errors="backslashreplace")


def time_of(ms: int) -> str | None:
    """Return a time in milliseconds since 1970 as ISO 8601, or None for 0, which means that there is none."""
    return datetime.fromtimestamp(ms / 1000, UTC).isoformat(timespec="milliseconds") if ms else None


def cells_of(row: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Return fields of a row as cells of a table. The cell of a field that is None is empty."""
    return ["" if row[name] is None else _shown(name, row[name]) for name in names]


def _shown(name: str, value: object) -> str:
    """Return a value for people. Bodies may have several lines."""
    return printable(str(value), keep="\n\t" if name == "body" else "")


def print_line(text: str, *, out: TextIO | None = None) -> None:
    """Print a line that may contain text from outside."""
    (out or sys.stdout).write(printable(text, keep="\n") + "\n")


def print_row(row: Mapping[str, object], as_json: bool) -> None:
    """Print a row at once: as a JSON object, or its values."""
    sys.stdout.write((printable(orjson.dumps(row).decode()) if as_json else "  ".join(starmap(_shown, row.items()))) + "\n")
    sys.stdout.flush()


def print_rows(
    rows: Iterable[Mapping[str, Any]], cells: Iterable[Sequence[str]], columns: Sequence[str], *, as_json: bool, out: TextIO
) -> None:
    """Print rows as JSON, one object a line, or print their cells as a table."""
    if as_json:
        for row in rows:
            out.write(printable(orjson.dumps(row).decode()) + "\n")
        return
    table = [[printable(cell) for cell in row_cells] for row_cells in cells]
    out.writelines(f"{line}\n" for line in laid_out(table, columns, get_terminal_size().columns if out.isatty() else None))


def laid_out(table: Sequence[Sequence[str]], columns: Sequence[str], width: int | None) -> Iterator[str]:
    """Yield the lines of a table, or a block of lines for each row where a line would be wider than the terminal.

    No cell is ever cut, because the next command may need what it has.

    Args:
        table: cells, by row and column.
        columns: their names.
        width: of the terminal; None for no bound.
    """
    from rich.cells import cell_len  # commands that print a row at a time do not need rich

    widths = [max(map(cell_len, column)) for column in zip(columns, *table, strict=True)]
    if width is not None and table and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        name_width = max(map(cell_len, columns))
        for number, row in enumerate(table):
            if number:
                yield ""
            yield from (f"{name:>{name_width}}  {cell}".rstrip() for name, cell in zip(columns, row, strict=True))
        return
    is_number = [bool(table) and all(_NUMBER.fullmatch(row[i]) for row in table) for i in range(len(columns))]
    for row in [columns, *table]:
        padded = []
        for cell, cell_width, is_right in zip(row, widths, is_number, strict=True):
            padding = " " * (cell_width - cell_len(cell))
            padded.append(padding + cell if is_right else cell + padding)
        yield GAP.join(padded).rstrip()
