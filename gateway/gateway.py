"""The gateway: the MQTT listeners, who is connected, and what holds for all connections."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from time import monotonic_ns

import structlog

from penstock.gateway.auth.access import Access
from penstock.gateway.connection.connection import CLOSE_FLUSH_S, Connection
from penstock.gateway.connection.plain import PlainReads
from penstock.gateway.connection.pressure import Pressure
from penstock.gateway.connection.throttle import DISK_FULL, Bucket, Meter, Throttle
from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.fanout import Fanout
from penstock.gateway.delivery.retained import RetainedMessages
from penstock.gateway.delivery.shared import SharedSubscriptions
from penstock.gateway.delivery.subscription import Subscription
from penstock.gateway.delivery.system import SystemTopics
from penstock.gateway.logbook import Logbook
from penstock.gateway.options import PLAIN_NAME, GatewayOptions
from penstock.gateway.protocol.errors import ConnectRefused
from penstock.gateway.protocol.packets import Connect
from penstock.gateway.protocol.reasons import ConnectCode, ReasonCode
from penstock.gateway.sessions.lifetimes import Lifetimes
from penstock.gateway.sessions.sessions import Sessions
from penstock.gateway.traffic import Traffic
from penstock.gateway.transport.listener import Listeners
from penstock.gateway.transport.peer import Peer
from penstock.gateway.transport.sockets import HAS_TURNS, Sockets
from penstock.gateway.transport.sources import Sources
from penstock.pop.core.admin import GroupAdmin
from penstock.store.errors import DiskFull, StoreError
from penstock.store.lightqueue import LightQueue
from penstock.store.options import MIB
from penstock.store.record import Flag
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages

logger = structlog.get_logger("gateway")

WHEEL_S = 1
"""Step of the wheel. A connection is closed at most this long after 1.5 times its keep alive; as a rule a will is published at
most this long after its delay, and a session ends at most this long after its expiry interval."""

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

SOCKETS_PER_CLIENT_MAX = 2
"""Sockets open per `mqtt.connections_max`. Between the two a socket is told in its CONNACK that the node is full."""

HELD_BYTES_MAX = 64 * MIB
"""Bytes that all connections together keep while the disk is full. With more, nobody of whom anything is kept is read."""


class Gateway:
    """MQTT over a store.

    Parameters:
        store: where messages go, and come from.
        retained: the retained messages, a part of that store.
        delayed: the delayed messages, another part of it.
        groups: POP's groups, which are what shared subscriptions are.
        sessions: what outlives connections, another part of it.
        options: see `GatewayOptions`.
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
        sessions: Sessions,
        options: GatewayOptions,
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
        self.pressure = Pressure(store, options.limits.undurable_bytes_max)
        self.throttle = Throttle(self.now_ms)
        self.handshakes = 0
        """Connections that are not yet where MQTT begins."""
        self.clients: dict[str, Connection] = {}
        self.connections: set[Connection] = set()
        self.lifetimes = Lifetimes(self, sessions)
        self.shared = SharedSubscriptions(self, groups, may_share)
        self.sys = SystemTopics(self)
        self.loop: asyncio.AbstractEventLoop
        self._fanouts: dict[int, Fanout] = {}
        self._holding: dict[Connection, None] = {}
        self.held_bytes = 0
        """Of packets that wait for a disk with room."""
        self._wheel: dict[int, set[Connection]] = {}
        self._wheel_second = 0
        self._wheel_timer: asyncio.TimerHandle | None = None
        self._emptied: asyncio.Future[None] | None = None
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
        self.pressure.start(self.loop)
        self.shared.start(self.loop)
        await self.access.start(lambda: self.loop.time())
        self.sockets = Sockets(self.loop, self.store.look, self._end_turn) if HAS_TURNS else None
        await self.listeners.start()
        self.throttle.ticker.start(self.loop)
        self._wheel_second = int(self.loop.time())
        self._turn_wheel()
        self.lifetimes.start()
        return self.listeners[PLAIN_NAME].address.port if self.options.plain == "on" else 0

    async def stop(self) -> None:
        """Accept nothing more; close all connections."""
        if self._wheel_timer is not None:
            self._wheel_timer.cancel()
        self.listeners.close()
        await self.listeners.end_handshakes()
        self.throttle.ticker.stop()
        for connection in tuple(self.connections):
            connection.close("", ReasonCode.SERVER_SHUTTING_DOWN)
        self.lifetimes.stop()
        self.shared.flush()
        if self.connections:
            self._emptied = self.loop.create_future()
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_FLUSH_S + 1):
                    await self._emptied
        await self.access.stop()
        if self.sockets is not None:
            self.sockets.close()
            self.sockets = None

    def _end_turn(self) -> None:
        self.plain.flush()
        self.store.end_turn()

    def now_ms(self) -> int:
        """Return a time in ms that only goes forward: for limits, which no clock that is set may disturb."""
        return monotonic_ns() // 1_000_000

    # --- connections ------------------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """Note a new socket. It has `connect_timeout_ms` for its CONNECT."""
        self.connections.add(connection)
        connection.meter = self._meter(connection.peer)
        self._watch_until(connection, self.loop.time() + self.options.connect_timeout_ms / 1000)
        if len(self.connections) > self.options.connections_max * SOCKETS_PER_CLIENT_MAX:
            connection.close(f"{len(self.connections)} sockets are open: see mqtt.connections_max", ReasonCode.QUOTA_EXCEEDED)

    def closed(self, connection: Connection) -> None:
        """Forget a socket."""
        self.connections.discard(connection)
        connection.peer.listener.closed(connection.peer)
        self.pressure.forget(connection)
        self.access.left(connection)
        self.traffic.left(connection)
        if self._emptied is not None and not self.connections and not self._emptied.done():
            self._emptied.set_result(None)
        self._unwatch(connection)
        if self.clients.get(connection.session.client_id) is connection:
            del self.clients[connection.session.client_id]

    def check_room(self, client_id: str) -> None:
        """Raise ConnectRefused where `mqtt.connections_max` clients are connected. Who takes over needs no room."""
        if len(self.clients) >= self.options.connections_max and client_id not in self.clients:
            raise ConnectRefused(
                f"{len(self.clients)} clients are connected, which is the limit: see mqtt.connections_max",
                ConnectCode.SERVER_UNAVAILABLE,
                ReasonCode.QUOTA_EXCEEDED,
            )

    def register(self, connection: Connection, client_id: str, wish: Connect) -> bool:
        """Make a connection the one of its client id; an older one with that id is closed [MQTT-3.1.4-3] 3.1.1:[MQTT-3.1.4-2].

        Gives it its session; returns whether that was there before. Raises ConnectRefused.
        """
        expiry_s = min(wish.session_expiry_s, self.options.session_expiry_s_max)
        self.lifetimes.check(client_id, wish, expiry_s)
        older = self.clients.get(client_id)
        if older is not None:
            older.close("another connection came with its client id", ReasonCode.SESSION_TAKEN_OVER)
        connection.session, is_present = self.lifetimes.open(client_id, wish, expiry_s, self.access.user_of(connection))
        self.clients[client_id] = connection
        self.counters.connections_accepted += 1
        self.access.entered(connection)
        self.traffic.entered(connection)
        return is_present

    def drop(self, subscription: Subscription) -> None:
        """Give up what a subscription holds here, and in the store if its session doesn't last. It has left its fanout."""
        self.counters.subscriptions -= 1
        self.counters.subscriptions_shared -= subscription.is_shared
        self.sys.unsubscribed(subscription)
        subscription.release()

    def assign_client_id(self) -> str:
        """Return a client id for a client that gave none [MQTT-3.1.3-6]."""
        return f"auto-{secrets.token_hex(8)}"

    def refused(self, connection: Connection, why: str, reason: ReasonCode) -> None:
        """Count and log a connection that the server closes."""
        self.counters.closed_by_reason[reason] = self.counters.closed_by_reason.get(reason, 0) + 1
        self.traffic.refused(connection, reason)
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
        return Meter(Bucket(limits.client_messages_per_s), Bucket(limits.client_bytes_per_s), peer)

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

    @property
    def is_holding_all(self) -> bool:
        """True where `HELD_BYTES_MAX` are kept for a disk with more room."""
        return self.held_bytes > HELD_BYTES_MAX

    def hold(self, connection: Connection, size: int) -> None:
        """Note that a connection keeps `size` bytes that can't be stored now."""
        had_room = not self.is_holding_all
        self._holding[connection] = None
        self.held_bytes += size
        if had_room and self.is_holding_all:
            for each in self._holding:
                each.hold_reading(DISK_FULL)

    def release(self, connection: Connection, size: int) -> None:
        """Note that a connection keeps nothing any more; it was `size` bytes."""
        self._holding.pop(connection, None)
        self.held_bytes -= size

    def _relieved(self) -> None:
        for connection in tuple(self._holding):
            self.loop.call_soon(connection.release_held)
        for connection in self.clients.values():
            if connection.lagging:  # what is sent at QoS 2 is recorded first
                connection.pump_soon()
        self.lifetimes.turn()

    # --- the wheel: one timer for all keep alives, sessions and wills -------------------------------------------------

    def watch(self, connection: Connection) -> None:
        """Close a connection that is silent for longer than its keep alive allows."""
        if connection.keep_alive_s:
            self._watch_until(connection, connection.received_s + connection.keep_alive_s)

    def _watch_until(self, watched: Connection, deadline_s: float) -> None:
        self._unwatch(watched)
        watched.wheel_slot = int(deadline_s) + 1
        self._wheel.setdefault(watched.wheel_slot, set()).add(watched)

    def _unwatch(self, watched: Connection) -> None:
        """Take a connection from the wheel: its slot may be a day away, and what is in it stays in memory."""
        slot = self._wheel.get(watched.wheel_slot)
        if slot is not None:
            slot.discard(watched)
            if not slot:
                del self._wheel[watched.wheel_slot]

    def _turn_wheel(self) -> None:
        now_s = self.loop.time()
        self._wheel_timer = self.loop.call_at(int(now_s) + WHEEL_S, self._turn_wheel)
        self.access.expire()
        self.logbook.turn_page()
        while self._wheel_second <= now_s:
            for watched in self._wheel.pop(self._wheel_second, ()):
                self._check_alive(watched, now_s)
            self._wheel_second += 1
        self.lifetimes.turn()
        self.sys.turn(now_s)

    def _check_alive(self, connection: Connection, now_s: float) -> None:
        if connection.is_unheard:  # what it may have sent is not read: not its fault
            self._watch_until(connection, now_s + WHEEL_S)
        elif not connection.connected:
            connection.close("no CONNECT came in mqtt.connect_timeout_ms", ReasonCode.KEEP_ALIVE_TIMEOUT)
        elif connection.keep_alive_s:
            if now_s >= connection.received_s + connection.keep_alive_s:
                connection.close("nothing came in 1.5 times its keep alive", ReasonCode.KEEP_ALIVE_TIMEOUT)
            else:
                self.watch(connection)

    # --- fanouts ----------------------------------------------------------------------------------------------------

    def fanout(self, queue: LightQueue) -> Fanout:
        """Return the fanout of a light queue."""
        fanout = self._fanouts.get(queue.id)
        if fanout is None:
            fanout = self._fanouts[queue.id] = Fanout(self.store, queue)
        return fanout

    def leave_fanout(self, subscription: Subscription) -> None:
        """Take a subscription from its fanout; the last one ends it."""
        fanout = self._fanouts[subscription.queue.id]
        fanout.remove(subscription)
        if not fanout:
            del self._fanouts[subscription.queue.id]
