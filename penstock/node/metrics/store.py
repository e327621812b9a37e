"""Metrics of the store and of delayed messages."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.node.metrics.families import add_latencies, counter, durations, gauge, labelled_counter, labelled_gauge
from penstock.store.retention import Blocker
from penstock.store.space import Level
from penstock.store.store import Store
from penstock.timer.delayed import DelayedMessages
from penstock.timer.schedules import Schedules


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
        yield labelled_gauge(
            "penstock_retention_blocked",
            "1 while something keeps segments that retention must delete, else 0: too many copies (store.copied_bytes_max), a "
            "backup, a follower that gets a snapshot, Parquet tables that are behind, a queue that is filled, a full disk, or "
            "more work than time.",
            ["reason"],
            {(blocker.value,): blocker is retention.blocked_by for blocker in Blocker},
        )
        yield counter(
            "penstock_queue_entries_trimmed", "Entries that retention removed from light queues.", retention.trimmed_entries
        )
        yield counter("penstock_log_syncs", "Group commits: calls of fdatasync for the CommitLog.", store.syncs)
        yield durations(
            "penstock_log_sync_seconds",
            "Time that a call of fdatasync took, from its request or the end of the one before.",
            store.sync_times,
        )
        yield durations(
            "penstock_log_commit_seconds",
            "Time from a write of the CommitLog until it is on disk and the answers that wait for it go out, such as PUBACKs.",
            store.commit_times,
        )
        yield counter("penstock_messages_stored", "Messages stored since the start.", store.messages_stored)
        yield gauge("penstock_queues", "Number of light queues.", len(store.queues))
        yield from self._index()
        yield from self._disk()
        yield from self._clock()

    def _clock(self) -> Iterator[Metric]:
        keeping = self._store.timekeeping
        yield gauge(
            "penstock_clock_offset_seconds",
            "Seconds by which the machine's time of day is ahead of the node's time. Negative if it is behind.",
            keeping.offset_ms / 1000,
        )
        yield gauge(
            "penstock_clock_unconfirmed",
            "1 while the time of day has jumped and nobody has confirmed it, else 0. Retention by age waits meanwhile.",
            not keeping.is_confirmed,
        )
        yield counter("penstock_clock_jumps", "Jumps of the time of day since the start.", keeping.jumps)
        yield counter("penstock_clock_steps", "Steps of the node's time since the start.", keeping.steps)

    def _index(self) -> Iterator[Metric]:
        figures = self._store.index.figures()
        yield labelled_gauge(
            "penstock_index_memory_bytes",
            "Memory of the index: rows that are not in a file yet, cached blocks, filters and indexes of the open files.",
            ["part"],
            {("memtables",): figures.memtables, ("block_cache",): figures.block_cache, ("tables",): figures.tables},
        )
        yield gauge(
            "penstock_index_block_cache_max_bytes",
            "Memory that cached blocks of the index may take at the moment.",
            figures.block_cache_max,
        )
        yield gauge("penstock_index_files_bytes", "Size of the files that hold present rows of the index.", figures.files)
        yield gauge("penstock_index_rows", "About the number of rows of the index.", figures.rows)
        yield gauge(
            "penstock_index_pending_compaction_bytes",
            "Bytes of the index that compactions still have to rewrite.",
            figures.pending_compaction,
        )
        yield gauge("penstock_index_compactions_running", "Compactions of the index that run.", figures.running)
        yield gauge(
            "penstock_index_slowed_bytes_per_second",
            "Rate to which RocksDB has slowed writes of the index down, because compactions are behind. 0 while it has not.",
            figures.slowed_bytes_per_s,
        )
        yield gauge(
            "penstock_index_stopped",
            "1 while RocksDB takes no writes of the index, because compactions are too far behind, else 0. The node waits.",
            figures.stopped,
        )
        yield counter("penstock_index_errors", "Errors of RocksDB in the background, such as failed writes.", figures.errors)

    def _disk(self) -> Iterator[Metric]:
        space = self._store.space
        yield gauge("penstock_disk_free_bytes", "Free bytes of the disk that holds the data directory.", space.usage.free)
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
        yield gauge("penstock_timers_pending", "Delayed messages that have neither fired nor been recalled.", len(delayed))
        yield labelled_gauge(
            "penstock_timers_due",
            "Pending delayed messages that are due within the next minute or hour, up to the end of a minute, or the next "
            "day, up to the end of an hour.",
            ["within"],
            {(name,): number for name, number in delayed.due_counts()._asdict().items()},
        )
        lateness = HistogramMetricFamily(
            "penstock_timers_lateness_seconds", "Time from the due time of a delayed message to its firing."
        )
        add_latencies(lateness, [], delayed.lateness)
        yield lateness
        yield counter("penstock_timers_fired", "Delayed messages delivered since the start.", delayed.fired)
        yield counter("penstock_timers_cancelled", "Delayed messages recalled since the start.", delayed.cancelled)


class ScheduleCollector(Collector):
    """Figures of schedules."""

    def __init__(self, schedules: Schedules) -> None:
        self._schedules = schedules

    def collect(self) -> Iterator[Metric]:
        schedules = self._schedules
        yield gauge("penstock_schedules", "Schedules, those that are paused or have ended included.", len(schedules))
        yield counter("penstock_schedules_sent", "Messages that schedules have sent since the start.", schedules.sent)
        yield counter("penstock_schedules_failed", "Occurrences that could not be sent since the start.", schedules.failed)
        yield counter(
            "penstock_schedules_missed",
            "How often since the start a schedule was late, and its setting `missed` said what becomes of its occurrences.",
            schedules.missed,
        )
