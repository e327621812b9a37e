"""What `penstock top` shows of a node: figures, and what somebody should look at."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from penstock.cli.output import shown_bytes, shown_seconds

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Scrape:
    """The metrics of a node at one time.

    Parameters:
        at_s: when, in monotonic seconds.
        samples: labels and value of each sample, by name.
    """

    at_s: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    @staticmethod
    def parse(text: str, at_s: float) -> Scrape:
        """Return what an answer of `/metrics` says. Raises ValueError if it is none."""
        samples: dict[str, list[tuple[Labels, float]]] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
        return Scrape(at_s, samples)

    def fitting(self, name: str, labels: Labels) -> Iterator[tuple[Labels, float]]:
        """Yield the samples of a metric that have these labels."""
        for found, value in self.samples.get(name, ()):
            if all(found.get(key) == wanted for key, wanted in labels.items()):
                yield found, value

    def sum(self, name: str, **labels: str) -> float:
        """Return the sum of the samples of a metric that have these labels; 0 if there are none."""
        return sum(value for _, value in self.fitting(name, labels))


class Figures:
    """What a node does between two scrapes, and how it is at the second.

    Parameters:
        before, now: the scrapes. If the node has started in between, there are no rates.
    """

    def __init__(self, before: Scrape, now: Scrape) -> None:
        start = "process_start_time_seconds"
        self.now = now
        self._before = before if before.sum(start) == now.sum(start) else now

    def rate(self, name: str, **labels: str) -> float:
        """Return by how much a counter has grown, per second."""
        seconds = self.now.at_s - self._before.at_s
        return (self.now.sum(name, **labels) - self._before.sum(name, **labels)) / seconds if seconds > 0 else 0.0

    def quantile(self, name: str, part: float, **labels: str) -> float | None:
        """Return about the time below which a part of what a histogram counted in between is; None if it counted nothing."""
        before, now = (_buckets(scrape, name, labels) for scrape in (self._before, self.now))
        counts = [(bound, count - before.get(bound, 0.0)) for bound, count in sorted(now.items())]
        if not counts or counts[-1][1] <= 0:
            return None
        wanted = part * counts[-1][1]
        lower_bound = lower_count = 0.0
        for bound, count in counts:
            if count >= wanted:
                if bound == float("inf"):
                    return lower_bound
                return lower_bound + (bound - lower_bound) * (wanted - lower_count) / (count - lower_count)
            lower_bound, lower_count = bound, count
        return lower_bound


def _buckets(scrape: Scrape, name: str, labels: Labels) -> dict[float, float]:
    buckets: dict[float, float] = {}
    for found, value in scrape.fitting(f"{name}_bucket", labels):
        bound = float(found["le"])
        buckets[bound] = buckets.get(bound, 0.0) + value
    return buckets


SORTS = ("visible", "oldest_s", "in_flight", "dead", "acked_per_s")
"""Columns by which groups can be sorted, the largest first."""

SLOW_S = 0.1
"""99th percentile of syncs, or of the lag of the event loop, from which somebody should look at it."""

ABANDONED_S = 60
"""Age of the oldest message of a group from which somebody should ask where its consumers are."""


CERTIFICATE_S = 14 * 86_400
"""Time before the end of a certificate from which somebody should replace it. The alert rules have the same bound."""

BACKUP_S = 2 * 86_400
"""Age of the last backup from which somebody should look at the job that makes them. The alert rules have the same bound."""


def view_of(
    figures: Figures,
    *,
    is_ready: bool,
    sort: str,
    drain: Mapping[str, Any] | None = None,
    busiest: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Return the view of a node as a row of JSON. Times are in seconds, rates per second, and what is unknown is None.

    Args:
        figures: of the node.
        is_ready: whether it accepts clients.
        sort: one of `SORTS`.
        drain: how far it has drained, if it is not ready; None if that is not known.
        busiest: the clients with the highest rates, the highest first; None if they are not known.
    """
    now, rate, quantile = figures.now, figures.rate, figures.quantile
    groups = sorted(_groups(figures), key=lambda group: (-group[sort], group["group"], group["filter"]))
    view: dict[str, Any] = {
        "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "version": next((labels["version"] for labels, _ in now.fitting("penstock_build_info", {})), ""),
        "up_s": round(max(datetime.now(UTC).timestamp() - now.sum("process_start_time_seconds"), 0.0), 1),
        "ready": is_ready,
        "traffic": {
            "published_per_s": rate("penstock_mqtt_publishes_in_total"),
            "sent_per_s": rate("penstock_pop_sent_total"),
            "delivered_per_s": rate("penstock_mqtt_publishes_out_total"),
            "popped_per_s": rate("penstock_pop_handed_out_total"),
            "acked_per_s": rate("penstock_pop_acked_total"),
            "stored_per_s": rate("penstock_messages_stored_total"),
            "in_bytes_per_s": rate("penstock_mqtt_bytes_in_total"),
            "out_bytes_per_s": rate("penstock_mqtt_bytes_out_total"),
        },
        "latency": {
            "sync_p50_s": quantile("penstock_log_sync_seconds", 0.5),
            "sync_p99_s": quantile("penstock_log_sync_seconds", 0.99),
            "commit_p99_s": quantile("penstock_log_commit_seconds", 0.99),
            "delivery_p99_s": quantile("penstock_mqtt_delivery_seconds", 0.99),
            "loop_p99_s": quantile("penstock_loop_lag_seconds", 0.99),
            "timer_p99_s": quantile("penstock_timers_lateness_seconds", 0.99),
        },
        "clients": {
            "connected": int(now.sum("penstock_mqtt_connections")),
            "accepted_per_s": rate("penstock_mqtt_connections_accepted_total"),
            "closed_per_s": rate("penstock_mqtt_connections_closed_total"),
            "sessions_stored": int(now.sum("penstock_mqtt_sessions_stored")),
            "sessions_away": int(now.sum("penstock_mqtt_sessions_away")),
            "subscriptions": int(now.sum("penstock_mqtt_subscriptions")),
            "slow": int(now.sum("penstock_mqtt_slow_consumers")),
            "busiest": busiest,
        },
        "store": {
            "log_bytes": int(now.sum("penstock_log_end_bytes") - now.sum("penstock_log_start_bytes")),
            "disk_free_bytes": int(now.sum("penstock_disk_free_bytes")),
            "disk_reserve_bytes": int(now.sum("penstock_disk_reserve_bytes")),
            "undurable_bytes": int(now.sum("penstock_mqtt_undurable_bytes")),
            "queues": int(now.sum("penstock_queues")),
            "retained": int(now.sum("penstock_mqtt_retained")),
            "timers_pending": int(now.sum("penstock_timers_pending")),
            "timers_due_minute": int(now.sum("penstock_timers_due", within="minute")),
        },
        "process": {
            "cpu": rate("process_cpu_seconds_total"),
            "memory_bytes": int(now.sum("process_resident_memory_bytes")),
            "open_fds": int(now.sum("process_open_fds")),
            "max_fds": int(now.sum("process_max_fds")),
        },
        "totals": {
            "groups": int(now.sum("penstock_pop_groups")),
            "unlabelled": int(now.sum("penstock_pop_groups_unlabelled")),
            "visible": int(now.sum("penstock_pop_visible")),
            "in_flight": int(now.sum("penstock_pop_in_flight")),
            "dead": int(now.sum("penstock_pop_dead")),
        },
        "groups": groups,
    }
    view["attention"] = list(_attention(figures, view, drain))
    return view


def _groups(figures: Figures) -> Iterator[dict[str, Any]]:
    now = figures.now
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name in ("visible", "in_flight", "delayed", "parked", "dead", "waiting", "oldest_seconds"):
        for labels, value in now.fitting(f"penstock_pop_group_{name}", {}):
            key = labels["group"], labels["filter"]
            row = rows.setdefault(key, {"group": key[0], "filter": key[1]})
            row[name.replace("seconds", "s")] = value if name == "oldest_seconds" else int(value)
    latency = "penstock_pop_group_ack_latency_seconds"
    for (group, topic_filter), row in rows.items():
        row["acked_per_s"] = figures.rate(f"{latency}_count", group=group, filter=topic_filter)
        row["ack_p99_s"] = None
        if row["acked_per_s"]:
            row["ack_p99_s"] = figures.quantile(latency, 0.99, group=group, filter=topic_filter)
        yield row


def _dated(now: Scrape) -> Iterator[str]:
    """Yield what is too near or too long ago."""
    now_s = datetime.now(UTC).timestamp()
    for labels, expires_s in now.fitting("penstock_certificate_expires_timestamp_seconds", {}):
        if (left_s := expires_s - now_s) < CERTIFICATE_S:
            ends = f"expires in {shown_seconds(left_s)}" if left_s > 0 else "has expired"
            yield f"The certificate of the listener {labels['listener']} {ends}: replace its files."
    backup_s = now.sum("penstock_backup_last_success_timestamp_seconds")
    if backup_s and now_s - backup_s > BACKUP_S:
        yield f"The last backup is {shown_seconds(now_s - backup_s)} old: look at the job that runs `penstock backup`."


def _attention(figures: Figures, view: dict[str, Any], drain: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield what somebody should look at, the worst first."""
    now, store, latency, process = figures.now, view["store"], view["latency"], view["process"]
    if now.sum("penstock_store_exhausted"):
        yield "The disk is full: nothing is stored, no acknowledgements either. Free or add space."
    elif now.sum("penstock_store_read_only"):
        yield "The disk is nearly full: new messages are refused. Free or add space."
    elif store["disk_free_bytes"] < 2 * store["disk_reserve_bytes"]:
        free = shown_bytes(store["disk_free_bytes"])
        yield f"The disk has {free} left; below {shown_bytes(store['disk_reserve_bytes'])} new messages are refused."
    if drain is not None and drain["state"] != "serving":
        left = f"{drain['clients']:,} clients of MQTT and {drain['checkpoints']:,} batches that consumers have"
        yield f"The node drains, and accepts no clients. What is left: {left}."
    elif not view["ready"]:
        yield "The node is not ready: it accepts no clients."
    yield from _dated(now)
    for reason in (labels["reason"] for labels, value in now.fitting("penstock_retention_blocked", {}) if value):
        yield f"Retention can't delete old segments ({reason}): the log of the node says why (retention.blocked)."
    if now.sum("penstock_clock_unconfirmed"):
        yield "The time of day has jumped: see `penstock clock`."
    if now.sum("penstock_index_stopped") or now.sum("penstock_index_slowed_bytes_per_second"):
        yield "The index can't keep up with the writes: its compactions are behind."
    if waiting := int(now.sum("penstock_mqtt_backpressure_waiting")):
        yield f"{waiting:,} publishers wait for the disk."
    for name, what in (("sync_p99_s", "One sync in a hundred takes"), ("loop_p99_s", "The event loop is late by")):
        if (latency[name] or 0) > SLOW_S:
            yield f"{what} {shown_seconds(latency[name])}."
    if held := int(now.sum("penstock_mqtt_logins_held")):
        wait = shown_seconds(now.sum("penstock_mqtt_login_wait_seconds"))
        yield f"{held:,} clients wait for room to log in; all are answered in about {wait}."
    if process["max_fds"] and process["open_fds"] > 0.9 * process["max_fds"]:
        yield f"{process['open_fds']:,} of {process['max_fds']:,} file descriptors are in use."
    for labels, held_now in now.fitting("penstock_quota_held", {}):
        maximum = now.sum("penstock_quota_maximum", resource=labels["resource"])
        if maximum and held_now > 0.8 * maximum:
            yield f"{held_now / maximum:.0%} of the {labels['resource']} are in use: see `penstock inspect quotas`."
    if (refused := figures.rate("penstock_quota_refused_total")) > 0:
        yield f"Quotas refuse {refused:,.1f} requests per second: see `penstock inspect quotas`."
    abandoned = [
        group["group"]
        for group in view["groups"]
        if group["visible"] and group["oldest_s"] > ABANDONED_S and not (group["waiting"] or group["in_flight"])
    ]
    if abandoned:
        more = f" and {len(abandoned) - 3} more" if len(abandoned) > 3 else ""
        yield f"Nobody consumes the messages of {', '.join(abandoned[:3])}{more}."
    if (dead := figures.rate("penstock_pop_dead_lettered_total")) > 0:
        yield f"{dead:,.1f} messages per second become dead letters: see `penstock dlq list GROUP`."
    if view["totals"]["unlabelled"]:
        yield f"{view['totals']['unlabelled']:,} groups have no metrics of their own; the totals count them."
