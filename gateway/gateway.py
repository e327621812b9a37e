"""The gateway: builds the parts that serve MQTT over a store, starts them and stops them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from math import ceil
from typing import Final

from penstock.access.bans import Kind, concerns
from penstock.access.control import AccessControl
from penstock.access.subject import Subject
from penstock.gateway.auth.authorizer import Authorizer
from penstock.gateway.auth.plugin_publisher import PluginPublisher
from penstock.gateway.connection.backpressure import Backpressure
from penstock.gateway.connection.clients import ClientRegistry
from penstock.gateway.connection.close_log import CloseLog
from penstock.gateway.connection.connection import Connection
from penstock.gateway.connection.disk_full import DiskFullBacklog
from penstock.gateway.connection.handshake import Handshake
from penstock.gateway.connection.keep_alive import Heartbeat, KeepAliveWheel
from penstock.gateway.connection.open_connections import OpenConnections
from penstock.gateway.connection.outbox import CLOSE_FLUSH_S
from penstock.gateway.connection.publish_fast_path import PublishFastPath
from penstock.gateway.connection.services import ConnectionServices
from penstock.gateway.connection.subscribing import Subscribing
from penstock.gateway.connection.throttle import Throttle
from penstock.gateway.counters import GatewayCounters, Traffic
from penstock.gateway.delivery.backlog import BacklogLimit
from penstock.gateway.delivery.client_subscriptions import Deliveries, DeliveryContext
from penstock.gateway.delivery.fanout import Fanouts
from penstock.gateway.delivery.mqtttraces import MqttTraces
from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.delivery.shared_subscriptions import SharedSubscriptions
from penstock.gateway.delivery.system import SystemFigures, SystemTopics
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import PLAIN_NAME, GatewayOptions
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.sessions.lifecycle import SessionLifecycle
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.gateway.sessions.wills import Wills
from penstock.gateway.transport.descriptors import SocketShare
from penstock.gateway.transport.listeners import Listeners
from penstock.gateway.transport.overtime import Overtime
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sockets import HAS_TURNS, Sockets
from penstock.gateway.transport.sources import Sources
from penstock.gateway.transport.strikes import Strikes
from penstock.pop.core.core import PopCore
from penstock.pop.core.handle import Handles
from penstock.store.clock import Clock
from penstock.store.options import OFF
from penstock.store.space.accounts import Resource
from penstock.store.space.ledger import QuotaRefusal
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages
from penstock.timer.duejob import DueJob
from penstock.tracing.traces import Traces

STOP_LINGER_S: Final = 1.0
"""Seconds that clients have to close their side when the node stops. The node then closes the sockets anyway."""


DRAINED_PER_S: Final = 1_000
"""Clients that a draining node disconnects in a second, unless its time is shorter."""

DRAIN_TICK_S: Final = 0.02
"""Seconds between two portions of them."""

RECHECKED_AT_ONCE: Final = 50
"""Clients that are looked at in one turn of the loop, when access control has changed."""


@dataclass(frozen=True, slots=True)
class ServedParts:
    """The parts of the store that the gateway serves."""

    retained: RetainedMessages
    """The retained messages."""
    delayed: DelayedMessages
    """The delayed messages."""
    sessions: StoredSessions
    """The stored sessions."""
    pop: PopCore
    """The core of POP. A shared subscription is one of its groups."""
    handles: Handles
    """Makes the handles that cancel delayed messages."""


class Gateway:
    """Serves MQTT over a store.

    Parameters:
        store: where messages go, and come from. All timeouts, rate limits and keep alives go by the time of its clock.
        parts: the parts of that store which the gateway serves.
        options: see `GatewayOptions`.
        access: the rules, the bans and the audit log.
        delay_ms_max: the longest delay of a message, in ms.
        descriptors_below: the first file descriptor that no connection may have; None if they may have all.
        traces: makes spans; None without tracing.
    """

    def __init__(
        self,
        store: Store,
        parts: ServedParts,
        options: GatewayOptions,
        access: AccessControl,
        *,
        delay_ms_max: int,
        descriptors_below: int | None = None,
        traces: Traces | None = None,
    ) -> None:
        self.store = store
        self.parts = parts
        self.options = options
        self.clock: Clock = store.clock
        self._access = access
        self._delay_ms_max = delay_ms_max
        self._traces = MqttTraces(traces, store) if traces is not None else None
        self._rechecking: asyncio.Task[None] | None = None
        self.loop: asyncio.AbstractEventLoop
        self._services: ConnectionServices
        self.counters = GatewayCounters()
        self.traffic = Traffic()
        self.logbook = Logbook(options.limits.log_lines_per_s)
        self.overtime = Overtime(self.clock.monotonic_s)
        self._limit_quotas()
        self._make_access_control()
        self._make_listeners(descriptors_below)
        self._make_limits()
        self._make_sessions()
        self._make_deliveries()
        self._make_packet_handlers()
        self.expiry = DueJob(store.now_ms, self.clock, self._end_expired, parts.retained.first_due_ms)
        parts.retained.on_expiring = self.expiry.expect
        self.heartbeat = Heartbeat(
            self.clock.monotonic_s,
            (
                lambda _: self.authorizer.expire(),
                lambda _: self.logbook.turn_page(),
                lambda _: access.audit.turn_page(),
                self.keep_alives.turn,
                self.sys.turn,
            ),
        )

    # --- its parts --------------------------------------------------------------------------------------------------

    def _limit_quotas(self) -> None:
        ledger, options = self.store.ledger, self.options
        ledger.on_refused = self._log_refusal
        ledger.limit(Resource.SUBSCRIPTIONS, options.all_subscriptions_max, "raise mqtt.sessions_max")
        ledger.limit(Resource.RETAINED, options.retained_max, "raise mqtt.retained_max")
        ledger.limit(Resource.RETAINED_BYTES, options.retained_bytes_max, "raise mqtt.retained_max")

    def _make_access_control(self) -> None:
        self._plugin_publisher = PluginPublisher(self.store, self.counters)
        self.authorizer = Authorizer(
            self.options.access,
            self._access,
            self.store,
            self.logbook,
            self._plugin_publisher.publish,
            connect_timeout_ms=self.options.connect_timeout_ms,
            logins_held_max=self.options.logins_held_max,
        )

    def _make_listeners(self, descriptors_below: int | None) -> None:
        limits = self.options.limits
        self.sources = Sources(limits)
        self.strikes = Strikes(self.sources, self.traffic, self.logbook, self.now_ms, limits)
        share = SocketShare(descriptors_below, self._shed) if descriptors_below is not None else None
        self.listeners = Listeners(
            self.options, self.sources, self.logbook, self.now_ms, self.connect, self.strikes.add, self.overtime, share
        )
        self.sockets: Sockets | None = None
        """Once the gateway has started, if the system has epoll."""

    def _make_limits(self) -> None:
        options = self.options
        self.backpressure = Backpressure(self.store, options.limits.undurable_bytes_max)
        self.throttle = Throttle(self.now_ms, options.limits)
        self.backlog = DiskFullBacklog()
        self.clients = ClientRegistry(options.connections_max)
        self.keep_alives = KeepAliveWheel()
        self.connections = OpenConnections(
            self.clients,
            self.keep_alives,
            self.backpressure,
            self.authorizer,
            self.traffic,
            clients_max=options.connections_max,
            connect_timeout_ms=options.connect_timeout_ms,
        )

    def _make_sessions(self) -> None:
        store, options, parts = self.store, self.options, self.parts
        self.shared = SharedSubscriptions(
            parts.pop,
            store.space,
            store.ledger,
            self.counters,
            is_enabled=options.shared_max > 0,
            groups_max=options.shared_max,
            ack_timeout_ms=options.share_ack_timeout_ms,
        )
        wills = Wills(store, parts.retained, self.authorizer)
        self.lifecycle = SessionLifecycle(
            store, parts.sessions, self.clients, wills, self.shared, self.counters, self.logbook, options
        )
        self.journal = self.lifecycle.journal

    def _make_deliveries(self) -> None:
        store, options, retained = self.store, self.options, self.parts.retained
        figures = SystemFigures(store, retained, self.clients, self.lifecycle, self.listeners, self.counters, self.traffic)
        self.sys = SystemTopics(options.sys_interval_s, figures.read, self.clock.monotonic_s)
        self.fanouts = Fanouts(store, self.overtime, self._traces)
        sends_once = options.overlapping == "once"
        self.deliveries = Deliveries(
            DeliveryContext(store, self.fanouts, self.journal, self.counters, self._traces, sends_once),
            retained,
            self.shared,
            self.sys,
            BacklogLimit(options.session_queued_max, self.counters, self.logbook, self.journal),
            options.subscriptions_max,
        )

    def _make_packet_handlers(self) -> None:
        options = self.options
        self.fast_path = PublishFastPath(
            self.store,
            self.counters,
            self.backpressure,
            self.journal,
            packet_bytes_max=min(options.packet_bytes_max, options.message_bytes_max),
            inflight_max=options.inflight_max,
        )
        self._subscribing = Subscribing(self.store, self.counters, self.logbook, options)
        self._handshake = Handshake(
            options,
            self.authorizer,
            self.connections,
            self.lifecycle,
            self.deliveries,
            self.strikes,
            self.counters,
            self.traffic,
        )
        self._close_log = CloseLog(self.counters, self.traffic, self.logbook, self.strikes.add, self._access.audit)

    def _make_services(self) -> ConnectionServices:
        return ConnectionServices(
            options=self.options,
            delay_ms_max=self._delay_ms_max,
            loop=self.loop,
            now_s=self.clock.monotonic_s,
            store=self.store,
            delayed=self.parts.delayed,
            retained=self.parts.retained,
            handles=self.parts.handles,
            connections=self.connections,
            handshake=self._handshake,
            lifecycle=self.lifecycle,
            journal=self.journal,
            subscribing=self._subscribing,
            settlements=self.shared.settlements,
            fast_path=self.fast_path,
            backlog=self.backlog,
            backpressure=self.backpressure,
            throttle=self.throttle,
            overtime=self.overtime,
            close_log=self._close_log,
            counters=self.counters,
            traffic=self.traffic,
            traces=self._traces,
        )

    # --- the listeners ----------------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Load the plugins and open the listeners; return the port of the plain one, or 0 if there is none.

        Raises:
            OSError: the gateway cannot listen on an address, or cannot load a plugin.
        """
        self.loop = asyncio.get_running_loop()
        self._services = self._make_services()
        self._access.on_change.append(self._recheck)
        self.store.space.on_relief.append(self._relieved)
        self._plugin_publisher.start(self.loop)
        self.overtime.start(self.loop)
        self.backpressure.start(self.loop)
        self.journal.start(self.loop)
        self.expiry.start(self.loop)
        self.shared.start(self.loop)
        self.sys.start(self.loop)
        await self.authorizer.start(self.clock.monotonic_s)
        self.sockets = Sockets(self.loop, self.store.release_durable, self._end_turn) if HAS_TURNS else None
        await self.listeners.start(self.loop, self.sockets)
        self.throttle.start(self.loop)
        self.keep_alives.start(self.clock.monotonic_s())
        self.heartbeat.start(self.loop)
        self.lifecycle.start(self.loop)
        return self.listeners[PLAIN_NAME].address.port if self.options.listen != OFF else 0

    async def stop(self) -> None:
        """Accept no more connections, and close all that are open."""
        self.heartbeat.stop()
        self.expiry.stop()
        if self._rechecking is not None:
            self._rechecking.cancel()
        self.listeners.close()
        await self.listeners.end_handshakes()
        self.throttle.stop()
        self.connections.close_all()
        self.lifecycle.stop()
        self.journal.stop()
        self.shared.settlements.flush()
        await self.connections.wait_closed(CLOSE_FLUSH_S + 1)
        await self.authorizer.stop()
        if self.sockets is not None:
            await self.sockets.lingering.wait_closed(STOP_LINGER_S)
            self.sockets.close()
            self.sockets = None

    async def drain(self, grace_s: float) -> None:
        """Refuse all clients that connect from now on, and send the others away at an even pace. Return when all were sent.

        It takes `grace_s` seconds at most, and less if fewer than `DRAINED_PER_S` clients are connected for each second. So
        those that connect again elsewhere don't come all at once.
        """
        self._services.handshake.is_draining = True
        connections = list(self.clients.values())
        pause_s = min(DRAIN_TICK_S, grace_s)
        ticks = max(min(int(grace_s / DRAIN_TICK_S), ceil(len(connections) / (DRAINED_PER_S * DRAIN_TICK_S))), 1)
        for tick in range(ticks):
            begin, end = (len(connections) * number // ticks for number in (tick, tick + 1))
            for connection in connections[begin:end]:
                connection.close("the node drains", ReasonCode.SERVER_SHUTTING_DOWN)
            await asyncio.sleep(pause_s)

    def _end_turn(self) -> None:
        self.fast_path.flush()
        self.store.end_turn()

    def _log_refusal(self, refusal: QuotaRefusal) -> None:
        user, source, client, tenant, topic = refusal.causer
        self.logbook.note(
            "quota.refused",
            resource=refusal.resource.name.lower(),
            user=user,
            source=source,
            client=client,
            tenant=tenant or topic,
            why=str(refusal.error),
        )

    def _end_expired(self, until_s: float) -> bool:
        """Give up retained messages that have expired, until a monotonic time; return whether there may be more."""
        self.store.commit()  # The work reads the index, which is as of the last commit.
        now_ms = self.store.now_ms()
        while self.parts.retained.end_expired(now_ms):
            if self.clock.monotonic_s() >= until_s:
                return True
        return False

    def now_ms(self) -> int:
        """Return the monotonic time in ms. Limits go by it, so a change of the time of day does not disturb them."""
        return int(self.clock.monotonic_s() * 1000)

    def disconnect(self, kind: Kind, name: str) -> int:
        """Disconnect the clients with a user name, a client id, or an address or network; return how many there were."""
        if kind == "client":
            named = self.clients.get(name)
            concerned = [named] if named is not None and named.connected else []
        else:
            concerned = [each for each in self.clients.values() if concerns(kind, name, _subject_of(each))]
        for connection in concerned:
            connection.close("an operator has disconnected the client", ReasonCode.ADMINISTRATIVE_ACTION)
        return len(concerned)

    def _recheck(self) -> None:
        """Look again at all clients, because access control has changed."""
        if self._rechecking is not None:
            self._rechecking.cancel()
        self._rechecking = self.loop.create_task(self._recheck_all())

    async def rechecked(self) -> None:
        """Return when a change of access control is in force for all clients."""
        while self._rechecking is not None and not self._rechecking.done():
            await asyncio.wait([self._rechecking])

    async def _recheck_all(self) -> None:
        for number, connection in enumerate(tuple(self.clients.values())):
            if number % RECHECKED_AT_ONCE == 0:
                await asyncio.sleep(0)  # so that the others are served meanwhile
            connection.recheck(self.authorizer)

    # --- connections ------------------------------------------------------------------------------------------------

    def connect(self, peer: Peer) -> Connection:
        """Return the connection of a new peer."""
        return Connection(peer, self._services)

    def _shed(self) -> bool:
        """Make room for a new connection: close a socket that lingers, or one that has sent nothing, or refuse a held login."""
        lingering = self.sockets.lingering if self.sockets is not None else None
        return (lingering is not None and lingering.shed()) or self.connections.shed() or self.authorizer.logins.give_way()

    # --- a full disk ------------------------------------------------------------------------------------------------

    def _relieved(self) -> None:
        """Go on with everything that has waited for room on the disk, which has some again."""
        self.backlog.retry(self.loop)
        for connection in self.clients.values():
            if connection.outbox.lagging:  # at QoS 2 a delivery is recorded first, for which there was no room
                connection.outbox.pump_soon()
        self.lifecycle.turn()


def _subject_of(connection: Connection) -> Subject:
    session = connection.session
    return Subject(session.user, client_id=session.client_id, address=connection.peer.host)
