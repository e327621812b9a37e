"""What can go wrong in the store. Each error says what was wrong, with which value, and what to do."""

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


class LogCorrupt(StoreError):
    """Raised at a start when records before the tail of the log are damaged: the node refuses to run on it."""


class SnapshotInvalid(StoreError):
    """Raised when a snapshot can't be read back: it is damaged, not whole, or of another format."""


class PositionUnknown(StoreError):
    """Raised when no record can be read at a position: it is outside of the log, or not committed yet."""


class TopicInvalid(StoreError):
    """Raised for a topic or a topic filter that breaks MQTT 5.0, 4.7."""


class QueueUnknown(StoreError):
    """Raised when a light queue is named that isn't declared."""


class LimitExceeded(StoreError):
    """Raised when a bound would be passed. The message names the option that holds the bound."""


class RecordTooLarge(LimitExceeded):
    """Raised when a record would be larger than a segment, or than any record may be."""


class DiskFull(StoreError):
    """Raised when the disk has too little room for what is to be stored. The node goes on: try later."""


class DataDirLocked(StoreError):
    """Raised when another process has the data directory open."""


class IndexDamaged(StoreError):
    """Raised when RocksDB can't read what the index holds. Nothing is lost: the next start rebuilds it from the log."""


class DataDirIncompatible(StoreError):
    """Raised when a data directory was written by a version whose formats this one does not read."""
