"""What can go wrong in Spark's part. Damage in the log itself is told by `store.errors.RecordCorrupt` and `LogCorrupt`."""

from __future__ import annotations


class ReconcileError(Exception):
    """Base of all errors of Spark's part."""


class JavaMissing(ReconcileError):
    """Raised when no Java that Spark can run on is found. Only Spark's part of Penstock needs Java."""


class LogMissing(ReconcileError):
    """Raised when a directory holds no CommitLog, or a segment of it is gone by the time it is read."""


class OptionInvalid(ReconcileError):
    """Raised for an option of the data source or of the reconciliation with a value that can't be."""


class ReportDirInUse(ReconcileError):
    """Raised when a report would be written over files that are not an earlier report."""
