"""What all subscriptions of a node use."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.counters import GatewayCounters
from penstock.gateway.delivery.fanout import Fanouts
from penstock.gateway.delivery.mqtttraces import MqttTraces
from penstock.gateway.sessions.journal import SessionJournal
from penstock.store.store import Store


@dataclass(frozen=True, slots=True)
class DeliveryContext:
    """What all subscriptions of a node use to deliver messages."""

    store: Store
    """The store, which has the messages."""
    fanouts: Fanouts
    """The fanouts of all light queues that have live subscriptions."""
    journal: SessionJournal
    """Records how far the subscriptions of lasting sessions have got."""
    counters: GatewayCounters
    """The counters of the gateway."""
    traces: MqttTraces | None = None
    """Makes spans of deliveries; None without tracing."""
    sends_once: bool = False
    """Whether clients of MQTT 3.1.1, too, get one copy of a message that several subscriptions match (`mqtt.overlapping`)."""
