"""The replication of a node: one replica of a shard, and what the node does when its role changes."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from penstock import __version__
from penstock.cluster.coordinator import ReplicaStatus
from penstock.cluster.errors import ReplicaInvalid
from penstock.cluster.etcd import EtcdCoordinator
from penstock.cluster.frames import RelayPayload
from penstock.cluster.member import Member
from penstock.cluster.options import ReplicationOptions
from penstock.cluster.replica import ReplicaRole
from penstock.cluster.replicafile import make_replica, read_replica
from penstock.cluster.shardkey import ReplicaId, name_of, replica_named
from penstock.node.config import Config
from penstock.node.errors import ConfigError, ControlRefused, ListenerExposed
from penstock.pop.core.handle import Handles, keep_secret, load_secret
from penstock.store.clock import Clock
from penstock.store.options import resolved
from penstock.store.space.causer import is_local
from penstock.store.store import Store

logger = structlog.get_logger("node")

HAND_OVER_S = 3.0
"""After this time a leader that ends waits no longer until another replica leads."""
POLL_S = 0.005

LEVEL = 1
"""The highest level of features that this version understands."""


def check_replication(config: Config) -> None:
    """Check what the section [replication] asks of other sections, and that strangers can't be replicas.

    Raises:
        ListenerExposed: the listener for replicas is reachable from elsewhere, and nothing authenticates them.
        ConfigError: `store.flush` is not "sync".
    """
    options = config.replication
    if not options.is_on:
        return
    if config.store.flush != "sync":
        raise ConfigError(
            f"store.flush is {config.store.flush!r}, but the replicas of a cluster acknowledge what is on their disks. "
            'Set it to "sync", or leave out replication.cluster.'
        )
    beyond = [address for address in resolved(options.listen) if not is_local(address)]
    if beyond and not options.certificate_file:
        raise ListenerExposed(
            f"The listener for replicas would give all messages to everybody who reaches it: replication.listen is "
            f"{options.listen}, which is beyond loopback. Set replication.certificate_file, key_file and ca_file."
        )


class NodeReplication:
    """One replica.

    Parameters:
        options: see `ReplicationOptions`.
        data_dir: of the node. It becomes a replica if it is empty.
        store: after `load`.
        handles: sign with the secret that all replicas share.
        clock: measures slices.
        lead: called when the node must serve clients.
        restart: called with the reason when the node must stop serving clients at once, and begin anew.
        fail: called with an error that must end the node.
        serve: returns a socket at whose other end a client is served that has connected to a follower.

    Raises:
        ReplicaInvalid: the directory is a replica of another cluster, or has data and is no replica.
        FilesInvalid: a file that the options name can't be used.
        OSError: the disk fails.
    """

    def __init__(
        self,
        options: ReplicationOptions,
        data_dir: Path,
        store: Store,
        handles: Handles,
        clock: Clock,
        *,
        lead: Callable[[], None],
        restart: Callable[[str], None],
        fail: Callable[[Exception], None],
        serve: Callable[[RelayPayload], Awaitable[socket.socket]],
    ) -> None:
        self._options = options
        self._data_dir = data_dir
        self._store = store
        self._handles = handles
        self._secret = load_secret(data_dir)
        self.lead = lead
        self._restart = restart
        self.fail = fail
        self._serve = serve
        self._is_leaving = False
        self._wanted: ReplicaId | None = None
        """To whom an operator wants this replica to hand over."""
        self._has_left = asyncio.Event()
        self.id = read_replica(data_dir, options.cluster) or self._new_replica()
        status = ReplicaStatus({}, __version__, LEVEL, 0, secrets.token_hex(8))
        self.tls = options.tls()
        """The TLS contexts for connections with other replicas that are dialled and taken; None for plain text."""
        self._coordinator = EtcdCoordinator(options.etcd(), options.cluster, self.id)
        self.member = Member(
            self.id,
            options.cluster,
            data_dir,
            store,
            self._coordinator,
            status,
            self,
            clock,
            advertise=options.advertise,
            tls=self.tls,
        )
        self.listen = options.listen
        """Where the node takes connections of other replicas, with its real port once it has started."""

    def _new_replica(self) -> int:
        if self._store.log.end:
            raise ReplicaInvalid(
                f"{self._data_dir} has data, and is no replica of cluster {self._options.cluster!r}; make the cluster from it "
                "with `penstock cluster create`, or name an empty directory, which gets everything from the leader"
            )
        return make_replica(self._data_dir, self._options.cluster)

    async def start(self) -> None:
        """Listen for followers, and follow or lead. The store must have been started with `synced`. Raises OSError."""
        self.listen = await self.member.start(self._options.listen)
        logger.info("replica.started", replica=name_of(self.id), cluster=self._options.cluster, listen=str(self.listen))

    async def stop(self) -> None:
        """Hand over if this replica leads, end all connections, and say no longer that it is alive.

        The node takes nothing more from clients.
        """
        self._is_leaving = True
        if self.member.core.role is ReplicaRole.LEADING:
            await self._hand_over()
        await self.member.stop()
        await self._coordinator.close()

    async def _hand_over(self) -> None:
        """Wait until everything is committed, then resign in favour of the follower that has most. Give up after a while."""
        store, log = self._store, self._store.log
        try:
            async with asyncio.timeout(HAND_OVER_S):
                store.commit()
                while not store.is_committed(log.end):  # noqa: ASYNC110 - the last record may be nobody's who waits for it
                    await asyncio.sleep(POLL_S)
                successor = self.member.followers.successor(self._wanted) or self.member.followers.successor()
                if successor is None:
                    logger.warning("replica.no_successor", why="no other replica that is in sync is connected")
                    return
                self.member.hand_over(successor)
                await self._has_left.wait()
                logger.info("replica.handed_over", to=name_of(successor))
        except TimeoutError:
            logger.warning("replica.not_handed_over", after_s=HAND_OVER_S, effect="another replica takes over by itself")

    def prepare_move(self, to: str) -> str:
        """Choose to whom this replica hands over when the node stops, and return its id.

        Args:
            to: id of the replica; empty for the one that has most of the log.

        Raises:
            ControlRefused: this replica does not lead, or that one can't take over.
        """
        leader = self.member.core.leader
        if not self.member.is_serving:
            who = "nobody leads" if leader in (None, self.id) else f"replica {name_of(leader)} leads"
            raise ControlRefused(f"this replica does not lead: {who}; run the command where the leader runs")
        try:
            wanted = replica_named(to) if to else None
        except ValueError as error:
            raise ControlRefused(f"{error}; `penstock cluster status` shows the ids") from error
        found = self.member.followers.successor(wanted)
        if found is None:
            raise ControlRefused(f"{to or 'no other replica'} is in sync and connected; see `penstock cluster status`")
        self._wanted = found
        return name_of(found)

    def synced(self) -> None:
        """Take that more of the log is durable."""
        self.member.synced()

    # --- roles ------------------------------------------------------------------------------------------------------

    def restart(self, why: str) -> None:
        """Let the node begin anew, unless it ends: then another replica leads now."""
        self._has_left.set()
        if not self._is_leaving:
            self._restart(why)

    async def serve(self, client: RelayPayload) -> socket.socket:
        """Return a socket at whose other end a client is served. Raises RelayRefused."""
        return await self._serve(client)

    @property
    def secret(self) -> bytes:
        """By which handles are signed."""
        return self._secret

    def secret_changed(self, secret: bytes) -> None:
        """Take the secret of the leader, and keep it: clients have handles that it has signed."""
        if secret == self._secret:
            return
        try:
            keep_secret(self._data_dir, secret)
        except (OSError, ValueError) as error:
            self.fail(error)
            return
        self._secret = secret
        self._handles.use(secret)

    # --- what operators see -----------------------------------------------------------------------------------------

    @property
    def cluster(self) -> str:
        """Name of the cluster."""
        return self._options.cluster

    @property
    def is_coordinated(self) -> bool:
        """Whether the coordinator answers."""
        return not self._coordinator.problem

    @property
    def applied(self) -> int:
        """Everything before this position of the log is in the index."""
        return self._store.applied

    def state(self) -> dict[str, Any]:
        """Return what `/api/v1/state` shows of the replica."""
        core = self.member.core
        key = core.key
        return {
            "cluster": self._options.cluster,
            "replica": name_of(self.id),
            "role": core.role.value,
            "epoch": core.epoch,
            "leader": name_of(key.leader) if key is not None and key.leader is not None else None,
            "members": sorted(map(name_of, key.members)) if key is not None else [],
            "required": key.required if key is not None else None,
            "committed": core.committed,
            "applied": self._store.applied,
            "followers": self.member.followers.state(),
            "relayed": self.member.followers.relayed,
            "coordinator": self._coordinator.problem or "ok",
        }
