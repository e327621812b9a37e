"""`penstock cluster`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from urllib.parse import quote

import orjson

from penstock.cluster.coordinator import ReplicaStatus
from penstock.cluster.errors import CoordinatorSilent, ReplicaInvalid
from penstock.cluster.etcd import EtcdCoordinator
from penstock.cluster.options import ReplicationOptions
from penstock.cluster.replicafile import make_replica, read_replica
from penstock.cluster.shardkey import ReplicaId, ShardKey, name_of, replica_named
from penstock.node.config import Config
from penstock.node.controladdress import CLUSTER_MOVE
from penstock.node.controlclient import Request
from penstock.node.errors import ConfigError
from penstock.node.lock import DataDirLock

REQUIRED_MAX = 9
MOVE_S = 30.0
"""How long `move` waits for the other replica to lead."""


def create_cluster(config: Config, required: int) -> None:
    """Make a data directory the first replica of a cluster, and print its id.

    Raises:
        ConfigError: the configuration has no section [replication], or `required` is not from 1 to `REQUIRED_MAX`.
        DataDirLocked: its node runs.
        ReplicaInvalid: the cluster exists, or the directory is a replica of another one.
        CoordinatorSilent: etcd has no answer.
    """
    options = _replicated(config)
    if not 1 <= required <= REQUIRED_MAX:
        raise ConfigError(f"--required is {required}, but it must be from 1 to {REQUIRED_MAX}.")
    with DataDirLock(config.data_dir):
        replica = read_replica(config.data_dir, options.cluster) or make_replica(config.data_dir, options.cluster)
        wanted = ShardKey(0, 0, None, frozenset((replica,)), required)
        key = asyncio.run(_create(config, replica, wanted))
    if key._replace(revision=0) != wanted:
        raise ReplicaInvalid(
            f"the cluster {options.cluster!r} exists already, with replicas {', '.join(map(name_of, sorted(key.members)))}; "
            "to join it, start a node with an empty data directory"
        )
    print(f"replica {name_of(replica)} is the first of cluster {options.cluster}")


async def _create(config: Config, replica: ReplicaId, wanted: ShardKey) -> ShardKey:
    coordinator = EtcdCoordinator(config.replication.etcd(), config.replication.cluster, replica)
    try:
        answer = await coordinator.swap(wanted)
        if answer is None:
            raise CoordinatorSilent(coordinator.problem)
        return answer.key
    finally:
        await coordinator.close()


def show_cluster(config: Config, *, as_json: bool) -> None:
    """Print who leads, who is in sync and who is alive. Raises ConfigError, CoordinatorSilent."""
    options = _replicated(config)
    key, alive = asyncio.run(_look(config))
    if as_json:
        found = {
            "cluster": options.cluster,
            "epoch": key.epoch,
            "leader": name_of(key.leader) if key.leader is not None else None,
            "members": sorted(map(name_of, key.members)),
            "required": key.required,
            "level": key.level,
            "alive": {name_of(replica): status._asdict() for replica, status in alive.items()},
        }
        print(orjson.dumps(found).decode())
        return
    if not key.revision:
        print(f"The cluster {options.cluster} does not exist. `penstock cluster create` makes it from a node's data.")
        return
    print(f"cluster {options.cluster}, epoch {key.epoch}, {key.required} replicas must have each message")
    print(f"{'replica':18}{'role':10}{'in sync':9}{'alive':7}{'durable':>16}  address")
    for replica in sorted(key.members | set(alive)):
        status = alive.get(replica)
        role = "leader" if replica == key.leader else "follower"
        in_sync, is_alive = ("yes" if yes else "no" for yes in (replica in key.members, status is not None))
        position = f"{status.position:,}" if status is not None else "-"
        address = status.addresses.get("replication", "-") if status is not None else "-"
        print(f"{name_of(replica):18}{role:10}{in_sync:9}{is_alive:7}{position:>16}  {address}")


def promote_replica(config: Config, name: str, *, lossy: bool) -> None:
    """Make a replica the only one in sync, so that it leads, though it may lack acknowledged messages. Print what may be lost.

    This is for a set of which no member can come back. A member that is alive leads by itself, and has everything.

    Args:
        config: of any node of the cluster.
        name: id of the replica, as `penstock cluster status` shows it.
        lossy: says that acknowledged messages may be lost. Without it nothing is changed.

    Raises:
        ConfigError: the configuration has no section [replication].
        CoordinatorSilent: etcd has no answer.
        ReplicaInvalid: the replica does not exist, is not alive, or is not needed, or `lossy` is not set.
    """
    options = _replicated(config)
    try:
        replica = replica_named(name)
    except ValueError as error:
        raise ReplicaInvalid(f"{error}; `penstock cluster status` shows the ids") from error
    key, status = asyncio.run(_promote(config, replica, lossy=lossy))
    print(f"{name} is the only replica of cluster {options.cluster} in sync, and leads from now on.")
    if key.required > 1:
        print(f"It serves when {key.required} replicas are in sync: start others, with empty directories.")
    print(f"It has the log up to position {status.position:,}. What replicas had beyond that is lost.")


def move_leader(config: Config, name: str) -> None:
    """Let the node on this machine, which leads, hand over to another replica, and wait until that one leads.

    Args:
        config: of the node that leads.
        name: id of the replica; empty for the one that has most of the log.

    Raises:
        ConfigError: the configuration has no section [replication].
        ControlRefused: the node does not run or does not lead, or that replica can't take over.
        CoordinatorSilent: etcd has no answer.
        ReplicaInvalid: another one leads, or none, after `MOVE_S`.
    """
    options = _replicated(config)
    with Request(config.data_dir, "POST", f"{CLUSTER_MOVE}?to={quote(name)}") as request:
        successor: str = request.line()["to"]
    key = asyncio.run(_led_by(config, replica_named(successor)))
    if key.leader is None or name_of(key.leader) != successor:
        raise ReplicaInvalid(f"{successor} does not lead after {MOVE_S:.0f} s; `penstock cluster status` says who does")
    print(f"{successor} leads cluster {options.cluster} in epoch {key.epoch}. This node follows.")


async def _led_by(config: Config, replica: ReplicaId) -> ShardKey:
    """Return the key once a replica leads, or what it is after `MOVE_S`."""
    coordinator = EtcdCoordinator(config.replication.etcd(), config.replication.cluster, 0)
    ends_s = time.monotonic() + MOVE_S
    try:
        while True:
            found = await coordinator.look()
            if found is None:
                raise CoordinatorSilent(coordinator.problem)
            if found[0].leader == replica or time.monotonic() > ends_s:
                return found[0]
            await asyncio.sleep(0.05)
    finally:
        await coordinator.close()


async def _promote(config: Config, replica: ReplicaId, *, lossy: bool) -> tuple[ShardKey, ReplicaStatus]:
    coordinator = EtcdCoordinator(config.replication.etcd(), config.replication.cluster, 0)
    try:
        found = await coordinator.look()
        if found is None:
            raise CoordinatorSilent(coordinator.problem)
        key, alive = found
        name = name_of(replica)
        if not key.revision:
            raise ReplicaInvalid(f"the cluster {config.replication.cluster!r} does not exist")
        if replica not in alive:
            raise ReplicaInvalid(f"no replica {name} is alive; start its node first, and look at `penstock cluster status`")
        in_sync = sorted(name_of(each) for each in key.members if each in alive)
        if in_sync:
            raise ReplicaInvalid(f"{', '.join(in_sync)} is alive and has everything: it leads by itself, and nothing is lost")
        members = ", ".join(map(name_of, sorted(key.members)))
        if not lossy:
            raise ReplicaInvalid(
                f"{name} may lack messages that were acknowledged: only {members} have all of them. Start one of these if you "
                f"can. Otherwise stop them for ever, and say --lossy; {name} has the log up to {alive[replica].position:,}"
            )
        wanted = key._replace(epoch=key.epoch + 1, leader=None, members=frozenset((replica,)))
        answer = await coordinator.swap(wanted)
        if answer is None:
            raise CoordinatorSilent(coordinator.problem)
        if not answer.is_swapped:
            raise ReplicaInvalid(
                "the cluster has changed meanwhile; look at `penstock cluster status`, and try again if need be"
            )
        return answer.key, alive[replica]
    finally:
        await coordinator.close()


async def _look(config: Config) -> tuple[ShardKey, Mapping[ReplicaId, ReplicaStatus]]:
    coordinator = EtcdCoordinator(config.replication.etcd(), config.replication.cluster, 0)
    try:
        found = await coordinator.look()
        if found is None:
            raise CoordinatorSilent(coordinator.problem)
        return found
    finally:
        await coordinator.close()


def _replicated(config: Config) -> ReplicationOptions:
    if not config.replication.is_on:
        raise ConfigError("The configuration has no replication.cluster, so the node is no replica.")
    return config.replication
