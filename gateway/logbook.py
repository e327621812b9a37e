"""A log that clients can't flood: a limited number of lines per second for each kind of event, and a count of the others."""

from __future__ import annotations

from typing import Any

import structlog


class Logbook:
    """The log of events that clients cause.

    Parameters:
        lines_per_s: the maximum number of lines of one kind of event between two calls of `turn_page`.
    """

    def __init__(self, lines_per_s: int) -> None:
        self._logger = structlog.get_logger("gateway")
        self._lines_per_s = lines_per_s
        self._written: dict[str, int] = {}
        """The events of this second, by kind. There are as many kinds as calls of `note` in the code."""

    def note(self, event: str, **values: Any) -> None:
        """Log an event, unless there were too many of its kind in this second."""
        written = self._written[event] = self._written.get(event, 0) + 1
        if written <= self._lines_per_s:
            self._logger.info(event, **values)

    def turn_page(self) -> None:
        """Begin a new second, and log how many events the last one left out. The caller calls this once a second."""
        for event, written in self._written.items():
            if written > self._lines_per_s:
                self._logger.warning("log.left_out", of=event, lines=written - self._lines_per_s)
        self._written.clear()
