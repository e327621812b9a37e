"""A node: composes all parts, recovers their state, and starts and stops them in order."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.registry import Collector

from penstock import __version__
from penstock.access.control import AccessControl
from penstock.access.subject import Subject
from penstock.cluster.bootstrap import install_snapshot
from penstock.cluster.errors import RelayRefused
from penstock.cluster.frames import POP_LISTENER, RelayPayload
from penstock.gateway.gateway import Gateway, ServedParts
from penstock.gateway.options import PLAIN_NAME
from penstock.gateway.transport.descriptors import SocketShare
from penstock.node import tablesoptions
from penstock.node.admin import Admin, NodeViews
from penstock.node.api.access import AccessOperations
from penstock.node.api.accessfiles import AccessFileOperations
from penstock.node.api.backup import BackupOperations
from penstock.node.api.changes import DurableChanges
from penstock.node.api.clients import ClientOperations
from penstock.node.api.clienttraffic import ClientTraffic
from penstock.node.api.deadletters import DeadLetterOperations
from penstock.node.api.deliverystates import DeliveryStates
from penstock.node.api.dispatch import AdminApi
from penstock.node.api.drain import DrainOperations
from penstock.node.api.groups import GroupOperations
from penstock.node.api.loglevel import LogLevelOperations
from penstock.node.api.messagereader import MessageReader
from penstock.node.api.messages import MessageOperations
from penstock.node.api.nodeoptions import NodeOptionOperations
from penstock.node.api.operation import Operation
from penstock.node.api.publishing import PublishOperations
from penstock.node.api.retained import RetainedOperations
from penstock.node.api.schedules import ScheduleOperations
from penstock.node.api.sessions import SessionOperations
from penstock.node.api.storage import StorageOperations
from penstock.node.api.streaming import STREAMS_MAX, Streams
from penstock.node.api.streams import StreamOperations
from penstock.node.api.subscriptions import SubscriptionOperations
from penstock.node.api.timers import DelayedOperations
from penstock.node.api.topics import TopicOperations
from penstock.node.api.transactions import TransactionOperations
from penstock.node.backups import Backups
from penstock.node.clientcontrol import ClientControl
from penstock.node.clockcontrol import ClockControl
from penstock.node.clustercontrol import ClusterControl
from penstock.node.config import Config
from penstock.node.control import OWNER, Control
from penstock.node.datafiles import refuse_foreign
from penstock.node.descriptors import address_of_listener, inherited_listener, log_shares, shares_of
from penstock.node.draining import Drain
from penstock.node.exposure import check_exposure, pop_gate
from penstock.node.holding import Holding
from penstock.node.keysets import KeySetFetcher
from penstock.node.lock import DataDirLock
from penstock.node.looplag import LoopLag
from penstock.node.metrics.access import AccessCollector
from penstock.node.metrics.backup import BackupCollector
from penstock.node.metrics.certificates import CertificateCollector
from penstock.node.metrics.exposition import registry_of
from penstock.node.metrics.grouptotals import GroupTotaller
from penstock.node.metrics.mqtt import MqttConnectionCollector, MqttMessageCollector, MqttProtectionCollector
from penstock.node.metrics.pop import PopCollector
from penstock.node.metrics.program import DescriptorCollector, ProgramCollector
from penstock.node.metrics.quotas import QuotaCollector
from penstock.node.metrics.replication import ReplicationCollector
from penstock.node.metrics.store import DelayedCollector, ScheduleCollector, StoreCollector
from penstock.node.metrics.tables import TablesCollector
from penstock.node.metrics.tracing import TracingCollector
from penstock.node.parts import NodeParts
from penstock.node.privacy import files_of, keep_private, warn_of_open_files
from penstock.node.relaying import Relaying
from penstock.node.replication import NodeReplication, check_replication
from penstock.node.state import state_of
from penstock.node.tablewriting import TableWriting
from penstock.node.timers import timers_of
from penstock.node.topictraffic import TrafficSample
from penstock.pop.grpc.groupservicer import GroupServicer
from penstock.pop.grpc.scheduleservicer import ScheduleServicer
from penstock.pop.grpc.servicer import PopServicer
from penstock.pop.grpc.timerservicer import TimerServicer
from penstock.pop.server import PopServer, Servicers, rocketmq_service
from penstock.store.clock import SteerableClock, SystemClock
from penstock.store.descriptors import descriptor_limit
from penstock.store.errors import DiskFull, IndexDamaged
from penstock.store.files import FULL, SYSTEM_FILES, make_directory
from penstock.store.options import OFF, HostPort
from penstock.store.recovery.recovery import Recovery
from penstock.store.space.ballast import release_ballast
from penstock.store.watchedfiles import WatchedFiles
from penstock.timer.listing import TimerListing
from penstock.tracing.exporter import SpanExporter
from penstock.tracing.traces import Traces

logger = structlog.get_logger("node")

EXIT_STORE_FAILED = 70
"""Exit status when the log or the index could not be written or synced. A supervisor must not take it for an orderly end."""

EXIT_INDEX_DAMAGED = 71
"""Exit status when the index is found damaged. Nothing is lost: the next start rebuilds the index."""


EXIT_RESTART = 75
"""Exit status of a replica that must begin anew, where nobody restarts it in place. A supervisor must start it again."""

EXIT_REPLICA_FAILED = 72
"""Exit status of a replica whose log and the leader's disagree, or that can't serve clients. Somebody must look at it."""


class Node:
    """One node on one data directory.

    Parameters:
        config: all options.
        clock: source of time; the system's clock if it is None.

    Raises:
        DataDirLocked: another process has the data directory.
        LogCorrupt: a record before the tail of the log is damaged.
        DescriptorsTooFew: the process may have fewer file descriptors than a node needs.
        ListenerExposed: a listener beyond loopback would serve callers without authentication.
        AccessInvalid: a file that `[access]` names can't be read, or its content is invalid.
    """

    def __init__(self, config: Config, clock: SteerableClock | None = None) -> None:
        inherited = inherited_listener()
        if inherited is not None:
            config = replace(config, pop=replace(config.pop, listen=address_of_listener(inherited)))
        self.config = config
        check_exposure(config)
        check_replication(config)
        writes_tables = tablesoptions.are_on(config.tables)
        clock = clock or SystemClock()
        self.descriptors = shares_of(descriptor_limit(), config.pop.connections_max)
        self._traces = Traces(config.tracing, clock.monotonic_s) if config.tracing.endpoint else None
        self._exporter = SpanExporter(self._traces, __version__) if self._traces is not None else None
        refuse_foreign(config.data_dir, files_of(config))
        make_directory(SYSTEM_FILES, config.data_dir)
        keep_private(config.data_dir)
        warn_of_open_files(config)
        self._lock = DataDirLock(config.data_dir)
        try:
            if config.replication.is_on:
                self._install_snapshot()
            self.access = AccessControl(config.access, config.data_dir, lambda: self.store.now_ms())
        except BaseException:
            self._lock.release()
            raise
        try:
            recovery = self._recover_in_room(clock) or self._recover_in_room(clock)
            if recovery is None:
                raise IndexDamaged(f"The index of {config.data_dir} is damaged again after it was rebuilt. Check the disk.")
            self.recovery: Recovery = recovery
            self._replication = self._make_replication(clock) if config.replication.is_on else None
        except BaseException:
            self.access.close()
            self._lock.release()
            raise
        self.gateway = Gateway(
            self.store,
            ServedParts(self.retained, self.delayed, self.sessions, self.pop, self._handles),
            config.mqtt,
            self.access,
            delay_ms_max=config.timer.delay_ms_max,
            descriptors_below=self.descriptors.mqtt,
            traces=self._traces,
        )
        self.draining = Drain(self.gateway, self.pop, lambda: self._serves, self._begin_drain)
        sender = self._parts.sender
        servicer = PopServicer(self.pop, self.store, self._handles, self.delayed, self.transactions, sender, config.pop)
        self.rocketmq = rocketmq_service(
            self.pop, self.store, self._handles, sender, self.delayed, self.transactions, config.pop
        )
        self._listing = listing = TimerListing(self.store, self.delayed.buckets, self.timer_keys)
        self._pop_server = PopServer(
            Servicers(
                servicer,
                GroupServicer(self.pop, self.store),
                ScheduleServicer(self.schedules, self.store),
                TimerServicer(self.delayed, self.timer_keys, listing, sender, self._handles, self.store),
                self.rocketmq,
            ),
            config.pop,
            self.access,
            inherited=inherited,
            connections_max=self.descriptors.pop,
            relay_dir=config.data_dir if config.replication.is_on else None,
        )
        self._relaying = self._make_relaying()
        self.tables = TableWriting(self.store, config.data_dir, config.tables, clock) if writes_tables else None
        self._loop_lag = LoopLag()
        self._totaller = GroupTotaller(self.pop, self.store)
        self._holding = Holding(self.store, config.data_dir)
        backup_dir = Path(config.admin.backup_dir).absolute() if config.admin.backup_dir else None
        self.backups = Backups(config.data_dir, backup_dir, self._holding, self.store.now_ms)
        self.registry = self._make_registry()
        """What `/metrics` shows."""
        self._traffic = TrafficSample(self.store)
        self._client_traffic = ClientTraffic(self.gateway.clients, self.gateway.clock.monotonic_s)
        streams = Streams(min(STREAMS_MAX, self.descriptors.admin // 2))
        self.api = AdminApi(self._operations(), self.access.audit, __version__, streams)
        self._admin = Admin(
            config.admin,
            self.access,
            NodeViews(
                self.registry,
                ready=lambda: self._is_ready,
                state=self.state,
                timers=partial(timers_of, self.delayed, listing),
                level=self._level,
                prepare=self._totaller.prepare,
            ),
            self.api,
            self.descriptors.admin,
        )
        self._key_sets = KeySetFetcher(self.access, config.access.jwt.url, config.access.jwt.jwks_refresh_s)
        self._control = Control(
            config.data_dir,
            {
                **self._holding.routes(),
                **ClockControl(self.store).routes(),
                **ClientControl(self.rocketmq, self.store).routes(),
                **ClusterControl(self._replication, lambda: self.on_move()).routes(),
            },
            self.api,
        )
        self._is_ready = False
        self._serves = False
        """Whether the listeners for clients were opened. Those of a replica are opened when it leads."""
        self._opening: asyncio.Task[None] | None = None
        self.on_move: Callable[[], None] = lambda: None
        """Called when the node must stop in order, which hands over to another replica, and begin anew."""
        self.on_drain: Callable[[float], None] = lambda grace_s: None
        """Called when an operator wants the node to drain within some seconds, and to stop then."""
        self.on_ready: Callable[[], None] = lambda: None
        """Called when the node serves clients: after `start`, or when a replica leads."""
        self.on_restart: Callable[[], None] = lambda: os._exit(EXIT_RESTART)
        """Called when a replica must stop serving clients at once, and begin anew from its data directory. Nothing may be
        written or sent any more."""
        self.mqtt: HostPort = config.mqtt.listen if isinstance(config.mqtt.listen, HostPort) else HostPort("", 0)
        self.grpc: HostPort = config.pop.listen
        self.admin: HostPort = config.admin.listen

    def _operations(self) -> Iterator[Operation]:
        """Yield the operations of the admin API."""
        gateway, store = self.gateway, self.store
        yield from DrainOperations(self.draining, lambda grace_s: self.on_drain(grace_s)).operations()
        yield from BackupOperations(self.backups).operations()
        yield from AccessOperations(
            self.access, self.reload, gateway.rechecked, gateway.disconnect, self._pop_server.disconnect
        ).operations()
        yield from AccessFileOperations(self.access).operations()
        yield from ClientOperations(gateway, self.access, self._client_traffic).operations()
        yield from SubscriptionOperations(gateway.clients, self.sessions, store.queues).operations()
        yield from SessionOperations(gateway.clients, gateway.lifecycle, store.queues, DurableChanges(store)).operations()
        yield from TopicOperations(self._traffic, store.queues).operations()
        yield from StorageOperations(store, self.tables).operations()
        yield from NodeOptionOperations(self.config).operations()
        yield from LogLevelOperations(self.config).operations()
        yield from self._message_operations()

    def _message_operations(self) -> Iterator[Operation]:
        """Yield the operations on messages, and on the groups that consume them."""
        pop, store = self.pop, self.store
        reader, changes = MessageReader(store), DurableChanges(store)
        yield from GroupOperations(pop, self.gateway.shared, store, changes).operations()
        yield from DeadLetterOperations(pop, reader, changes).operations()
        yield from MessageOperations(reader, DeliveryStates(pop, store)).operations()
        yield from TransactionOperations(self.transactions, reader, store, changes).operations()
        yield from ScheduleOperations(self.schedules, changes).operations()
        sender, bytes_max = self._parts.sender, self.config.pop.message_bytes_max
        yield from DelayedOperations(self.delayed, self._listing, sender, reader, store, changes).operations()
        yield from PublishOperations(sender, self.retained, store, changes, bytes_max).operations()
        yield from RetainedOperations(self.retained, store, reader, changes).operations()
        yield from StreamOperations(store, reader, self.registry, self._totaller.prepare).operations()

    def _install_snapshot(self) -> None:
        position = install_snapshot(self.config.data_dir)
        if position is not None:
            logger.warning("replica.begins_anew", position=position, why="its log ended before the leader's began")

    def _recover_in_room(self, clock: SteerableClock) -> Recovery | None:
        """Do what `_try_to_recover` does. Where the disk has no room for it, release the ballast and try again."""
        try:
            return self._try_to_recover(clock)
        except (OSError, DiskFull) as error:
            if isinstance(error, OSError) and error.errno not in FULL:
                raise
            logger.warning("recovery.no_room", error=str(error))
            freed = release_ballast(self.config.data_dir)
            if not freed:
                raise
        return self._try_to_recover(clock)

    def _try_to_recover(self, clock: SteerableClock) -> Recovery | None:
        """Recover the store and its parts. Return None if the index is found damaged: the next try rebuilds the index.

        The error must be released before the next try, because the frames that it refers to keep RocksDB open.
        """
        try:
            return self._recover(clock)
        except IndexDamaged as error:
            logger.warning("index.damaged", error=str(error))
            return None

    def _recover(self, clock: SteerableClock) -> Recovery:
        self._parts = parts = NodeParts(self.config, clock, traces=self._traces)
        self.store, self.delayed, self.retained = parts.store, parts.delayed, parts.retained
        self.schedules, self.timer_keys = parts.schedules, parts.timer_keys
        self.pop, self.transactions, self.sessions = parts.pop, parts.transactions, parts.sessions
        self.sent_ids = parts.sent_ids
        self._handles = parts.handles
        if self.config.replication.is_on:
            self.store.load()  # What is not committed may be cut off, so nothing more is applied.
            return Recovery(0, 0, False, 0, 0.0)
        return self.store.recover()

    def _make_replication(self, clock: SteerableClock) -> NodeReplication:
        try:
            return NodeReplication(
                self.config.replication,
                self.config.data_dir,
                self.store,
                self._handles,
                clock,
                lead=self._lead,
                restart=self._must_restart,
                fail=_replica_failed,
                serve=self._serve,
            )
        except BaseException:
            self.store.abandon()
            raise

    async def start(self) -> None:
        """Open the listeners. Afterwards `mqtt`, `grpc` and `admin` hold the addresses with their real ports.

        A replica opens those for clients when it leads.

        Raises:
            OSError, AdminUnavailable: an address is in use, or isn't one of this machine. The node is stopped again.
        """
        loop = asyncio.get_running_loop()
        log_shares(self.descriptors, self.config.mqtt.connections_max)
        try:
            if self._replication is None:
                _log_recovery(self.recovery)
                self._parts.start(loop, self._store_failed)
                await self._open()
            else:
                self.store.start(loop, self._store_failed, self._replication.synced)
            self.admin = HostPort(self.config.admin.listen.host, await self._admin.start())
            await self._control.start()
            self._key_sets.start()
            if self.tables is not None:
                self.tables.start()
            if self._exporter is not None:
                self._exporter.start()
            if self._replication is not None:
                await self._relay()
                await self._replication.start()
        except BaseException:
            await self.stop()
            raise
        self._loop_lag.start(loop)
        if self._replication is None:
            self._ready()

    async def _open(self) -> None:
        """Open the listeners for clients. Raises OSError."""
        self._serves = True
        port = await self.gateway.start()
        if isinstance(self.config.mqtt.listen, HostPort):
            self.mqtt = HostPort(self.config.mqtt.listen.host, port)
        self.grpc = HostPort(self.config.pop.listen.host, await self._pop_server.start())

    def _ready(self) -> None:
        self._is_ready = True
        data = str(self.config.data_dir)
        logger.info("node.ready", **self._addresses(), pop=str(self.grpc), admin=str(self.admin), data=data)
        self.on_ready()

    # --- the roles of a replica -------------------------------------------------------------------------------------

    def _lead(self) -> None:
        loop = asyncio.get_running_loop()
        self._parts.fire(loop)
        self._opening = loop.create_task(self._open_as_leader())

    async def _open_as_leader(self) -> None:
        try:
            if self._relaying is not None:
                await self._relaying.stop()
            await self._open()
        except OSError as error:
            _replica_failed(error)  # Another replica leads then, and clients reach that.
        self._ready()

    def _make_relaying(self) -> Relaying | None:
        config, gateway = self.config, self.gateway
        if self._replication is None:
            return None
        share = SocketShare(self.descriptors.mqtt, lambda: False)
        return Relaying(
            config.replication.cluster,
            self._replication.member,
            config.mqtt,
            config.pop,
            self._replication.tls and self._replication.tls[0],
            gateway.sources,
            gateway.logbook,
            share,
            gateway.now_ms,
        )

    async def _relay(self) -> None:
        """Open the listeners for clients as a follower. Raises OSError."""
        if self._relaying is not None:
            await self._relaying.start()
            if self.config.mqtt.listen != OFF:
                self.mqtt = self._relaying.address(PLAIN_NAME)
            self.grpc = self._relaying.address(POP_LISTENER)

    async def _serve(self, client: RelayPayload) -> socket.socket:
        if not self._is_ready:
            raise RelayRefused("this replica does not serve clients yet")
        if client.listener == POP_LISTENER:
            gate = pop_gate(self.config)
            if not gate.admits(client.host):
                raise RelayRefused(f"nothing authenticates the callers of {gate.name} here; set {gate.ways}")
            try:
                return await self._pop_server.connect(client.host, client.port, begins_tls=client.is_tls)
            except OSError as error:
                raise RelayRefused(f"{client.listener} can't be reached: {error}") from error
        try:
            listener = self.gateway.listeners[client.listener]
        except KeyError:
            raise RelayRefused(
                f"this replica has no MQTT listener {client.listener!r}; give all nodes of the cluster the same listeners"
            ) from None
        ours, theirs = socket.socketpair()
        listener.take(theirs, client.host, client.port)
        return ours

    def _must_restart(self, why: str) -> None:
        self._is_ready = False
        logger.warning("replica.restarts", why=why)
        self.on_restart()

    def _begin_drain(self) -> None:
        self._is_ready = False
        self.backups.close("the node drains")

    async def stop(self) -> None:
        """Close the listeners and all connections, finish the current group commit, flush the index, and close the store.

        A replica that leads hands over to another one first.
        """
        self._is_ready = False
        self.draining.stop()
        self._loop_lag.stop()
        self._key_sets.stop()
        if self._opening is not None:
            await asyncio.wait((self._opening,))
        self.api.streams.close()
        await self.backups.stop()
        await self._holding.stop()
        await self._control.stop()
        if self.tables is not None:
            await self.tables.stop()
        if self._serves:
            await self.gateway.stop()
            await self._pop_server.stop()
            self._parts.stop()
        if self._relaying is not None:
            await self._relaying.stop()
        if self._replication is not None:
            await self._replication.stop()
        await self._admin.stop()
        self._traffic.stop()
        self._client_traffic.stop()
        await self.store.close()
        self._lock.release()
        self.access.close()
        if self._exporter is not None:
            await self._exporter.stop()  # last: nothing waits for the collector
        logger.info("node.stopped", log_end=self.store.log.end)

    @property
    def is_ready(self) -> bool:
        """Whether the node serves clients. A follower relays them, and does not serve them."""
        return self._is_ready

    def ready_line(self) -> str:
        """Return the line that `penstock serve` prints when all listeners are open.

        It names the listeners of `[[mqtt.listeners]]` as `mqtt.NAME=`. `data=` comes last, because a path may hold spaces.
        """
        mqtt, *more = (f"{name}={address} " for name, address in self._addresses().items())
        return f"ready {mqtt}pop={self.grpc} admin={self.admin} {''.join(more)}data={self.config.data_dir}"

    def _addresses(self) -> dict[str, str]:
        """Return the addresses of the MQTT listeners by name. The first is that of `mqtt.listen`, or `off`."""
        more = {f"mqtt.{each.name}": str(each) for each in self.gateway.listeners if each.name != PLAIN_NAME}
        return {"mqtt": OFF if self.config.mqtt.listen == OFF else str(self.mqtt), **more}

    def reload(self, by: Subject = OWNER, over: str = "") -> None:
        """Read certificates, rules, users and keys again, and apply them to what clients are doing.

        Raises:
            AccessInvalid: a file of access control is not valid. The old rules, users and keys stay in force.
        """
        warn_of_open_files(self.config)
        self.gateway.listeners.reload()
        self._admin.reload()
        self._pop_server.reload()
        self.access.reload(by, over)

    def state(self) -> dict[str, Any]:
        """Return what `/api/v1/state` shows of this node."""
        listen = {"pop": str(self.grpc), "admin": str(self.admin)}
        for listener in self.gateway.listeners if self._serves or self._relaying is None else self._relaying.mqtt_listeners:
            listen["mqtt" if listener.name == PLAIN_NAME else f"mqtt.{listener.name}"] = str(listener)
        parts = state_of(self.store, self.recovery, self.gateway, self.delayed, self.transactions, self.pop)
        replication = {"replication": self._replication.state()} if self._replication is not None else {}
        return {"ready": self._is_ready, "listen": listen, **replication, **parts}

    def _make_registry(self) -> CollectorRegistry:
        rocketmq = self.rocketmq
        tables = [TablesCollector(self.tables)] if self.tables is not None else []
        tracing = [TracingCollector(self._exporter)] if self._exporter is not None else []
        return registry_of(
            ProgramCollector(self._loop_lag.lags),
            StoreCollector(self.store),
            MqttConnectionCollector(self.gateway),
            MqttMessageCollector(self.gateway, self.retained),
            MqttProtectionCollector(self.gateway),
            DelayedCollector(self.delayed),
            ScheduleCollector(self.schedules),
            AccessCollector(self.access),
            QuotaCollector(self.store.ledger),
            BackupCollector(self._holding),
            CertificateCollector(self._certificates),
            DescriptorCollector(self.descriptors, lambda: self._admin.closed_early),
            PopCollector(
                self.pop,
                self.transactions,
                self._pop_server.requests,
                self._pop_server.responses,
                self._pop_server.refusals,
                self.sent_ids,
                self._parts.sender,
                (lambda: len(rocketmq.clients)) if rocketmq is not None else None,
                self._totaller,
            ),
            *tables,
            *tracing,
            *self._replication_collectors(),
        )

    def _certificates(self) -> Iterator[WatchedFiles[Any]]:
        """Yield the certificates of the listeners that have started."""
        yield from self.gateway.listeners.certificates()
        for certificates in (self._pop_server.certificates, self._admin.certificates):
            if certificates is not None:
                yield certificates

    def _replication_collectors(self) -> list[Collector]:
        relaying = self._relaying
        if self._replication is None:
            return []
        return [ReplicationCollector(self._replication, lambda: relaying.relayed if relaying is not None else 0)]

    def _level(self) -> str:
        return self.store.space.level.name.lower()

    def _store_failed(self, error: OSError) -> None:
        """End the process at once. Data since the last sync may be lost, so nothing more may be acknowledged."""
        logger.critical("store.failed", error=str(error), durable=self.store.durable_position)
        os._exit(EXIT_INDEX_DAMAGED if self.store.is_index_damaged else EXIT_STORE_FAILED)


def _replica_failed(error: Exception) -> None:
    """End the process at once, and leave its data as they are."""
    logger.critical("replica.failed", error=str(error))
    os._exit(EXIT_REPLICA_FAILED)


def _log_recovery(recovery: Recovery) -> None:
    log = logger.warning if recovery.torn_bytes or recovery.rebuilt else logger.info
    log(
        "store.recovered",
        replayed=recovery.replayed,
        torn_bytes=recovery.torn_bytes,
        index_rebuilt=recovery.rebuilt,
        skipped_bytes=recovery.skipped_bytes,
        seconds=round(recovery.seconds, 3),
    )
