"""The gateway: the MQTT listeners, who is connected, and what holds for all connections."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from penstock.gateway.auth.access import Access
from penstock.gateway.connection.backpressure import Backpressure
from penstock.gateway.connection.clients import ClientRegistry
from penstock.gateway.connection.connection import CLOSE_FLUSH_S, Connection
from penstock.gateway.connection.disk_full import DiskFullBacklog
from penstock.gateway.connection.keep_alive import KeepAliveWheel
from penstock.gateway.connection.open_connections import OpenConnections
from penstock.gateway.connection.plain import PlainReads
from penstock.gateway.connection.throttle import Meter, Throttle
from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.backlog import BacklogLimit
from penstock.gateway.delivery.client_subscriptions import Deliveries
from penstock.gateway.delivery.context import DeliveryContext
from penstock.gateway.delivery.fanout import Fanouts
from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.delivery.shared_subscriptions import SharedSubscriptions
from penstock.gateway.delivery.system import SystemTopics
from penstock.gateway.heartbeat import Heartbeat
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import PLAIN_NAME, GatewayOptions
from penstock.gateway.protocol.connect import Connect
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.sessions.journal import SessionJournal
from penstock.gateway.sessions.lifecycle import SessionLifecycle
from penstock.gateway.sessions.stored_sessions import StoredSessions
from penstock.gateway.token_bucket import TokenBucket
from penstock.gateway.traffic import Traffic
from penstock.gateway.transport.listener import Listeners
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sockets import HAS_TURNS, Sockets
from penstock.gateway.transport.sources import Sources
from penstock.pop.core.admin import GroupAdmin
from penstock.store.clock import Clock
from penstock.store.errors import DiskFull, StoreError
from penstock.store.record import Flag
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages

logger = structlog.get_logger("gateway")

STRUCK = frozenset(
    (
        ReasonCode.MALFORMED_PACKET,
        ReasonCode.PROTOCOL_ERROR,
        ReasonCode.PACKET_TOO_LARGE,
        ReasonCode.BAD_USER_NAME_OR_PASSWORD,
        ReasonCode.NOT_AUTHORIZED,
        ReasonCode.BAD_AUTHENTICATION_METHOD,
    )
)
"""Reasons for closing a connection that count as a strike of its source."""


class Gateway:
    """MQTT over a store.

    Parameters:
        store: where messages go, and come from.
        retained: the retained messages, a part of that store.
        delayed: the delayed messages, another part of it.
        groups: POP's groups, which are what shared subscriptions are.
        sessions: what outlives connections, another part of it.
        options: see `GatewayOptions`.
        clock: its monotonic time is that of all timeouts, limits and keep alives.
        delay_ms_max: how long a message may be delayed.
        may_share: whether a user may take from a group, where that is restricted. A user name is empty where nobody vouches
            for one.
    """

    def __init__(
        self,
        store: Store,
        retained: RetainedMessages,
        delayed: DelayedMessages,
        groups: GroupAdmin,
        sessions: StoredSessions,
        options: GatewayOptions,
        clock: Clock,
        *,
        delay_ms_max: int,
        may_share: Callable[[str, str], bool] | None = None,
    ) -> None:
        self.store = store
        self.retained = retained
        self.delayed = delayed
        self.options = options
        self.delay_ms_max = delay_ms_max
        self.counters = GatewayCounters()
        self.traffic = Traffic()
        self.logbook = Logbook(options.limits.log_lines_per_s)
        self.access = Access(options.access, store, self.logbook, self._publish_for_plugin)
        self.sources = Sources(options.limits)
        self.clock = clock
        self.backpressure = Backpressure(store, options.limits.undurable_bytes_max)
        self.throttle = Throttle(self.now_ms)
        self.handshakes = 0
        """Connections that are not yet where MQTT begins."""
        self.clients: ClientRegistry[Connection] = ClientRegistry(options.connections_max)
        self.connections: OpenConnections[Connection] = OpenConnections(options.connections_max)
        self.keep_alives = KeepAliveWheel()
        self.backlog = DiskFullBacklog()
        self.journal = SessionJournal(store, clock)
        self.shared = SharedSubscriptions(
            groups,
            store.space,
            self.counters,
            is_enabled=options.shared == "on",
            groups_max=options.shared_max,
            ack_timeout_ms=options.share_ack_timeout_ms,
            may_share=may_share,
        )
        self.lifecycle = SessionLifecycle(
            store,
            sessions,
            self.journal,
            self.clients,
            self.shared,
            self.counters,
            self.logbook,
            clock,
            sessions_max=options.sessions_max,
        )
        self.sys = SystemTopics(options.sys_interval_s, self._system_figures, clock.monotonic_s)
        self.fanouts = Fanouts(store)
        self.deliveries = Deliveries(
            DeliveryContext(store, self.fanouts, self.journal, self.counters),
            retained,
            self.shared,
            self.sys,
            BacklogLimit(options.session_queued_max, self.counters, self.logbook, self.journal),
            options.subscriptions_max,
        )
        self.loop: asyncio.AbstractEventLoop
        self.heartbeat = Heartbeat(
            clock.monotonic_s,
            (
                lambda _: self.access.expire(),
                lambda _: self.logbook.turn_page(),
                self.keep_alives.turn,
                lambda _: self.lifecycle.turn(),
                self.sys.turn,
            ),
        )
        self.plain = PlainReads(self)
        self.sockets: Sockets | None = None
        """Where the system has such, once it has started."""
        self.listeners = Listeners(self)

    # --- the listeners ----------------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Load the plugins and open the listeners; return the port of the plain one, 0 where there is none.

        Raises:
            OSError: an address can't be listened on, or a plugin can't be loaded.
        """
        self.loop = asyncio.get_running_loop()
        self.store.space.on_relief.append(self._relieved)
        self.backpressure.start(self.loop)
        self.journal.start(self.loop)
        self.shared.start(self.loop)
        self.sys.start(self.loop)
        await self.access.start(self.clock.monotonic_s)
        self.sockets = Sockets(self.loop, self.store.release_durable, self._end_turn) if HAS_TURNS else None
        await self.listeners.start()
        self.throttle.start(self.loop)
        self.keep_alives.start(self.clock.monotonic_s())
        self.heartbeat.start(self.loop)
        self.lifecycle.start(self.loop)
        return self.listeners[PLAIN_NAME].address.port if self.options.plain == "on" else 0

    async def stop(self) -> None:
        """Accept nothing more; close all connections."""
        self.heartbeat.stop()
        self.listeners.close()
        await self.listeners.end_handshakes()
        self.throttle.stop()
        self.connections.close_all()
        self.lifecycle.stop()
        self.journal.stop()
        self.shared.settlements.flush()
        await self.connections.wait_closed(CLOSE_FLUSH_S + 1)
        await self.access.stop()
        if self.sockets is not None:
            self.sockets.close()
            self.sockets = None

    def _end_turn(self) -> None:
        self.plain.flush()
        self.store.end_turn()

    def now_ms(self) -> int:
        """Return the monotonic time in ms: for limits, which no change of the time of day may disturb."""
        return int(self.clock.monotonic_s() * 1000)

    # --- connections ------------------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """Note a new socket. It has `connect_timeout_ms` for its CONNECT."""
        connection.meter = self._meter(connection.peer)
        self.keep_alives.watch_until(connection, connection.received_s + self.options.connect_timeout_ms / 1000)
        self.connections.add(connection)

    def closed(self, connection: Connection) -> None:
        """Forget a socket."""
        listener, client_id = connection.peer.listener, connection.session.client_id
        listener.closed(connection.peer)
        self.backpressure.forget(connection)
        self.access.left(connection)
        if client_id:
            self.traffic.client_disconnected(listener.name, connection.level)
        if not connection.is_refused:
            self.traffic.connection_closed(listener.name, None)
        self.connections.remove(connection)
        self.keep_alives.forget(connection)
        self.clients.leave(client_id, connection)

    def register(self, connection: Connection, client_id: str, wish: Connect) -> bool:
        """Make a connection the one of its client id; an older one with that id is closed [MQTT-3.1.4-3] 3.1.1:[MQTT-3.1.4-2].

        Gives it its session; returns whether that was there before. Raises ConnectRefused.
        """
        expiry_s = min(wish.session_expiry_s, self.options.session_expiry_s_max)
        self.lifecycle.check_room(client_id, wish, expiry_s)
        self.clients.close_older(client_id)
        connection.session, is_present = self.lifecycle.open(client_id, wish, expiry_s, self.access.user_of(connection))
        self.clients.enter(client_id, connection)
        self.counters.connections_accepted += 1
        self.access.entered(connection)
        self.traffic.client_connected(connection.peer.listener.name, connection.level)
        return is_present

    def refused(self, connection: Connection, why: str, reason: ReasonCode) -> None:
        """Count and log a connection that the server closes."""
        self.counters.closed_by_reason[reason] = self.counters.closed_by_reason.get(reason, 0) + 1
        connection.is_refused = True
        self.traffic.connection_closed(connection.peer.listener.name, reason)
        if reason in STRUCK:
            self.strike(connection.peer)
        self.logbook.note(
            "connection.closed",
            client=connection.session.client_id,
            peer=str(connection.peer),
            listener=connection.peer.listener.name,
            reason=reason.name,
            why=why,
        )

    def strike(self, peer: Peer) -> None:
        """Note that a peer did what no client should; the source of many strikes is held off."""
        if self.sources.strike(peer.source, self.now_ms()):
            self.traffic.held_off += 1
            self.logbook.note("source.held_off", source=peer.source, for_ms=self.options.limits.hold_off_ms)

    def _meter(self, peer: Peer) -> Meter | None:
        limits, listener = self.options.limits, peer.listener
        if not (limits.client_messages_per_s or limits.client_bytes_per_s or listener.messages.per_s or listener.bytes.per_s):
            return None
        own = TokenBucket(limits.client_messages_per_s), TokenBucket(limits.client_bytes_per_s)
        return Meter(*own, listener.messages, listener.bytes)

    def _publish_for_plugin(self, topic: str, body: bytes, qos: int, retain: bool) -> None:
        """Publish what a plugin sends. Called on the plugins' thread."""
        self.loop.call_soon_threadsafe(self._publish, topic, body, qos | (Flag.RETAIN if retain else 0))

    def _publish(self, topic: str, body: bytes, flags: int) -> None:
        try:
            self.store.append_message(self.store.queues.route(topic.encode()), body, b"", flags)
        except StoreError as error:
            self.counters.publishes_dropped += isinstance(error, DiskFull)
            logger.warning("plugin.publish_refused", topic=topic[:80], why=str(error))

    # --- a full disk ------------------------------------------------------------------------------------------------

    def _relieved(self) -> None:
        self.backlog.retry(self.loop)
        for connection in self.clients.values():
            if connection.lagging:  # what is sent at QoS 2 is recorded first
                connection.pump_soon()
        self.lifecycle.turn()

    # --- $SYS -------------------------------------------------------------------------------------------------------

    def _system_figures(self) -> dict[str, object]:
        """Return the figures below `$SYS/broker/`, under the names that users of mosquitto know."""
        counters, traffic, listeners = self.counters, self.traffic, tuple(self.listeners)
        connected, away = len(self.clients), self.lifecycle.away
        return {
            "clients/connected": connected,
            "clients/disconnected": away,
            "clients/total": connected + away,
            "clients/expired": counters.sessions_expired,
            "messages/received": counters.packets_in,
            "messages/sent": sum(traffic.packets_out) + counters.publishes_out,
            "publish/messages/received": counters.publishes_in,
            "publish/messages/sent": counters.publishes_out,
            "publish/messages/dropped": counters.publishes_refused + counters.publishes_dropped + counters.deliveries_too_large,
            "bytes/received": sum(listener.bytes_in for listener in listeners),
            "bytes/sent": sum(listener.bytes_out for listener in listeners),
            "subscriptions/count": counters.subscriptions,
            "shared_subscriptions/count": counters.subscriptions_shared,
            "retained messages/count": len(self.retained),
            "messages/stored": self.store.messages_stored,
        }
