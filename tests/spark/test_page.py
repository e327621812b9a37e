"""The page of a report tells what the summary tells, whatever the names in it are, and needs nothing else."""

from __future__ import annotations

import re
import string
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.spark.reconciliation import page, plots, verdict
from penstock.spark.reconciliation.engines import Row
from penstock.spark.reconciliation.markup import NAME_CHARS_MAX
from penstock.spark.reconciliation.summary import (
    BUCKETS_MS,
    FINDINGS,
    MEANINGS,
    OF_DELIVERIES,
    REPORT,
    SCHEMA_VERSION,
    Counts,
    DamagedRange,
    Example,
    Hour,
    LogPart,
    Outcome,
    Summary,
    group_sections,
    hours,
    is_ok,
    totals,
)
from tests.spark.logs import every_outcome

HOUR_MS = plots.HOUR_MS
DAY_MS = plots.DAY_MS
MAY_28_MS = 1_779_926_400_000
"""2026-05-28 00:00 UTC."""


def tally(outcome: Outcome, deliveries: int, **columns: Any) -> Row:
    row = {"group_id": 1, "group_name": "billing", "hour_ms": MAY_28_MS, "attempt": 1, "bucket_ms": None}
    return {**row, "outcome": outcome, "deliveries": deliveries, "duplicate_acks": 0, "first_popped_ms": MAY_28_MS, **columns}


def example(outcome: Outcome, **columns: Any) -> Example:
    of_it = Example(
        delivery_id=7_777,
        group_id=1,
        group="billing",
        outcome=outcome,
        message_position=0xABC,
        topic="plant/1",
        attempt=1,
        popped_ms=MAY_28_MS,
        deadline_ms=MAY_28_MS + 30_000,
        ended_ms=None,
    )
    return of_it | columns  # type: ignore[return-value]


def a_summary(
    *tallies: Row,
    strays: tuple[Row, ...] = (),
    examples: tuple[Example, ...] = (),
    topic_filter: str = "plant/#",
    data_dir: str = "/var/lib/penstock",
    damages: tuple[DamagedRange, ...] = (),
) -> Summary:
    groups = group_sections(
        tallies,
        [
            {**row, "messages": row["deliveries"]}
            for row in tallies
            if row["outcome"] in (Outcome.ACKED, Outcome.LOST, Outcome.IN_FLIGHT, Outcome.DEAD_LETTERED, Outcome.WAITING)
        ],
        strays,
        [{"group_id": row["group_id"], "topic_filter": topic_filter, "extensions": 0} for row in tallies],
        as_of_ms=MAY_28_MS + DAY_MS,
        is_unknown=False,
    )
    counted = totals(groups, strays)
    return Summary(
        report=REPORT,
        schema_version=SCHEMA_VERSION,
        engine="duckdb",
        ok=is_ok(counted),
        complete=counted["outcomes"]["unknown"] == 0,
        data_dir=data_dir,
        log=LogPart(
            start_position=0,
            begin_position=4_096,
            end_position=1_000_000,
            sealed_position=4_096,
            first_ms=MAY_28_MS,
            last_ms=MAY_28_MS + DAY_MS,
            torn_tail=True,
        ),
        as_of_ms=MAY_28_MS + DAY_MS,
        grace_ms=60_000,
        filter=None,
        node=None,
        totals=counted,
        groups=groups,
        hours=hours(tallies),
        damages=list(damages),
        examples={outcome: [each for each in examples if each["outcome"] == outcome] for outcome in Outcome},
    )


def text_of(html: str) -> str:
    """Return the words of a page. It must be well-formed, also as XML."""
    return " ".join(" ".join(ElementTree.fromstring(html).itertext()).split())


ACKED = tally(Outcome.ACKED, 1_234, bucket_ms=12)
LOST = tally(Outcome.LOST, 3, hour_ms=MAY_28_MS + 4 * HOUR_MS)
UNKNOWN = tally(Outcome.UNKNOWN, 2)
ORPHAN = {"group_id": 1, "group_name": "billing", "kind": "orphan", "ends": 4}


@pytest.mark.parametrize(
    ("summary", "verdict_class", "words"),
    [
        (a_summary(), "good", "OK: there are no deliveries"),
        (a_summary(ACKED), "good", "OK: all 1,234 deliveries are accounted for"),
        (a_summary(ACKED, UNKNOWN), "unsure", "Nothing known is wrong, but some outcomes are unknown"),
        (a_summary(ACKED, LOST), "bad", "NOT OK: 3 lost"),
        (a_summary(ACKED, LOST, UNKNOWN, strays=(ORPHAN,)), "bad", "NOT OK: 3 lost, 4 ends without a delivery"),
        (a_summary(tally(Outcome.CONFLICTING, 1), tally(Outcome.ACKED_LATE, 2)), "bad", "NOT OK: 2 acked late, 1 conflicting"),
    ],
)
def test_the_head_of_the_page_is_the_verdict(summary: Summary, verdict_class: str, words: str) -> None:
    root = ElementTree.fromstring(page.render(summary))
    header = root.find("body/header")
    assert header is not None
    assert header.get("class") == verdict_class
    assert words in " ".join(header.itertext())
    assert words in root.findtext("head/title", "")


def test_the_verdict_says_what_where_and_since_when() -> None:
    later = tally(Outcome.LOST, 9, hour_ms=MAY_28_MS + 6 * HOUR_MS, group_id=2, group_name="audit")
    damage = DamagedRange(position=512, until_position=1_024, at_ms=0, cause="damaged")
    text = text_of(page.render(a_summary(ACKED, LOST, later, damages=(damage,) * 7)))
    assert "12 lost in audit (9), billing (3), popped from 2026-05-28 04:00 to 07:00 UTC, and none in the 17 h since" in text
    assert "records are missing : positions 512 to 1,024 are damaged" in text
    assert "and 2 more ranges" in text


def test_a_finding_of_the_last_hour_goes_on() -> None:
    assert "UTC and until the end" in page.render(a_summary(tally(Outcome.LOST, 1, hour_ms=MAY_28_MS + 23 * HOUR_MS)))


def test_a_wait_that_is_lost_has_the_time_of_its_example() -> None:
    summary = a_summary(examples=(example(Outcome.LOST),))
    summary["totals"]["message_outcomes"]["lost"] = 1
    summary["ok"] = False
    assert "NOT OK: 1 lost" in page.render(summary)
    assert "popped from 2026-05-28 00:00" in page.render(summary)


def test_the_page_says_what_was_read() -> None:
    text = text_of(page.render(a_summary(ACKED)))
    for fact in (
        "/var/lib/penstock",
        "4,096 to 1,000,000 (the log begins at 0). The last record is incomplete",
        "2026-05-28 00:00 to 2026-05-29 00:00 UTC",
        "2026-05-29 00:00:00 UTC, with 60 s of grace",
        "DuckDB",
    ):
        assert fact in text


@pytest.mark.parametrize("outcome", Outcome)
def test_each_outcome_has_its_count_its_meaning_and_its_worst_deliveries(outcome: Outcome) -> None:
    html = page.render(
        a_summary(tally(outcome, 4_321) if outcome is not Outcome.WAITING else ACKED, examples=(example(outcome),))
    )
    text = text_of(html)
    assert MEANINGS[outcome].replace("`", " ").split(" (")[0][1:] in text
    assert "4,321" in text or outcome is Outcome.WAITING
    assert f'id="{outcome}"' in html
    assert "penstock story 0000000000000abc" in text
    assert "2026-05-28 00:00:30.000" in text


def test_each_outcome_has_one_colour() -> None:
    assert sorted(outcome for family in plots.FAMILIES.values() for outcome in family) == sorted(Outcome)
    assert plots.FAMILIES["wrong"] == FINDINGS


def test_the_worst_groups_come_first() -> None:
    groups = (
        tally(Outcome.ACKED, 10, group_id=1, group_name="small", bucket_ms=1),
        tally(Outcome.ACKED, 10_000, group_id=2, group_name="large", bucket_ms=1),
        tally(Outcome.DEAD_LETTERED, 1, group_id=3, group_name="dead"),
        tally(Outcome.LOST, 1, group_id=4, group_name="losing"),
        tally(Outcome.IN_FLIGHT, 1, group_id=5, group_name="behind", first_popped_ms=MAY_28_MS + 21 * HOUR_MS),
    )
    html = page.render(a_summary(*groups))
    table = html[html.index("Messages by group") :]
    names = [re.escape(f"<bdi>{name}</bdi>") for name in ("losing", "dead", "behind", "large", "small")]
    assert re.search(".*".join(names), table)
    assert "1<small>3 h</small>" in table, "the age of the oldest delivery in flight"


HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror='alert(1)'>",
    "' onmouseover='alert(1)",
    "</style></title><b>&amp;&lt;",
    "\u202eevil\u2066\u200f",
    "شحنة/مضخة",
    "nul\x00 bell\x07 line\nbreak",
    "lone\ud800surrogate\ufffe",
    "]]><!--",
)


@pytest.mark.parametrize("name", HOSTILE)
def test_names_stay_text(name: str) -> None:
    plain = page.render(a_summary(ACKED, LOST, examples=(example(Outcome.LOST),)))
    html = page.render(
        a_summary(
            *({**row, "group_name": name} for row in (ACKED, LOST)),
            topic_filter=name,
            data_dir=name,
            examples=(example(Outcome.LOST, group=name, topic=name),),
        )
    )
    html.encode()
    assert tags(html) == tags(plain), "no name makes an element or an attribute"
    shown = "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in name)
    assert shown in "".join(ElementTree.fromstring(html).itertext())


def tags(html: str) -> list[tuple[str, tuple[str, ...]]]:
    return [(each.tag, tuple(each.keys())) for each in ElementTree.fromstring(html).iter()]


def test_a_long_name_is_shortened_and_its_title_is_the_whole() -> None:
    long = "".join(string.ascii_lowercase[number % 26] for number in range(65_536))
    root = ElementTree.fromstring(page.render(a_summary({**ACKED, "group_name": long}, topic_filter=long)))
    names = [each for each in root.iter("bdi") if each.get("title")]
    assert len(names) == 4
    for each in names:
        assert each.get("title") == long
        assert each.text is not None
        assert len(each.text) == NAME_CHARS_MAX
        assert each.text.endswith(long[-10:])


@cache
def a_year_of_a_thousand_groups() -> str:
    """The page with all that one can have: outcomes and latencies of all kinds in 10,000 hours and 1,000 groups."""
    times_ms = [each for each in BUCKETS_MS if 0 <= each < 10**6]
    rows = [
        tally(outcome, 12_345 * number + 678, group_id=group, group_name=f"group-{group:04d}/of/a/name/that/is/quite/long")
        for group in range(1_000)
        for number, outcome in enumerate(OF_DELIVERIES)
    ]
    rows += [
        {**row, "outcome": outcome, "bucket_ms": bucket_ms, "attempt": attempt}
        for row in rows[: 50 * len(OF_DELIVERIES) : len(OF_DELIVERIES)]
        for attempt, bucket_ms in enumerate(times_ms)
        for outcome in (Outcome.ACKED, Outcome.REVIVED)
    ]
    topics = [f"plant/{number}/hall/{number}/press/temperature/of/the/oil" for number in range(20)]
    examples = tuple(
        example(outcome, topic=topic, ended_ms=MAY_28_MS + 31_000)
        for outcome in (*FINDINGS, Outcome.UNKNOWN, Outcome.DEAD_LETTERED, Outcome.REVIVED)
        for topic in topics
    )
    summary = a_summary(*rows, examples=examples)
    summary["hours"] = hourly(10_000, dict.fromkeys(OF_DELIVERIES, 12345))
    return page.render(summary)


def hourly(count: int, outcomes: dict[str, int]) -> list[Hour]:
    return [Hour(hour_ms=MAY_28_MS + number * HOUR_MS, outcomes=outcomes) for number in range(count)]


def test_a_page_stays_small_however_long_the_log_is() -> None:
    html = a_year_of_a_thousand_groups()
    assert len(html.encode()) < 300_000
    text = text_of(html)
    assert text.count("950 more in summary.json.") == 2
    assert "Each bar is one week" in text


def test_a_page_names_no_address_and_runs_nothing() -> None:
    html = a_year_of_a_thousand_groups()
    assert "http" not in html
    assert "//" not in html.partition("</style>")[0].replace("<!DOCTYPE html>", "")
    assert not re.search(r"<script|<link|<iframe|<img|@import|url\(|\son\w+=|\ssrc=", html)
    assert set(re.findall(r'href="(.)', html)) == {"#"}
    links, ids = set(re.findall(r'href="#(\w+)"', html)), set(re.findall(r'\sid="(\w+)"', html))
    assert links <= ids


def test_each_drawing_and_table_says_what_it_shows() -> None:
    root = ElementTree.fromstring(a_year_of_a_thousand_groups())
    drawings, tables = list(root.iter("svg")), list(root.iter("table"))
    assert len(drawings) > 50
    assert all(each.get("role") == "img" and each.findtext("title") for each in drawings)
    assert all(each.findtext("desc") for each in drawings if each.get("class") == "bars")
    assert all(each.findtext("caption") for each in tables)
    assert all(cell.get("scope") for each in tables for cell in each.iter("th"))
    levels = [int(each.tag[1]) for each in root.iter() if re.fullmatch(r"h\d", each.tag)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))


@pytest.mark.parametrize(
    ("hour_count", "step", "bars"),
    [
        (1, "one hour", 1),
        (48, "one hour", 48),
        (199, "one hour", 199),
        (201, "2 h", 101),
        (24 * 150, "one day", 150),
        (10_000, "one week", 61),
    ],
)
def test_hours_are_merged_until_their_bars_are_few(hour_count: int, step: str, bars: int) -> None:
    found = hourly(hour_count, {"acked": 1})
    html = plots.over_time(found)
    assert plots.step_of(found) == step
    assert abs(html.count("<title>2") - bars) <= 1
    assert html.count("<title>2") <= plots.BARS_MAX


def test_times_that_no_calendar_has_are_numbers() -> None:
    html = page.render(
        a_summary(tally(Outcome.LOST, 1, hour_ms=0), tally(Outcome.LOST, 1, hour_ms=10**17 // HOUR_MS * HOUR_MS))
    )
    assert "99,566,066,419,200,000 ms: lost 1" in html
    assert html.count("<title>") < 100


@pytest.mark.parametrize(
    ("counts", "words"),
    [
        ([[12, 1]], "50 % under 15 ms, 99 % under 15 ms, all under 15 ms"),
        ([[-1, 98], [10, 1], [1000, 1]], "50 % under 0 ms, 99 % under 15 ms, all under 1.5 s"),
        ([[10**10, 1]], "50 % over 116 d, 99 % over 116 d, all over 116 d"),
    ],
)
def test_quantiles_of_counts_are_bounds(counts: Counts, words: str) -> None:
    placed = [[max(each for each in BUCKETS_MS if each <= time_ms), count] for time_ms, count in counts]
    assert plots.within(placed) == words
    assert "<svg" in plots.histogram(placed, "Times")


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (0, "0 ms"),
        (-5, "-5 ms"),
        (999, "999 ms"),
        (1_500, "1.5 s"),
        (60_000, "60 s"),
        (7_000_000, "117 min"),
        (5 * DAY_MS, "5 d"),
    ],
)
def test_durations_have_units(ms: int, words: str) -> None:
    assert plots.duration(ms) == words


def test_counts_of_times_are_sums_of_the_tallies() -> None:
    rows = [
        tally(Outcome.ACKED, 1, bucket_ms=time_ms, group_id=group)
        for time_ms in (-7, 0, 14, 15, 19, 10**12)
        for group in (1, 2)
    ]
    rows += [tally(Outcome.REVIVED, 5, bucket_ms=1_230), UNKNOWN]
    summary = a_summary(*rows)
    assert summary["groups"][1]["ack_latency_counts"] == [[-1, 1], [0, 1], [10, 1], [15, 2], [10**10, 1]]
    assert summary["totals"]["ack_latency_counts"] == [[-1, 2], [0, 2], [10, 2], [15, 4], [10**10, 2]]
    assert summary["totals"]["revive_lateness_counts"] == [[1_000, 5]]
    assert list(BUCKETS_MS) == sorted(BUCKETS_MS)
    assert len(BUCKETS_MS) <= 64


def test_a_verdict_names_few_groups() -> None:
    rows = [tally(Outcome.LOST, 1, group_id=group, group_name=f"g{group}") for group in range(20)]
    assert "and 17 more groups" in verdict.banner(a_summary(*rows))


def test_a_reconciliation_leaves_the_page_beside_its_summary(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    from penstock.spark.reconciliation.engines import DuckEngine
    from penstock.spark.reconciliation.reconcile import PAGE_FILE, reconcile

    every_outcome().save(tmp_path / "data")
    engine = DuckEngine(tmp_path / "spilled")
    summary = reconcile(engine, tmp_path / "data", tmp_path / "out")
    engine.close()
    assert (tmp_path / "out" / PAGE_FILE).read_text("utf-8") == page.render(summary)
    assert summary["totals"]["ack_latency_counts"] == [[30, 1], [100, 1], [10_000, 1], [30_000, 2]]
