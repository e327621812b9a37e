"""How tools of the command line print what they got: a row a line."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import orjson


def text(body: bytes) -> str:
    """Return a body as text, with escapes for what is none."""
    return body.decode(errors="backslashreplace")


def show(row: Mapping[str, object], as_json: bool) -> None:
    """Print a row at once: as a JSON object, or its values."""
    sys.stdout.write((orjson.dumps(row).decode() if as_json else "  ".join(str(value) for value in row.values())) + "\n")
    sys.stdout.flush()
