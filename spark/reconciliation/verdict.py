"""The verdict of a reconciliation, at the head of its page."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.spark.reconciliation.markup import Markup, element, name
from penstock.spark.reconciliation.nodecheck import difference_words, headline
from penstock.spark.reconciliation.plots import HOUR_MS, duration, moment, word
from penstock.spark.reconciliation.summary import FINDINGS, GroupSection, Outcome, Summary, Totals

GROUPS_NAMED_MAX = 3
"""Maximum number of groups that the verdict names for each finding."""

DIFFERENCES_SHOWN_MAX = 5
"""Maximum number of differences from a node that the verdict names."""

DAMAGES_SHOWN_MAX = 5
"""Maximum number of damaged ranges that the verdict names."""


def line(summary: Summary) -> str:
    """Return the verdict in one line."""
    wrong = [f"{count:,} {word(outcome)}" for outcome, count in findings(summary).items() if count]
    if orphans := summary["totals"]["orphans"]:
        wrong.append(f"{orphans:,} ends without a delivery")
    if (check := summary["node"]) and check["differing"] and check["certain"]:
        wrong.append(headline(check))
    if not summary["ok"]:
        return f"NOT OK: {', '.join(wrong)}"
    if not summary["complete"]:
        return "Nothing known is wrong, but some outcomes are unknown"
    if not summary["totals"]["deliveries"]:
        return "OK: there are no deliveries"
    return f"OK: all {summary['totals']['deliveries']:,} deliveries are accounted for"


def findings(summary: Summary) -> dict[Outcome, int]:
    """Return how many deliveries or messages have each outcome that must not be."""
    return {outcome: most(summary["totals"], outcome) for outcome in FINDINGS}


def most(counts: Totals | GroupSection, outcome: Outcome) -> int:
    """Return a count of deliveries or, where that is greater, of messages: a message can be lost while no consumer has it."""
    return max(counts["outcomes"].get(outcome, 0), counts["message_outcomes"].get(outcome, 0))


def banner(summary: Summary) -> Markup:
    """Return the head of the page: whether something is wrong, and if so what, where and since when."""
    kind, mark = ("bad", "✕") if not summary["ok"] else ("good", "✓") if summary["complete"] else ("unsure", "?")
    totals = summary["totals"]
    lines = [
        element("li", _linked(summary, each), *_where(summary, each), *_since(summary, each))
        for each in (*FINDINGS, Outcome.UNKNOWN, Outcome.DEAD_LETTERED)
        if most(totals, each)
    ]
    if totals["orphans"]:
        where = _named((group["orphans"], group["group"]) for group in summary["groups"])
        lines.append(element("li", element("b", f"{totals['orphans']:,} ends without a delivery"), *where))
    lines += _differences(summary)
    for damage in summary["damages"][:DAMAGES_SHOWN_MAX]:
        what = "are damaged" if damage["cause"] == "damaged" else "were dropped by retention before they were in the tables"
        positions = f": positions {damage['position']:,} to {damage['until_position']:,} {what}"
        lines.append(element("li", element("b", "records are missing"), positions))
    if (more := len(summary["damages"]) - DAMAGES_SHOWN_MAX) > 0:
        lines.append(element("li", f"and {more:,} more ranges, which summary.json names"))
    return element(
        "header",
        element("p", "penstock reconcile", class_="product"),
        element("h1", element("span", mark, class_="mark", aria_hidden="true"), line(summary)),
        element("ul", *lines) if lines else None,
        class_=kind,
    )


def _differences(summary: Summary) -> list[Markup]:
    """Return the result of the comparison with a node, and the first differences."""
    check = summary["node"]
    if check is None or not check["differing"]:
        return []
    shown = check["differences"][:DIFFERENCES_SHOWN_MAX]
    lines = [element("li", element("b", headline(check)))]
    lines += [element("li", name(each["group"]), f": {difference_words(each)}") for each in shown]
    if (more := len(check["differences"]) - len(shown)) > 0:
        lines.append(element("li", f"and {more:,} more differences, which summary.json names"))
    return lines


def _linked(summary: Summary, outcome: Outcome) -> Markup:
    """Return the count of an outcome, with a link to its examples."""
    count = element("b", f"{most(summary['totals'], outcome):,} {word(outcome)}")
    return element("a", count, href=f"#{outcome}") if summary["examples"].get(outcome) else count


def _since(summary: Summary, outcome: Outcome) -> list[str]:
    """Return when deliveries with an outcome were popped: to the hour, or by the examples for waits, which no hour counts."""
    times = [hour["hour_ms"] for hour in summary["hours"] if hour["outcomes"].get(outcome)]
    times = times or [example["popped_ms"] for example in summary["examples"].get(outcome, [])]
    if not times:
        return []
    begin_ms, end_ms = min(times), max(times) + HOUR_MS
    if end_ms >= summary["as_of_ms"]:
        return [f", popped since {moment(begin_ms)} UTC and until the end"]
    begin, end, quiet = moment(begin_ms), moment(end_ms), duration(summary["as_of_ms"] - end_ms)
    end = end.removeprefix(begin.partition(" ")[0]).strip()  # the same day is named once
    return [f", popped from {begin} to {end} UTC, and none in the {quiet} since"]


def _where(summary: Summary, outcome: Outcome) -> list[str]:
    return _named((most(group, outcome), group["group"]) for group in summary["groups"])


def _named(counts: Iterable[tuple[int, str]]) -> list[str]:
    """Return the groups with the greatest counts, by name."""
    found = sorted((each for each in counts if each[0]), key=lambda each: -each[0])
    if not found:
        return []
    listed = [" in "]
    for number, (count, group) in enumerate(found[:GROUPS_NAMED_MAX]):
        listed += [", " if number else "", name(group), f" ({count:,})" if len(found) > 1 else ""]
    if (more := len(found) - GROUPS_NAMED_MAX) > 0:
        listed.append(f" and {more:,} more group{'s' if more > 1 else ''}")
    return listed
