"""The gateway: the MQTT listener, who is connected, whose sessions wait for them, and what holds for all connections."""

from __future__ import annotations

import asyncio
import secrets
from collections import OrderedDict

import structlog

from gateway.connection import Connection
from gateway.errors import ConnectRefused
from gateway.fanout import Fanout
from gateway.message import to_stored
from gateway.options import GatewayOptions
from gateway.packets import Will
from gateway.reasons import ConnectCode, ReasonCode
from gateway.retained import RetainedMessages
from gateway.session import Session
from gateway.subscription import Subscription
from gateway.system import SystemTopics
from store.errors import StoreError
from store.lightqueue import LightQueue
from store.record import Flag, encode_properties
from store.store import Store
from timer.delayed import DelayedMessages

logger = structlog.get_logger("gateway")

WHEEL_S = 1
"""Step of the wheel. A connection is closed at most this long after 1.5 times its keep alive, a will is published at most this
long after its delay, and a session ends at most this long after its expiry interval."""

SOCKETS_PER_CLIENT_MAX = 2
"""Sockets open per `mqtt.connections_max`. Between the two a socket is told in its CONNACK that the node is full."""


class Counters:
    """What the gateway has done since the start. Plain integers: `millrace.metrics` reads them."""

    __slots__ = (
        "bytes_in",
        "bytes_out",
        "closed_by_reason",
        "connections_accepted",
        "deliveries_acked",
        "deliveries_too_large",
        "packets_in",
        "packets_out",
        "publishes_in",
        "publishes_out",
        "publishes_refused",
        "sessions_expired",
        "subscriptions",
        "subscriptions_refused",
    )

    def __init__(self) -> None:
        self.bytes_in = 0
        self.bytes_out = 0
        self.packets_in = 0
        self.packets_out = 0
        self.connections_accepted = 0
        self.publishes_in = 0
        self.publishes_out = 0
        self.publishes_refused = 0
        """Those that an ack of MQTT 5.0 refused; at QoS 0 nobody is told."""
        self.deliveries_acked = 0
        self.deliveries_too_large = 0
        """Those not sent because the client takes no packet as large."""
        self.sessions_expired = 0
        self.subscriptions = 0
        """Those that exist now."""
        self.subscriptions_refused = 0
        self.closed_by_reason: dict[ReasonCode, int] = {}


class Gateway:
    """MQTT over a store.

    Parameters:
        store: where messages go, and come from.
        retained: the retained messages, a part of that store.
        delayed: the delayed messages, another part of it.
        options: see `GatewayOptions`.
        delay_ms_max: how long a message may be delayed.
    """

    def __init__(
        self,
        store: Store,
        retained: RetainedMessages,
        delayed: DelayedMessages,
        options: GatewayOptions,
        *,
        delay_ms_max: int,
    ) -> None:
        self.store = store
        self.retained = retained
        self.delayed = delayed
        self.options = options
        self.delay_ms_max = delay_ms_max
        self.counters = Counters()
        self.clients: dict[str, Connection] = {}
        self.connections: set[Connection] = set()
        self.away: OrderedDict[str, Session] = OrderedDict()
        """The sessions whose clients are not connected, by client id; who left first comes first."""
        self.sys = SystemTopics(self)
        self.loop: asyncio.AbstractEventLoop
        self._fanouts: dict[int, Fanout] = {}
        self._wheel: dict[int, set[Connection | Session]] = {}
        self._wheel_second = 0
        self._wheel_timer: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None

    # --- the listener -----------------------------------------------------------------------------------------------

    async def start(self) -> int:
        """Open the listener; return its port.

        Raises:
            OSError: the address can't be listened on.
        """
        self.loop = asyncio.get_running_loop()
        listen = self.options.listen
        try:
            self._server = await self.loop.create_server(
                lambda: Connection(self), listen.host, listen.port, backlog=self.options.listen_backlog
            )
        except OSError as error:
            why = f"MQTT can't listen on {listen}: {error.strerror or error}; choose another address with --mqtt HOST:PORT"
            raise OSError(error.errno, why) from error
        self._wheel_second = int(self.loop.time())
        self._turn_wheel()
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    async def stop(self) -> None:
        """Accept nothing more; close all connections."""
        if self._wheel_timer is not None:
            self._wheel_timer.cancel()
        if self._server is not None:
            self._server.close()
        for connection in tuple(self.connections):
            connection.close("", ReasonCode.SERVER_SHUTTING_DOWN)
        # Sessions end with the process, and a will is published when its session ends (MQTT 5.0, 3.1.2.5).
        for session in tuple(self.away.values()):
            self._end(session)
        if self._server is not None:
            await self._server.wait_closed()

    # --- connections ------------------------------------------------------------------------------------------------

    def opened(self, connection: Connection) -> None:
        """Note a new socket. It has `connect_timeout_ms` for its CONNECT."""
        self.connections.add(connection)
        self._watch_until(connection, self.loop.time() + self.options.connect_timeout_ms / 1000)
        if len(self.connections) > self.options.connections_max * SOCKETS_PER_CLIENT_MAX:
            connection.close(f"{len(self.connections)} sockets are open: see mqtt.connections_max", ReasonCode.QUOTA_EXCEEDED)

    def closed(self, connection: Connection) -> None:
        """Forget a socket."""
        self.connections.discard(connection)
        self._unwatch(connection)
        if self.clients.get(connection.session.client_id) is connection:
            del self.clients[connection.session.client_id]

    def check_room(self, client_id: str) -> None:
        """Raise ConnectRefused where `mqtt.connections_max` clients are connected. Who takes over needs no room."""
        if len(self.clients) >= self.options.connections_max and client_id not in self.clients:
            raise ConnectRefused(
                f"{len(self.clients)} clients are connected, which is the limit: see mqtt.connections_max",
                ConnectCode.SERVER_UNAVAILABLE,
            )

    def register(self, connection: Connection, client_id: str, *, clean_start: bool) -> tuple[Session, bool]:
        """Make a connection the one of its client id; an older one with that id is closed [MQTT-3.1.4-3] 3.1.1:[MQTT-3.1.4-2].

        Returns the session, and whether it was there before [MQTT-3.1.2-4], [MQTT-3.1.2-5].
        """
        older = self.clients.get(client_id)
        if older is not None:
            older.close("another connection came with its client id", ReasonCode.SESSION_TAKEN_OVER)
        session = self.away.get(client_id)
        if session is not None and clean_start:
            self._end(session)
            session = None
        is_present = session is not None
        if session is None:
            session = Session(client_id, 0, None)
        else:
            del self.away[client_id]
            self._unwatch(session)  # a will that was not due yet is not published [MQTT-3.1.3-9]
        self.clients[client_id] = connection
        self.counters.connections_accepted += 1
        return session, is_present

    # --- sessions ---------------------------------------------------------------------------------------------------

    def expiry_s(self, wished_s: int) -> int:
        """Return how many seconds a session lasts for a client that wishes for `wished_s`."""
        return min(wished_s, self.options.session_expiry_s_max)

    def left(self, session: Session) -> None:
        """Keep the session of a client whose connection has ended, or end it. To be called once for each connection."""
        if not session.expiry_s:
            self._end(session)
            return
        if len(self.away) >= self.options.sessions_away_max:
            self._end(next(iter(self.away.values())))
        now_s = self.loop.time()
        session.ends_s = now_s + session.expiry_s
        session.will_due_s = now_s + session.will.delay_s if session.will is not None else 0.0
        self.away[session.client_id] = session
        self._go_on(session, now_s)

    def _go_on(self, session: Session, now_s: float) -> None:
        """Do what is due in a session whose client is away: publish its will, end it."""
        if now_s >= session.ends_s:
            self.counters.sessions_expired += 1
            self._end(session)
            return
        if session.will is not None and now_s >= session.will_due_s:
            self._publish_will(session)
        self._watch_until(session, session.ends_s if session.will is None else min(session.will_due_s, session.ends_s))

    def _end(self, session: Session) -> None:
        """End a session. Its will, if it has one, is published now at the latest [MQTT-3.1.2-8]."""
        if self.away.get(session.client_id) is session:
            del self.away[session.client_id]
        self._unwatch(session)
        for subscription in session.subscriptions.values():
            self.drop(subscription)
        session.subscriptions.clear()
        session.subscriptions_changed()
        self._publish_will(session)

    def drop(self, subscription: Subscription) -> None:
        """Give up what a subscription holds in the store. It has left its fanout."""
        self.counters.subscriptions -= 1
        self.sys.unsubscribed(subscription)
        self.store.queues.detach(subscription.queue, subscription.session.owner)

    def _publish_will(self, session: Session) -> None:
        """Publish what a client left behind, once [MQTT-3.1.2-8]."""
        will, session.will = session.will, None
        if will is not None:
            self.publish_will(will, session.client_id if session.no_local else "")

    def assign_client_id(self) -> str:
        """Return a client id for a client that gave none [MQTT-3.1.3-6]."""
        return f"auto-{secrets.token_hex(8)}"

    def refused(self, connection: Connection, why: str, reason: ReasonCode) -> None:
        """Count and log a connection that the server closes."""
        self.counters.closed_by_reason[reason] = self.counters.closed_by_reason.get(reason, 0) + 1
        logger.info("connection.closed", client=connection.session.client_id, reason=reason.name, why=why)

    def publish_will(self, will: Will, publisher: str = "") -> None:
        """Publish a will. `publisher` is its client, where its own subscriptions must not get it."""
        try:
            route = self.store.queues.route(will.topic.encode())
            properties = encode_properties(to_stored(will.properties, self.store.now_ms(), publisher=publisher))
            self.store.append_message(route, will.body, properties, will.qos | (Flag.RETAIN if will.retain else 0))
        except StoreError as error:
            logger.warning("will.refused", topic=will.topic[:80], why=str(error))

    # --- the wheel: one timer for all keep alives, sessions and wills -------------------------------------------------

    def watch(self, connection: Connection) -> None:
        """Close a connection that is silent for longer than its keep alive allows."""
        if connection.keep_alive_s:
            self._watch_until(connection, connection.received_s + connection.keep_alive_s)

    def _watch_until(self, watched: Connection | Session, deadline_s: float) -> None:
        self._unwatch(watched)
        watched.wheel_slot = int(deadline_s) + 1
        self._wheel.setdefault(watched.wheel_slot, set()).add(watched)

    def _unwatch(self, watched: Connection | Session) -> None:
        """Take a connection or session from the wheel: its slot may be a day away, and what is in it stays in memory."""
        slot = self._wheel.get(watched.wheel_slot)
        if slot is not None:
            slot.discard(watched)
            if not slot:
                del self._wheel[watched.wheel_slot]

    def _turn_wheel(self) -> None:
        now_s = self.loop.time()
        self._wheel_timer = self.loop.call_at(int(now_s) + WHEEL_S, self._turn_wheel)
        while self._wheel_second <= now_s:
            for watched in self._wheel.pop(self._wheel_second, ()):
                if isinstance(watched, Session):
                    self._go_on(watched, now_s)
                else:
                    self._check_alive(watched, now_s)
            self._wheel_second += 1
        self.sys.turn(now_s)

    def _check_alive(self, connection: Connection, now_s: float) -> None:
        if not connection.connected:
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
