"""The audit log: who connected, was refused, was denied, left, and changed what or failed to. A JSON object a line.

    {"at": "2026-11-23T11:31:14.000Z", "event": "denied", "user": "sensor-7", "client": "s7", "address": "10.0.0.7", ...}

It is written to a file of its own, apart from the node's log, because others read it and for longer.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, Literal, TypeAlias

import orjson
import structlog

from penstock.access.subject import Subject
from penstock.store.printable import printable

logger = structlog.get_logger("access")

Event = Literal["connected", "refused", "denied", "disconnected", "changed", "failed"]

TEXT_CHARS_MAX: Final = 300
"""Longer texts are cut: clients choose most of them."""

KIND_FIELDS: Final = ("what", "reason", "action")
"""Fields whose values tell the kinds of one event apart, such as denied publishes and denied pops. No client chooses them."""

KIND_SHARE: Final = 10
"""Each kind of an event has this part of the lines for itself, so that a flood of one kind does not hide the others."""

_PERMISSIONS: Final = 0o600

EventKind: TypeAlias = tuple[Event, str, str]
"""An event, and the first of `KIND_FIELDS` that its line has, with its value."""


class Audit:
    """The audit log of a node. Without a path it only counts.

    Parameters:
        path: of the file; empty for none.
        lines_per_s: the maximum number of lines of one event between two calls of `turn_page`. When an event has had them, each
            kind of it still gets a tenth of that number: see `KIND_FIELDS`. The event "changed" has no limit.
        now_ms: returns the time in ms since 1970.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(self, path: str, lines_per_s: int, now_ms: Callable[[], int]) -> None:
        self._path = path
        self._lines_per_s = lines_per_s
        self._now_ms = now_ms
        self._kind_lines = max(lines_per_s // KIND_SHARE, 1)
        self._written: dict[Event, int] = {}
        """Lines of each event in this second."""
        self._written_of: dict[EventKind, int] = {}
        """Lines of each kind in this second."""
        self._left_out: dict[EventKind, int] = {}
        """Lines of each kind in this second that were not written."""
        self._file = self._open() if path else -1
        self._is_failing = False
        self.is_on: Final = bool(path)
        """Whether there is a file."""
        self.counts: dict[str, int] = {}
        """How often each event was noted."""
        self.lost = 0
        """Lines that could not be written."""

    def note(self, event: Event, subject: Subject, **values: object) -> None:
        """Write a line, unless there were too many of its event in this second. Values that are empty are left out."""
        self.counts[event] = self.counts.get(event, 0) + 1
        if not self._path:
            return
        field = next((each for each in KIND_FIELDS if each in values), "")
        kind: EventKind = (event, field, str(values.get(field, "")))
        written, written_of = self._written.get(event, 0), self._written_of.get(kind, 0)
        has_room = written < self._lines_per_s or written_of < self._kind_lines
        if not has_room and event != "changed":  # nobody can hide a change behind many
            self._left_out[kind] = self._left_out.get(kind, 0) + 1
            return
        self._written[event], self._written_of[kind] = written + 1, written_of + 1
        about = {"user": subject.user, "client": subject.client_id, "address": subject.address}
        self._write({"event": event} | about | values)

    def turn_page(self) -> None:
        """Begin a new second, and write how many lines the last one left out. The caller calls this once a second."""
        left_out = self._left_out
        self._written, self._written_of, self._left_out = {}, {}, {}
        for (event, field, value), lines in left_out.items():
            self._write({"event": "left_out", "of": event} | ({field: value} if field else {}) | {"lines": lines})

    def reopen(self) -> None:
        """Open the file anew, because it may have been renamed. Where that fails, go on with the old one, and log it."""
        if not self._path:
            return
        try:
            fresh = self._open()
        except OSError as error:
            logger.error("audit.unavailable", path=self._path, error=str(error))
            return
        os.close(self._file)
        self._file = fresh

    def close(self) -> None:
        """Write how many lines were left out, and close the file."""
        if self._file >= 0:
            self.turn_page()
            os.close(self._file)
            self._file = -1
            self._path = ""

    def _open(self) -> int:
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, _PERMISSIONS)

    def _write(self, values: dict[str, object]) -> None:
        at = datetime.fromtimestamp(self._now_ms() / 1000, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        line = {"at": at} | {name: _short(value) for name, value in values.items() if value not in ("", None)}
        try:
            data = _encoded(line) + b"\n"
            if os.write(self._file, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:  # a full disk must not end the service; the metric and the log tell
            self.lost += 1
            if not self._is_failing:
                logger.error("audit.failed", path=self._path, error=str(error))
            self._is_failing = True
        else:
            self._is_failing = False


def _encoded(line: dict[str, object]) -> bytes:
    """Return a line as JSON. What JSON of 64 bits can't hold becomes text."""
    try:
        return orjson.dumps(line, default=str)
    except TypeError:
        return orjson.dumps({name: str(value) for name, value in line.items()})


def _short(value: object) -> object:
    if not isinstance(value, str):
        return value
    return printable(value[:TEXT_CHARS_MAX])  # people read the file on terminals
