"""When schedules occur: against other libraries, at daylight-saving changes, and within bounds."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import cycle, islice, pairwise
from zoneinfo import ZoneInfo

import pytest
from croniter import croniter
from dateutil.rrule import rrulestr
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.timer import recurrence as recurrence_module
from penstock.timer.errors import RecurrenceInvalid
from penstock.timer.options import YEAR_MS
from penstock.timer.recurrence import Cron, Every, Recurrence, RecurrenceRule, local_time, zone_of
from tests.depth import DEPTH

ZONES = {
    "Europe/Berlin": ("2026-03-28", "2026-10-24"),
    "America/New_York": ("2026-03-07", "2026-10-31"),
    "Australia/Lord_Howe": ("2026-04-04", "2026-10-03"),
}
"""Zones north and south of the equator, with the day before each change of the clock; that of the last is by half an hour."""

BERLIN = ZoneInfo("Europe/Berlin")
YEAR = 2026


def ms_of(text: str, zone: str = "UTC") -> int:
    """Return a local time without an offset, or any time with one, in ms since 1970."""
    found = datetime.fromisoformat(text)
    return int((found if found.tzinfo else found.replace(tzinfo=ZoneInfo(zone))).timestamp() * 1000)


def occurrences(recurrence: Recurrence, from_ms: int, until_ms: int = 2**60, count: int = 100_000) -> list[int]:
    """Return the occurrences from one time up to another, as the timer asks for them."""
    found: list[int] = []
    while len(found) < count:
        next_ms = recurrence.first_from(from_ms)
        if next_ms is None or next_ms > until_ms:
            break
        assert next_ms >= from_ms
        found.append(next_ms)
        from_ms = next_ms + 1
    return found


def shown(found: list[int], zone: ZoneInfo) -> list[str]:
    return [local_time(ms, zone).strftime("%m-%d %H:%M%z")[:-2] for ms in found]


# --- cron -------------------------------------------------------------------------------------------------------------


EXPRESSIONS = (
    *("0 6 * * *", "30 9,17 * * MON-FRI", "0 12 1 * *", "15 0 29 2 *"),
    *("*/20 8-18 1,15 * *", "45 23 * * 0", "0 4 13 * FRI"),
)


@pytest.mark.parametrize(("expression", "zone"), [*zip(EXPRESSIONS, cycle(ZONES), strict=False)])
def test_a_year_of_a_cron_expression_agrees_with_another_library(expression: str, zone: str) -> None:
    """At times of day that no change of the clock concerns. The tests below are about those."""
    begin, end = (ms_of(f"{year}-01-01T00:00:00", zone) for year in (YEAR, YEAR + 1))
    others = croniter(expression, datetime.fromtimestamp(begin / 1000 - 1, ZoneInfo(zone)), ret_type=datetime)
    expected = []
    while (found := int(others.get_next(datetime).timestamp() * 1000)) < end:
        expected.append(found)
    assert occurrences(Cron(expression, ZoneInfo(zone)), begin, end - 1) == expected
    assert len(expected) > 0 or "29 2" in expression


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        # A fixed time in the gap comes right after it, once; one that is repeated comes once.
        ("30 2 * * *", ["03-28 02:30+01", "03-29 03:00+02", "03-30 02:30+02"]),
        ("0,30 2 * * *", ["03-28 02:00+01", "03-28 02:30+01", "03-29 03:00+02", "03-30 02:00+02"]),
        # What begins with a star goes by the clock.
        ("*/30 2 * * *", ["03-28 02:00+01", "03-28 02:30+01", "03-30 02:00+02", "03-30 02:30+02"]),
        ("30 * * * *", ["03-28 00:30+01", "03-28 01:30+01"]),
    ],
)
def test_a_cron_expression_at_a_gap(expression: str, expected: list[str]) -> None:
    begin = ms_of("2026-03-28T00:00:00", "Europe/Berlin")
    assert shown(occurrences(Cron(expression, BERLIN), begin, count=len(expected)), BERLIN) == expected


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("30 2 * * *", ["10-25 02:30+02", "10-26 02:30+01"]),
        ("0,30 2 * * *", ["10-25 02:00+02", "10-25 02:30+02", "10-26 02:00+01"]),
        ("*/30 2 * * *", ["10-25 02:00+02", "10-25 02:30+02", "10-25 02:00+01", "10-25 02:30+01", "10-26 02:00+01"]),
        ("30 * * * *", ["10-25 00:30+02", "10-25 01:30+02", "10-25 02:30+02", "10-25 02:30+01", "10-25 03:30+01"]),
    ],
)
def test_a_cron_expression_in_a_repeated_hour(expression: str, expected: list[str]) -> None:
    begin = ms_of("2026-10-25T00:00:00", "Europe/Berlin")
    cron = Cron(expression, BERLIN)
    assert shown(occurrences(cron, begin, count=len(expected)), BERLIN) == expected
    # The same, whatever the instant from which the timer asks: also from the second of the two hours.
    all_of_day = occurrences(cron, begin, begin + 26 * 3_600_000)
    for minutes in range(0, 26 * 60, 29):
        from_ms = begin + minutes * 60_000
        assert occurrences(cron, from_ms, begin + 26 * 3_600_000) == [each for each in all_of_day if each >= from_ms]


@pytest.mark.parametrize(("zone", "days"), ZONES.items())
def test_an_hourly_expression_occurs_each_hour_also_when_the_clock_is_changed(zone: str, days: tuple[str, str]) -> None:
    for day in days:
        begin = ms_of(f"{day}T00:00:00", zone)
        found = occurrences(Cron("0 * * * *", ZoneInfo(zone)), begin, begin + 3 * 86_400_000)
        gaps = {after - before for before, after in pairwise(found)}
        # Where the clock is moved by half an hour, one of the hours of the clock takes longer.
        assert gaps == ({3_600_000} if zone != "Australia/Lord_Howe" else {3_600_000, 5_400_000})


@pytest.mark.parametrize(
    "expression", ["", "* * * *", "* * * * * *", "60 * * * *", "0 0 31 2 *", "x * * * *", "*/0 * * * *", "1" * 300]
)
def test_a_cron_expression_that_is_none_is_refused(expression: str) -> None:
    with pytest.raises(RecurrenceInvalid, match="cron expression"):
        Cron(expression, BERLIN)


# --- recurrence rules ---------------------------------------------------------------------------------------------------


RULES = (
    "FREQ=DAILY",
    "FREQ=DAILY;INTERVAL=3;BYHOUR=6,18",
    "FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,SU;WKST=SU",
    "FREQ=WEEKLY;INTERVAL=2;BYDAY=MO,SU",
    "FREQ=MONTHLY",
    "FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=18;BYMINUTE=0",
    "FREQ=MONTHLY;INTERVAL=5;BYMONTHDAY=-1",
    "FREQ=MONTHLY;BYDAY=MO,TU,WE,TH,FR;BYSETPOS=-2",
    "FREQ=YEARLY",
    "FREQ=YEARLY;INTERVAL=3;BYMONTH=2,8;BYDAY=1MO",
    "FREQ=YEARLY;BYWEEKNO=20,53",
    "FREQ=YEARLY;BYYEARDAY=1,200,-1",
    "FREQ=DAILY;COUNT=40",
)


@settings(max_examples=30 * DEPTH)
@given(
    rule=st.sampled_from(RULES),
    start=st.datetimes(datetime(2016, 1, 1), datetime(2030, 1, 1)),
    later=st.timedeltas(timedelta(), timedelta(days=4_000)),
)
def test_a_rule_occurs_when_it_would_if_it_were_followed_from_its_start(rule: str, start: datetime, later: timedelta) -> None:
    start = start.replace(microsecond=0)
    start_ms = ms_of(start.isoformat())
    found = occurrences(RecurrenceRule(rule, ZoneInfo("UTC"), start_ms), start_ms + int(later.total_seconds() * 1000), count=5)
    expected = islice((each for each in rrulestr(rule, dtstart=start) if each >= start + later), 5)
    assert found == [ms_of(each.isoformat()) for each in expected]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # RFC 5545, 3.3.5: with the offset before the gap, so an hour later by the clock.
        ("FREQ=DAILY;BYHOUR=2;BYMINUTE=30", ["03-28 02:30+01", "03-29 03:30+02", "03-30 02:30+02"]),
        # In the order of time, and what coincides once.
        ("FREQ=DAILY;BYHOUR=2,3;BYMINUTE=0,30;COUNT=9", [
            *("03-28 02:00+01", "03-28 02:30+01", "03-28 03:00+01", "03-28 03:30+01"),
            *("03-29 03:00+02", "03-29 03:30+02", "03-30 02:00+02"),
        ]),
    ],
)  # fmt: skip
def test_a_rule_at_a_gap(rule: str, expected: list[str]) -> None:
    begin = ms_of("2026-03-28T00:00:00", "Europe/Berlin")
    found = occurrences(RecurrenceRule(rule, BERLIN, begin), begin, count=len(expected))
    assert shown(found, BERLIN) == expected


def test_a_rule_in_a_repeated_hour_means_the_first_of_the_two() -> None:
    begin = ms_of("2026-10-25T00:00:00", "Europe/Berlin")
    rule = RecurrenceRule("RRULE:FREQ=DAILY;BYHOUR=2;BYMINUTE=30", BERLIN, begin)
    assert shown(occurrences(rule, begin, count=2), BERLIN) == ["10-25 02:30+02", "10-26 02:30+01"]
    in_second = ms_of("2026-10-25T02:10:00+01:00")
    assert shown(occurrences(rule, in_second, count=1), BERLIN) == ["10-26 02:30+01"]


@pytest.mark.parametrize(
    ("until", "last"),
    [("20260330T120000Z", "03-29 12:00+02"), ("20260330T120000", "03-30 12:00+02"), ("20260329T115959", "03-28 12:00+01")],
)
def test_until_is_a_time_of_utc_or_of_the_zone(until: str, last: str) -> None:
    begin = ms_of("2026-03-27T12:00:00", "Europe/Berlin")
    rule = RecurrenceRule(f"FREQ=DAILY;BYHOUR=12;BYMINUTE=0;BYSECOND=0;UNTIL={until}", BERLIN, begin)
    expected = {"20260330T120000Z": "03-30 12:00+02"}.get(until, last)
    assert shown(occurrences(rule, begin), BERLIN)[-1] == expected


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ("", "not one of RFC 5545"),
        ("BYDAY=MO", "FREQ"),
        ("FREQ=HOURLY", "FREQ"),
        ("FREQ=SECONDLY;BYMONTH=2;BYMONTHDAY=30", "FREQ"),
        ("FREQ=DAILY;FREQ=DAILY", "not one of RFC 5545"),
        ("FREQ=DAILY;BYEASTER=1", "not one of RFC 5545"),
        ("FREQ=DAILY;INTERVAL=0", "INTERVAL"),
        ("FREQ=DAILY;INTERVAL=-1", "INTERVAL"),
        ("FREQ=DAILY;COUNT=1001", "COUNT"),
        ("FREQ=DAILY;UNTIL=20260101", "UNTIL"),
        ("FREQ=DAILY;UNTIL=20261301T000000", "UNTIL"),
        ("FREQ=DAILY;BYWEEKNO=20;BYMONTH=12", "BYWEEKNO"),
        ("FREQ=WEEKLY;BYMONTHDAY=1", "BYMONTHDAY"),
        ("FREQ=DAILY;BYMONTH=2;BYMONTHDAY=30", "no month"),
        ("FREQ=DAILY;BYHOUR=25", "can't be used"),
        ("FREQ=MONTHLY;BYDAY=XX", "can't be used"),
        ("FREQ=DAILY\nDTSTART:20200101T000000", "not one of RFC 5545"),
        ("FREQ=DAILY;BYHOUR=" + ",".join(map(str, range(24))) + ";BYMINUTE=" + ",".join(map(str, range(61))), "times a day"),
        ("FREQ=WEEKLY;BYHOUR=1,2,3,4,5;BYSETPOS=99", "5 times a day with BYSETPOS; use 4"),
        ("FREQ=DAILY;BYHOUR=" + "1," * 300 + "1", "characters"),
    ],
)
def test_a_rule_that_is_none_is_refused(rule: str, says: str) -> None:
    with pytest.raises(RecurrenceInvalid, match=says):
        RecurrenceRule(rule, BERLIN, 0)


@pytest.mark.parametrize(
    "rule", ["FREQ=YEARLY;BYWEEKNO=20;BYMONTH=12", "FREQ=DAILY;INTERVAL=7;BYDAY=MO", "FREQ=MONTHLY;BYMONTHDAY=31;BYSETPOS=2"]
)
def test_a_rule_that_never_occurs_is_searched_for_within_the_horizon_only(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """dateutil would search up to the year 9999, and hold up the node meanwhile."""
    given_up_by: list[str] = []

    def noted(text: str, dtstart: datetime) -> object:
        given_up_by.append(text)
        return rrulestr(text, dtstart=dtstart)

    start_ms = ms_of("2026-03-28T12:00:00")  # a Saturday
    never = RecurrenceRule(rule, ZoneInfo("UTC"), start_ms)
    monkeypatch.setattr(recurrence_module, "rrulestr", noted)
    assert never.first_from(start_ms) is None
    (text,) = given_up_by
    until = datetime.strptime(text.rpartition("UNTIL=")[2], "%Y%m%dT%H%M%S")
    # The calendar repeats itself after 400 years. The search takes place as late as it can.
    assert (until.year - YEAR) % 400 == 10
    assert datetime.max.year - until.year < 400


# --- all kinds ----------------------------------------------------------------------------------------------------------


@settings(max_examples=30 * DEPTH)
@given(
    kind=st.sampled_from([0, 1, 2]),
    span_ms=st.integers(1, 30 * 86_400_000),
    before_ms=st.integers(0, 30 * 86_400_000),
)
def test_the_last_occurrence_before_an_instant_is_the_one_before_the_first_from_it(
    kind: int, span_ms: int, before_ms: int
) -> None:
    start_ms = ms_of("2026-10-10T00:00:00", "Europe/Berlin")
    made: list[Recurrence] = [
        Every(1_234_567, start_ms),
        Cron("17 */5 * * *", BERLIN),
        RecurrenceRule("FREQ=DAILY;BYHOUR=2,14", BERLIN, start_ms),
    ]
    recurrence, ms = made[kind], start_ms + span_ms
    from_ms = max(ms - before_ms, start_ms)
    found = recurrence.last_before(ms, from_ms)
    expected = occurrences(recurrence, from_ms, ms - 1)
    assert found == (expected[-1] if expected else None)


def test_a_schedule_of_ms_counts_from_its_start() -> None:
    every = Every(1_000, 5_500)
    assert [every.first_from(ms) for ms in (0, 5_500, 5_501, 6_500, 10**12)] == [5_500, 5_500, 6_500, 6_500, 10**12 + 500]
    assert [every.last_before(ms, 0) for ms in (5_500, 5_501, 6_501)] == [None, 5_500, 6_500]
    assert every.last_before(6_501, 6_501) is None


def test_the_last_occurrence_of_years_is_found_without_a_walk_over_all_of_them() -> None:
    end_ms = ms_of("2036-01-01T00:00:00")
    passed_over: list[int] = []

    class Walked(Cron):
        def occurrences_from(self, ms: int) -> Iterator[int]:
            for found in super().occurrences_from(ms):
                passed_over.append(found)
                yield found

    assert Walked("* * * * *", BERLIN).last_before(end_ms, end_ms - 10 * YEAR_MS) == end_ms - 60_000
    assert len(passed_over) < 10
    assert Every(1, 0).last_before(end_ms, 0) == end_ms - 1


@pytest.mark.parametrize("name", ["Nowhere/Else", "../../etc/passwd", "/etc/localtime", "Europe", "\0", "x" * 5_000])
def test_a_time_zone_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(RecurrenceInvalid, match="there is no time zone"):
        zone_of(name)


def test_the_zone_is_utc_where_none_is_named() -> None:
    assert local_time(0, zone_of("")) == datetime(1970, 1, 1, tzinfo=UTC)
