"""Metrics for Prometheus: read from the parts' own counters when somebody asks, so the hot path counts integers only."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from penstock.gateway.protocol.packets import NAMES
from penstock.pop.core.counters import LATENCY_BOUNDS_MS, Latencies
from penstock.pop.core.snapshot import snapshots
from penstock.store.space import Level

if TYPE_CHECKING:
    from penstock.node.node import Node

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)

GROUPS_LABELLED_MAX = 200
"""Groups with metrics of their own. A label that grows with the users would be the monitoring's end; the sum has all."""


GROUP_GAUGES = {
    "visible": "Messages that a pop could get now; with a filter on delivery: at most.",
    "retries": "Of these, messages that came back.",
    "in_flight": "Messages handed out and not settled.",
    "delayed": "Of these, messages that wait for their back-off.",
    "parked": "Messages that wait behind their message group.",
    "dead": "Dead letters that were not sent back.",
    "waiting": "Pops that wait for a message.",
    "oldest_ms": "Age in ms of the oldest message that is not handed out.",
    "oldest_in_flight_ms": "Age in ms of the oldest delivery that is not settled.",
}


class NodeCollector(Collector):
    """What a node tells about itself."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node = self._node
        store, pop = node.store, node.pop
        yield _gauge("penstock_log_end_bytes", "Position behind the last record of the CommitLog.", store.log.written)
        yield _gauge("penstock_log_durable_bytes", "Position up to which the CommitLog is on disk.", store.durable_position)
        retention = store.retention
        yield _gauge("penstock_log_start_bytes", "Position of the oldest record of the CommitLog.", store.log.start)
        yield _counter("penstock_log_dropped_bytes", "Bytes of the CommitLog dropped by retention.", retention.dropped_bytes)
        yield _counter("penstock_log_copied_bytes", "Bytes of records carried forward.", retention.copied_bytes)
        yield _gauge("penstock_log_pinned_bytes", "Bytes of records that outlive retention.", store.copies.pinned_bytes)
        yield _gauge(
            "penstock_retention_blocked", "1 while store.copied_bytes_max keeps segments from being dropped.", retention.blocked
        )
        yield _counter(
            "penstock_queue_entries_trimmed", "Entries removed from light queues by retention.", retention.trimmed_entries
        )
        yield _counter("penstock_log_syncs", "Group commits: fdatasync calls of the CommitLog.", store.syncs)
        yield _counter("penstock_messages_stored", "Messages stored since the start.", store.messages_stored)
        space = store.space
        yield _gauge("penstock_disk_free_bytes", "Free bytes of the disk of the data directory.", space.usage.free)
        yield _gauge("penstock_disk_reserve_bytes", "Free bytes below which the node is read-only.", space.reserve)
        yield _gauge("penstock_store_read_only", "1 while the disk is too full for new messages.", space.level > Level.OPEN)
        yield _gauge("penstock_store_exhausted", "1 while the disk is too full for any record.", space.level > Level.READ_ONLY)
        refused = CounterMetricFamily(
            "penstock_store_refused", "Records refused because the disk is full.", labels=["kind", "level"]
        )
        for (kind, level), count in space.refused.items():
            refused.add_metric([kind.name.lower(), level.name.lower()], count)
        yield refused
        yield _gauge("penstock_queues", "Light queues that exist.", len(store.queues))
        yield from self._mqtt()
        yield _gauge("penstock_timers_pending", "Delayed messages that wait for their time.", len(node.delayed))
        yield _counter("penstock_timers_fired", "Delayed messages fired since the start.", node.delayed.fired)
        yield _counter("penstock_timers_cancelled", "Delayed messages recalled since the start.", node.delayed.cancelled)
        yield _gauge("penstock_pop_waiting", "Pops that wait for a message.", pop.waiting)
        if node.rocketmq is not None:
            yield _gauge("penstock_rocketmq_clients", "RocketMQ clients heard of lately.", len(node.rocketmq.clients))
        yield _gauge("penstock_pop_checkpoints_open", "Checkpoints that are not settled.", pop.checkpoints_open)
        yield _counter("penstock_pop_handed_out", "Deliveries handed out since the start.", pop.counters.handed_out)
        yield _counter("penstock_pop_acked", "Deliveries acknowledged since the start.", pop.counters.acked)
        yield _counter("penstock_pop_revived", "Deliveries revived since the start.", pop.counters.revived)
        yield _counter(
            "penstock_pop_dead_lettered", "Messages put among the dead letters since the start.", pop.counters.dead_lettered
        )
        yield _counter(
            "penstock_pop_expired", "Messages that no consumer got because their time to live was over.", pop.counters.expired
        )
        yield _counter("penstock_pop_refused", "Pops refused because too many wait.", pop.counters.refused)
        yield _gauge(
            "penstock_pop_revive_late_ms_max",
            "Most ms by which a revival came after its time.",
            pop.counters.revive_late_ms_max,
        )
        yield _gauge("penstock_pop_transactions_pending", "Half messages that wait for their outcome.", len(node.transactions))
        yield _counter("penstock_pop_transactions_committed", "Half messages committed.", node.transactions.committed)
        yield _counter("penstock_pop_transactions_rolled_back", "Half messages rolled back.", node.transactions.rolled_back)
        yield from self._groups()

    def _mqtt(self) -> Iterator[Metric]:
        """The gateway's figures: by listener, version, type of packet and reason, of which there are few; never by client."""
        gateway = self._node.gateway
        counts, traffic, listeners = gateway.counters, gateway.traffic, list(gateway.listeners)
        yield _gauge("penstock_mqtt_connections", "Open MQTT connections.", len(gateway.connections))
        yield _gauge("penstock_mqtt_handshakes", "Connections in a TLS handshake or PROXY header.", gateway.handshakes)
        yield _labelled(
            GaugeMetricFamily("penstock_mqtt_clients", "Clients connected.", labels=["listener", "version"]), traffic.connected
        )
        yield _labelled(
            CounterMetricFamily(
                "penstock_mqtt_connections_accepted", "MQTT clients accepted since the start.", labels=["listener", "version"]
            ),
            traffic.accepted,
        )
        yield _labelled(
            CounterMetricFamily(
                "penstock_mqtt_connections_closed",
                'Connections that ended: "client" where the client ended them, else why the node did.',
                labels=["listener", "reason"],
            ),
            traffic.closed,
        )
        yield _labelled(
            CounterMetricFamily(
                "penstock_mqtt_connections_refused",
                "Sockets closed before they were connections.",
                labels=["listener", "reason"],
            ),
            {(each.name, why): count for each in listeners for why, count in each.refused.items()},
        )
        in_bytes = {(each.name,): each.bytes_in for each in listeners}
        out_bytes = {(each.name,): each.bytes_out for each in listeners}
        for direction, done, packets, publishes, sizes in (
            ("in", "received", traffic.packets_in, counts.publishes_in, in_bytes),
            ("out", "sent", traffic.packets_out, counts.publishes_out, out_bytes),
        ):
            by_type = {(NAMES[kind].lower(),): count for kind, count in enumerate(packets) if count}
            by_type["publish",] = publishes
            yield _labelled(
                CounterMetricFamily(f"penstock_mqtt_packets_{direction}", f"MQTT packets {done}, by type.", labels=["type"]),
                by_type,
            )
            yield _labelled(
                CounterMetricFamily(f"penstock_mqtt_bytes_{direction}", f"Bytes of MQTT {done}.", labels=["listener"]), sizes
            )
        yield _counter("penstock_mqtt_publishes_in", "PUBLISH packets received and stored.", counts.publishes_in)
        yield _counter("penstock_mqtt_publishes_out", "PUBLISH packets sent.", counts.publishes_out)
        yield _counter(
            "penstock_mqtt_deliveries_acked", "Deliveries at QoS 1 and 2 that clients acknowledged.", counts.deliveries_acked
        )
        yield _counter(
            "penstock_mqtt_publishes_refused",
            "PUBLISH packets not stored: refused, or forbidden by plugins.",
            counts.publishes_refused,
        )
        yield _counter(
            "penstock_mqtt_publishes_dropped",
            "PUBLISH packets of QoS 0 dropped because the disk is full.",
            counts.publishes_dropped,
        )
        yield _counter("penstock_mqtt_wills_dropped", "Wills dropped because the disk is full.", counts.wills_dropped)
        yield _gauge("penstock_mqtt_held_bytes", "Bytes of packets that wait for a disk with room.", gateway.backlog.kept_bytes)
        yield _counter(
            "penstock_mqtt_deliveries_too_large",
            "Deliveries left out because their client takes no packet as large.",
            counts.deliveries_too_large,
        )
        yield _counter("penstock_mqtt_subscriptions_refused", "Filters refused in SUBACKs.", counts.subscriptions_refused)
        yield _gauge("penstock_mqtt_retained", "Retained messages.", len(self._node.retained))
        yield from self._mqtt_sessions()
        yield from self._mqtt_protection()

    def _mqtt_sessions(self) -> Iterator[Metric]:
        """Sessions. The slow ones are counted when it is asked for: 0.1 us a connection."""
        gateway = self._node.gateway
        counts, clients = gateway.counters, gateway.clients.values()
        yield _gauge("penstock_mqtt_sessions", "Sessions of clients that are connected.", len(clients))
        yield _gauge(
            "penstock_mqtt_sessions_stored", "Sessions that are stored: of both, and wills.", len(gateway.lifecycle.sessions)
        )
        yield _gauge("penstock_mqtt_sessions_away", "Sessions whose clients are not connected.", gateway.lifecycle.away)
        yield _counter(
            "penstock_mqtt_queued_dropped",
            "Messages passed over because too many waited for a client: see mqtt.session_queued_max.",
            counts.queued_dropped,
        )
        yield _counter(
            "penstock_mqtt_sessions_expired", "Sessions that ended because their time was over.", counts.sessions_expired
        )
        yield _gauge("penstock_mqtt_subscriptions", "Subscriptions of clients that are connected.", counts.subscriptions)
        yield _gauge("penstock_mqtt_subscriptions_shared", "Of these, shared ones.", counts.subscriptions_shared)
        yield _gauge("penstock_mqtt_shared", "Filters that connected clients share, each under one name.", len(gateway.shared))
        yield _counter(
            "penstock_mqtt_deliveries_returned",
            "Deliveries of shared subscriptions that went back to the others, unacknowledged.",
            counts.deliveries_returned,
        )
        yield _gauge(
            "penstock_mqtt_slow_consumers",
            "Clients with subscriptions that read from their cursor, not live.",
            sum(1 for client in clients if client.lagging),
        )

    def _mqtt_protection(self) -> Iterator[Metric]:
        gateway = self._node.gateway
        access, backpressure = gateway.access, gateway.backpressure
        yield _labelled(
            CounterMetricFamily(
                "penstock_mqtt_access_decisions",
                "Answers of the plugins, and of the gateway where it has to answer for them.",
                labels=["action", "outcome"],
            ),
            access.decisions,
        )
        yield _gauge("penstock_mqtt_access_answers", "Answers of the plugins about topics that are kept.", access.kept)
        yield _gauge("penstock_mqtt_access_questions", "Questions that wait for the plugins.", access.questions)
        yield _labelled(
            CounterMetricFamily(
                "penstock_mqtt_throttled", "Reads after which a client had to wait, by whose limit.", labels=["limit"]
            ),
            {(limit,): count for limit, count in gateway.throttle.throttled.items()},
        )
        yield _gauge("penstock_mqtt_throttled_now", "Clients that wait for a rate limit.", len(gateway.throttle))
        yield _counter("penstock_mqtt_held_off", "Times that a source was held off for what it did.", gateway.traffic.held_off)
        yield _gauge(
            "penstock_mqtt_pressure_waiting", "Publishers that are not read until the disk catches up.", len(backpressure)
        )
        yield _counter("penstock_mqtt_pressure", "Times that the disk fell behind.", backpressure.entered)
        yield _gauge(
            "penstock_mqtt_undurable_bytes", "Bytes of log that are stored and not yet on disk.", backpressure.undurable_bytes
        )

    def _groups(self) -> Iterator[Metric]:
        labels = ["group", "filter"]
        gauges = {
            name: GaugeMetricFamily(f"penstock_pop_group_{name}", text, labels=labels) for name, text in GROUP_GAUGES.items()
        }
        latency = HistogramMetricFamily(
            "penstock_pop_group_ack_latency_ms", "Milliseconds from pop to acknowledgement.", labels=labels
        )
        for told in snapshots(islice(self._node.pop, GROUPS_LABELLED_MAX), self._node.pop.state, self._node.store):
            group = told.group
            values = {
                "visible": told.visible,
                "retries": told.retries,
                "in_flight": told.in_flight,
                "delayed": told.delayed,
                "parked": told.parked,
                "dead": told.dead,
                "waiting": len(group.polls),
                "oldest_ms": told.oldest_ms or 0,
                "oldest_in_flight_ms": told.oldest_in_flight_ms or 0,
            }
            for name, value in values.items():
                gauges[name].add_metric([group.name, group.filter], value)
            buckets, total = _histogram(group.latency)
            latency.add_metric([group.name, group.filter], buckets, total)
        yield from gauges.values()
        yield latency
        lateness = HistogramMetricFamily(
            "penstock_pop_revive_lateness_ms", "Milliseconds by which revivals came after their time."
        )
        lateness.add_metric([], *_histogram(self._node.pop.counters.revive_lateness))
        yield lateness


def _histogram(latencies: Latencies) -> tuple[list[tuple[str, float]], float]:
    """Return the buckets, each with all below it, and the sum."""
    ends = [*map(str, LATENCY_BOUNDS_MS), "+Inf"]
    return list(zip(ends, accumulate(latencies.counts), strict=True)), latencies.sum_ms


def registry_of(node: Node) -> CollectorRegistry:
    """Return the registry that a node's `/metrics` shows: its own figures and its process's."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(node))
    ProcessCollector(registry=registry)
    return registry


def _labelled(family: Family, values: Mapping[Any, float]) -> Family:
    """Return a family with a sample for each tuple of its labels (tuples are of one length: no type says that of a key)."""
    for labels, value in values.items():
        family.add_metric(list(labels), value)
    return family


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
