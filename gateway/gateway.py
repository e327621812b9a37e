"""The gateway: the MQTT listener, who is connected, and what holds for all connections."""

from __future__ import annotations

import asyncio
import secrets

import structlog

from gateway.connection import HELD_OVERHEAD_BYTES, Connection
from gateway.errors import ConnectRefused
from gateway.fanout import Fanout
from gateway.options import GatewayOptions
from gateway.packets import Will
from gateway.reasons import ConnectCode, ReasonCode
from gateway.retained import RetainedMessages
from gateway.subscription import Subscription
from store.errors import DiskFull, StoreError
from store.lightqueue import LightQueue
from store.options import MIB
from store.record import Flag
from store.store import Store

logger = structlog.get_logger("gateway")

WHEEL_S = 1
"""Step of the keep-alive wheel. A connection is closed at most this long after 1.5 times its interval."""

SOCKETS_PER_CLIENT_MAX = 2
"""Sockets open per `mqtt.connections_max`. Between the two a socket is told in its CONNACK that the node is full."""

HELD_BYTES_MAX = 64 * MIB
"""Bytes that all connections together keep while the disk is full. With more, nobody of whom anything is kept is read."""


class Counters:
    """What the gateway has done since the start. Plain integers: `millrace.metrics` reads them."""

    __slots__ = (
        "closed_by_reason",
        "connections_accepted",
        "deliveries_acked",
        "publishes_dropped",
        "publishes_in",
        "publishes_out",
        "subscriptions_refused",
        "wills_dropped",
    )

    def __init__(self) -> None:
        self.connections_accepted = 0
        self.publishes_dropped = 0
        self.publishes_in = 0
        self.publishes_out = 0
        self.deliveries_acked = 0
        self.subscriptions_refused = 0
        self.wills_dropped = 0
        self.closed_by_reason: dict[ReasonCode, int] = {}


class Gateway:
    """MQTT over a store.

    Parameters:
        store: where messages go, and come from.
        retained: the retained messages, a part of that store.
        options: see `GatewayOptions`.
    """

    def __init__(self, store: Store, retained: RetainedMessages, options: GatewayOptions) -> None:
        self.store = store
        self.retained = retained
        self.options = options
        self.counters = Counters()
        self.clients: dict[str, Connection] = {}
        self.connections: set[Connection] = set()
        self.loop: asyncio.AbstractEventLoop
        self._fanouts: dict[int, Fanout] = {}
        self._holding: dict[Connection, None] = {}
        self.held_bytes = 0
        """Of PUBLISHes and wills that wait for a disk with room."""
        self._wills: list[Will] = []
        self._wheel: dict[int, set[Connection]] = {}
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
        self.store.space.on_relief.append(self._relieved)
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
        if self._wills:
            logger.warning("will.dropped", count=len(self._wills), why="the node stops while the disk is full")
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

    def register(self, connection: Connection) -> None:
        """Make a connection the one of its client id; an older one with that id is closed [MQTT-3.1.4-2]."""
        client_id = connection.session.client_id
        older = self.clients.get(client_id)
        if older is not None:
            older.close("another connection came with its client id", ReasonCode.SESSION_TAKEN_OVER)
        self.clients[client_id] = connection
        self.counters.connections_accepted += 1

    def assign_client_id(self) -> str:
        """Return a client id for a client that gave none [MQTT-3.1.3-6]."""
        return f"auto-{secrets.token_hex(8)}"

    def refused(self, connection: Connection, why: str, reason: ReasonCode) -> None:
        """Count and log a connection that the server closes."""
        self.counters.closed_by_reason[reason] = self.counters.closed_by_reason.get(reason, 0) + 1
        logger.info("connection.closed", client=connection.session.client_id, reason=reason.name, why=why)

    def publish_will(self, will: Will) -> None:
        """Publish what a client left behind [MQTT-3.1.2-8]. While the disk is full it waits, as a PUBLISH does."""
        try:
            route = self.store.queues.route(will.topic.encode())
            self.store.append_message(route, will.body, b"", will.qos | (Flag.RETAIN if will.retain else 0))
        except DiskFull as error:
            if will.qos and not self.is_holding_all:
                self._wills.append(will)
                self.held_bytes += len(will.body) + HELD_OVERHEAD_BYTES
            else:
                self.counters.wills_dropped += 1
                logger.warning("will.dropped", topic=will.topic[:80], why=str(error))
        except StoreError as error:
            logger.warning("will.refused", topic=will.topic[:80], why=str(error))

    # --- a full disk ------------------------------------------------------------------------------------------------

    @property
    def is_holding_all(self) -> bool:
        """True where `HELD_BYTES_MAX` are kept for a disk with more room."""
        return self.held_bytes > HELD_BYTES_MAX

    def hold(self, connection: Connection, size: int) -> None:
        """Note that a connection keeps `size` bytes that can't be stored now."""
        self._holding[connection] = None
        self.held_bytes += size

    def release(self, connection: Connection, size: int) -> None:
        """Note that a connection keeps nothing any more; it was `size` bytes."""
        self._holding.pop(connection, None)
        self.held_bytes -= size

    def _relieved(self) -> None:
        wills, self._wills = self._wills, []
        self.held_bytes -= sum(len(will.body) + HELD_OVERHEAD_BYTES for will in wills)
        for will in wills:
            self.publish_will(will)
        for connection in tuple(self._holding):
            self.loop.call_soon(connection.release_held)

    # --- keep alive: one timer for all connections ------------------------------------------------------------------

    def watch(self, connection: Connection) -> None:
        """Close a connection that is silent for longer than its keep alive allows."""
        if connection.keep_alive_s:
            self._watch_until(connection, connection.received_s + connection.keep_alive_s)

    def _watch_until(self, connection: Connection, deadline_s: float) -> None:
        self._unwatch(connection)
        connection.wheel_slot = int(deadline_s) + 1
        self._wheel.setdefault(connection.wheel_slot, set()).add(connection)

    def _unwatch(self, connection: Connection) -> None:
        """Take a connection from the wheel: its slot may be a day away, and what is in it stays in memory."""
        watched = self._wheel.get(connection.wheel_slot)
        if watched is not None:
            watched.discard(connection)
            if not watched:
                del self._wheel[connection.wheel_slot]

    def _turn_wheel(self) -> None:
        now_s = self.loop.time()
        self._wheel_timer = self.loop.call_at(int(now_s) + WHEEL_S, self._turn_wheel)
        while self._wheel_second <= now_s:
            for connection in self._wheel.pop(self._wheel_second, ()):
                self._check_alive(connection, now_s)
            self._wheel_second += 1

    def _check_alive(self, connection: Connection, now_s: float) -> None:
        if not connection.connected:
            connection.close("no CONNECT came in mqtt.connect_timeout_ms", ReasonCode.KEEP_ALIVE_TIMEOUT)
        elif connection.silenced:
            self._watch_until(connection, now_s + connection.keep_alive_s)
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
