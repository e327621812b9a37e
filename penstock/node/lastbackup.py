"""The time of the last backup, which the node keeps in a file of its data directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import orjson

from penstock.store.files import Files, read_file, replace_file

FILE: Final = "last_backup"

_KEY: Final = "completed_ms"


def read_last_backup(data_dir: Path, files: Files) -> int:
    """Return when the last backup was complete, in ms since 1970; 0 if the data directory knows of none.

    Raises:
        OSError: the file can't be read.
        ValueError: the file has other content.
    """
    try:
        content: Any = orjson.loads(read_file(files, data_dir / FILE))
    except FileNotFoundError:
        return 0
    completed_ms = content.get(_KEY) if isinstance(content, dict) else None
    if not isinstance(completed_ms, int) or completed_ms < 0:
        raise ValueError(f"{_KEY} is {completed_ms!r}, but must be a time in ms")
    return completed_ms


def write_last_backup(data_dir: Path, completed_ms: int, files: Files) -> None:
    """Note that a backup was complete at a time in ms since 1970. Raises OSError."""
    replace_file(files, data_dir / FILE, orjson.dumps({_KEY: completed_ms}))
