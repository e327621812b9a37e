"""Metrics of the store and of delayed messages."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import counter, gauge, labelled_counter
from penstock.store.space import Level
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages


class StoreCollector(Collector):
    """Figures of the CommitLog, of retention and of the disk."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        store, retention = self._store, self._store.retention
        yield gauge("penstock_log_end_bytes", "Position after the last record of the CommitLog.", store.log.written)
        yield gauge("penstock_log_durable_bytes", "Position up to which the CommitLog is on disk.", store.durable_position)
        yield gauge("penstock_log_start_bytes", "Position of the oldest record of the CommitLog.", store.log.start)
        yield counter("penstock_log_dropped_bytes", "Bytes of the CommitLog that retention deleted.", retention.dropped_bytes)
        yield counter("penstock_log_copied_bytes", "Bytes of records that retention copied forward.", retention.copied_bytes)
        yield gauge("penstock_log_pinned_bytes", "Bytes of records that outlive retention.", store.copies.pinned_bytes)
        yield gauge(
            "penstock_retention_blocked",
            "1 while store.copied_bytes_max keeps retention from deleting segments, else 0.",
            retention.blocked,
        )
        yield counter(
            "penstock_queue_entries_trimmed", "Entries that retention removed from light queues.", retention.trimmed_entries
        )
        yield counter("penstock_log_syncs", "Group commits: calls of fdatasync for the CommitLog.", store.syncs)
        yield counter("penstock_messages_stored", "Messages stored since the start.", store.messages_stored)
        yield gauge("penstock_queues", "Number of light queues.", len(store.queues))
        yield from self._disk()

    def _disk(self) -> Iterator[Metric]:
        space = self._store.space
        yield gauge("penstock_disk_free_bytes", "Free bytes of the disk that holds the data directory.", space.usage.free)
        yield gauge("penstock_disk_reserve_bytes", "Free bytes below which the node is read-only.", space.reserve)
        yield gauge(
            "penstock_store_read_only", "1 while the disk is too full for new messages, else 0.", space.level > Level.OPEN
        )
        yield gauge(
            "penstock_store_exhausted", "1 while the disk is too full for any record, else 0.", space.level > Level.READ_ONLY
        )
        yield labelled_counter(
            "penstock_store_refused",
            "Records refused because the disk is full.",
            ["kind", "level"],
            {(kind.name.lower(), level.name.lower()): count for (kind, level), count in space.refused.items()},
        )


class DelayedCollector(Collector):
    """Figures of delayed messages."""

    def __init__(self, delayed: DelayedMessages) -> None:
        self._delayed = delayed

    def collect(self) -> Iterator[Metric]:
        delayed = self._delayed
        yield gauge("penstock_timers_pending", "Delayed messages that are not due yet.", len(delayed))
        yield counter("penstock_timers_fired", "Delayed messages delivered since the start.", delayed.fired)
        yield counter("penstock_timers_cancelled", "Delayed messages recalled since the start.", delayed.cancelled)
