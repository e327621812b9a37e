"""The one key of a shard that the coordinator keeps: who leads, in which epoch, and which replicas are in sync."""

from __future__ import annotations

from typing import Any, NamedTuple, Self

import orjson

from penstock.cluster.errors import KeyInvalid
from penstock.store.topics import excerpt

ReplicaId = int
"""A random number below 2**64 that a data directory gets when it is made. Messages show it as 16 hexadecimal digits."""

IDS = 1 << 64


def name_of(replica: ReplicaId) -> str:
    """Return a replica's id as 16 hexadecimal digits."""
    return f"{replica:016x}"


def replica_named(name: str) -> ReplicaId:
    """Return the id that `name_of` has written. Raises ValueError."""
    if len(name) != 16:
        raise ValueError(f"{name!r} is not 16 hexadecimal digits")
    return int(name, 16)


class ShardKey(NamedTuple):
    """The value of the key. It changes by compare-and-swap only, each time with the revision that was read."""

    revision: int
    """The coordinator's number of this value; 0 if the key does not exist."""
    epoch: int
    """Number of the last epoch that somebody has won; 0 before the first."""
    leader: ReplicaId | None
    """Who has won it, or None before the first epoch."""
    members: frozenset[ReplicaId]
    """The in-sync set: a record is committed when all of these have it. The next leader is one of them."""
    required: int
    """Members without which nothing is committed."""
    level: int = 1
    """The features that all replicas understand. Nobody writes a kind of record that needs a higher level."""

    def encoded(self) -> bytes:
        """Return the value as JSON. The revision is the coordinator's and not part of it."""
        return orjson.dumps(
            {
                "epoch": self.epoch,
                "leader": None if self.leader is None else name_of(self.leader),
                "members": sorted(map(name_of, self.members)),
                "required": self.required,
                "level": self.level,
            }
        )

    @classmethod
    def decoded(cls, value: bytes, revision: int) -> Self:
        """Return the key that has a value. Raises KeyInvalid."""
        try:
            fields: dict[str, Any] = orjson.loads(value)
            leader = fields["leader"]
            return cls(
                revision,
                int(fields["epoch"]),
                None if leader is None else replica_named(leader),
                frozenset(map(replica_named, fields["members"])),
                int(fields["required"]),
                int(fields["level"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise KeyInvalid(
                f"the coordinator's key of the shard is {excerpt(value, 200)}, which no replica writes ({error}); "
                "check replication.cluster and the coordinator's data"
            ) from error


ABSENT = ShardKey(0, 0, None, frozenset(), 0)
"""The key of a shard that nobody has created."""
