"""Metrics of the store and of delayed messages."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import add_latencies, counter, durations, gauge, labelled_counter, labelled_gauge
from penstock.store.retention.retention import Blocker
from penstock.store.space.space import Level
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages
from penstock.timer.schedules import Schedules


class StoreCollector(Collector):
    """Figures of the CommitLog, of retention and of the disk."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def collect(self) -> Iterator[Metric]:
        store, retention = self._store, self._store.retention
        yield gauge("penstock_log_end_bytes", "Position after the last record of the log.", store.log.written)
        yield gauge("penstock_log_durable_bytes", "Position up to which the log is on disk.", store.durable_position)
        yield gauge("penstock_log_start_bytes", "Position of the oldest record.", store.log.start)
        yield counter("penstock_log_dropped_bytes", "Bytes of the log that retention deleted.", retention.dropped_bytes)
        yield counter("penstock_log_copied_bytes", "Bytes that retention copied forward.", retention.copied_bytes)
        yield gauge("penstock_log_pinned_bytes", "Bytes of records that outlive retention.", store.copies.pinned_bytes)
        yield labelled_gauge(
            "penstock_retention_blocked",
            "1 while something keeps segments that retention must delete, else 0.",
            ["reason"],
            {(blocker.value,): blocker is retention.blocked_by for blocker in Blocker},
        )
        yield counter(
            "penstock_queue_entries_trimmed", "Entries that retention removed from light queues.", retention.trimmed_entries
        )
        yield counter("penstock_log_syncs", "Group commits: calls of fdatasync.", store.syncs)
        yield durations(
            "penstock_log_sync_seconds",
            "Time of a call of fdatasync, from its request or the end of the one before.",
            store.sync_times,
        )
        yield durations(
            "penstock_log_commit_seconds",
            "Time from a write of the log until it is on disk and answers such as PUBACKs go out.",
            store.commit_times,
        )
        yield counter("penstock_messages_stored", "Messages stored.", store.messages_stored)
        yield gauge("penstock_queues", "Light queues.", len(store.queues))
        yield from self._index()
        yield from self._disk()
        yield from self._clock()

    def _clock(self) -> Iterator[Metric]:
        keeping = self._store.timekeeping
        yield gauge(
            "penstock_clock_offset_seconds",
            "Seconds by which the time of day is ahead of the node's time, or behind if negative.",
            keeping.offset_ms / 1000,
        )
        yield gauge(
            "penstock_clock_unconfirmed",
            "1 while a jump of the time of day is not confirmed, else 0. Retention by age waits.",
            not keeping.is_confirmed,
        )
        yield counter("penstock_clock_jumps", "Jumps of the time of day.", keeping.jumps)
        yield counter("penstock_clock_steps", "Steps of the node's time.", keeping.steps)

    def _index(self) -> Iterator[Metric]:
        figures = self._store.index.figures()
        yield labelled_gauge(
            "penstock_index_memory_bytes",
            "Memory of the index: rows that are in no file yet, cached blocks, filters and indexes of files.",
            ["part"],
            {("memtables",): figures.memtables, ("block_cache",): figures.block_cache, ("tables",): figures.tables},
        )
        yield gauge(
            "penstock_index_block_cache_max_bytes",
            "Bytes that cached blocks may take.",
            figures.block_cache_max,
        )
        yield gauge("penstock_index_files_bytes", "Size of the present files of the index.", figures.files)
        yield gauge("penstock_index_rows", "Rows of the index, about.", figures.rows)
        yield gauge(
            "penstock_index_pending_compaction_bytes",
            "Bytes that compactions must rewrite.",
            figures.pending_compaction,
        )
        yield gauge("penstock_index_compactions_running", "Running compactions.", figures.running)
        yield gauge(
            "penstock_index_slowed_bytes_per_second",
            "Rate to which RocksDB has slowed writes, because compactions are behind; else 0.",
            figures.slowed_bytes_per_s,
        )
        yield gauge(
            "penstock_index_stopped",
            "1 while RocksDB takes no writes, because compactions are too far behind, else 0.",
            figures.stopped,
        )
        yield counter("penstock_index_errors", "Background errors of RocksDB, such as failed writes.", figures.errors)

    def _disk(self) -> Iterator[Metric]:
        space = self._store.space
        yield gauge("penstock_disk_free_bytes", "Free bytes of the disk.", space.usage.free)
        yield gauge("penstock_disk_reserve_bytes", "Free bytes below which the node is read-only.", space.reserve)
        yield gauge("penstock_ballast_bytes", "Bytes kept for a start on a full disk.", self._store.ballasts.bytes)
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
        yield gauge("penstock_timers_pending", "Pending delayed messages.", len(delayed))
        yield labelled_gauge(
            "penstock_timers_due",
            "Delayed messages that are due within a minute, an hour or a day, up to the end of a minute or hour.",
            ["within"],
            {(name,): number for name, number in delayed.due_counts()._asdict().items()},
        )
        lateness = HistogramMetricFamily("penstock_timers_lateness_seconds", "Time from a message's due time to its firing.")
        add_latencies(lateness, [], delayed.lateness)
        yield lateness
        yield counter("penstock_timers_fired", "Delayed messages delivered.", delayed.fired)
        yield counter("penstock_timers_cancelled", "Delayed messages recalled.", delayed.cancelled)


class ScheduleCollector(Collector):
    """Figures of schedules."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    def collect(self) -> Iterator[Metric]:
        schedules = self._schedules
        yield gauge("penstock_schedules", "Schedules, including paused and ended ones.", len(schedules))
        yield counter("penstock_schedules_sent", "Messages that schedules sent.", schedules.sent)
        yield counter("penstock_schedules_failed", "Occurrences that could not be sent.", schedules.failed)
        yield counter(
            "penstock_schedules_missed",
            "Times that a late schedule followed its setting `missed`.",
            schedules.missed,
        )
