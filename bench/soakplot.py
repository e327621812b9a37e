"""The plot of `bench.soak`: panels one above the other, each with a few figures over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, PANEL_HEIGHT = 900, 240
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 34, 30
COLOURS = ("#1f6feb", "#bf5700", "#1a7f37", "#8250df", "#6e7781")
STEPS = 4
"""Lines of the grid of a panel, besides that at 0."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Parameters:
        title: above it.
        unit: of the figures as they are shown.
        divisor: by which a figure is divided to get that unit.
        names: of the figures.
    """

    title: str
    unit: str
    divisor: float
    names: tuple[str, ...]


def svg_of(samples: Sequence[Mapping[str, float]], panels: Sequence[Panel]) -> str:
    """Return the plot of the samples, which have the key `seconds` and figures by name. A sample may lack a figure."""
    height = PANEL_HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += _panel(samples, panel, number * PANEL_HEIGHT)
    return "\n".join((*parts, "</svg>", ""))


def _panel(samples: Sequence[Mapping[str, float]], panel: Panel, top: float) -> list[str]:
    minutes = max((sample["seconds"] for sample in samples), default=0) / 60 or 1
    lines = {
        name: [(sample["seconds"] / 60, sample[name] / panel.divisor) for sample in samples if name in sample]
        for name in panel.names
    }
    most = max((value for points in lines.values() for _, value in points), default=0) * 1.1 or 1

    def x(at_min: float) -> float:
        return LEFT + at_min / minutes * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return top + PANEL_HEIGHT - BOTTOM - value / most * (PANEL_HEIGHT - TOP - BOTTOM)

    unit = f", {panel.unit}" if panel.unit else ""
    parts = [f'<text x="{LEFT}" y="{top + 20}" font-size="14">{panel.title}{unit}</text>']
    for step in range(STEPS + 1):
        value = most * step / STEPS
        parts.append(f'<path d="M{LEFT} {y(value):.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{value:,.0f}</text>')
        at_min = minutes * step / STEPS
        parts.append(f'<text x="{x(at_min):.1f}" y="{top + PANEL_HEIGHT - 12}" text-anchor="middle">{at_min:.1f} min</text>')
    for colour, points in zip(COLOURS, lines.values(), strict=False):
        line = " ".join(f"{x(at_min):.1f},{y(value):.1f}" for at_min, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
    for number, (colour, name) in enumerate(zip(COLOURS, lines, strict=False)):
        label = name.removesuffix("_bytes").replace("_", " ")
        parts.append(f'<text x="{WIDTH - RIGHT + 12}" y="{top + TOP + 16 * number + 10}" fill="{colour}">{label}</text>')
    return parts
