"""A coordinator in memory, which a test stops and delays."""

from __future__ import annotations

from penstock.cluster.coordinator import Answer, Observer, ReplicaStatus
from penstock.cluster.shardkey import ReplicaId, ShardKey


class CoordinatedShard:
    """The keys of a shard, and who watches them."""

    def __init__(self, key: ShardKey) -> None:
        self.key = key
        self.alive: dict[ReplicaId, ReplicaStatus] = {}
        self.observers: dict[ReplicaId, Observer] = {}
        self.is_up = True

    def die(self, replica: ReplicaId) -> None:
        """Forget a replica, as when its lease has ended."""
        self.observers.pop(replica, None)
        if self.alive.pop(replica, None) is not None:
            self.tell_alive()

    def tell_alive(self) -> None:
        """Tell everybody who is alive."""
        for observer in list(self.observers.values()):
            observer.alive_seen(dict(self.alive))


class MemoryCoordinator:
    """What one replica has of it."""

    def __init__(self, shard: CoordinatedShard, replica: ReplicaId) -> None:
        self._shard = shard
        self._replica = replica

    @property
    def problem(self) -> str:
        return "" if self._shard.is_up else "it is down"

    def start(self, observer: Observer, status: ReplicaStatus) -> None:
        self._shard.observers[self._replica] = observer
        self.announce(status)
        observer.key_seen(self._shard.key)

    def announce(self, status: ReplicaStatus) -> None:
        shard = self._shard
        if shard.is_up and self._replica in shard.observers and shard.alive.get(self._replica) != status:
            shard.alive[self._replica] = status
            shard.tell_alive()

    async def read(self) -> ShardKey | None:
        return self._shard.key if self._shard.is_up else None

    async def swap(self, key: ShardKey) -> Answer | None:
        shard = self._shard
        if not shard.is_up:
            return None
        if key.revision != shard.key.revision:
            return Answer(False, shard.key)
        shard.key = key._replace(revision=key.revision + 1)
        for observer in list(shard.observers.values()):
            observer.key_seen(shard.key)
        return Answer(True, shard.key)

    async def close(self) -> None:
        self._shard.die(self._replica)
