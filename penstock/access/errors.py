"""The errors of access control. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations


class AccessInvalid(ValueError):
    """Raised when a file of access control can't be read, or contains something that it must not."""
