"""How commands print their results: a row a line, or a table, with quantities as people read them."""

from __future__ import annotations

import re
import sys
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import starmap
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Any, TextIO
from unicodedata import category, east_asian_width

import orjson

from penstock.store.printable import printable

if TYPE_CHECKING:
    from google.protobuf.message import Message


GAP = "  "
"""What stands between the columns of a table."""

_NUMBER = re.compile(r"-?[0-9][0-9,]*(?:\.[0-9]+)?|-")
"""A cell that is aligned to the right. A dash fits both sides."""


def text_of(body: bytes) -> str:
    """Return a body as text. Bytes that are not UTF-8 become escapes."""
    return body.decode(errors="backslashreplace")


def body_fields(body: bytes, name: str = "body") -> dict[str, str]:
    """Return a body as fields of a row of JSON: the text, or Base64 and the field `encoding` for what is no UTF-8.

    Args:
        body: the bytes.
        name: of the field. Fields other than the body have the name of their encoding, too, such as `x_encoding`.
    """
    try:
        return {name: body.decode()}
    except UnicodeDecodeError:
        encoding = "encoding" if name == "body" else f"{name}_encoding"
        return {name: b64encode(body).decode(), encoding: "base64"}


def shortened(text: str) -> str:
    """Return a text in one line for the last column of a table. The JSON output has all of it."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS else f"{line[:TEXT_CHARS]}..."


TEXT_CHARS = 60
"""Characters of free text that a table shows."""


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
    """Print rows as JSON, one object a line, or print their cells as a table, where an empty cell is a dash."""
    if as_json:
        for row in rows:
            out.write(printable(orjson.dumps(row).decode()) + "\n")
        return
    table = [[printable(cell) or "-" for cell in row_cells] for row_cells in cells]
    out.writelines(f"{line}\n" for line in laid_out(table, columns, get_terminal_size().columns if out.isatty() else None))


def laid_out(table: Sequence[Sequence[str]], columns: Sequence[str], width: int | None) -> Iterator[str]:
    """Yield the lines of a table, or a block of lines for each row where a line would be wider than the terminal.

    No cell is ever cut, because the next command may need what it has.

    Args:
        table: cells, by row and column.
        columns: their names.
        width: of the terminal; None for no bound.
    """
    widths = [max(map(_cell_width, column)) for column in zip(columns, *table, strict=True)]
    if width is not None and table and sum(widths) + len(GAP) * (len(widths) - 1) > width:
        name_width = max(map(_cell_width, columns))
        for number, row in enumerate(table):
            if number:
                yield ""
            yield from (f"{name:>{name_width}}  {cell}".rstrip() for name, cell in zip(columns, row, strict=True))
        return
    is_number = [bool(table) and all(_NUMBER.fullmatch(row[i]) for row in table) for i in range(len(columns))]
    for row in [columns, *table]:
        padded = []
        for cell, cell_width, is_right in zip(row, widths, is_number, strict=True):
            padding = " " * (cell_width - _cell_width(cell))
            padded.append(padding + cell if is_right else cell + padding)
        yield GAP.join(padded).rstrip()


def _cell_width(text: str) -> int:
    """Return the number of columns that a text takes on a terminal: two for wide characters, none for combining ones."""
    if text.isascii():
        return len(text)
    return sum(0 if category(each) in ("Mn", "Me", "Cf") else 1 + (east_asian_width(each) in "WF") for each in text)


_BINARY = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_TIMES = ((86_400, "d"), (3_600, "h"), (60, "min"), (1, "s"), (0.001, "ms"))


def shown_bytes(count: float) -> str:
    """Return a number of bytes with the largest unit that it has one of."""
    for unit in _BINARY[:-1]:
        if abs(count) < 1024:
            return f"{count:,.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:,.1f} {_BINARY[-1]}"


def shown_seconds(seconds: float | None) -> str:
    """Return a time with the largest unit that it has one of; a dash for None."""
    if seconds is None:
        return "-"
    for size, unit in _TIMES:
        if abs(seconds) >= size:
            return f"{seconds / size:.1f} {unit}" if seconds < 10 * size else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1000:.1f} ms" if seconds else "0"


def shown_rate(per_s: float) -> str:
    """Return a number per second."""
    return f"{per_s:,.0f}" if per_s >= 10 or not per_s else f"{per_s:.1f}"


def row_of(message: Message, *, is_full: bool = False) -> dict[str, Any]:
    """Return the fields of a message by their names in the definition.

    Args:
        message: any message.
        is_full: also return fields that have their default, such as 0.
    """
    from google.protobuf.json_format import MessageToDict

    row: dict[str, Any] = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=is_full)
    _make_numbers(row, message.DESCRIPTOR)
    return row


def _make_numbers(row: dict[str, Any], descriptor: Any) -> None:
    """Make numbers of the texts that protobuf's JSON has for integers of 64 bits, for languages that have none."""
    from google.protobuf.descriptor import FieldDescriptor

    long = (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
    for field in descriptor.fields:
        value = row.get(field.name)
        if value is None:
            continue
        if field.cpp_type in long:
            row[field.name] = [int(each) for each in value] if isinstance(value, list) else int(value)
        elif field.message_type is not None and not field.message_type.GetOptions().map_entry:
            for each in value if isinstance(value, list) else [value]:
                _make_numbers(each, field.message_type)
