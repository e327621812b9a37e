"""Bodies that name their occurrence: placeholders in double braces, which each occurrence fills in.

{{occurrence}}           its time, as ISO 8601 by the schedule's wall clock: 2026-03-01T02:30:00+01:00
{{occurrence:FORMAT}}    the same in a format of `strftime`, such as {{occurrence:%Y-%m-%d}}
{{occurrence_ms}}        the same in ms since 1970 UTC
{{number}}               how many messages the schedule has sent, this one included
{{schedule}}             the name of the schedule
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final

from penstock.timer.errors import RecurrenceInvalid

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
