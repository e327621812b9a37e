"""`$SYS/broker/...`: what the node tells about itself over MQTT, under the names that mosquitto's users know.

Nothing of it is stored. A new subscription gets all values it matches as retained messages, and after that those that have
changed, every `mqtt.sys_interval_s`, at QoS 0. A client that doesn't read misses some.
"""

from __future__ import annotations

from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

from penstock.gateway.protocol.codec import encode_publish
from penstock.gateway.protocol.fields import write_varint
from penstock.store import topics

if TYPE_CHECKING:
    from penstock.gateway.delivery.subscription import Subscription
    from penstock.gateway.gateway import Gateway

PREFIX = "$SYS/"

try:
    VERSION = f"Penstock {version('penstock')}"
except PackageNotFoundError:  # run from a checkout that was never installed
    VERSION = "Penstock"


class SystemTopics:
    """The node's own topics.

    Parameters:
        gateway: whose figures they are.
    """

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._subscriptions: dict[Subscription, None] = {}
        self._told: dict[str, str] = {}
        self._next_s = 0.0
        self._started_s = 0.0

    def subscribed(self, subscription: Subscription, *, says_all: bool) -> None:
        """Serve a subscription, if it is one to such topics; with `says_all` it begins with all values."""
        if not subscription.filter.startswith(PREFIX) or not self._gateway.options.sys_interval_s:
            return
        self._subscriptions[subscription] = None
        if says_all:  # behind the SUBACK
            self._gateway.loop.call_soon(self._tell_all, subscription)

    def _tell_all(self, subscription: Subscription) -> None:
        self._tell(subscription, self.values(), retain=True)

    def unsubscribed(self, subscription: Subscription) -> None:
        """Serve a subscription no longer."""
        self._subscriptions.pop(subscription, None)

    def turn(self, now_s: float) -> None:
        """Publish what has changed, if it is time. Called every second or so; `now_s` is the monotonic time in seconds."""
        self._started_s = self._started_s or now_s
        interval_s = self._gateway.options.sys_interval_s
        if not interval_s or now_s < self._next_s or not self._subscriptions:
            return
        self._next_s = now_s + interval_s
        values = self.values()
        changed = {topic: value for topic, value in values.items() if self._told.get(topic) != value}
        self._told = values
        for subscription in tuple(self._subscriptions):
            self._tell(subscription, changed, retain=False)

    def values(self) -> dict[str, str]:
        """Return all topics with their values."""
        gateway = self._gateway
        counters, traffic, listeners = gateway.counters, gateway.traffic, tuple(gateway.listeners)
        connected, away = len(gateway.clients), gateway.lifetimes.away
        uptime_s = int(gateway.clock.monotonic_s() - self._started_s) if self._started_s else 0
        figures: dict[str, object] = {
            "version": VERSION,
            "uptime": f"{uptime_s} seconds",
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
            "retained messages/count": len(gateway.retained),
            "messages/stored": gateway.store.messages_stored,
        }
        return {f"{PREFIX}broker/{name}": str(value) for name, value in figures.items()}

    def _tell(self, subscription: Subscription, values: dict[str, str], *, retain: bool) -> None:
        connection = subscription.connection
        if subscription not in self._subscriptions or not connection.connected or not connection.writable:
            return
        values = {topic: value for topic, value in values.items() if topics.matches(subscription.filter, topic)}
        if connection.guard is not None:
            again = partial(self._tell, subscription, values, retain=retain)
            allowed = connection.guard.receivable([topic.encode() for topic in values], again)
            if allowed is None:  # told when the plugins have answered
                return
            values = {topic.decode(): values[topic.decode()] for topic in allowed}
        properties = b""
        if connection.is_v5:
            raw = b"\x0b" + write_varint(subscription.identifier) if subscription.identifier else b""
            properties = write_varint(len(raw)) + raw
        packets = [
            encode_publish(topic.encode(), value.encode(), 0, retain=retain, properties=properties)
            for topic, value in values.items()
        ]
        most = connection.packet_bytes_max
        packets = [packet for packet in packets if most is None or len(packet) <= most]
        if packets:
            connection.send_publishes(b"".join(packets), len(packets))
