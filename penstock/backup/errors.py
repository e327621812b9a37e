"""The errors of backups. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations

from penstock.store.errors import StoreError


class BackupFailed(StoreError):
    """Raised when a backup can't be made or restored. An earlier backup in the same directory is as it was."""


class BackupInvalid(StoreError):
    """Raised when a directory is not a backup, is of another version, or lacks what its manifest names."""
