"""What the audit log says of a call: that it was refused or denied, and what it changed or failed to.

Every error that ends a call passes `AuditedCall.__exit__`, so a new check of a right needs no line of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import Final, Self, TypeAlias

from penstock.access.audit import Audit, Event
from penstock.access.subject import Subject
from penstock.pop.access.caller import AccessDenied
from penstock.pop.access.refusals import CallRefused
from penstock.store.store import Store

NAMES_MAX: Final = 16
"""Messages that a line names. A call may be about more of them."""

LineFields: TypeAlias = Mapping[str, object]
"""Fields of a line of the audit log."""


class AuditedCall:
    """A call that is being served. It is a context manager around the code that serves the call.

    Parameters:
        audit: the audit log.
        method: the name of the method.
        caller: returns who calls. Its argument is what an error says of the caller, if it does.
        change: returns what the call is to change, as fields; None for a method whose purpose is no change. If another method
            ends with an error, its change has failed.
    """

    __slots__ = ("_audit", "_caller", "_change", "_has_changed", "_method")

    def __init__(
        self, audit: Audit, method: str, caller: Callable[[Subject | None], Subject], change: Callable[[], LineFields] | None
    ) -> None:
        self._audit = audit
        self._method = method
        self._caller = caller
        self._change = change
        self._has_changed = False

    def __enter__(self) -> Self:
        _PRESENT.set(self)
        return self

    def __exit__(self, _kind: type[BaseException] | None, error: BaseException | None, _at: TracebackType | None) -> None:
        if isinstance(error, CallRefused) and error.__cause__ is not None:
            error = error.__cause__
        if isinstance(error, AccessDenied):
            why = {"why": str(error)} if error.event != "denied" else {}
            self._note(error.event, error.subject, {"method": self._method} | why | error.fields)
        elif isinstance(error, Exception) and self._change is not None and not self._has_changed:
            self.failed(str(error))

    def changed(self, fields: LineFields) -> None:
        """Write that the call has changed something."""
        self._has_changed = True
        self._note("changed", None, {"what": self._method} | self._asked() | dict(fields))

    def failed(self, why: str) -> None:
        """Write that the call has not changed what it was to change."""
        self._note("failed", None, {"what": self._method} | self._asked() | {"why": why})

    def _asked(self) -> dict[str, object]:
        return dict(self._change()) if self._change is not None else {}

    def _note(self, event: Event, subject: Subject | None, values: LineFields) -> None:
        self._audit.note(event, self._caller(subject), over="grpc", **values)


_PRESENT: ContextVar[AuditedCall | None] = ContextVar("audited", default=None)
"""The call that is being served. gRPC serves each call in a task of its own, so this is the call's own context."""


def note_change(**fields: object) -> None:
    """Write into the audit log that the present call has changed something; do nothing outside of a call.

    The code that makes a change calls this right after it. So there is a line also if the caller does not wait for the answer,
    and none if nothing was changed.

    Args:
        fields: of the line, besides those that `ServiceRules.changes` gives.
    """
    call = _PRESENT.get()
    if call is not None:
        call.changed(fields)


@contextmanager
def change_noted(store: Store) -> Iterator[dict[str, object]]:
    """Write into the audit log that the present call has changed something, if the code within appends a record.

    Every change is a record: a call that asks for what is so already changes nothing. Yields the fields of the line, which the
    code within may add to: see `note_change`.
    """
    fields: dict[str, object] = {}
    before = store.log.end
    yield fields
    if store.log.end > before:
        note_change(**fields)


def note_failed(why: str) -> None:
    """Write into the audit log that the present call has changed nothing, where the response says so, and no error."""
    call = _PRESENT.get()
    if call is not None:
        call.failed(why)
