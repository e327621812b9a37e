"""Metrics for Prometheus: read from the parts' own counters when somebody asks, so the hot path counts integers only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from millrace.node import Node

GROUPS_LABELLED_MAX = 200
"""Groups with metrics of their own. A label that grows with the users would be the monitoring's end; the sum has all."""


class NodeCollector(Collector):
    """What a node tells about itself."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def collect(self) -> Iterator[Metric]:
        node = self._node
        store, pop, gateway = node.store, node.pop, node.gateway
        counts = gateway.counters
        yield _gauge("millrace_log_end_bytes", "Position behind the last record of the CommitLog.", store.log.written)
        yield _gauge("millrace_log_durable_bytes", "Position up to which the CommitLog is on disk.", store.durable_position)
        retention = store.retention
        yield _gauge("millrace_log_start_bytes", "Position of the oldest record of the CommitLog.", store.log.start)
        yield _counter("millrace_log_dropped_bytes", "Bytes of the CommitLog dropped by retention.", retention.dropped_bytes)
        yield _counter("millrace_log_copied_bytes", "Bytes of records carried forward.", retention.copied_bytes)
        yield _gauge("millrace_log_pinned_bytes", "Bytes of records that outlive retention.", store.copies.pinned_bytes)
        yield _gauge(
            "millrace_retention_blocked", "1 while store.copied_bytes_max keeps segments from being dropped.", retention.blocked
        )
        yield _counter(
            "millrace_queue_entries_trimmed", "Entries removed from light queues by retention.", retention.trimmed_entries
        )
        yield _counter("millrace_log_syncs", "Group commits: fdatasync calls of the CommitLog.", store.syncs)
        yield _counter("millrace_messages_stored", "Messages stored since the start.", store.messages_stored)
        yield _gauge("millrace_queues", "Light queues that exist.", len(store.queues))
        yield _gauge("millrace_mqtt_connections", "Open MQTT connections.", len(gateway.connections))
        yield _counter(
            "millrace_mqtt_connections_accepted", "MQTT clients accepted since the start.", counts.connections_accepted
        )
        yield _counter("millrace_mqtt_publishes_in", "PUBLISH packets received and stored.", counts.publishes_in)
        yield _counter("millrace_mqtt_publishes_out", "PUBLISH packets sent.", counts.publishes_out)
        yield _counter(
            "millrace_mqtt_deliveries_acked", "Deliveries at QoS 1 and 2 that clients acknowledged.", counts.deliveries_acked
        )
        yield _counter("millrace_mqtt_publishes_refused", "PUBLISH packets refused in their acks.", counts.publishes_refused)
        yield _counter(
            "millrace_mqtt_deliveries_too_large",
            "Deliveries left out because their client takes no packet as large.",
            counts.deliveries_too_large,
        )
        yield _gauge("millrace_mqtt_sessions_away", "Sessions whose clients are not connected.", len(gateway.away))
        yield _counter(
            "millrace_mqtt_sessions_expired", "Sessions that ended because their time was over.", counts.sessions_expired
        )
        yield _gauge("millrace_mqtt_subscriptions", "Subscriptions that exist.", counts.subscriptions)
        yield _gauge("millrace_mqtt_retained", "Retained messages.", len(gateway.retained))
        yield _counter("millrace_mqtt_subscriptions_refused", "Filters refused in SUBACKs.", counts.subscriptions_refused)
        closed = CounterMetricFamily("millrace_mqtt_connections_closed", "Connections the node closed.", labels=["reason"])
        for reason, count in counts.closed_by_reason.items():
            closed.add_metric([reason.name.lower()], count)
        yield closed
        yield _gauge("millrace_timers_pending", "Delayed messages that wait for their time.", len(node.delayed))
        yield _counter("millrace_timers_fired", "Delayed messages fired since the start.", node.delayed.fired)
        yield _counter("millrace_timers_cancelled", "Delayed messages recalled since the start.", node.delayed.cancelled)
        yield _gauge("millrace_pop_waiting", "Pops that wait for a message.", pop.waiting)
        yield _gauge("millrace_pop_checkpoints_open", "Checkpoints that are not settled.", pop.checkpoints_open)
        yield _counter("millrace_pop_handed_out", "Deliveries handed out since the start.", pop.counters.handed_out)
        yield _counter("millrace_pop_acked", "Deliveries acknowledged since the start.", pop.counters.acked)
        yield _counter("millrace_pop_revived", "Deliveries revived since the start.", pop.counters.revived)
        yield _counter(
            "millrace_pop_dead_lettered", "Messages put among the dead letters since the start.", pop.counters.dead_lettered
        )
        yield _counter("millrace_pop_refused", "Pops refused because too many wait.", pop.counters.refused)
        yield _gauge(
            "millrace_pop_revive_late_ms_max",
            "Most ms by which a revival came after its time.",
            pop.counters.revive_late_ms_max,
        )
        yield from self._groups()

    def _groups(self) -> Iterator[Metric]:
        labels = ["group", "filter"]
        visible = GaugeMetricFamily("millrace_pop_group_visible", "Messages that a pop could get now.", labels=labels)
        in_flight = GaugeMetricFamily("millrace_pop_group_in_flight", "Messages handed out and not settled.", labels=labels)
        for number, group in enumerate(self._node.pop):
            if number >= GROUPS_LABELLED_MAX:
                break
            visible.add_metric([group.name, group.filter], group.visible)
            in_flight.add_metric([group.name, group.filter], group.in_flight)
        yield visible
        yield in_flight


def registry_of(node: Node) -> CollectorRegistry:
    """Return the registry that a node's `/metrics` shows: its own figures and its process's."""
    registry = CollectorRegistry()
    registry.register(NodeCollector(node))
    ProcessCollector(registry=registry)
    return registry


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)
