"""The topics `$SYS/broker/...`: what the node tells about itself over MQTT, under the names that users of mosquitto know.

None of it is stored. A new subscription gets all values that it matches as retained messages. Every `mqtt.sys_interval` it
gets those that have changed, at QoS 0. A client that doesn't read misses some.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version

from penstock.gateway.counters import GatewayCounters, Traffic
from penstock.gateway.delivery.subscription import Subscription
from penstock.gateway.protocol.encode import encode_publish
from penstock.gateway.protocol.fields import write_varint
from penstock.gateway.sessions.lifecycle import SessionLifecycle
from penstock.gateway.transport.listeners import Listeners
from penstock.store import topics
from penstock.store.store import Store

PREFIX = "$SYS/"

try:
    VERSION = f"Penstock {version('penstock')}"
except PackageNotFoundError:  # The node runs from a checkout that was never installed.
    VERSION = "Penstock"


class SystemTopics:
    """The node's own topics.

    Parameters:
        interval_s: seconds between two publications; 0 to publish nothing (`mqtt.sys_interval`).
        read_figures: returns the current figures by topic, without `$SYS/broker/`.
        now_s: returns the monotonic time in seconds.
    """

    def __init__(self, interval_s: float, read_figures: Callable[[], Mapping[str, object]], now_s: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._read_figures = read_figures
        self._now_s = now_s
        self._loop: asyncio.AbstractEventLoop
        self._subscriptions: dict[Subscription, None] = {}
        self._undecided: set[Subscription] = set()
        """Those for which the plugins are asked. They miss a publication, so that none piles up for them."""
        self._published: dict[str, str] = {}
        """The values of the last publication."""
        self._next_s = 0.0
        """When the next publication is due."""
        self._started_s = 0.0

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to work on a loop. The first publication is due an interval later: a new subscription has all values."""
        self._loop = loop
        self._started_s = self._now_s()
        self._next_s = self._started_s + self._interval_s

    def add(self, subscription: Subscription, *, sends_all: bool) -> None:
        """Serve a subscription to topics below `$SYS/`. With `sends_all` it first gets all values as retained messages."""
        if not subscription.filter.startswith(PREFIX) or not self._interval_s:
            return
        self._subscriptions[subscription] = None
        if sends_all:  # The SUBACK is sent first.
            self._loop.call_soon(self._send_all, subscription)

    def remove(self, subscription: Subscription) -> None:
        """Serve a subscription no longer."""
        self._subscriptions.pop(subscription, None)
        self._undecided.discard(subscription)

    def turn(self, now_s: float) -> None:
        """Publish what has changed if a publication is due. The gateway calls this once a second with its monotonic time."""
        if not self._interval_s or now_s < self._next_s:
            return
        self._next_s = now_s + self._interval_s
        if not self._subscriptions:
            return
        values = self.values()
        changed = {topic: value for topic, value in values.items() if self._published.get(topic) != value}
        self._published = values
        for subscription in [one for one in self._subscriptions if one not in self._undecided]:
            self._send(subscription, changed, retain=False)

    def values(self) -> dict[str, str]:
        """Return the current values by topic."""
        uptime_s = int(self._now_s() - self._started_s)
        figures = {"version": VERSION, "uptime": f"{uptime_s} seconds", **self._read_figures()}
        return {f"{PREFIX}broker/{name}": str(value) for name, value in figures.items()}

    def _send_all(self, subscription: Subscription) -> None:
        self._send(subscription, self.values(), retain=True)

    def _send(self, subscription: Subscription, values: dict[str, str], *, retain: bool) -> None:
        outlet = subscription.outlet
        self._undecided.discard(subscription)
        if subscription not in self._subscriptions or not outlet.writable:
            return
        values = {topic: value for topic, value in values.items() if topics.matches(subscription.filter, topic)}
        if outlet.permissions is not None:
            again = partial(self._send, subscription, values, retain=retain)
            allowed = outlet.permissions.receivable([topic.encode() for topic in values], again)
            if allowed is None:  # The plugins are asked, and `again` runs when they have answered.
                self._undecided.add(subscription)
                return
            values = {topic.decode(): values[topic.decode()] for topic in allowed}
        properties = b""
        if outlet.is_v5:
            raw = b"\x0b" + write_varint(subscription.identifier) if subscription.identifier else b""
            properties = write_varint(len(raw)) + raw
        packets = [
            encode_publish(topic.encode(), value.encode(), 0, retain=retain, properties=properties)
            for topic, value in values.items()
        ]
        packet_bytes_max = outlet.packet_bytes_max
        packets = [packet for packet in packets if packet_bytes_max is None or len(packet) <= packet_bytes_max]
        if packets:
            outlet.send_publishes(b"".join(packets), len(packets))


@dataclass(frozen=True, slots=True)
class SystemFigures:
    """The parts of the gateway whose figures are published."""

    store: Store
    retained: Sized
    """The retained messages."""
    clients: Sized
    """The clients that are connected."""
    lifecycle: SessionLifecycle
    listeners: Listeners
    counters: GatewayCounters
    traffic: Traffic

    def read(self) -> Mapping[str, object]:
        """Return the current figures by topic, without `$SYS/broker/`."""
        counters, traffic = self.counters, self.traffic
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
            "bytes/received": sum(listener.bytes_in for listener in self.listeners),
            "bytes/sent": sum(listener.bytes_out for listener in self.listeners),
            "subscriptions/count": counters.subscriptions,
            "shared_subscriptions/count": counters.subscriptions_shared,
            "retained messages/count": len(self.retained),
            "messages/stored": self.store.messages_stored,
        }
