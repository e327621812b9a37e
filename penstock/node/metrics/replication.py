"""Metrics of replication."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.cluster.replica import ReplicaRole
from penstock.node.metrics.families import gauge, labelled_gauge
from penstock.node.replication import NodeReplication


class ReplicationCollector(Collector):
    """Role, epoch and set of a replica, and how far the others lag behind it.

    Parameters:
        replication: of the node.
        relayed: returns how many connections of clients the node relays to the leader.
    """

    def __init__(self, replication: NodeReplication, relayed: Callable[[], int]) -> None:
        self._replication = replication
        self._relayed = relayed

    def collect(self) -> Iterator[Metric]:
        member, core = self._replication.member, self._replication.member.core
        key, followers = core.key, member.followers.state()
        yield labelled_gauge(
            "penstock_replication_role",
            "1 for the replica's role, 0 for others.",
            ["cluster", "role"],
            {(self._replication.cluster, role.value): int(core.role is role) for role in ReplicaRole},
        )
        yield gauge("penstock_replication_epoch", "Epoch that the replica leads or follows.", core.epoch)
        yield gauge(
            "penstock_replication_in_sync", "Replicas in sync, as far as this one knows.", len(key.members) if key else 0
        )
        yield gauge(
            "penstock_replication_required",
            "Replicas that must have a message before its acknowledgement.",
            key.required if key else 0,
        )
        yield gauge("penstock_replication_committed_position", "Everything before it is committed.", core.committed)
        yield gauge("penstock_replication_applied_position", "Everything before it is in the index.", self._replication.applied)
        yield labelled_gauge(
            "penstock_replication_follower_lag_bytes",
            "Bytes that a follower has not acknowledged.",
            ["replica"],
            {(each["replica"],): each["lag_bytes"] for each in followers},
        )
        yield labelled_gauge(
            "penstock_replication_follower_lag_seconds",
            "Time since a follower had acknowledged everything.",
            ["replica"],
            {(each["replica"],): each["lag_ms"] / 1000 for each in followers},
        )
        yield gauge(
            "penstock_replication_coordinator_reachable",
            "1 while etcd answers, else 0. Without it nobody takes over.",
            int(self._replication.is_coordinated),
        )
        yield labelled_gauge(
            "penstock_replication_relayed_connections",
            "Clients that a follower relays (to_leader), or a leader serves for followers.",
            ["direction"],
            {("to_leader",): self._relayed(), ("from_followers",): member.followers.relayed},
        )
