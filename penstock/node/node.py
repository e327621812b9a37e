"""A node: all parts wired together, from an empty directory or from what a crash left, to an orderly end."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import structlog

from penstock.gateway.delivery.retained import RetainedMessages
from penstock.gateway.gateway import Gateway
from penstock.gateway.options import PLAIN_NAME
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.node.admin import Admin
from penstock.node.config import Config
from penstock.node.lock import DataDirLock
from penstock.node.metrics import registry_of
from penstock.pop.access.file import load_access_policy
from penstock.pop.core.admin import GroupAdmin
from penstock.pop.core.core import PopCore
from penstock.pop.core.handle import Handles, load_secret
from penstock.pop.core.redrive import DeadLetterAdmin
from penstock.pop.core.sender import Sender
from penstock.pop.core.transactions import Transactions
from penstock.pop.grpc.groupservicer import GroupServicer
from penstock.pop.grpc.servicer import PopServicer
from penstock.pop.server import PopServer, rocketmq_service
from penstock.store.clock import Clock, SystemClock
from penstock.store.errors import IndexDamaged
from penstock.store.options import HostPort
from penstock.store.store import Recovery, Store
from penstock.timer.delayed import DelayedMessages

logger = structlog.get_logger("node")

EXIT_STORE_FAILED = 70
"""Exit status when log or index could not be written or synced. A supervisor must not take it for an orderly end."""

EXIT_INDEX_DAMAGED = 71
"""Exit status when the index turned out to be damaged: nothing is lost, and the next start rebuilds it."""


class Node:
    """One node on one data directory.

    Parameters:
        config: all options.
        clock: where time comes from.

    Raises:
        DataDirLocked: another process has the data directory.
        LogCorrupt: a record before the tail of the log is damaged.
        AccessInvalid: the file `pop.access_file` can't be read, or says what it can't mean.
    """

    def __init__(self, config: Config, clock: Clock | None = None) -> None:
        self.config = config
        clock = clock or SystemClock()
        access = load_access_policy(Path(config.pop.access_file)) if config.pop.access_file else None
        config.data_dir.mkdir(parents=True, exist_ok=True)
        self._lock = DataDirLock(config.data_dir)
        try:
            recovery = self._try_to_recover(clock) or self._try_to_recover(clock)
            if recovery is None:
                raise IndexDamaged(f"the index of {config.data_dir} is damaged again when it is rebuilt: look at that disk")
            self.recovery: Recovery = recovery
        except BaseException:
            self._lock.release()
            raise
        self.groups = GroupAdmin(self.pop)
        self.dead_letters = DeadLetterAdmin(self.pop)
        self.gateway = Gateway(
            self.store,
            self.retained,
            self.delayed,
            self.groups,
            self.sessions,
            config.mqtt,
            clock,
            delay_ms_max=config.timer.delay_ms_max,
            may_share=access.may_share if access is not None else None,
        )
        sender = Sender(self.store, self.pop.handles, self.delayed, self.transactions, config.pop, config.timer)
        servicer = PopServicer(self.pop, self.delayed, self.transactions, sender)
        self.rocketmq = rocketmq_service(self.groups, sender, self.delayed, self.transactions)
        group_servicer = GroupServicer(self.pop, self.groups, self.dead_letters)
        self._pop_server = PopServer(servicer, group_servicer, config.pop, access, self.rocketmq)
        self._admin = Admin(
            config.admin.listen, registry=registry_of(self), ready=lambda: self._is_ready, state=self.state, level=self._level
        )
        self._is_ready = False
        self.mqtt: HostPort = config.mqtt.listen
        self.grpc: HostPort = config.pop.listen
        self.admin: HostPort = config.admin.listen

    def _try_to_recover(self, clock: Clock) -> Recovery | None:
        """Bring up store and parts; None where the index turned out to be damaged, so that the next try rebuilds it.

        The error must be gone by then: the frames that it holds keep RocksDB open.
        """
        try:
            return self._recover(clock)
        except IndexDamaged as error:
            logger.warning("index.damaged", error=str(error))
            return None

    def _recover(self, clock: Clock) -> Recovery:
        config = self.config
        self.store = Store(config.data_dir, config.store, clock)
        self.delayed = DelayedMessages(self.store, config.timer)
        self.retained = RetainedMessages(self.store.now_ms)
        self.pop = PopCore(self.store, Handles(load_secret(config.data_dir)), config.pop, config.timer)
        self.transactions = Transactions(self.store, config.pop, config.timer)
        self.sessions = StoredSessions(self.store.queues)
        for part in (self.delayed, self.retained, self.transactions, self.sessions, self.pop.state):
            self.store.add_part(part)
        return self.store.recover()

    async def start(self) -> None:
        """Open the listeners. Afterwards `mqtt`, `grpc` and `admin` are the addresses really listened on.

        Raises:
            OSError, AdminUnavailable: an address is taken, or isn't one of this machine. Everything is closed again.
        """
        loop = asyncio.get_running_loop()
        _log_recovery(self.recovery)
        self.store.start(loop, self._store_failed)
        self.delayed.start(loop)
        self.transactions.start(loop)
        self.pop.start(loop)
        try:
            port = await self.gateway.start()
            if port:
                self.mqtt = HostPort(self.config.mqtt.listen.host, port)
            self.grpc = HostPort(self.config.pop.listen.host, await self._pop_server.start())
            self.admin = HostPort(self.config.admin.listen.host, await self._admin.start())
        except BaseException:
            await self.stop()
            raise
        self._is_ready = True
        logger.info(
            "node.ready", mqtt=str(self.mqtt), pop=str(self.grpc), admin=str(self.admin), data=str(self.config.data_dir)
        )

    async def stop(self) -> None:
        """Stop accepting, finish the group that is under way, flush, close."""
        self._is_ready = False
        await self.gateway.stop()
        await self._pop_server.stop()
        self.pop.stop()
        self.transactions.stop()
        self.delayed.stop()
        await self._admin.stop()
        await self.store.close()
        self._lock.release()
        logger.info("node.stopped", log_end=self.store.log.end)

    def ready_line(self) -> str:
        """Return the line that `serve` prints when all listeners are open.

        The listeners of `[[mqtt.listeners]]` are in it as `mqtt.NAME=`, before `data=`, which may hold spaces.
        """
        more = "".join(
            f"mqtt.{listener.name}={listener} " for listener in self.gateway.listeners if listener.name != PLAIN_NAME
        )
        mqtt = self.mqtt if self.config.mqtt.plain == "on" else "off"
        return f"ready mqtt={mqtt} pop={self.grpc} admin={self.admin} {more}data={self.config.data_dir}"

    def reload(self) -> None:
        """Read again what may change while the node runs: the certificates of the listeners."""
        self.gateway.listeners.reload()

    def state(self) -> dict[str, Any]:
        """Return what the admin listener shows of this node."""
        return {
            "ready": self._is_ready,
            "listen": {"pop": str(self.grpc), "admin": str(self.admin)}
            | {
                "mqtt" if listener.name == PLAIN_NAME else f"mqtt.{listener.name}": str(listener)
                for listener in self.gateway.listeners
            },
            "log": {
                "start": self.store.log.start,
                "end": self.store.log.written,
                "durable": self.store.durable_position,
                "torn_bytes_at_start": self.recovery.torn_bytes,
                "replayed_at_start": self.recovery.replayed,
            },
            "disk": {
                "store": self._level(),
                "free": self.store.space.usage.free,
                "reserve": self.store.space.reserve,
                "why": self.store.space.why(),
                "held_bytes": self.gateway.backlog.kept_bytes,
            },
            "connections": len(self.gateway.connections),
            "queues": len(self.store.queues),
            "timers_pending": len(self.delayed),
            "transactions_pending": len(self.transactions),
            "pop": {
                name: value
                for name in self.pop.counters.__slots__
                if isinstance(value := getattr(self.pop.counters, name), int)
            },
            "groups": [
                {
                    "group": group.name,
                    "filter": group.filter,
                    "visible": group.visible,
                    "retries": group.visible_retries,
                    "in_flight": group.in_flight,
                    "waiting": len(group.polls),
                }
                for group in self.pop
            ],
        }

    def _level(self) -> str:
        return self.store.space.level.name.lower()

    def _store_failed(self, error: OSError) -> None:
        """End at once: what was written since the last sync may be gone, and nobody may be told otherwise."""
        logger.critical("store.failed", error=str(error), durable=self.store.durable_position)
        os._exit(EXIT_INDEX_DAMAGED if self.store.index.is_damaged else EXIT_STORE_FAILED)


def _log_recovery(recovery: Recovery) -> None:
    log = logger.warning if recovery.torn_bytes or recovery.rebuilt else logger.info
    log(
        "store.recovered",
        replayed=recovery.replayed,
        torn_bytes=recovery.torn_bytes,
        index_rebuilt=recovery.rebuilt,
        seconds=round(recovery.seconds, 3),
    )
