"""Durations as people write them: `500ms`, `30s`, `15m`, `12h`, `7d`.

The options of a node and the arguments of commands are written so. The code, the log and the wire have milliseconds.
"""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final

UNITS_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
"""Milliseconds of each unit, the longest first."""

_DURATION: Final = re.compile(r"([0-9]{1,15})(ms|s|m|min|h|d)")

_MILLISECOND: Final = timedelta(milliseconds=1)


def parse_duration(text: str) -> int:
    """Return the milliseconds of a duration: a whole number and one of ms, s, m, min, h and d.

    Raises:
        ValueError: the text is no such duration.
    """
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no duration: write a whole number with ms, s, m, h or d, such as 10m")
    unit = "m" if found[2] == "min" else found[2]
    return int(found[1]) * UNITS_MS[unit]


def format_duration(ms: int) -> str:
    """Return the shortest text that `parse_duration` reads as these milliseconds; `0` for none."""
    if ms == 0:
        return "0"
    unit, unit_ms = next((unit, unit_ms) for unit, unit_ms in UNITS_MS.items() if ms % unit_ms == 0)
    return f"{ms // unit_ms}{unit}"


def milliseconds_of(duration: timedelta) -> int:
    """Return the milliseconds of a duration of Python. Raises ValueError if they are no whole number."""
    ms, rest = divmod(duration, _MILLISECOND)
    if rest:
        raise ValueError(f"{duration} is no whole number of milliseconds")
    return ms
