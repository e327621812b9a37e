"""The summary of a reconciliation as one page, `report.html`, that needs nothing else: no network, no fonts, no script."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files

from penstock.spark.reconciliation import plots, verdict
from penstock.spark.reconciliation.markup import Markup, element, join, name
from penstock.spark.reconciliation.nodecheck import headline
from penstock.spark.reconciliation.plots import duration, moment, word
from penstock.spark.reconciliation.selection import filter_words
from penstock.spark.reconciliation.summary import (
    FINDINGS,
    MEANINGS,
    OF_DELIVERIES,
    OF_MESSAGES,
    Example,
    GroupSection,
    Outcome,
    Summary,
)
from penstock.spark.reconciliation.verdict import findings, most

GROUPS_SHOWN_MAX = 50
"""Maximum number of groups on the page. `summary.json` has all of them."""

ATTEMPTS_SHOWN_MAX = 12
"""Maximum number of attempts with a row of their own."""

_ENGINES = {"spark": "Apache Spark", "duckdb": "DuckDB"}


def render(summary: Summary) -> str:
    """Return the page of a summary."""
    head = element(
        "head",
        Markup('<meta charset="utf-8" /><meta name="viewport" content="width=device-width, initial-scale=1" />'),
        element("title", f"{verdict.line(summary)} | penstock reconcile"),
        element("style", Markup((files(__package__) / "page.css").read_text(encoding="utf-8"))),
    )
    parts = (_tiles, _over_time, _groups, _times, _latencies, _examples, _glossary)
    main = element("main", *(part(summary) for part in parts))
    body = element("body", verdict.banner(summary), _facts(summary), main)
    return "<!DOCTYPE html>\n" + element("html", head, body, lang="en") + "\n"


def _card(heading: str, *content: str | None) -> Markup:
    return element("section", element("h2", heading), *content, class_="card")


def _note(text: str) -> Markup:
    return element("p", text, class_="note")


def _facts(summary: Summary) -> Markup:
    log = summary["log"]
    sealed = "" if log["begin_position"] == log["start_position"] else f" (the log begins at {log['start_position']:,})"
    torn = ". The last record is incomplete and is not part of this report" if log["torn_tail"] else ""
    facts: dict[str, str] = {
        "Log": name(summary["data_dir"]),
        "Positions": f"{log['begin_position']:,} to {log['end_position']:,}{sealed}{torn}",
        "Stored": f"{moment(log['first_ms'])} to {moment(log['last_ms'])} UTC",
        "As of": f"{moment(summary['as_of_ms'], '%Y-%m-%d %H:%M:%S')} UTC, with {duration(summary['grace_ms'])} of grace",
        "Engine": _ENGINES.get(summary["engine"], summary["engine"]),
    }
    if summary["filter"] is not None:
        facts["Filter"] = join(filter_words(summary["filter"]))
    if (check := summary["node"]) is not None:
        facts["Node"] = join(name(check["node"]), f": {headline(check)} at position {check['position']:,}")
    shown = (element("div", element("dt", key), element("dd", value)) for key, value in facts.items())
    return element("dl", *shown, class_="facts")


def _tiles(summary: Summary) -> Markup:
    totals = summary["totals"]
    outcomes, messages = totals["outcomes"], totals["message_outcomes"]
    checks = [
        *(_tile(word(each), count, "bad", MEANINGS[each]) for each, count in findings(summary).items()),
        _tile("ends without a delivery", totals["orphans"], "bad", "the log does not contain what they end"),
        _tile("unknown", most(totals, Outcome.UNKNOWN), "unsure", MEANINGS[Outcome.UNKNOWN]),
        _tile("dead letters", most(totals, Outcome.DEAD_LETTERED), "dead", MEANINGS[Outcome.DEAD_LETTERED]),
    ]
    back = sum(outcomes.get(each, 0) for each in plots.FAMILIES["came back"])
    counts = [
        _tile("deliveries", totals["deliveries"]),
        _tile("acked in time", outcomes.get("acked", 0), "", MEANINGS[Outcome.ACKED]),
        _tile("came back", back, "", "revived, nacked, suspended or returned"),
        _tile("messages", totals["messages"], "", "messages that were delivered, counted for each group"),
        _tile("in flight", messages.get("in_flight", 0), "", MEANINGS[Outcome.IN_FLIGHT]),
        _tile("waiting", messages.get("waiting", 0), "", MEANINGS[Outcome.WAITING]),
        _tile("extensions", totals["extensions"], "", "how often a consumer has changed the invisible time and gone on"),
        _tile("duplicate acks", totals["duplicate_acks"], "", "acknowledgements after the first one of a delivery"),
    ]
    tiles = (element("dl", *checks, class_="tiles checks"), element("dl", *counts, class_="tiles"))
    return element("section", element("h2", "Totals"), *tiles)


def _tile(title: str, count: int, kind: str = "", meaning: str | None = None) -> Markup:
    """Return a tile. `kind` is how it looks if the count is not 0."""
    number = f"{count:,}" if count < 10**9 else element("span", plots.short(count), title=f"{count:,}")
    parts = (element("dt", title), element("dd", number))
    return element("div", *parts, class_=f"tile {kind if count else 'none'}".strip(), title=meaning)


def _over_time(summary: Summary) -> Markup | None:
    hours = summary["hours"]
    if not hours:
        return None
    note = _note(f"Each bar is {plots.step_of(hours)} of pops. The rows below have their own scale.")
    return _card("Outcomes over time", note, plots.legend(summary["totals"]["outcomes"]), plots.over_time(hours))


def _worst_first(groups: Iterable[GroupSection]) -> list[GroupSection]:
    """Return groups in order: those with findings, then those with outcomes that need a look, then those with most messages."""

    def badness(group: GroupSection) -> tuple[int, ...]:
        wrong = sum(most(group, outcome) for outcome in FINDINGS) + group["orphans"]
        backlog = sum(group["message_outcomes"].get(each, 0) for each in (Outcome.WAITING, Outcome.IN_FLIGHT))
        return wrong, most(group, Outcome.UNKNOWN), most(group, Outcome.DEAD_LETTERED), backlog, group["messages"]

    return sorted(groups, key=badness, reverse=True)


def _groups(summary: Summary) -> Markup | None:
    if not summary["groups"]:
        return None
    counted = [each for each in (*FINDINGS, Outcome.UNKNOWN, Outcome.DEAD_LETTERED) if most(summary["totals"], each)]
    titles = (word(each).capitalize() for each in counted)
    columns = ["Group and filter", *titles, "Messages", "What became of them", "Waiting", "In flight"]
    rows = []
    for group in _worst_first(summary["groups"])[:GROUPS_SHOWN_MAX]:
        messages = group["message_outcomes"]
        backlog = (
            _aged(messages.get("waiting", 0), group["oldest_waiting_ms"]),
            _aged(messages.get("in_flight", 0), group["oldest_in_flight_ms"]),
        )
        counts = (_count(most(group, each), each) for each in counted)
        rows.append([_group_cell(group), *counts, f"{group['messages']:,}", plots.stacked(messages), *backlog])
    table = _table("Messages by outcome, per group", columns, rows, text=(0, len(counted) + 2))
    order = "Groups with findings come first, then those with dead letters, a backlog, many messages."
    note = _note(f"{order} A time below a count is the age of the oldest one at the end.")
    legend = plots.legend(summary["totals"]["message_outcomes"])
    return _card("Messages by group", note, legend, table, _more_groups(summary["groups"]))


def _more_groups(groups: Sequence[object]) -> Markup | None:
    more = len(groups) - GROUPS_SHOWN_MAX
    return _note(f"{more:,} more in summary.json.") if more > 0 else None


def _group_cell(group: GroupSection) -> Markup:
    topic_filter = "filter unknown" if group["filter"] is None else name(group["filter"])
    return join(name(group["group"]), element("small", topic_filter))


def _aged(count: int, oldest_ms: int | None) -> Markup:
    return join(_count(count), None if oldest_ms is None or not count else element("small", duration(oldest_ms)))


def _count(count: int, outcome: Outcome | None = None) -> Markup:
    if not count:
        return element("span", "0", class_="zero")
    family = None if outcome is None else plots.FAMILY_OF[outcome].partition(" ")[0]
    return element("b", f"{count:,}", class_=f"t-{family}") if family else join(f"{count:,}")


def _times(summary: Summary) -> Markup | None:
    totals = summary["totals"]
    attempts: dict[int, int] = {}
    for group in summary["groups"]:
        for attempt, count in group["attempts"].items():
            attempts[int(attempt)] = attempts.get(int(attempt), 0) + count
    cards = []
    for heading, counts, note in (
        ("Pop to acknowledgement", totals["ack_latency_counts"], "All groups"),
        ("Deadline to revival", totals["revive_lateness_counts"], "All groups, back-off included"),
    ):
        if counts:
            cards.append(_card(heading, _note(f"{note}: {plots.within(counts)}."), plots.histogram(counts, heading)))
    if attempts:
        cards.append(_attempts(attempts))
    return element("div", *cards, class_="cards") if cards else None


def _attempts(counts: dict[int, int]) -> Markup:
    total = sum(counts.values())
    shown = {str(attempt): counts[attempt] for attempt in sorted(counts)[:ATTEMPTS_SHOWN_MAX]}
    if rest := total - sum(shown.values()):
        shown["more"] = rest
    rows = [[attempt, f"{count:,}", _percent(count / total), plots.share(count / total)] for attempt, count in shown.items()]
    table = _table("Deliveries by attempt", ["Attempt", "Deliveries", "Share", ""], rows, text=(3,))
    return _card("Attempts", _note("All groups."), table)


def _percent(part: float) -> str:
    return "< 0.01%" if part < 0.0001 else f"{part:.2%}"


def _latencies(summary: Summary) -> Markup | None:
    groups = [group for group in _worst_first(summary["groups"])[:GROUPS_SHOWN_MAX] if group["ack_latency_ms"]]
    if not groups:
        return None
    span = plots.span_of(summary["totals"]["ack_latency_counts"])
    axis = f"{duration(span[0])} to {duration(span[-1])}"
    rows = []
    for group in groups:
        quantiles = group["ack_latency_ms"]
        assert quantiles is not None
        times = (duration(quantiles["p50"]), duration(quantiles["p90"]), duration(quantiles["p99"]), duration(quantiles["max"]))
        rows.append([_group_cell(group), *times, plots.small_histogram(group["ack_latency_counts"], span)])
    columns = ["Group and filter", "Half", "90 %", "99 %", "Slowest", f"Distribution, {axis}"]
    table = _table("Time from pop to acknowledgement, per group", columns, rows, text=(0, 5))
    return _card("Pop to acknowledgement by group", table, _more_groups(summary["groups"]))


def _examples(summary: Summary) -> Markup | None:
    sections = [_worst(Outcome(outcome), examples, summary) for outcome, examples in summary["examples"].items() if examples]
    note = _note("One click selects a command. It prints all that the log knows of that message. Times are UTC.")
    return _card("Worst deliveries", note, *sections) if sections else None


def _worst(outcome: Outcome, examples: Sequence[Example], summary: Summary) -> Markup:
    columns = ["Message", "Topic", "Group", "Attempt", "Popped", "Deadline", "Ended", "Delivery"]
    rows = []
    for each in examples:
        at = f"{each['message_position']:016x}"  # the message's id, as all APIs give it
        late_ms = (summary["as_of_ms"] if each["ended_ms"] is None else each["ended_ms"]) - each["deadline_ms"]
        ended = "never" if each["ended_ms"] is None else _precise(each["ended_ms"])
        late = element("small", f"{duration(late_ms)} late") if late_ms > 0 else None
        rows.append(
            [
                join(element("code", at), element("code", f"penstock story {at}", class_="command")),
                "not read" if each["topic"] is None else name(each["topic"]),
                name(each["group"]),
                f"{each['attempt']:,}",
                _precise(each["popped_ms"]),
                _precise(each["deadline_ms"]),
                join(ended, late),
                str(each["delivery_id"]),
            ]
        )
    count = max(most(summary["totals"], outcome), len(examples))
    shown = f"{len(examples):,} of {count:,}" if count > len(examples) else f"{count:,}"
    heading = element("h3", plots.swatch(plots.FAMILY_OF[outcome]), f"{word(outcome).capitalize()} ({shown})")
    table = _table(f"Deliveries: {word(outcome)}", columns, rows, text=(0, 1, 2))
    opened = None if outcome is Outcome.REVIVED else "open"
    return element("details", element("summary", heading), _note(_meaning(outcome)), table, open=opened, id=outcome)


def _meaning(outcome: Outcome) -> Markup:
    """Return the meaning of an outcome as a sentence."""
    text = f"{MEANINGS[outcome][0].upper()}{MEANINGS[outcome][1:]}."
    return join(*(element("code", part) if number % 2 else part for number, part in enumerate(text.split("`"))))


def _precise(ms: int) -> Markup:
    return join(moment(ms, "%Y-%m-%d"), element("small", moment(ms, f"%H:%M:%S.{ms % 1000:03d}")))


def _glossary(summary: Summary) -> Markup:
    totals = summary["totals"]
    rows = [
        [
            join(plots.swatch(plots.FAMILY_OF[outcome]), word(outcome), element("small", _meaning(outcome))),
            _count(totals["outcomes"].get(outcome, 0)) if outcome in OF_DELIVERIES else "",
            _count(totals["message_outcomes"].get(outcome, 0)) if outcome in OF_MESSAGES else "",
        ]
        for outcome in Outcome
    ]
    table = _table("Outcomes", ["Outcome", "Deliveries", "Messages"], rows, text=(0,))
    before = f"Ends of deliveries older than what was read: {totals['before']:,}."
    damaged = f"Ends of deliveries that began in a damaged range: {totals['unknown']:,}."
    return _card("All outcomes", element("div", table, class_="glossary"), _note(f"{before} {damaged}"))


def _table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[str]], text: Sequence[int]) -> Markup:
    """Return a table that scrolls where the window is too narrow. Columns in `text` are aligned to the left."""
    kinds = ["text" if number in text else None for number in range(len(columns))]
    head = (element("th", column, scope="col", class_=kind) for column, kind in zip(columns, kinds, strict=True))
    lines = []
    for row in rows:
        cells = (element("td", cell, class_=kind) for cell, kind in zip(row[1:], kinds[1:], strict=True))
        lines.append(element("tr", element("th", row[0], scope="row", class_=kinds[0]), *cells))
    table = element("table", element("caption", caption), element("thead", element("tr", *head)), element("tbody", *lines))
    return element("div", table, class_="scroll", role="region", aria_label=caption, tabindex=0)
