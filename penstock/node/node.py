"""A node: composes all parts, recovers their state, and starts and stops them in order."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from functools import partial
from typing import Any

import structlog
from prometheus_client import CollectorRegistry

from penstock import __version__
from penstock.access.control import AccessControl
from penstock.gateway.gateway import Gateway
from penstock.gateway.options import PLAIN_NAME
from penstock.node.accesscontrol import OPERATOR, AccessOverSocket
from penstock.node.admin import Admin
from penstock.node.clientcontrol import ClientControl
from penstock.node.clockcontrol import ClockControl
from penstock.node.config import Config
from penstock.node.control import Control
from penstock.node.descriptors import log_shares, shares_of
from penstock.node.exposure import check_exposure
from penstock.node.holding import Holding
from penstock.node.inherited import address_of_listener, inherited_listener
from penstock.node.keysets import KeySetFetcher
from penstock.node.lock import DataDirLock
from penstock.node.looplag import LoopLag
from penstock.node.metrics.access import AccessCollector
from penstock.node.metrics.descriptors import DescriptorCollector
from penstock.node.metrics.grouptotals import GroupTotaller
from penstock.node.metrics.mqtt import MqttConnectionCollector, MqttMessageCollector, MqttProtectionCollector
from penstock.node.metrics.pop import PopCollector
from penstock.node.metrics.program import ProgramCollector
from penstock.node.metrics.quotas import QuotaCollector
from penstock.node.metrics.registry import registry_of
from penstock.node.metrics.store import DelayedCollector, ScheduleCollector, StoreCollector
from penstock.node.metrics.tracing import TracingCollector
from penstock.node.parts import NodeParts
from penstock.node.privacy import keep_private, warn_of_open_files
from penstock.node.state import state_of
from penstock.node.timers import timers_of
from penstock.pop.grpc.groupservicer import GroupServicer
from penstock.pop.grpc.scheduleservicer import ScheduleServicer
from penstock.pop.grpc.servicer import PopServicer
from penstock.pop.grpc.timerservicer import TimerServicer
from penstock.pop.server import PopServer, rocketmq_service
from penstock.store.ballast import release_ballast
from penstock.store.clock import SteerableClock, SystemClock
from penstock.store.descriptors import descriptor_limit
from penstock.store.errors import DiskFull, IndexDamaged
from penstock.store.files import FULL, SYSTEM_FILES, make_directory
from penstock.store.options import HostPort
from penstock.store.recovery import Recovery
from penstock.timer.listing import TimerListing
from penstock.tracing.exporter import SpanExporter
from penstock.tracing.traces import Traces

logger = structlog.get_logger("node")

EXIT_STORE_FAILED = 70
"""Exit status when the log or the index could not be written or synced. A supervisor must not take it for an orderly end."""

EXIT_INDEX_DAMAGED = 71
"""Exit status when the index is found damaged. Nothing is lost: the next start rebuilds the index."""


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
        clock = clock or SystemClock()
        self.descriptors = shares_of(descriptor_limit(), config.pop.connections_max)
        self._traces = Traces(config.tracing, clock.monotonic_s) if config.tracing.endpoint else None
        self._exporter = SpanExporter(self._traces, __version__) if self._traces is not None else None
        make_directory(SYSTEM_FILES, config.data_dir)
        keep_private(config.data_dir)
        warn_of_open_files(config)
        self._lock = DataDirLock(config.data_dir)
        try:
            self.access = AccessControl(config.access, config.data_dir, lambda: self.store.now_ms())
        except BaseException:
            self._lock.release()
            raise
        try:
            recovery = self._recover_in_room(clock) or self._recover_in_room(clock)
            if recovery is None:
                raise IndexDamaged(f"The index of {config.data_dir} is damaged again after it was rebuilt. Check the disk.")
            self.recovery: Recovery = recovery
        except BaseException:
            self.access.close()
            self._lock.release()
            raise
        self.gateway = Gateway(
            self.store,
            self.retained,
            self.delayed,
            self.pop,
            self._handles,
            self.sessions,
            config.mqtt,
            clock,
            self.access,
            delay_ms_max=config.timer.delay_ms_max,
            descriptors_below=self.descriptors.mqtt,
            traces=self._traces,
        )
        sender = self._parts.sender
        servicer = PopServicer(self.pop, self.store, self._handles, self.delayed, self.transactions, sender, config.pop)
        self.rocketmq = rocketmq_service(
            self.pop, self.store, self._handles, sender, self.delayed, self.transactions, config.pop
        )
        listing = TimerListing(self.store, self.delayed.buckets, self.timer_keys)
        self._pop_server = PopServer(
            servicer,
            GroupServicer(self.pop, self.store),
            ScheduleServicer(self.schedules, self.store),
            TimerServicer(self.delayed, self.timer_keys, listing, sender, self._handles, self.store),
            config.pop,
            self.access,
            self.rocketmq,
            inherited=inherited,
            connections_max=self.descriptors.pop,
        )
        self._loop_lag = LoopLag()
        self._totaller = GroupTotaller(self.pop, self.store)
        self.registry = self._make_registry()
        """What `/metrics` shows."""
        self._admin = Admin(
            config.admin,
            self.access,
            registry=self.registry,
            ready=lambda: self._is_ready,
            state=self.state,
            timers=partial(timers_of, self.delayed, listing),
            level=self._level,
            prepare=self._totaller.prepare,
            connections_max=self.descriptors.admin,
        )
        access = AccessOverSocket(
            self.access, self.reload, self.gateway.rechecked, self.gateway.disconnect, self._pop_server.disconnect
        )
        self._key_sets = KeySetFetcher(self.access, config.access.jwt.jwks_url, config.access.jwt.jwks_refresh_s)
        self._holding = Holding(self.store, config.data_dir)
        self._control = Control(
            config.data_dir,
            {
                **self._holding.routes(),
                **ClockControl(self.store).routes(),
                **access.routes(),
                **ClientControl(self.rocketmq, self.store).routes(),
            },
        )
        self._is_ready = False
        self.mqtt: HostPort = config.mqtt.listen
        self.grpc: HostPort = config.pop.listen
        self.admin: HostPort = config.admin.listen

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
        return self.store.recover()

    async def start(self) -> None:
        """Open the listeners. Afterwards `mqtt`, `grpc` and `admin` hold the addresses with their real ports.

        Raises:
            OSError, AdminUnavailable: an address is in use, or isn't one of this machine. The node is stopped again.
        """
        loop = asyncio.get_running_loop()
        _log_recovery(self.recovery)
        log_shares(self.descriptors, self.config.mqtt.connections_max)
        self._parts.start(loop, self._store_failed)
        try:
            port = await self.gateway.start()
            if port:
                self.mqtt = HostPort(self.config.mqtt.listen.host, port)
            self.grpc = HostPort(self.config.pop.listen.host, await self._pop_server.start())
            self.admin = HostPort(self.config.admin.listen.host, await self._admin.start())
            await self._control.start()
            self._key_sets.start()
            if self._exporter is not None:
                self._exporter.start()
        except BaseException:
            await self.stop()
            raise
        self._loop_lag.start(loop)
        self._is_ready = True
        logger.info(
            "node.ready", mqtt=str(self.mqtt), pop=str(self.grpc), admin=str(self.admin), data=str(self.config.data_dir)
        )

    async def stop(self) -> None:
        """Close the listeners and all connections, finish the current group commit, flush the index, and close the store."""
        self._is_ready = False
        self._loop_lag.stop()
        self._key_sets.stop()
        await self._holding.stop()
        await self._control.stop()
        await self.gateway.stop()
        await self._pop_server.stop()
        self._parts.stop()
        await self._admin.stop()
        await self.store.close()
        self._lock.release()
        self.access.close()
        if self._exporter is not None:
            await self._exporter.stop()  # last: nothing waits for the collector
        logger.info("node.stopped", log_end=self.store.log.end)

    def ready_line(self) -> str:
        """Return the line that `penstock serve` prints when all listeners are open.

        It names the listeners of `[[mqtt.listeners]]` as `mqtt.NAME=`. `data=` comes last, because a path may hold spaces.
        """
        more = "".join(
            f"mqtt.{listener.name}={listener} " for listener in self.gateway.listeners if listener.name != PLAIN_NAME
        )
        mqtt = self.mqtt if self.config.mqtt.plain == "on" else "off"
        return f"ready mqtt={mqtt} pop={self.grpc} admin={self.admin} {more}data={self.config.data_dir}"

    def reload(self, by: str = OPERATOR) -> None:
        """Read certificates, rules, users and keys again, and apply them to what clients are doing.

        Raises:
            AccessInvalid: a file of access control is not valid. The old rules, users and keys stay in force.
        """
        warn_of_open_files(self.config)
        self.gateway.listeners.reload()
        self._admin.reload()
        self._pop_server.reload()
        self.access.reload(by)

    def state(self) -> dict[str, Any]:
        """Return what `/api/v1/state` shows of this node."""
        listen = {"pop": str(self.grpc), "admin": str(self.admin)}
        for listener in self.gateway.listeners:
            listen["mqtt" if listener.name == PLAIN_NAME else f"mqtt.{listener.name}"] = str(listener)
        parts = state_of(self.store, self.recovery, self.gateway, self.delayed, self.transactions, self.pop)
        return {"ready": self._is_ready, "listen": listen, **parts}

    def _make_registry(self) -> CollectorRegistry:
        rocketmq = self.rocketmq
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
            DescriptorCollector(self.descriptors, lambda: self._admin.closed_early),
            PopCollector(
                self.pop,
                self.transactions,
                self._pop_server.requests,
                self._pop_server.responses,
                self._pop_server.refusals,
                self.sent_ids,
                (lambda: len(rocketmq.clients)) if rocketmq is not None else None,
                self._totaller,
            ),
            *tracing,
        )

    def _level(self) -> str:
        return self.store.space.level.name.lower()

    def _store_failed(self, error: OSError) -> None:
        """End the process at once. Data since the last sync may be lost, so nothing more may be acknowledged."""
        logger.critical("store.failed", error=str(error), durable=self.store.durable_position)
        os._exit(EXIT_INDEX_DAMAGED if self.store.is_index_damaged else EXIT_STORE_FAILED)


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
