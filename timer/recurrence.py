"""When a schedule occurs: every so many ms, by a cron expression, or by a recurrence rule of RFC 5545.

A recurrence is a pure function of its rule. It tells the first occurrence from an instant on, and the last one before an
instant. Both are bounded, whatever the rule and the time between: a search ends after `HORIZON_MS`.

Cron expressions are those of Debian's cron, parsed by `cronsim`. A job at a fixed time that falls into the gap of a
daylight-saving change occurs right after the gap, and one that falls into the repeated hour occurs once. A job whose minute or
hour begins with `*` occurs by the clock: not in the gap, and in both of the repeated hours.

Recurrence rules are evaluated by `dateutil`. As RFC 5545 (3.3.5) says, a time in the gap is taken with the offset before the
gap, and a time that is repeated means the first of the two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Final, Protocol
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from cronsim import CronSim, CronSimError
from dateutil.rrule import rrulestr

from penstock.timer.errors import RecurrenceInvalid
from penstock.timer.options import YEAR_MS

HORIZON_MS: Final = 10 * YEAR_MS
"""How far a search for an occurrence looks ahead. A rule without an occurrence within this time has none."""

INSTANT_MS_MAX: Final = 16_725_225_600_000
"""Latest instant that a schedule may name, in ms since 1970: the end of the year 2499."""

CRON_CHARS_MAX: Final = 256
RRULE_CHARS_MAX: Final = 512
"""Maximum length of a rule."""

RRULE_COUNT_MAX: Final = 1_000
"""Maximum COUNT of a recurrence rule, because each search counts from its start. `count` of a schedule has no such bound."""

RRULE_TIMES_MAX: Final = 1_440
"""Maximum number of times of day that BYHOUR, BYMINUTE and BYSECOND of a recurrence rule give together."""

RRULE_TIMES_SETPOS_MAX: Final = 4
"""The same for a rule with BYSETPOS. A search that finds nothing lists all times of all days of ten years."""

_CYCLE_YEARS: Final = 400
"""The calendar repeats itself after so many years, days of the week included. dateutil looks for an occurrence up to the year
9999, whatever UNTIL says. Rules are evaluated as many cycles later as fit, which bounds the search for one that never comes."""

_MONTH_DAYS: Final = (31, 29, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)

_PERIODS: Final = {"DAILY": 1, "WEEKLY": 7}
_FREQUENCIES: Final = (*_PERIODS, "MONTHLY", "YEARLY")
_PARTS: Final = (
    *("FREQ", "INTERVAL", "COUNT", "UNTIL", "WKST", "BYSETPOS", "BYMONTH", "BYWEEKNO", "BYYEARDAY", "BYMONTHDAY", "BYDAY"),
    *("BYHOUR", "BYMINUTE", "BYSECOND"),
)
_ONLY_IN: Final = {
    "BYWEEKNO": ("YEARLY",),
    "BYYEARDAY": ("YEARLY",),
    "BYMONTHDAY": ("DAILY", "MONTHLY", "YEARLY"),
    "BYSETPOS": ("WEEKLY", "MONTHLY", "YEARLY"),
}
"""The parts that only rules of some frequencies may have (RFC 5545, 3.3.10)."""
_UNTIL: Final = re.compile(r"[0-9]{8}T[0-9]{6}Z?")
_CHANGE: Final = timedelta(hours=3)
"""A clock is changed by less than this. Where a zone moves across the date line, times in the day left out may get lost."""


class Recurrence(Protocol):
    """The occurrences of a rule, all in ms since 1970."""

    def first_from(self, ms: int) -> int | None:
        """Return the first occurrence at `ms` or later; None if there is none."""
        ...

    def occurrences_from(self, ms: int) -> Iterator[int]:
        """Yield the occurrences at `ms` or later within ten years, in order. One walk costs little more than its first step."""
        ...

    def last_before(self, ms: int, from_ms: int) -> int | None:
        """Return the last occurrence before `ms` that is not before `from_ms`; None if there is none."""
        ...


class Every:
    """Occurs at `start_ms`, and then every `every_ms` ms."""

    def __init__(self, every_ms: int, start_ms: int) -> None:
        self._every_ms = every_ms
        self._start_ms = start_ms

    def first_from(self, ms: int) -> int | None:
        return self._start_ms - (self._start_ms - max(ms, self._start_ms)) // self._every_ms * self._every_ms

    def occurrences_from(self, ms: int) -> Iterator[int]:
        begin_ms = self._start_ms - (self._start_ms - max(ms, self._start_ms)) // self._every_ms * self._every_ms
        yield from range(begin_ms, ms + HORIZON_MS + 1, self._every_ms)

    def last_before(self, ms: int, from_ms: int) -> int | None:
        found = self._start_ms + (ms - 1 - self._start_ms) // self._every_ms * self._every_ms
        return found if found >= max(from_ms, self._start_ms) else None


class _Calendar:
    """Occurrences by a wall clock. A subclass finds the times of the clock, and says what they mean where the clock is changed.

    Parameters:
        zone: has the clock.
    """

    def __init__(self, zone: ZoneInfo) -> None:
        self._zone = zone

    def _times_from(self, begin: datetime) -> Iterator[datetime]:
        """Yield the times of the clock from one on, without a zone, in order."""
        raise NotImplementedError

    def _instants_of(self, time: datetime) -> tuple[int, ...]:
        """Return the instants that a time means, in ms since 1970. The clock shows it not exactly once."""
        raise NotImplementedError

    def first_from(self, ms: int) -> int | None:
        return next(self.occurrences_from(ms), None)

    def last_before(self, ms: int, from_ms: int) -> int | None:
        # Look at longer and longer times before `ms`, so that few occurrences are passed over.
        span_ms = 60_000
        while True:
            begin_ms = max(ms - span_ms, from_ms)
            last = None
            for found in self.occurrences_from(begin_ms):
                if found >= ms:
                    break
                last = found
            if last is not None or begin_ms <= from_ms:
                return last
            span_ms *= 2

    def occurrences_from(self, ms: int) -> Iterator[int]:
        begin, last_ms = _local(ms, self._zone), ms - 1
        # Where the clock is changed, later times can mean earlier instants: then some must be found before the first is known.
        steady_until = begin + 2 * _CHANGE
        slack = timedelta() if self._is_steady(ms) else _CHANGE
        waiting: list[tuple[int, datetime]] = []
        for time in self._times_from(begin - slack):
            if time >= steady_until:
                slack = _CHANGE
            while waiting and waiting[0][1] + slack < time:
                found_ms = waiting.pop(0)[0]
                if found_ms > last_ms:
                    last_ms = found_ms
                    yield found_ms
            instants = self._instants(time)
            if instants and instants[0] > ms + HORIZON_MS:
                break
            if not slack:
                if instants[0] > last_ms:
                    last_ms = instants[0]
                    yield last_ms
                continue
            waiting += [(found_ms, time) for found_ms in instants]
            waiting.sort()
        for found_ms, _ in waiting:
            if found_ms > last_ms:
                last_ms = found_ms
                yield found_ms

    def _is_steady(self, ms: int) -> bool:
        """Return whether the clock is not changed around an instant."""
        change_ms = _CHANGE // timedelta(milliseconds=1)
        offsets = {local_time(ms + step * change_ms, self._zone).utcoffset() for step in (-1, 0, 1, 2, 3)}
        return len(offsets) == 1

    def _instants(self, time: datetime) -> tuple[int, ...]:
        first_ms, second_ms = self._both(time)
        return (first_ms,) if first_ms == second_ms else self._instants_of(time)

    def _both(self, time: datetime) -> tuple[int, int]:
        """Return the instant of a time with the offset before a change of the clock, and with the offset after it."""
        return _ms_of(time.replace(tzinfo=self._zone)), _ms_of(time.replace(tzinfo=self._zone, fold=1))


class Cron(_Calendar):
    """Occurs as a five-field cron expression says.

    Parameters:
        expression: minute, hour, day of month, month and day of week.
        zone: whose wall clock the expression means.

    Raises:
        RecurrenceInvalid: the expression has an error.
    """

    def __init__(self, expression: str, zone: ZoneInfo) -> None:
        if len(expression) > CRON_CHARS_MAX or len(expression.split()) != 5:
            raise RecurrenceInvalid(
                f"the cron expression {expression[:40]!r} should have five fields: minute, hour, day of month, month and day "
                f'of week, such as "30 2 * * MON-FRI", in at most {CRON_CHARS_MAX} characters'
            )
        try:
            CronSim(expression, datetime.now(UTC))
        except CronSimError as error:
            raise RecurrenceInvalid(f"the cron expression {expression!r} can't be used: {error}") from error
        super().__init__(zone)
        self._expression = expression
        minute, hour, *_ = expression.split()
        self._goes_by_clock = minute.startswith("*") or hour.startswith("*")

    def _times_from(self, begin: datetime) -> Iterator[datetime]:
        # Without a zone, because CronSim 2.8 passes over occurrences where a clock is changed by half an hour.
        return CronSim(self._expression, begin - timedelta(seconds=1))

    def _instants_of(self, time: datetime) -> tuple[int, ...]:
        before_ms, after_ms = self._both(time)
        if before_ms < after_ms:  # the clock shows it twice
            return (before_ms, after_ms) if self._goes_by_clock else (before_ms,)
        return () if self._goes_by_clock else (self._end_of_gap(after_ms, before_ms),)

    def _end_of_gap(self, low_ms: int, high_ms: int) -> int:
        """Return the instant between two others from which the clock has the offset of the second."""
        offset = local_time(high_ms, self._zone).utcoffset()
        while high_ms - low_ms > 1:
            middle_ms = (low_ms + high_ms) // 2
            if local_time(middle_ms, self._zone).utcoffset() == offset:
                high_ms = middle_ms
            else:
                low_ms = middle_ms
        return high_ms


class RecurrenceRule(_Calendar):
    """Occurs as an RRULE of RFC 5545 says.

    Parameters:
        text: the rule, such as `FREQ=MONTHLY;BYDAY=-1FR;BYHOUR=18`, with or without `RRULE:` before it.
        zone: whose wall clock the rule means.
        start_ms: DTSTART, from which the rule takes what it does not say, such as the time of day.

    Raises:
        RecurrenceInvalid: the rule has an error, or exceeds a bound.
    """

    def __init__(self, text: str, zone: ZoneInfo, start_ms: int) -> None:
        if len(text) > RRULE_CHARS_MAX:
            raise RecurrenceInvalid(f"the recurrence rule has {len(text)} characters; use {RRULE_CHARS_MAX} at most")
        super().__init__(zone)
        self._start = _local(start_ms, zone)
        parts = _parts_of(text)
        self._frequency = parts["FREQ"]
        self._interval = int(parts.get("INTERVAL", "1"))
        self.is_counted = "COUNT" in parts
        """Whether each search counts from the start."""
        until = parts.pop("UNTIL", None)
        self._until_ms: int | None = None
        if until is not None:
            if _UNTIL.fullmatch(until) is None:
                raise RecurrenceInvalid(f"UNTIL of the recurrence rule is {until!r}; write a time, such as 20301231T235959Z")
            try:
                named = datetime.strptime(until.rstrip("Z"), "%Y%m%dT%H%M%S")
                self._until_ms = _ms_of(named.replace(tzinfo=UTC if until.endswith("Z") else zone))
            except (ValueError, OverflowError) as error:
                raise RecurrenceInvalid(f"UNTIL of the recurrence rule is {until!r}, which is no time: {error}") from error
        self._text = ";".join(f"{name}={value}" for name, value in parts.items())
        try:
            rrulestr(self._text, dtstart=self._start)
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, OverflowError) as error:
            # dateutil raises all of these for rules that are not valid.
            raise RecurrenceInvalid(f"the recurrence rule {text!r} can't be used: {error}") from error

    def _times_from(self, begin: datetime) -> Iterator[datetime]:
        begin = max(begin, self._start)
        end = begin + timedelta(milliseconds=HORIZON_MS) + _CHANGE
        years = (datetime.max.year - 1 - end.year) // _CYCLE_YEARS * _CYCLE_YEARS
        start = self._start_near(begin)
        bound = "" if self.is_counted else f";UNTIL={end.replace(year=end.year + years):%Y%m%dT%H%M%S}"
        rule = rrulestr(self._text + bound, dtstart=start.replace(year=start.year + years))
        for later in rule.xafter(begin.replace(year=begin.year + years), inc=True):
            time = later.replace(year=later.year - years)
            if self._until_ms is not None and self._both(time)[0] > self._until_ms:
                return
            yield time

    def _instants_of(self, time: datetime) -> tuple[int, ...]:
        return (self._both(time)[0],)

    def _start_near(self, begin: datetime) -> datetime:
        """Return a DTSTART with the same occurrences from `begin` on: whole intervals later, so that none is passed over."""
        start, interval = self._start, self._interval
        if self.is_counted:
            return start
        days = _PERIODS.get(self._frequency)
        if days is not None:
            # Two periods less: a week begins up to six days before its DTSTART.
            steps = (begin - start).days // (days * interval) - 2
            return start + timedelta(days=max(steps, 0) * days * interval)
        months = interval * (12 if self._frequency == "YEARLY" else 1)
        steps = ((begin.year - start.year) * 12 + begin.month - start.month) // months - 2
        while steps > 0:
            month = start.year * 12 + start.month - 1 + steps * months
            try:
                return start.replace(year=month // 12, month=month % 12 + 1)
            except ValueError:  # that month has no such day
                steps -= 1
        return start


def zone_of(name: str) -> ZoneInfo:
    """Return a time zone. Raises RecurrenceInvalid if there is none of that name."""
    try:
        return ZoneInfo(name or "UTC")
    except (ZoneInfoNotFoundError, ValueError, OSError) as error:
        raise RecurrenceInvalid(
            f"there is no time zone {name[:80]!r}; use a name of the IANA database, such as Europe/Berlin"
        ) from error


def _parts_of(text: str) -> dict[str, str]:
    """Return the parts of a recurrence rule by their names. Raises RecurrenceInvalid."""
    parts: dict[str, str] = {}
    for part in text.upper().removeprefix("RRULE:").split(";"):
        name, equals, value = part.partition("=")
        if name not in _PARTS or not equals or not value or name in parts or not re.fullmatch(r"[A-Z0-9,+-]+", value):
            raise RecurrenceInvalid(
                f"the recurrence rule {text[:80]!r} is not one of RFC 5545 because of {part[:40]!r}; "
                "write parts such as FREQ=WEEKLY;BYDAY=MO,FR"
            )
        parts[name] = value
    if parts.get("FREQ") not in _FREQUENCIES:
        raise RecurrenceInvalid(
            f"FREQ of the recurrence rule is {parts.get('FREQ', 'missing')}; use {', '.join(_FREQUENCIES)}, "
            "or for shorter periods a schedule of ms or a cron expression"
        )
    for name, maximum in (("INTERVAL", 10_000), ("COUNT", RRULE_COUNT_MAX)):
        value = parts.get(name, "1")
        if not value.isdigit() or not 0 < int(value[:9]) <= maximum:
            raise RecurrenceInvalid(f"{name} of the recurrence rule is {value[:40]}; use 1 to {maximum}")
    for name, frequencies in _ONLY_IN.items():
        if name in parts and parts["FREQ"] not in frequencies:
            raise RecurrenceInvalid(f"a recurrence rule with {name} needs a FREQ of {' or '.join(frequencies)}")
    if "BYMONTH" in parts and "BYMONTHDAY" in parts:
        months = {int(each) for each in parts["BYMONTH"].split(",") if each.isdigit() and 0 < int(each[:3]) <= 12}
        days = {int(each.lstrip("+-")[:3] or 0) for each in parts["BYMONTHDAY"].split(",") if each.lstrip("+-").isdigit()}
        if not any(day <= _MONTH_DAYS[month - 1] for month in months for day in days):
            raise RecurrenceInvalid(
                f"no month {parts['BYMONTH'][:40]} has a day {parts['BYMONTHDAY'][:40]}, as the recurrence rule wants"
            )
    times = 1
    for name in ("BYHOUR", "BYMINUTE", "BYSECOND"):
        times *= parts.get(name, "").count(",") + 1
    times_max = RRULE_TIMES_SETPOS_MAX if "BYSETPOS" in parts else RRULE_TIMES_MAX
    if times > times_max:
        with_setpos = " with BYSETPOS" * ("BYSETPOS" in parts)
        raise RecurrenceInvalid(f"the recurrence rule has {times} times a day{with_setpos}; use {times_max} at most")
    return parts


def _at(ms: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=ms)


def local_time(ms: int, zone: ZoneInfo) -> datetime:
    """Return an instant, in ms since 1970, by the wall clock of a zone."""
    return _at(ms).astimezone(zone)


def _local(ms: int, zone: ZoneInfo) -> datetime:
    """Return the wall clock's time at an instant, without its zone and in whole seconds."""
    return local_time(ms, zone).replace(tzinfo=None, microsecond=0)


def _ms_of(instant: datetime) -> int:
    return (instant - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(milliseconds=1)
