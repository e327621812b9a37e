"""Remembers what a coordinator tells of its keys."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.cluster.coordinator import ReplicaStatus
from penstock.cluster.shardkey import ReplicaId, ShardKey
from tests.waiting import until


class Observed:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.keys: list[ShardKey] = []
        self.alive: Mapping[ReplicaId, ReplicaStatus] = {}
        self.twins: list[ReplicaStatus] = []

    def key_seen(self, key: ShardKey) -> None:
        """Take a value of the key."""
        self.keys.append(key)

    def alive_seen(self, alive: Mapping[ReplicaId, ReplicaStatus]) -> None:
        """Take who is alive."""
        self.alive = alive

    def twin_seen(self, status: ReplicaStatus) -> None:
        """Take that somebody else has the same id."""
        self.twins.append(status)

    async def until_key(self, key: ShardKey) -> None:
        """Return when the key has a value. Raises TimeoutError."""
        await until(lambda: self.keys[-1] == key)

    async def until_position(self, replica: ReplicaId, position: int) -> None:
        """Return when a replica says that its log is durable up to a position. Raises TimeoutError."""
        await until(lambda: replica in self.alive and self.alive[replica].position == position)
