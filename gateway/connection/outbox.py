"""The output of one connection: answers, deliveries, and the end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final
from weakref import ref

from penstock.gateway.connection.backpressure import PauseReason
from penstock.gateway.connection.redelivery import Redelivery
from penstock.gateway.counters import GatewayCounters, Traffic
from penstock.gateway.delivery.aliases import TopicAliases
from penstock.gateway.delivery.client_subscriptions import ClientSubscriptions
from penstock.gateway.protocol.encode import encode_disconnect
from penstock.gateway.protocol.packets import DISCONNECT, PUBREL
from penstock.gateway.protocol.reasons import ReasonCode
from penstock.gateway.transport.overtime import Overtime
from penstock.gateway.transport.peer import PeerListener
from penstock.store.options import KIB
from penstock.store.store import Store

if TYPE_CHECKING:
    from penstock.gateway.auth.permissions import Permissions
    from penstock.gateway.connection.connection import Connection
    from penstock.gateway.delivery.subscription import Subscription

CLOSE_FLUSH_S: Final = 1.0
"""Seconds that a connection which the server closes has to send what was written before, and the acks that are due."""

ANSWERS_BYTES_MAX: Final = 64 * KIB
"""Bytes of answers (acks, PINGRESP) that may pile up behind a full send buffer before the server stops reading the client."""

HELD_BYTES: Final = 64
"""Memory that an answer takes besides its bytes while it waits for the CONNACK."""


class Outbox:
    """Writes the packets of one connection.

    Subscriptions deliver through it: they look at `writable`, join `lagging` when they cannot go on, and are pumped when they
    can. The outbox has only a weak reference to its connection: memory that is in no circle is freed at once.

    Parameters:
        store: says when records are durable.
        counters, traffic: count what is sent.
        listener: counts the bytes.
        send_buffer_bytes: see `GatewayOptions.send_buffer_bytes`.
        queued_max: see `GatewayOptions.session_queued_max`.
        overtime: bounds what is sent in one turn of the loop.
    """

    __slots__ = (
        "_answers_bytes",
        "_counters",
        "_farewell",
        "_gathered",
        "_held",
        "_is_closed",
        "_is_full",
        "_is_pump_scheduled",
        "_listener",
        "_loop",
        "_overtime",
        "_owner",
        "_queued_max",
        "_send_buffer_bytes",
        "_store",
        "_subscriptions",
        "_traffic",
        "_transport",
        "_waiting_bytes",
        "_waiting_runs",
        "aliases",
        "bytes_out",
        "has_greeted",
        "is_v5",
        "lagging",
        "messages_out",
        "packet_bytes_max",
        "permissions",
        "redelivery",
        "says_why",
        "unacked",
        "writable",
    )

    def __init__(
        self,
        store: Store,
        counters: GatewayCounters,
        traffic: Traffic,
        listener: PeerListener,
        *,
        send_buffer_bytes: int,
        queued_max: int,
        overtime: Overtime,
    ) -> None:
        self._store = store
        self._counters = counters
        self._traffic = traffic
        self._listener = listener
        self._send_buffer_bytes = send_buffer_bytes
        self._queued_max = queued_max
        self._overtime = overtime
        self._owner: ref[Connection]
        self._loop: asyncio.AbstractEventLoop
        self._transport: asyncio.Transport | None = None
        self._subscriptions: ClientSubscriptions | None = None
        """The subscriptions of the client, from its CONNECT to the end of the connection."""
        self.bytes_out = 0
        """Bytes of the packets that were sent."""
        self.messages_out = 0
        """PUBLISH packets that were sent."""
        self.writable = True
        """There is room for more deliveries."""
        self.lagging: dict[Subscription, None] = {}
        """The subscriptions that are not live. The one that has waited longest for its turn comes first."""
        self.redelivery: Redelivery | None = None
        """What an earlier connection left unacknowledged, until all of it has gone out again."""
        self.permissions: Permissions | None = None
        """What the plugins allow the client to receive, if there are plugins for topics."""
        self.has_greeted = False
        """A CONNACK of success went out or will do so first, so a DISCONNECT may follow [MQTT-3.14.0-1]."""
        self.is_v5 = False
        self.says_why = True
        """The client wants reason strings."""
        self.packet_bytes_max: int | None = None
        """The largest packet that the client takes, if it has stated one."""
        self.aliases: TopicAliases | None = None
        """The topic aliases that the server has given, if the client wants them."""
        self.unacked = 0
        """PUBLISHes at QoS 1 whose ack waits until they are durable. Those at QoS 2 are in `Session.received`."""
        self._waiting_runs = 0
        self._waiting_bytes = 0
        """PUBLISHes that go out when their packet ids are durable."""
        self._is_full = False
        """The transport's buffer is full."""
        self._answers_bytes = 0
        self._gathered: list[bytes] | None = None
        """The answers to the read that is handled now; None if each goes out at once."""
        self._held: list[tuple[bytes, int]] | None = None
        """Answers that wait for the CONNACK, with the numbers of their packets; None if no CONNACK waits."""
        self._is_pump_scheduled = False
        self._is_closed = False
        self._farewell = b""

    def open(self, owner: Connection, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Write to a transport from now on."""
        self._owner = ref(owner)
        self._transport = transport
        self._loop = loop
        transport.set_write_buffer_limits(high=self._send_buffer_bytes)

    def begin(self, subscriptions: ClientSubscriptions) -> None:
        """Deliver what subscriptions have: the CONNECT was accepted."""
        self._subscriptions = subscriptions

    def end(self) -> None:
        """Deliver nothing more: the connection has ended. Answers that are due still go out."""
        self._subscriptions = self.redelivery = None

    # --- the transport's buffer -------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        """Stop deliveries: the transport's buffer is full.

        Reading goes on, or the server would miss the pings of a slow subscriber. `send` bounds what is written meanwhile.
        """
        self.writable = False
        self._is_full = True

    def resume_writing(self) -> None:
        """Go on with deliveries: the transport's buffer has room."""
        self._is_full = False
        self._answers_read()
        self._write_on()

    def _answers_read(self) -> None:
        """Read the client again: no answers pile up any more."""
        self._answers_bytes = 0
        if self._transport is not None and not self._is_closed and (owner := self._owner()) is not None:
            owner.resume_reading(PauseReason.ANSWERS_UNREAD)

    def _write_on(self) -> None:
        """Deliver again if nothing prevents it any more."""
        self.writable = not self._is_full and self._waiting_bytes < self._send_buffer_bytes
        if self.writable and self._transport is not None and not self._is_closed:
            self.pump()

    # --- deliveries -------------------------------------------------------------------------------------------------

    def pump_soon(self) -> None:
        """Go on with the subscriptions that lag, in a later turn of the loop."""
        if not self._is_pump_scheduled:
            self._is_pump_scheduled = True
            self._overtime.add(self._pump_on)

    def _pump_on(self) -> None:
        self._is_pump_scheduled = False
        self.pump()

    def pump(self) -> None:
        """Send as much as there is room for: first what an earlier connection left, then what lagging subscriptions have."""
        subscriptions = self._subscriptions
        if subscriptions is None:
            return
        if self.redelivery is not None and self.redelivery.send():
            self.redelivery = None
        if self._queued_max and self.lagging:
            subscriptions.limit_backlog()
        for subscription in tuple(self.lagging):
            if not self.writable or self.redelivery is not None:
                break
            self.lagging[subscription] = self.lagging.pop(subscription)  # to the end: they take turns
            subscription.pump()
            if self.lagging and self._overtime.is_over():
                self.pump_soon()
                break
        if subscriptions.draining:
            subscriptions.release_drained()

    def send_publishes(self, data: bytes, count: int) -> None:
        """Send a run of `count` PUBLISH packets, after the runs that wait."""
        if self._waiting_runs:
            self.send_when_durable(data, count)
            return
        size = len(data)
        self._counters.publishes_out += count
        self.messages_out += count
        self._listener.bytes_out += size
        self.bytes_out += size
        if self._transport is not None:
            if self._gathered:
                self._send_gathered()
            self._transport.write(data)

    def send_when_durable(self, data: bytes, count: int) -> None:
        """Send a run of `count` PUBLISH packets, or one PUBREL if it is 0, when all records appended so far are durable.

        Deliveries stop while more waits than the send buffer takes.
        """
        self._waiting_runs += 1
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= self._send_buffer_bytes:
            self.writable = False
        self._store.when_durable(partial(self._send_durable, data, count))

    def _send_durable(self, data: bytes, count: int) -> None:
        self._counters.publishes_out += count
        self.messages_out += count
        if not count:
            self._traffic.packets_out[PUBREL] += 1
        self._listener.bytes_out += len(data)
        self.bytes_out += len(data)
        if self._transport is not None:
            if self._gathered:
                self._send_gathered()
            self._transport.write(data)
        self._waiting_runs -= 1
        self._waiting_bytes -= len(data)
        if not self.writable:
            self._write_on()

    # --- answers ----------------------------------------------------------------------------------------------------

    def greet(self, connack: bytes, *, is_recorded: bool) -> None:
        """Send a CONNACK of success. Everything else goes out after it.

        Args:
            connack: the packet.
            is_recorded: the CONNECT has begun, resumed or ended a stored session. The CONNACK says so, and waits until that is
                durable: see "Sessions" in `docs/internals/gateway.md`.
        """
        if is_recorded and len(connack) <= (self.packet_bytes_max or len(connack)):
            self._held = []
            self._waiting_runs += 1
            self._store.when_durable(partial(self._greet, connack))
        else:
            self.send(connack)
        self.has_greeted = True

    def _greet(self, connack: bytes) -> None:
        held, self._held = self._held, None
        assert held is not None, "a CONNACK waits once"
        self._waiting_runs -= 1
        self.send(connack)
        for data, packets in held:
            self.send(data, packets)
        if self._answers_bytes and not self._is_full:
            self._answers_read()

    def send(self, data: bytes, packets: int = 1) -> None:
        """Send answers: `packets` packets of one type.

        A client that does not read its answers must not make the server write more: the server stops reading it.
        """
        transport, size = self._transport, len(data)
        if transport is None:
            return
        if self._held is not None:
            self._held.append((data, packets))
            self._pile_up(size + HELD_BYTES)
            return
        if self.packet_bytes_max is not None and packets == 1 and size > self.packet_bytes_max:  # [MQTT-3.1.2-24]
            if (owner := self._owner()) is not None:
                owner.close(
                    f"an answer of {size} bytes exceeds the client's maximum packet size of {self.packet_bytes_max}",
                    ReasonCode.PACKET_TOO_LARGE,
                )
            return
        self._listener.bytes_out += size
        self.bytes_out += size
        self._traffic.packets_out[data[0] >> 4] += packets
        if self._gathered is None:
            transport.write(data)
        else:
            self._gathered.append(data)
        if self._is_full:
            self.note_answer(size)

    def note_answer(self, size: int) -> None:
        """Count an answer of `size` bytes, and stop reading a client that lets too many pile up."""
        if self._is_full:
            self._pile_up(size)

    def _pile_up(self, size: int) -> None:
        self._answers_bytes += size
        if self._answers_bytes > ANSWERS_BYTES_MAX and (owner := self._owner()) is not None:
            owner.pause_reading(PauseReason.ANSWERS_UNREAD)

    def gather(self) -> None:
        """Collect answers from now on, so that the many answers to one read take one write."""
        self._gathered = []

    def send_gathered(self) -> None:
        """Send what was collected, and collect nothing more."""
        if self._gathered:
            self._send_gathered()
        self._gathered = None

    def _send_gathered(self) -> None:
        gathered, self._gathered = self._gathered, []
        if self._transport is not None and gathered:
            self._transport.write(b"".join(gathered))

    def send_pubacks(self, data: bytes, count: int) -> None:
        """Send `count` PUBACKs that were counted in `unacked`."""
        self.unacked -= count
        self.send(data, count)

    def send_when_recorded(self, data: bytes) -> None:
        """Send an answer when all records that were appended so far are durable: what the answer says is among them."""
        self._store.when_durable(partial(self.send, data))

    def explained(self, encode: Callable[[str], bytes], why: str) -> bytes:
        """Return a packet with its reason string, or with the value of its user property.

        If the client wants neither [MQTT-3.1.2-29], or takes no packet as large, the packet comes without it. See
        [MQTT-3.2.2-19], [MQTT-3.4.2-2], [MQTT-3.4.2-3], [MQTT-3.5.2-2], [MQTT-3.5.2-3], [MQTT-3.14.2-3].
        """
        data = encode(why if self.says_why else "")
        return data if len(data) <= (self.packet_bytes_max or len(data)) else encode("")

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, why: str, reason: ReasonCode) -> None:
        """Close the transport after what was written, and after the acks that are due.

        A client of MQTT 5.0 that was accepted gets a DISCONNECT with the reason last, unless the client itself has left.
        """
        self._is_closed = True
        if self._transport is None:
            return
        if self.is_v5 and self.has_greeted and reason != ReasonCode.NORMAL_DISCONNECTION:
            farewell = self.explained(partial(encode_disconnect, reason), why)  # [MQTT-4.13.1-1]
            self._farewell = farewell if len(farewell) <= (self.packet_bytes_max or len(farewell)) else b""
        self._store.when_durable(self._close_transport)
        self._loop.call_later(CLOSE_FLUSH_S, self.abort)

    def _close_transport(self) -> None:
        if self._transport is not None:
            if self._gathered:
                self._send_gathered()
            if self._farewell:
                self._listener.bytes_out += len(self._farewell)
                self.bytes_out += len(self._farewell)
                self._traffic.packets_out[DISCONNECT] += 1
                self._transport.write(self._farewell)
            self._transport.close()

    def abort(self) -> None:
        """Close the transport at once."""
        if self._transport is not None:
            self._transport.abort()

    def lost(self) -> None:
        """Write nothing more: the transport has closed."""
        self._is_closed = True
        self._transport = None
