"""The errors of timers."""

from __future__ import annotations

from penstock.store.errors import StoreError


class RecurrenceInvalid(StoreError):
    """Raised when a schedule says nothing that can be carried out: its rule, its times or its body are not valid."""
