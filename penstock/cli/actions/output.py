"""How commands print their results: a row a line, or a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from itertools import starmap
from typing import Any, TextIO

import orjson

from penstock.store.printable import printable


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
    from rich.console import Console  # commands that print a row at a time do not need rich
    from rich.table import Table
    from rich.text import Text

    table = Table(*columns, box=None, pad_edge=False)
    for row_cells in cells:
        table.add_row(
            *(Text(printable(cell, keep="\n")) for cell in row_cells)
        )  # a plain string would be read as markup, and topics may hold brackets
    Console(file=out, width=None if out.isatty() else 200, soft_wrap=True).print(table)
