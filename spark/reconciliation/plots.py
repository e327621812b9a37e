"""Plots of a report as SVG. A drawing takes the width of the page; the words beside it are HTML and keep their size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from penstock.spark.reconciliation.markup import Markup, element, join
from penstock.spark.reconciliation.summary import BEFORE_ZERO, BUCKETS_MS, FINDINGS, Counts, Hour, Outcome

FAMILIES: dict[str, tuple[Outcome, ...]] = {
    "acked": (Outcome.ACKED,),
    "expired or voided": (Outcome.EXPIRED, Outcome.VOIDED),
    "in flight or waiting": (Outcome.IN_FLIGHT, Outcome.WAITING),
    "came back": (Outcome.REVIVED, Outcome.NACKED, Outcome.SUSPENDED, Outcome.RETURNED),
    "dead letter": (Outcome.DEAD_LETTERED,),
    "unknown": (Outcome.UNKNOWN,),
    "wrong": FINDINGS,
}
"""Outcomes that have one colour, because nobody can tell fourteen colours apart. In the order of their bars, from below."""

FAMILY_OF = {outcome: family for family, outcomes in FAMILIES.items() for outcome in outcomes}

LANES = (*FINDINGS, Outcome.UNKNOWN, Outcome.DEAD_LETTERED, Outcome.REVIVED, Outcome.NACKED)
"""Outcomes that have bars of their own below those of all deliveries, where few of them among millions would not be seen."""

BARS_MAX = 200
"""Maximum number of bars of a plot."""

BARS_MIN = 16
"""Places for bars that a plot has at least, so that one hour is not as wide as the page."""

TICKS_MAX = 4
"""Maximum number of ticks of an axis. More would overlap on the screen of a phone."""

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
_STEPS_MS = tuple(hours * HOUR_MS for hours in (1, 2, 3, 6, 12, 24, 48, 168, 336, 672))
_MONDAY_MS = 4 * DAY_MS
"""The first Monday after 1970 began. Weeks begin on Mondays."""

_HEIGHT, _LANE, _LANE_BAR, _VISIBLE = 180, 34, 24, 2.5
"""Heights in pixels: of a plot, of a lane, of the highest bar of a lane, and of the bar of a single delivery among millions."""


def word(outcome: str) -> str:
    """Return an outcome in words."""
    return outcome.replace("_", " ")


def moment(ms: int, pattern: str = "%Y-%m-%d %H:%M") -> str:
    """Return a time in UTC, or the number itself if no calendar has it."""
    try:
        return datetime.fromtimestamp(ms // 1000, UTC).strftime(pattern)
    except (OverflowError, OSError, ValueError):
        return f"{ms:,} ms"


def duration(ms: float) -> str:
    """Return a length of time with its unit, to two digits or the whole number."""
    if abs(ms) < 1000:
        return f"{ms:,.0f} ms"
    units = (("s", 1000, 120), ("min", 60_000, 120), ("h", HOUR_MS, 48), ("d", DAY_MS, float("inf")))
    unit, unit_ms = next((unit, unit_ms) for unit, unit_ms, end in units if abs(ms) < end * unit_ms)
    number = f"{ms / unit_ms:,.{1 if abs(ms) < 10 * unit_ms else 0}f}".removesuffix(".0")
    return f"{number} {unit}"


def short(count: int) -> str:
    """Return a count for the axis of a plot, such as 1.5k."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.1f}".removesuffix(".0") + unit
    return str(count)


class _Bins(NamedTuple):
    """Counts by outcome in equal steps of time, empty ones included."""

    begin_ms: int
    step_ms: int
    outcomes: list[dict[str, int]]


def _bins(hours: Sequence[Hour]) -> _Bins:
    """Merge hours so that there are at most `BARS_MAX` bars."""
    first, last = hours[0]["hour_ms"], hours[-1]["hour_ms"]
    step_ms = next((step for step in _STEPS_MS if (last - first) // step < BARS_MAX - 1), _STEPS_MS[-1])
    while (last - first) // step_ms >= BARS_MAX - 1:
        step_ms *= 2
    begin_ms = _floor(first, step_ms)
    bins: list[defaultdict[str, int]] = [defaultdict(int) for _ in range((last - begin_ms) // step_ms + 1)]
    for hour in hours:
        for outcome, count in hour["outcomes"].items():
            bins[(hour["hour_ms"] - begin_ms) // step_ms][outcome] += count
    return _Bins(begin_ms, step_ms, [dict(each) for each in bins])


def _floor(ms: int, step_ms: int) -> int:
    offset_ms = _MONDAY_MS if step_ms >= 7 * DAY_MS else 0
    return (ms - offset_ms) // step_ms * step_ms + offset_ms


def over_time(hours: Sequence[Hour]) -> Markup:
    """Return the plot of outcomes by the time of the pop: stacked bars, and a lane for each of `LANES` that occurs."""
    begin_ms, step_ms, outcomes = _bins(hours)
    columns = [_families(each) for each in outcomes]
    highest = _round_up(max(sum(each.values()) for each in columns))
    width = max(len(columns), BARS_MIN)
    totals = {lane: sum(each.get(lane, 0) for each in outcomes) for lane in LANES}
    lanes = [lane for lane in LANES if totals[lane]]
    height = _HEIGHT + _LANE * len(lanes)
    drawn = [_grid(width, _HEIGHT), _bars(columns, highest, _HEIGHT)]
    labels = [_label(short(highest), 0), _label(short(highest // 2), _HEIGHT / 2), _label("0", _HEIGHT)]
    for number, lane in enumerate(lanes):
        base = _HEIGHT + (number + 1) * _LANE
        most = max(each.get(lane, 0) for each in outcomes)
        drawn.append(element("path", d=f"M0 {base}H{width}", class_="line"))
        drawn.append(_bars([{FAMILY_OF[lane]: each.get(lane, 0)} for each in outcomes], most, _LANE_BAR, base))
        labels.append(_label(join(word(lane), " ", element("b", short(totals[lane]))), base - _LANE_BAR / 2))
    tooltips = (_tooltip(begin_ms + number * step_ms, step_ms, each) for number, each in enumerate(outcomes))
    drawn.append(_hits(tooltips, height))
    description = "Deliveries by the time of their pop. " + " ".join(f"{word(lane)}: {totals[lane]:,}." for lane in lanes)
    svg = _svg(f"Outcomes in steps of {duration(step_ms)}", description, width, height, join(*drawn))
    return _framed(svg, labels, _time_ticks(begin_ms, step_ms, width), "Time of the pop, UTC", "y lanes" if lanes else "y")


def step_of(hours: Sequence[Hour]) -> str:
    """Return how long the time of each bar of `over_time` is."""
    step_ms = _bins(hours).step_ms
    return {HOUR_MS: "one hour", DAY_MS: "one day", 7 * DAY_MS: "one week"}.get(step_ms, duration(step_ms))


def _tooltip(at_ms: int, step_ms: int, outcomes: Mapping[str, int]) -> str | None:
    if not outcomes:
        return None
    listed = ", ".join(f"{word(each)} {outcomes[each]:,}" for each in Outcome if outcomes.get(each))
    return f"{moment(at_ms, '%Y-%m-%d' if step_ms >= DAY_MS else '%Y-%m-%d %H:%M')}: {listed}"


def _time_ticks(begin_ms: int, step_ms: int, width: int) -> list[tuple[float, str]]:
    end_ms, tick_ms = begin_ms + width * step_ms, step_ms
    while (end_ms - begin_ms) // tick_ms > TICKS_MAX:
        tick_ms = next((step for step in _STEPS_MS if step > tick_ms), tick_ms * 2)
    at_ms = _floor(begin_ms - 1, tick_ms) + tick_ms
    days = "%b %Y" if end_ms - begin_ms > 300 * DAY_MS else "%-d %b"
    ticks = [(each, days if each % DAY_MS == 0 else "%H:%M") for each in range(at_ms, end_ms, tick_ms)]
    return [((each - begin_ms) / step_ms / width, moment(each, pattern)) for each, pattern in ticks]


def span_of(counts: Counts) -> list[int]:
    """Return the buckets that a histogram needs, in whole powers of ten."""
    powers = [at for at, bucket_ms in enumerate(BUCKETS_MS) if bucket_ms in _MARKS_MS]
    first, last = BUCKETS_MS.index(counts[0][0]), BUCKETS_MS.index(counts[-1][0])
    begin = max(at for at in powers if at <= first)
    end = min((at for at in powers if at > last), default=len(BUCKETS_MS))
    return list(BUCKETS_MS[begin:end])


_MARKS_MS = (BEFORE_ZERO, 0, *(10**power for power in range(11)))


def histogram(counts: Counts, title: str) -> Markup:
    """Return the plot of times on a logarithmic axis."""
    span, found = span_of(counts), {each[0]: each[1] for each in counts}
    columns = [{"acked": found.get(bucket_ms, 0)} for bucket_ms in span]
    width = max(len(span), BARS_MIN)
    highest = _round_up(max(found.values()))
    total = sum(found.values())
    tooltips = (f"{_range(each)}: {found[each]:,} ({found[each] / total:.1%})" if each in found else None for each in span)
    drawn = join(_grid(width, _HEIGHT), _bars(columns, highest, _HEIGHT), _hits(tooltips, _HEIGHT))
    labels = [_label(short(highest), 0), _label(short(highest // 2), _HEIGHT / 2), _label("0", _HEIGHT)]
    ticks = [(at / width, duration(each)) for at, each in enumerate(span) if each in _MARKS_MS[1:]]
    ticks = [each for number, each in enumerate(ticks) if not number or each[0] - ticks[number - 1][0] > 1.5 / width]
    ticks = ticks[::2] if len(ticks) > TICKS_MAX else ticks
    svg = _svg(title, f"{total:,} deliveries: {within(counts)}", width, _HEIGHT, drawn)
    return _framed(svg, labels, ticks, "Logarithmic axis")


def within(counts: Counts) -> str:
    """Return within which time half, nearly all and all deliveries were, as far as the buckets tell."""
    total, seen, found = sum(count for _, count in counts), 0, []
    wanted = [("50 %", 0.5), ("99 %", 0.99), ("all", 1.0)]
    for bucket_ms, count in counts:
        seen += count
        while wanted and seen >= wanted[0][1] * total:
            found.append(f"{wanted.pop(0)[0]} {_limit(bucket_ms)}")
    return ", ".join(found)


def _limit(bucket_ms: int) -> str:
    after = BUCKETS_MS[BUCKETS_MS.index(bucket_ms) + 1 :]
    return f"under {duration(after[0])}" if after else f"over {duration(bucket_ms)}"


def _range(bucket_ms: int) -> str:
    return (
        _limit(bucket_ms)
        if bucket_ms in (BEFORE_ZERO, BUCKETS_MS[-1])
        else f"from {duration(bucket_ms)} to {_limit(bucket_ms)}"
    )


def small_histogram(counts: Counts, span: Sequence[int]) -> Markup:
    """Return a small histogram over the buckets of a larger one."""
    found = {each[0]: each[1] for each in counts}
    bars = _bars([{"acked": found.get(bucket_ms, 0)} for bucket_ms in span], max(found.values()), _LANE_BAR)
    return _svg(None, within(counts), len(span), _LANE_BAR, bars, "spark")


def stacked(outcomes: Mapping[str, int]) -> Markup:
    """Return one small horizontal bar of what became of messages."""
    total, families, at, drawn = sum(outcomes.values()), _families(outcomes), 0.0, []
    visible = {family: max(100 * count / total, _VISIBLE) for family, count in families.items() if count}
    scale = 100 / sum(visible.values()) if visible else 0
    for family in FAMILIES:
        if size := visible.get(family, 0) * scale:
            drawn.append(element("path", d=f"M{at:.1f} 0h{size:.1f}v10h-{size:.1f}z", class_=_class(family)))
            at += size
    listed = ", ".join(f"{word(each)} {outcomes[each]:,}" for each in Outcome if outcomes.get(each))
    return _svg(None, listed or "none", 100, 10, join(*drawn), "stack")


def share(part: float) -> Markup:
    """Return a small horizontal bar for a part of a whole, from 0 to 1."""
    bar = element("path", d=f"M0 0h{max(100 * part, 0.5):.2f}v10H0z", class_=_class("acked"))
    return _svg(None, f"{part:.2%}", 100, 10, bar, "share")


def legend(outcomes: Mapping[str, int]) -> Markup:
    """Return what the colours of the outcomes mean that occur."""
    families = _families(outcomes)
    return element(
        "ul", *(element("li", swatch(family), family) for family in FAMILIES if families.get(family)), class_="legend"
    )


def swatch(family: str) -> Markup:
    """Return a small square in the colour of a family."""
    return element("i", class_=f"swatch {_class(family)}", aria_hidden="true")


def _families(outcomes: Mapping[str, int]) -> dict[str, int]:
    return {family: sum(outcomes.get(each, 0) for each in of_family) for family, of_family in FAMILIES.items()}


def _class(family: str) -> str:
    return "f-" + family.partition(" ")[0]


def _round_up(count: int) -> int:
    """Return an even, round number above a count."""
    size = 1
    while size * 10 < count:
        size *= 10
    steps = (2, 2.4, 3, 4, 5, 6, 8, 10, 12) if size > 1 else (2, 4, 6, 8, 10, 12)
    return next(int(size * step) for step in steps if size * step > count * 1.05)


def _bars(columns: Sequence[Mapping[str, int]], highest: int, height: float, base: float | None = None) -> Markup:
    """Return stacked bars of width 1 that stand on `base`, one path for each family. No count above 0 is invisible."""
    paths: defaultdict[str, list[str]] = defaultdict(list)
    for number, column in enumerate(columns):
        at = height if base is None else base
        for family in FAMILIES:
            if count := column.get(family, 0):
                size = max(height * count / highest, _VISIBLE)
                at -= size
                paths[family].append(f"M{number + 0.06:.2f} {at:.1f}h.88v{size:.1f}h-.88z")
    return join(*(element("path", d="".join(path), class_=_class(family)) for family, path in paths.items()))


def _hits(tooltips: Iterable[str | None], height: float) -> Markup:
    """Return invisible columns that show a tooltip under the pointer."""
    return element(
        "g",
        *(
            element("path", element("title", tooltip), d=f"M{number} 0h1v{height}h-1z")
            for number, tooltip in enumerate(tooltips)
            if tooltip
        ),
        class_="hits",
    )


def _grid(width: int, height: float) -> Markup:
    return element("path", d=f"M0 .5H{width}M0 {height / 2}H{width}M0 {height}H{width}", class_="line")


def _svg(title: str | None, description: str, width: int, height: float, drawn: Markup, kind: str = "bars") -> Markup:
    """Return a drawing. Without a title, the description is its title."""
    return element(
        "svg",
        element("title", title or description),
        element("desc", description) if title else None,
        drawn,
        viewBox=f"0 0 {width} {height:g}",
        preserveAspectRatio="none",
        role="img",
        class_=kind,
        style=f"height:{height:g}px" if title else None,
    )


def _label(text: str, at: float) -> Markup:
    return element("span", text, style=f"top:{at:g}px")


def _framed(svg: Markup, labels: Iterable[Markup], ticks: Iterable[tuple[float, str]], caption: str, kind: str = "y") -> Markup:
    """Return a drawing with the words on its axes."""
    return element(
        "div",
        element("div", *labels, class_=kind, aria_hidden="true"),
        svg,
        element("div", *(element("span", text, style=f"left:{at:.2%}") for at, text in ticks), class_="x", aria_hidden="true"),
        element("p", caption, class_="caption"),
        class_="plot",
    )
