"""The errors of timers."""

from __future__ import annotations

from penstock.store.errors import StoreError


class RecurrenceInvalid(StoreError):
    """Raised when a schedule says nothing that can be carried out: its rule, its times or its body are not valid."""


class ListingInvalid(StoreError):
    """Raised when pending messages are to be listed with a page token, a time or a number that is not valid."""
