"""The errors of the store. Each message says what was wrong, the value, and what to do."""

from __future__ import annotations


class StoreError(Exception):
    """Base of all errors of the store."""


class RecordCorrupt(StoreError):
    """Raised when the bytes at a position of the log are not the record that was written there."""

    def __init__(self, position: int, reason: str, segment: str = "") -> None:
        self.position = position
        self.reason = reason
        self.segment = segment
        where = f" in segment {segment}" if segment else ""
        super().__init__(f"record at position {position}{where} is corrupt: {reason}")


class PositionUnknown(StoreError):
    """Raised when no record can be read at a position because it is outside of the log or not committed yet."""


class RecordUnreadable(RecordCorrupt, PositionUnknown):
    """Raised when the disk can't read bytes of the log. `position` is that of the first of them.

    It is both of its bases, so whoever handles a damaged record or one that isn't there handles it too.
    """

    def __init__(self, position: int, reason: str, segment: str) -> None:
        super().__init__(position, f"{reason}; check the disk, stop the node, and run `penstock repair`", segment)


class LogCorrupt(StoreError):
    """Raised at a start when records before the tail of the log are damaged. The node refuses to run on such a log."""


class SnapshotInvalid(StoreError):
    """Raised when a snapshot can't be restored: it is damaged, incomplete, or of another format."""


class TopicInvalid(StoreError):
    """Raised for a topic or a topic filter that violates MQTT 5.0, 4.7."""


class QueueUnknown(StoreError):
    """Raised when no light queue has the given id."""


class LimitExceeded(StoreError):
    """Raised when a limit would be exceeded. The message names the option that sets the limit."""


class QuotaExceeded(LimitExceeded):
    """Raised when a tenant, user, source or client holds as much of something as it may, while the node has room for others."""


class RecordTooLarge(LimitExceeded):
    """Raised when a record would be larger than a segment, or than any record may be."""


class DiskFull(StoreError):
    """Raised when the disk has too little room to store a record. The node keeps running, so the caller may try again later."""


class ClockDiffers(StoreError):
    """Raised when a jump of the time of day can't be accepted, because it is not the one that the caller has seen."""


class DataDirLocked(StoreError):
    """Raised when another process has the data directory open."""

    def __init__(self, message: str, pid: str) -> None:
        super().__init__(message)
        self.pid = pid
        """Of that process; "unknown" if it has just begun."""


class DataDirIncomplete(StoreError):
    """Raised when a data directory lacks files, because it is being restored from a backup."""


class IndexAhead(StoreError):
    """Raised when the log was cut before the position up to which the index covers it."""


class IndexDamaged(StoreError):
    """Raised when RocksDB can't read the index. Nothing is lost, because the next start rebuilds the index from the log."""


class DataDirIncompatible(StoreError):
    """Raised when a data directory was written by a version whose formats this version can't read."""
