"""A schedule: what it sends, when it occurs, and how far it has got.

A body may name its occurrence with placeholders in double braces, which each occurrence fills in:

    {{occurrence}}           its time, as ISO 8601 by the schedule's wall clock: 2026-03-01T02:30:00+01:00
    {{occurrence:FORMAT}}    the same in a format of `strftime`, such as {{occurrence:%Y-%m-%d}}
    {{occurrence_ms}}        the same in ms since 1970 UTC
    {{number}}               how many messages the schedule has sent, this one included
    {{schedule}}             the name of the schedule
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from itertools import islice
from struct import Struct
from typing import Any, Final, Literal, NamedTuple, get_args

import orjson

from penstock.store.options import SECOND_MS
from penstock.timer.errors import RecurrenceInvalid
from penstock.timer.options import YEAR_MS
from penstock.timer.recurrence import HORIZON_MS, INSTANT_MS_MAX, Cron, Every, Recurrence, RecurrenceRule, local_time, zone_of

FORMAT_CHARS_MAX: Final = 64
"""Maximum length of a format of a time."""

_PLACEHOLDER: Final = re.compile(r"\{\{(.*?)\}\}", re.DOTALL)

_NAMES: Final = ("occurrence", "occurrence_ms", "number", "schedule")


def check_template(body: bytes) -> None:
    """Raise RecurrenceInvalid if a template can't be filled in."""
    try:
        text = body.decode()
    except UnicodeDecodeError as error:
        raise RecurrenceInvalid(f"the template is not UTF-8 from byte {error.start} on") from error
    for found in _PLACEHOLDER.finditer(text):
        name, colon, form = found[1].partition(":")
        if name not in _NAMES or (colon and name != "occurrence"):
            raise RecurrenceInvalid(
                f"the template has the placeholder {found[0][:60]!r}; the names are {', '.join(_NAMES)}, and only occurrence "
                "may have a format"
            )
        if len(form) > FORMAT_CHARS_MAX or not form.isprintable():
            raise RecurrenceInvalid(
                f"the template has the format {form[:60]!r}; use up to {FORMAT_CHARS_MAX} printable characters, such as "
                "%Y-%m-%d"
            )
        try:
            datetime(2026, 3, 1, tzinfo=UTC).strftime(form)
        except ValueError as error:
            raise RecurrenceInvalid(f"the template has the format {form!r}, which is none of strftime: {error}") from error


def filled(body: bytes, *, schedule: str, occurrence: datetime, occurrence_ms: int, number: int) -> bytes:
    """Return a checked template with its placeholders filled in.

    Args:
        body: the template.
        schedule: name of the schedule.
        occurrence: the time of the occurrence by the schedule's wall clock.
        occurrence_ms: the same in ms since 1970.
        number: how many messages the schedule has sent, this one included.
    """
    values: dict[str, Callable[[str], str]] = {
        "occurrence": lambda form: occurrence.strftime(form) if form else occurrence.isoformat(),
        "occurrence_ms": lambda _: str(occurrence_ms),
        "number": lambda _: str(number),
        "schedule": lambda _: schedule,
    }

    def value_of(found: re.Match[str]) -> str:
        name, _, form = found[1].partition(":")
        return values[name](form)

    return _PLACEHOLDER.sub(value_of, body.decode()).encode()


NAME_BYTES_MAX: Final = 255
"""Maximum length of the name of a schedule."""

SCHEDULE_BYTES_MAX: Final = 64 * 1024
"""Maximum size of the record of a schedule: its body, its properties and all else that it says."""

GRACE_MS: Final = 60 * SECOND_MS
"""Milliseconds after its time at which an occurrence counts as missed, unless the schedule says otherwise."""

Missed = Literal["skip", "once", "all", "latest"]
"""What becomes of occurrences that were missed, because the node was down or had no room on its disk: nothing is sent; one
message for all of them, with the time of the first; a message for each; or one message, with the time of the last."""

_ERROR_CHARS_MAX: Final = 200
_STATE = Struct("<qqqqB")


class ScheduleState(NamedTuple):
    """How far a schedule has got."""

    next_ms: int = 0
    """When it occurs next, in ms since 1970; 0 if it has ended."""
    sent: int = 0
    """Number of messages that it has sent, those of `run` included."""
    counted: int = 0
    """Number of those that count against `count`: all but those of `run`."""
    last_ms: int = 0
    """Time of the occurrence that was sent last, in ms since 1970; 0 if there was none."""
    is_paused: bool = False
    error: str = ""
    """Why the last occurrence could not be sent; empty if it was."""

    def row(self) -> bytes:
        """Return the state as the index and the log have it."""
        return _STATE.pack(*self[:5]) + self.error.encode()

    @classmethod
    def from_row(cls, row: bytes) -> ScheduleState:
        """Return the state in a row."""
        next_ms, sent, counted, last_ms, is_paused = _STATE.unpack_from(row)
        return cls(next_ms, sent, counted, last_ms, bool(is_paused), row[_STATE.size :].decode())

    def failed(self, error: str) -> ScheduleState:
        """Return the state with the reason for which an occurrence was not sent."""
        return self._replace(error=error[:_ERROR_CHARS_MAX])


@dataclass(frozen=True, kw_only=True)
class ScheduleDefinition:
    """What a schedule sends, and when.

    Parameters:
        name: names it on this node.
        topic, body, properties, tag, message_group, content_type: of its messages.
        is_template: whether the body has placeholders (`timer.template`).
        expire_after_ms: its messages expire so many ms after they are sent; 0 means never.
        every_ms, cron, rrule: when it occurs; exactly one of them is given.
        zone: the time zone of `cron` and `rrule`, by its name in the IANA database.
        start_ms: nothing occurs before, in ms since 1970. `every_ms` counts from here, and it is the DTSTART of `rrule`.
        end_ms: nothing occurs after; 0 means that it never ends.
        count: it ends when it has sent so many messages; 0 means that it does not.
        missed: see `Missed`.
        grace_ms: how late an occurrence is at least that counts as missed.
        by: who is charged: see `Causer.row`.
    """

    name: str
    topic: str
    body: bytes = b""
    is_template: bool = False
    properties: list[tuple[str, str]] = field(default_factory=list)
    tag: str = ""
    message_group: str = ""
    content_type: str = ""
    expire_after_ms: int = 0
    every_ms: int = 0
    cron: str = ""
    rrule: str = ""
    zone: str = "UTC"
    start_ms: int = 0
    end_ms: int = 0
    count: int = 0
    missed: Missed = "skip"
    grace_ms: int = GRACE_MS
    by: list[str] = field(default_factory=list)

    def check(self, every_ms_min: int, now_ms: int) -> None:
        """Raise RecurrenceInvalid if the schedule says nothing that can be carried out.

        Args:
            every_ms_min: least value of `every_ms`.
            now_ms: the time, in ms since 1970.
        """
        name = self.name
        if not name or len(name.encode()) > NAME_BYTES_MAX or not name.isprintable() or name != name.strip():
            raise RecurrenceInvalid(
                f"the schedule's name {name[:40]!r} can't be used: it needs 1 to {NAME_BYTES_MAX} bytes of printable "
                "characters, and no space at its ends"
            )
        rules = [rule for rule in ("every_ms", "cron", "rrule") if getattr(self, rule)]
        if len(rules) != 1:
            raise RecurrenceInvalid(
                f"the schedule has {' and '.join(rules) or 'no rule'}; give one of every_ms, cron and rrule"
            )
        if self.every_ms and not every_ms_min <= self.every_ms <= 10 * YEAR_MS:
            raise RecurrenceInvalid(f"every_ms is {self.every_ms}; use {every_ms_min} to {10 * YEAR_MS}")
        for field_name, value, maximum in (
            ("start_ms", self.start_ms, INSTANT_MS_MAX),
            ("end_ms", self.end_ms, INSTANT_MS_MAX),
            ("count", self.count, 2**62),
            ("grace_ms", self.grace_ms, 10 * YEAR_MS),
            ("expire_after_ms", self.expire_after_ms, 2**53),
        ):
            if not 0 <= value <= maximum:
                raise RecurrenceInvalid(f"{field_name} is {value}; use 0 to {maximum}")
        if self.end_ms and self.end_ms < self.start_ms:
            raise RecurrenceInvalid(f"the schedule ends (end_ms {self.end_ms}) before it starts (start_ms {self.start_ms})")
        if self.missed not in get_args(Missed):
            raise RecurrenceInvalid(f"missed is {self.missed!r}; use one of {', '.join(get_args(Missed))}")
        if self.is_template:
            check_template(self.body)
        recurrence = self.recurrence
        if isinstance(recurrence, RecurrenceRule) and recurrence.is_counted and self.start_ms < now_ms - HORIZON_MS:
            raise RecurrenceInvalid(
                f"the recurrence rule has a COUNT, and start_ms is {self.start_ms}, more than ten years ago: leave COUNT out, "
                "use count of the schedule in its place, or a later start"
            )

    @cached_property
    def recurrence(self) -> Recurrence:
        """When it occurs. Raises RecurrenceInvalid."""
        zone = zone_of(self.zone)
        if self.every_ms:
            return Every(self.every_ms, self.start_ms)
        return Cron(self.cron, zone) if self.cron else RecurrenceRule(self.rrule, zone, self.start_ms)

    def first_from(self, ms: int, counted: int) -> int:
        """Return the first occurrence at `ms` or later, in ms since 1970; 0 if there is none.

        Args:
            ms: in ms since 1970.
            counted: number of messages sent so far that count against `count`.
        """
        if self.count and counted >= self.count:
            return 0
        found = self.recurrence.first_from(max(ms, self.start_ms))
        return found if found is not None and not (self.end_ms and found > self.end_ms) else 0

    def upcoming(self, ms: int, counted: int, most: int) -> list[int]:
        """Return up to `most` occurrences at `ms` or later, in ms since 1970: see `first_from`."""
        if self.count:
            most = min(most, max(self.count - counted, 0))
        found = islice(self.recurrence.occurrences_from(max(ms, self.start_ms)), most)
        return [each for each in found if not (self.end_ms and each > self.end_ms)]

    def last_before(self, ms: int, from_ms: int) -> int:
        """Return the last occurrence before `ms` that is not before `from_ms`; 0 if there is none."""
        return self.recurrence.last_before(min(ms, self.end_ms + 1) if self.end_ms else ms, from_ms) or 0

    def body_of(self, occurrence_ms: int, number: int) -> bytes:
        """Return the body of an occurrence: see `timer.template`."""
        if not self.is_template:
            return self.body
        occurrence = local_time(occurrence_ms, zone_of(self.zone))
        return filled(self.body, schedule=self.name, occurrence=occurrence, occurrence_ms=occurrence_ms, number=number)

    def encoded(self) -> bytes:
        """Return the definition without its body, as JSON."""
        fields: dict[str, Any] = asdict(self)
        del fields["body"]
        return orjson.dumps(fields)

    @classmethod
    def decoded(cls, data: bytes, body: bytes) -> ScheduleDefinition:
        """Return the definition in JSON, with its body. Names that this version doesn't know are left out."""
        known = cls.__dataclass_fields__
        fields: dict[str, Any] = {name: value for name, value in orjson.loads(data).items() if name in known}
        fields["properties"] = [(name, value) for name, value in fields["properties"]]
        return cls(body=body, **fields)
