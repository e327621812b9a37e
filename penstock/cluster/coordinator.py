"""What replicas ask of the service that they agree by: one key of the shard, and which replicas are alive."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import orjson

from penstock.cluster.errors import KeyInvalid
from penstock.cluster.shardkey import ReplicaId, ShardKey
from penstock.store.topics import excerpt


class ReplicaStatus(NamedTuple):
    """What a replica says of itself while it is alive. The coordinator forgets it about a second after the replica has died."""

    addresses: Mapping[str, str]
    """`HOST:PORT` by listener. The one named `replication` is where followers dial the leader."""
    version: str
    """Version of the package."""
    level: int
    """The highest level of features that the replica understands."""
    position: int
    """Up to where the replica's log is durable, about half a second ago."""
    instance: str
    """A random text that the process has made: two processes with one replica id differ by it."""

    def encoded(self) -> bytes:
        """Return the status as JSON."""
        return orjson.dumps(self._asdict())

    @classmethod
    def decoded(cls, value: bytes) -> Self:
        """Return the status that `encoded` has written. Raises KeyInvalid."""
        try:
            fields: dict[str, Any] = orjson.loads(value)
            return cls(
                {str(name): str(address) for name, address in fields["addresses"].items()},
                str(fields["version"]),
                int(fields["level"]),
                int(fields["position"]),
                str(fields["instance"]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise KeyInvalid(
                f"the coordinator has {excerpt(value, 200)} as the status of a replica, which no replica writes ({error}); "
                "check replication.cluster and the coordinator's data"
            ) from error


class Answer(NamedTuple):
    """The coordinator's answer to a swap."""

    is_swapped: bool
    """Whether this request has replaced the key. One that is repeated may be told False although an earlier one did."""
    key: ShardKey
    """The key after the request."""


class Observer(Protocol):
    """Who is told what the coordinator's keys become. It must not raise."""

    def key_seen(self, key: ShardKey) -> None:
        """Take a value of the shard's key. Values come in order, and some may be left out."""
        ...

    def alive_seen(self, alive: Mapping[ReplicaId, ReplicaStatus]) -> None:
        """Take which replicas are alive: all of them, each time that one changes."""
        ...

    def twin_seen(self, status: ReplicaStatus) -> None:
        """Take that another process with this replica's id is alive, and has been for some seconds."""
        ...


class Coordinator(Protocol):
    """A service with a linearizable key.

    No call raises when the service is away or slow, refuses, or has a value that no replica writes: all these are no answer.
    `problem` says why, for operators.
    """

    @property
    def problem(self) -> str:
        """Why the last calls had no answer; empty if the last one had one."""
        ...

    def start(self, observer: Observer, status: ReplicaStatus) -> None:
        """Begin to say that this replica is alive, and to tell the observer what becomes of the keys."""
        ...

    def announce(self, status: ReplicaStatus) -> None:
        """Say something else of this replica from now on. This is cheap: it is sent at intervals."""
        ...

    async def read(self) -> ShardKey | None:
        """Return the key as it was at some time during the call, or None if there is no answer.

        The key has the revision 0 if it does not exist.
        """
        ...

    async def swap(self, key: ShardKey) -> Answer | None:
        """Replace the key if it still has the revision `key.revision`, which is 0 for one that does not exist.

        Without an answer this returns None, and the key may be replaced all the same, also later.
        """
        ...

    async def close(self) -> None:
        """End all calls, and say no longer that this replica is alive."""
        ...
