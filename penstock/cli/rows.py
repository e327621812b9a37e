"""How tools of the command line print what they got: a row a line, or a table."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import orjson


def text(body: bytes) -> str:
    """Return a body as text, with escapes for what is none."""
    return body.decode(errors="backslashreplace")


def show(row: Mapping[str, object], as_json: bool) -> None:
    """Print a row at once: as a JSON object, or its values."""
    sys.stdout.write((orjson.dumps(row).decode() if as_json else "  ".join(str(value) for value in row.values())) + "\n")
    sys.stdout.flush()


def show_all(
    rows: Iterable[Mapping[str, Any]], cells: Iterable[Sequence[str]], columns: Sequence[str], *, as_json: bool, out: TextIO
) -> None:
    """Print rows: each as a JSON object a line, or the cells of each as a table."""
    if as_json:
        for row in rows:
            out.write(orjson.dumps(row).decode() + "\n")
        return
    from rich.console import Console  # those who print a row at a time need none of this
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for row_cells in cells:
        table.add_row(*row_cells)
    Console(file=out, width=None if out.isatty() else 200, soft_wrap=True).print(table)
