"""Quantities as people read them."""

from __future__ import annotations

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
