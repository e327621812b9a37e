"""Errors of replication."""

from __future__ import annotations


class ClusterError(Exception):
    """Base of the errors of replication. The message says what was wrong and what an operator can do."""


class KeyInvalid(ClusterError):
    """Raised when the coordinator's key of a shard can't be read: somebody else wrote it, or a later version did."""


class LogsDiverge(ClusterError):
    """Raised when a leader's log lacks records that are committed."""


class StreamBroken(ClusterError):
    """Raised when the other end of a stream sends what it must not. The connection ends, and is made anew."""


class CoordinatorSilent(ClusterError):
    """Raised when a command has no answer from the coordinator. The message says why."""


class FilesInvalid(ClusterError):
    """Raised when a file that an option of replication names can't be used."""


class ReplicaInvalid(ClusterError):
    """Raised when a data directory can't be a replica of the cluster that the options name."""


class RelayRefused(ClusterError):
    """Raised when a replica can't serve a client that has connected to another one."""
