"""The figures below `$SYS/broker/`, under the names that users of mosquitto know."""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass

from penstock.gateway.counters import GatewayCounters
from penstock.gateway.sessions.lifecycle import SessionLifecycle
from penstock.gateway.traffic import Traffic
from penstock.gateway.transport.listeners import Listeners
from penstock.store.store import Store


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
