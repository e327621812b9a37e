"""Plots of benchmarks as SVG: panels one above the other, each with a few curves over one quantity."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10

WIDTH, PANEL = 720, 190
LEFT, RIGHT, TOP, GAP = 76, 16, 60, 90
COLOURS = ("#1f6feb", "#bf5700", "#6e7781", "#1a7f37")
STEPS = 5
"""Lines of the grid of a linear axis, besides that at 0."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Parameters:
        title: above it.
        unit: of the values, with the space before it.
        curves: points by name.
        is_log: whether the y axis has powers of ten.
    """

    title: str
    unit: str
    curves: Mapping[str, Points]
    is_log: bool = False


class _Axis:
    """Where values are on an axis.

    Parameters:
        values: all of them.
        is_log: whether the axis has powers of ten; otherwise it begins at 0.
        begin, end: where the lowest and the highest value are.
    """

    def __init__(self, values: Sequence[float], begin: float, end: float, *, is_log: bool) -> None:
        self._begin, self._end, self._is_log = begin, end, is_log
        if is_log:
            above_0 = [value for value in values if value > 0] or [1.0]
            first, last = floor(log10(min(above_0))), ceil(log10(max(above_0)))
            self._low, self._high = float(first), float(max(last, first + 1))
            self.marks = [10.0**power for power in range(first, int(self._high) + 1)]
        else:
            self._low, self._high = 0.0, max(values, default=0.0) or 1.0
            self.marks = [self._high * step / STEPS for step in range(STEPS + 1)]

    def __call__(self, value: float) -> float:
        at = log10(max(value, 10**self._low)) if self._is_log else value
        return self._begin + (at - self._low) / (self._high - self._low) * (self._end - self._begin)


def svg_of(panels: Sequence[Panel], x_unit: str, *, is_log: bool = False, note: str = "") -> str:
    """Return the plot.

    Args:
        panels: from top to bottom.
        x_unit: unit of the x axis, with the space before it.
        is_log: whether the x axis has powers of ten; otherwise it begins at 0.
        note: below all panels.
    """
    height = TOP + len(panels) * PANEL + (len(panels) - 1) * GAP + 30 + (20 if note else 0)
    across = _Axis(
        [x for panel in panels for points in panel.curves.values() for x, _ in points], LEFT, WIDTH - RIGHT, is_log=is_log
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(panel, TOP + number * (PANEL + GAP), across, x_unit)
    if note:
        parts.append(f'<text x="{LEFT}" y="{height - 6}">{note}</text>')
    return "\n".join((*parts, "</svg>", ""))


def _panel(panel: Panel, top: float, across: _Axis, x_unit: str) -> list[str]:
    up = _Axis([y for points in panel.curves.values() for _, y in points], top + PANEL, top, is_log=panel.is_log)
    parts = [f'<text x="{LEFT}" y="{top - 26}" font-size="14">{panel.title}</text>']
    for mark in up.marks:
        parts.append(f'<path d="M{LEFT} {up(mark):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{up(mark) + 4:.1f}" text-anchor="end">{_short(mark)}{panel.unit}</text>')
    for mark in across.marks:
        parts.append(f'<text x="{across(mark):.1f}" y="{top + PANEL + 18}" text-anchor="middle">{_short(mark)}{x_unit}</text>')
    for number, (name, points) in enumerate(panel.curves.items()):
        line = " ".join(f"{across(x):.1f},{up(y):.1f}" for x, y in points)
        colour = COLOURS[number % len(COLOURS)]
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts.append(f'<text x="{LEFT + number * 205}" y="{top - 8}" fill="{colour}">{name}</text>')
    return parts


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 1_000 else f"{value:.3g}"
