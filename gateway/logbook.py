"""A log that clients can't flood: so many lines a second of one kind of event, and a count of those left out."""

from __future__ import annotations

from typing import Any

import structlog


class Logbook:
    """Events that clients cause.

    Parameters:
        lines_per_s: lines of one kind of event between two calls of `turn_page`.
    """

    def __init__(self, lines_per_s: int) -> None:
        self._logger = structlog.get_logger("gateway")
        self._lines_per_s = lines_per_s
        self._written: dict[str, int] = {}
        """Events of this second, by kind. There are as many kinds as places in the code that log."""

    def note(self, event: str, **values: Any) -> None:
        """Log an event, if there were not too many of its kind in this second."""
        written = self._written[event] = self._written.get(event, 0) + 1
        if written <= self._lines_per_s:
            self._logger.info(event, **values)

    def turn_page(self) -> None:
        """Begin a new second: say how many events were left out of the last one. Called once a second."""
        for event, written in self._written.items():
            if written > self._lines_per_s:
                self._logger.warning("log.left_out", of=event, lines=written - self._lines_per_s)
        self._written.clear()
