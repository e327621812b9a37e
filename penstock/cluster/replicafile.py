"""The file that says which replica of which cluster a data directory is.

A replica's id is a random number that the directory gets when it becomes a replica. So a directory that was lost and is made
anew is another replica, and can't be elected for what the old one had.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import orjson

from penstock.cluster.errors import ReplicaInvalid
from penstock.cluster.shardkey import ReplicaId, name_of, replica_named
from penstock.store.files import SYSTEM_FILES, Files, read_file, replace_file

FILE = "replica"


def read_replica(data_dir: Path, cluster: str, files: Files = SYSTEM_FILES) -> ReplicaId | None:
    """Return the id of a data directory in a cluster; None if it is no replica yet.

    Raises:
        ReplicaInvalid: it is a replica of another cluster, or the file can't be read.
        OSError: the disk fails.
    """
    path = data_dir / FILE
    try:
        data = read_file(files, path)
    except FileNotFoundError:
        return None
    try:
        fields: dict[str, Any] = orjson.loads(data)
        of, replica = str(fields["cluster"]), replica_named(fields["replica"])
    except (ValueError, KeyError, TypeError) as error:
        raise ReplicaInvalid(
            f"{path} is damaged ({error}); if the other replicas are well, begin anew with an empty directory, which gets "
            "everything from them"
        ) from error
    if of != cluster:
        raise ReplicaInvalid(
            f"{data_dir} is a replica of cluster {of!r}, but replication.cluster is {cluster!r}; name that cluster, or another "
            "data directory"
        )
    return replica


def make_replica(data_dir: Path, cluster: str, files: Files = SYSTEM_FILES) -> ReplicaId:
    """Make a data directory a replica of a cluster, and return its id. Raises OSError."""
    replica = secrets.randbits(64)
    replace_file(files, data_dir / FILE, orjson.dumps({"cluster": cluster, "replica": name_of(replica)}))
    return replica
