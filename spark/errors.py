"""Errors of reconciliation. Damage of the log itself is `RecordCorrupt` or `LogCorrupt` of `penstock.store.errors`."""

from __future__ import annotations


class ReconcileError(Exception):
    """Base of the errors of reconciliation, of the data sources and of the tables."""


class JavaMissing(ReconcileError):
    """Raised when there is no Java that Spark can use. Only reconciliation needs Java."""


class EngineMissing(ReconcileError):
    """Raised when what is to run the reconciliation is not installed."""


class LogMissing(ReconcileError):
    """Raised when a directory holds no CommitLog, or a segment disappears before it is read."""


class LogUnreadable(ReconcileError):
    """Raised when the user of the process may not read the directory of a log."""


class ReadOptionInvalid(ReconcileError):
    """Raised for an invalid option of the data source or of the reconciliation."""


class ReportDirInUse(ReconcileError):
    """Raised when a report would replace files that are not an earlier report."""


class NodeUnreadable(ReconcileError):
    """Raised when a running node does not answer, or its answer can't be compared with the log: the message says why."""


class TablesInvalid(ReconcileError):
    """Raised when the Parquet tables of a log can't be used or continued: the message says why, and what to do."""


class TablesLocked(TablesInvalid):
    """Raised when another process writes the Parquet tables."""


class TablesInUse(TablesInvalid):
    """Raised when files of the Parquet tables can't be replaced or deleted, because another process reads them."""


class RecordsLost(ReconcileError):
    """Raised when a stream can't go on, because the log does not have its next records any more."""


class MessageUnknown(ReconcileError):
    """Raised when neither the tables nor the log have a message: the message says which positions they have."""


class WriteOptionInvalid(ReconcileError):
    """Raised for an invalid option of the format `penstock` when rows are written."""


class RowsInvalid(ReconcileError):
    """Raised when rows can't be published: a column is unknown, missing or of another type, or a row has no value in it."""


class PublishFailed(ReconcileError):
    """Raised when a task could not publish its rows: the message says which row, why, and what to do."""
