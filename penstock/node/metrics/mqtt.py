"""Metrics of MQTT. Labels are listeners, versions, packet types and reasons, which are few, and never clients or topics."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.gateway.delivery.retained_messages import RetainedMessages
from penstock.gateway.gateway import Gateway
from penstock.gateway.protocol.packets import NAMES
from penstock.node.metrics.families import counter, durations, gauge, labelled_counter, labelled_gauge


class MqttConnectionCollector(Collector):
    """Figures of connections and packets."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway, traffic, listeners = self._gateway, self._gateway.traffic, list(self._gateway.listeners)
        yield gauge("penstock_mqtt_connections", "Open connections.", len(gateway.connections))
        yield gauge(
            "penstock_mqtt_handshakes", "Connections in a TLS handshake or PROXY header.", gateway.listeners.handshakes.open
        )
        lingering = gateway.sockets.lingering if gateway.sockets is not None else None
        yield gauge(
            "penstock_mqtt_sockets_lingering",
            "Sockets whose clients have not closed their side yet.",
            len(lingering) if lingering is not None else 0,
        )
        yield counter(
            "penstock_mqtt_sockets_cut_short",
            "Sockets closed before their clients had closed their side.",
            lingering.cut_short if lingering is not None else 0,
        )
        yield labelled_gauge("penstock_mqtt_clients", "Connected clients.", ["listener", "version"], traffic.connected)
        yield labelled_counter(
            "penstock_mqtt_connections_accepted",
            "Clients accepted.",
            ["listener", "version"],
            traffic.accepted,
        )
        yield labelled_counter(
            "penstock_mqtt_connections_closed",
            "Connections closed, by the node's reason, or client.",
            ["listener", "reason"],
            traffic.closed,
        )
        yield labelled_counter(
            "penstock_mqtt_connections_refused",
            "Sockets closed before MQTT began on them.",
            ["listener", "reason"],
            {(each.name, reason): count for each in listeners for reason, count in each.admission.refused.items()},
        )
        yield from self._packets("in", "received", traffic.packets_in, gateway.counters.publishes_in)
        yield from self._packets("out", "sent", traffic.packets_out, gateway.counters.publishes_out)
        for direction, done, sizes in (
            ("in", "received", {(each.name,): each.bytes_in for each in listeners}),
            ("out", "sent", {(each.name,): each.bytes_out for each in listeners}),
        ):
            yield labelled_counter(f"penstock_mqtt_bytes_{direction}", f"Bytes {done}.", ["listener"], sizes)

    def _packets(self, direction: str, done: str, packets: list[int], publishes: int) -> Iterator[Metric]:
        by_type = {(NAMES[kind].lower(),): count for kind, count in enumerate(packets) if count}
        by_type["publish",] = publishes
        yield labelled_counter(f"penstock_mqtt_packets_{direction}", f"Packets {done}.", ["type"], by_type)


class MqttMessageCollector(Collector):
    """Figures of publishes, deliveries, sessions and subscriptions."""

    def __init__(self, gateway: Gateway, retained: RetainedMessages) -> None:
        self._gateway = gateway
        self._retained = retained

    def collect(self) -> Iterator[Metric]:
        counters = self._gateway.counters
        yield counter("penstock_mqtt_publishes_in", "PUBLISH packets stored.", counters.publishes_in)
        yield counter("penstock_mqtt_publishes_out", "PUBLISH packets sent.", counters.publishes_out)
        yield counter(
            "penstock_mqtt_deliveries_acked",
            "Deliveries that clients acknowledged.",
            counters.deliveries_acked,
        )
        yield durations(
            "penstock_mqtt_delivery_seconds",
            "Time from a commit until clients that keep up have been sent its messages.",
            self._gateway.fanouts.times,
        )
        yield counter(
            "penstock_mqtt_publishes_refused",
            "PUBLISH packets refused.",
            counters.publishes_refused,
        )
        yield counter(
            "penstock_mqtt_publishes_dropped",
            "PUBLISH packets of QoS 0 dropped because the disk is full.",
            counters.publishes_dropped,
        )
        yield counter("penstock_mqtt_wills_dropped", "Wills dropped because the disk is full.", counters.wills_dropped)
        yield gauge(
            "penstock_mqtt_held_bytes",
            "Bytes of packets that wait until the disk has room.",
            self._gateway.backlog.kept_bytes,
        )
        yield counter(
            "penstock_mqtt_deliveries_too_large",
            "Deliveries skipped because of the client's Maximum Packet Size.",
            counters.deliveries_too_large,
        )
        yield counter(
            "penstock_mqtt_deliveries_untaken",
            "Deliveries of shared subscriptions that no member could take.",
            counters.deliveries_untaken,
        )
        yield gauge("penstock_mqtt_retained", "Retained messages.", len(self._retained))
        yield from self._sessions()
        yield from self._subscriptions()

    def _sessions(self) -> Iterator[Metric]:
        gateway, counters = self._gateway, self._gateway.counters
        yield gauge("penstock_mqtt_sessions", "Sessions of connected clients.", len(gateway.clients.values()))
        yield gauge(
            "penstock_mqtt_sessions_stored",
            "Stored sessions and wills.",
            len(gateway.lifecycle.sessions),
        )
        yield gauge("penstock_mqtt_sessions_away", "Stored sessions of disconnected clients.", gateway.lifecycle.away)
        yield counter(
            "penstock_mqtt_queued_dropped",
            "Messages skipped because of mqtt.session_queued_max.",
            counters.queued_dropped,
        )
        yield counter("penstock_mqtt_sessions_expired", "Sessions that expired.", counters.sessions_expired)

    def _subscriptions(self) -> Iterator[Metric]:
        gateway, counters = self._gateway, self._gateway.counters
        yield counter(
            "penstock_mqtt_subscriptions_refused", "Topic filters refused in SUBACK packets.", counters.subscriptions_refused
        )
        yield counter(
            "penstock_mqtt_subscriptions_withdrawn",
            "Subscriptions ended because access was withdrawn.",
            counters.subscriptions_withdrawn,
        )
        yield gauge("penstock_mqtt_subscriptions", "Subscriptions of connected clients.", counters.subscriptions)
        yield gauge(
            "penstock_mqtt_subscriptions_shared", "Shared subscriptions of connected clients.", counters.subscriptions_shared
        )
        yield gauge("penstock_mqtt_shared", "Pairs of share name and filter that connected clients use.", len(gateway.shared))
        yield counter(
            "penstock_mqtt_deliveries_returned",
            "Deliveries of shared subscriptions returned unacknowledged.",
            counters.deliveries_returned,
        )
        yield gauge(
            "penstock_mqtt_slow_consumers",
            "Clients with a subscription that has fallen behind.",
            sum(1 for client in gateway.clients.values() if client.outbox.lagging),
        )


class MqttProtectionCollector(Collector):
    """Figures of access control, rate limits and back-pressure."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def collect(self) -> Iterator[Metric]:
        gateway, authorizer, backpressure = self._gateway, self._gateway.authorizer, self._gateway.backpressure
        yield labelled_counter(
            "penstock_mqtt_access_decisions",
            "Questions to plugins, by answer, or why there was none: error, timeout or overload.",
            ["action", "outcome"],
            authorizer.questions.outcomes,
        )
        yield gauge("penstock_mqtt_access_answers", "Cached answers of plugins about topics.", authorizer.decisions.kept)
        yield gauge("penstock_mqtt_access_questions", "Questions that wait for plugins.", authorizer.questions.waiting)
        logins, verified = authorizer.logins.queue, authorizer.logins.verified
        yield gauge("penstock_mqtt_logins_waiting", "Logins that wait for their turn.", logins.waiting)
        yield gauge(
            "penstock_mqtt_logins_waiting_max",
            "Logins that may wait; further ones are held.",
            logins.waiting_max,
        )
        yield gauge(
            "penstock_mqtt_logins_held",
            "Logins for which there is no room to wait.",
            logins.held,
        )
        yield gauge("penstock_mqtt_logins_running", "Logins under way.", logins.running)
        yield gauge(
            "penstock_mqtt_logins_per_second",
            "Logins answered per second when more came than could be answered; 0 before that.",
            logins.per_s,
        )
        yield gauge(
            "penstock_mqtt_login_wait_seconds",
            "Seconds until all waiting and held logins could be answered.",
            logins.wait_s,
        )
        yield gauge(
            "penstock_mqtt_logins_remembered",
            "Remembered credentials.",
            len(verified) if verified is not None else 0,
        )
        yield counter(
            "penstock_mqtt_logins_recognized",
            "Logins whose credentials were remembered.",
            verified.hits if verified is not None else 0,
        )
        yield labelled_counter(
            "penstock_mqtt_throttled",
            "Pauses of clients by a rate limit.",
            ["limit"],
            {(limit,): count for limit, count in gateway.throttle.throttled.items()},
        )
        yield gauge("penstock_mqtt_throttled_now", "Clients paused by a rate limit.", len(gateway.throttle))
        yield counter(
            "penstock_mqtt_held_off",
            "Clients, users and sources held off after protocol errors.",
            gateway.traffic.held_off,
        )
        yield gauge("penstock_mqtt_backpressure_waiting", "Publishers paused until the disk catches up.", len(backpressure))
        yield counter("penstock_mqtt_backpressure", "Times that the disk fell behind.", backpressure.entered)
        yield gauge(
            "penstock_mqtt_undurable_bytes",
            "Bytes of the log that are not yet on disk.",
            backpressure.undurable_bytes,
        )
